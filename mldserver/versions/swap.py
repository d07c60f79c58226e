"""Brings a running function's workers to the version of its code that the ledger names, and keeps the old one if that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from mldserver.base.clock import Clock
from mldserver.base.kill_points import kill_point
from mldserver.base.threads import run_in_daemon_thread
from mldserver.coordinator.shards import CoordinatorIntake
from mldserver.errors import HandlerError, OperatorError
from mldserver.handler.spec import HandlerSpec
from mldserver.jobs.engine import Engine
from mldserver.ledger.contract import CodeVersion
from mldserver.output.store import OutputStore
from mldserver.runtime.interface import Runtime
from mldserver.versions.code import read_code
from mldserver.workers.reload import require_fit
from mldserver.workers.runtime import WorkerRuntime

log = structlog.get_logger("mldserver")


@dataclass(kw_only=True, eq=False, slots=True)
class Swap:
    """Exchanges the code of one running function."""

    runtime: Runtime
    engine: Engine | None
    shards: CoordinatorIntake
    store: OutputStore
    clock: Clock
    wanted: Callable[[], CodeVersion]
    """Returns the deployed version, as the ledger's latest state names it."""
    seconds: float
    """How often ``run`` asks for it."""
    path: str
    """The archive whose modules run (``CodeVersion.path``); empty: those on the Python path."""
    trouble: str | None = field(init=False, default=None)
    """What an operator should look at: the deployed version does not run here. None while it runs."""
    _tried: str = field(init=False)
    """The archive that was tried last, with or without success."""
    _one: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._tried = self.path

    async def run(self) -> None:
        """Follow the ledger until cancelled: each version that a command on any server has deployed is tried once."""
        while True:
            deployed = self.wanted()
            if deployed.path != self._tried:
                try:
                    await self.reach(deployed)
                except (HandlerError, OperatorError) as error:
                    log.error("function.refused", version=deployed.id, **error.told())  # it says where
            await self.clock.sleep(self.seconds)

    def require_fit(self, now: HandlerSpec, *, accept_shorter_ttl: bool) -> None:
        """Raise OperatorError if the workers could not go on with a version that was loaded elsewhere."""
        runtime = self._workers()
        require_fit(runtime.spec, now, self._callbacks())
        before_ms, now_ms = runtime.spec.state_ttl_ms, now.state_ttl_ms
        if now_ms is not None and (before_ms is None or now_ms < before_ms) and not accept_shorter_ttl:
            raise OperatorError(
                f"The new version keeps the state of a key for {now_ms / 1000:g} s after its last write, which is shorter than "
                f"{'for ever' if before_ms is None else f'{before_ms / 1000:g} s'}: states that are older would be forgotten.",
                did="Nothing has changed: the old version goes on.",
                advice="Repeat the command with --yes to accept that.",
            )

    async def reach(self, version: CodeVersion) -> None:
        """Replace the workers by new ones that run a version, and Spark's driver later; do nothing if it runs already.

        Raises HandlerError or OperatorError if that fails. The old code then stays, and ``trouble`` says so until a version
        is reached.
        """
        async with self._one:
            self._tried = version.path
            if version.path != self.path:
                kill_point("function.swapping")
                former = self._spec_version()
                try:
                    code = await run_in_daemon_thread(
                        partial(read_code, self.store, version.path), name="mldserver-code"
                    )
                    await self._reload(code)
                except (HandlerError, OperatorError) as error:
                    self.trouble = (
                        f"the deployed version {version.id} does not run here, {former} does: {error.what.rstrip('.')}. Deploy "
                        "another version, or roll back"
                    )
                    raise
                self.path = version.path
                log.info("function.swapped", version=self._spec_version(), former=former)
            self.trouble = None

    async def reload(self) -> str:
        """Load the code that is on the Python path again; return what was done. Raises as ``reach``, and changes nothing then."""
        async with self._one:
            if self.path:
                raise OperatorError(
                    f"The function runs a staged version, {self._spec_version()}, and not the code on the Python path.",
                    advice="Stage the new code with `mldserver functions stage NAME --code PATH`, then deploy it.",
                )
            former = self._spec_version()
            await self._reload(None)
        text = f"Workers run {self._workers().spec.path} as it is now ({self._spec_version()}; before: {former})."
        if self.engine is None:
            return text
        return (
            f"{text} Spark's driver starts afresh with it once the windows that are being computed are done."
        )

    async def _reload(self, code: dict[str, tuple[str, bytes]] | None) -> None:
        runtime = self._workers()
        try:
            await runtime.reload(self._callbacks(), code)
        except HandlerError as error:
            error.did = error.did or "Nothing has changed: the old version goes on."
            raise
        if self.engine is not None:
            self.engine.renew(runtime.spec.code)

    def _callbacks(self) -> frozenset[str]:
        """Return the callbacks for which timers are pending in the stores that this server has open."""
        return self.shards.timer_counts.callbacks(self.shards.sessions.live_stores())

    def _workers(self) -> WorkerRuntime:
        if not isinstance(self.runtime, WorkerRuntime):
            raise OperatorError(
                "The handler runs in the server's own process, which cannot load it twice.",
                advice="Stop and start the server, or give it workers (`--workers 1`).",
            )
        return self.runtime

    def _spec_version(self) -> str:
        return self.runtime.spec.version if isinstance(self.runtime, WorkerRuntime) else "the old one"
