"""Gives running workers the handler's new code: new processes load it, try it, and replace the old ones all at once.

    load       a new process for each worker; the old ones work on meanwhile
    wait       until the workers have finished their requests; no new request begins from here on
    open       the shards in the new processes, where ``initialize`` runs; the old processes wait
    take over  without an await

If a step before the last one fails, the old processes go on with the state of their shards, and waiting requests continue
there. So no batch is ever in two processes, and two versions never work at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from mldserver.base.clock import first_of
from mldserver.errors import HandlerError, OperatorError
from mldserver.handler.spec import HandlerSpec, windows_text
from mldserver.records import Sequence as Position
from mldserver.records import Shard
from mldserver.workers.open_stores import OpenStores
from mldserver.workers.standby import StandbyWorkers
from mldserver.workers.wire import Forget
from mldserver.workers.worker import WorkerSlot
from mldserver.workers.worker_process import WorkerProcess

WAIT_SECONDS: Final = 30.0
"""How long shards may wait for running calls, and then again for ``initialize``, until the reload is given up."""
_DID: Final = "Nothing has changed: the old version goes on."


def differences(before: HandlerSpec, now: HandlerSpec) -> list[str]:
    """Return the differences that require a restart of the server, each as part of a sentence."""
    schemas = [spec.schema.ddl if spec.schema else "no schema" for spec in (before, now)]
    windows = [windows_text(spec.windows) for spec in (before, now)]
    kinds = [str(spec.kind) for spec in (before, now)]
    state = ["used" if spec.keyed else "not used" for spec in (before, now)]
    timers = ["present" if spec.timers else "absent" for spec in (before, now)]
    lookups = [", ".join(each.name for each in spec.lookups) or "none" for spec in (before, now)]
    if before.lookups != now.lookups and lookups[0] == lookups[1]:
        lookups[1] += " with another query or interval"
    after = [", ".join(spec.after) or "none" for spec in (before, now)]
    previous = ["taken" if spec.takes_previous else "not taken" for spec in (before, now)]
    names: tuple[str, ...] = ("the schema", "windows", "the kind of handler", "keyed state")
    names += ("a callback of timers", "lookups")
    columns = [str(spec.window_columns) for spec in (before, now)]
    names += ("after", "the result of the window before", "window_columns")
    found = schemas, windows, kinds, state, timers, lookups, after, previous, columns
    return [
        f"{name} was {then}, and is {is_}"
        for name, (then, is_) in zip(names, found, strict=True)
        if then != is_
    ]


def require_fit(before: HandlerSpec, now: HandlerSpec, pending_callbacks: AbstractSet[str]) -> None:
    """Raise OperatorError if a new version cannot replace the running one, whose rows and timers it would get."""
    if other := differences(before, now):
        raise OperatorError(
            f"The new version has another shape: {'; '.join(other)}.",
            did=_DID,
            advice="A reload brings code, no other rows. Stop the server and start the new version; where it does not "
            "go with rows that are there, `mldserver drain` with the old one closes and publishes every window first.",
        )
    if stranded := sorted(pending_callbacks & before.timers.keys() - now.timers.keys()):
        raise OperatorError(
            f"Timers are pending that call {', '.join(stranded)}, and the new version has no such callback.",
            did=_DID,
            advice="Keep the function, marked with @timer, until they have fired, or cancel them with `mldserver timers "
            f"cancel --timer {stranded[0]}`.",
        )


@dataclass(frozen=True, slots=True)
class Reload:
    """One reload of a runtime's handler. All fields belong to the runtime."""

    standby: StandbyWorkers
    workers: Sequence[WorkerSlot]
    shards: Mapping[str, Shard]
    stores: OpenStores
    parked: Mapping[str, Mapping[str, Position]]
    owing: AbstractSet[str]
    pending_callbacks: AbstractSet[str] = frozenset()
    """The callbacks for which timers are pending."""
    code: dict[str, tuple[str, bytes]] | None = None
    """The new modules (``HandlerSpec.code``); without modules: those on the Python path."""

    async def run(self, before: HandlerSpec) -> HandlerSpec:
        """Replace the workers' processes by new ones and return the spec that these have loaded.

        Raises HandlerError if the handler cannot be loaded or a shard cannot be opened, OperatorError if the new
        version does not fit the old one (``before``), or the old processes cannot be replaced now.
        """
        async with self.standby.start_afresh(len(self.workers), self.code) as (now, processes):
            require_fit(before, now, self.pending_callbacks)
            async with self._nothing_in_hand():
                if self.owing:
                    raise OperatorError(
                        f"Record processors have not checkpointed all that they were given: {', '.join(sorted(self.owing))}.",
                        did=_DID,
                        advice="Another process could not go on for them. Ask again, or stop and start the server.",
                    )
                plan = list(zip(self.workers, processes, strict=True))
                opened = {worker.number: await self._open(worker, process) for worker, process in plan}
                if not all(process.is_open for process in processes):
                    raise HandlerError("A process of the new version has died.", did=_DID)
                # No await from here on. Shards may have been let go of, and workers may have died, meanwhile.
                unused = []
                for worker, process in plan:
                    there = {name for name in opened[worker.number] if worker.has_open(name)}
                    for gone in opened[worker.number] - there:
                        process.send(Forget(0, gone))
                    if not worker.take_over(process, there):
                        unused.append(process)
                processes[:] = self.standby.replace_ready(unused, now.code)
            for worker in self.workers:
                await worker.taken_over()
        return now

    @contextlib.asynccontextmanager
    async def _nothing_in_hand(self) -> AsyncIterator[None]:
        """Wait until all workers finish their requests, except requests that wait to retry. Begin none during the block.

        Skip dead workers: they run nothing, and requests queued for them are retried in the next process.
        """
        inside: list[tuple[WorkerSlot, int]] = []
        try:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    for worker in filter(lambda each: each.present, self.workers):
                        # Those that came in go out again.
                        inside.append((worker, await worker.gate.enter(alone=True)))
            except TimeoutError:
                raise OperatorError(
                    f"Worker {worker.number} has not finished what it has in hand for {WAIT_SECONDS:g} s.",
                    did=_DID,
                    advice="Ask again when its calls take less long.",
                ) from None
            yield
        finally:
            for worker, pass_ in inside:
                worker.gate.leave(pass_)

    async def _open(self, worker: WorkerSlot, process: WorkerProcess) -> set[str]:
        """Open the worker's shards in a new process. Raises HandlerError."""
        names = [name for name in self.shards if worker.has_open(name)]
        opened = asyncio.Event()

        async def open_all() -> None:
            await asyncio.gather(
                *(self.stores.open_in(process, self.shards[name], self.parked.get(name)) for name in names)
            )
            opened.set()

        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await first_of(open_all(), process.ended())
        except TimeoutError:
            what = f"`initialize` of the new version has taken longer than {WAIT_SECONDS:g} s: see handler.failed"
            raise HandlerError(f"{what}.", did=_DID) from None
        if not opened.is_set():
            await process.close()
            what = f"`initialize` of the new version ended its process: {await process.ending()}."
            raise HandlerError(what, did=_DID)
        return set(names)
