"""Carries out steering requests in a running server, on its event loop.

    pause [SHARD]        hold the answers to all shards, or to one: their daemons wait and keep their leases
    resume [SHARD]       answer again
    flush                make all accepted rows durable now
    drain-shard SHARD    flush and checkpoint a shard, then hold its answers: after a move of its lease no record is delivered again
    log-level LEVEL      set the lowest level that the server and its workers log
    reload               replace the workers and Spark's driver by new ones that load the handler's present code

All of it ends with the server: the next server answers every shard, and logs at the configured level.
"""

from __future__ import annotations

import logging
from typing import Final, get_args

from mldserver.assembly import Parts
from mldserver.base.clock import Clock, in_time
from mldserver.config.settings import Level
from mldserver.coordinator.core.sessions import Session
from mldserver.errors import HandlerError, OperatorError
from mldserver.observe.logging import Logger, set_level
from mldserver.sources.link import Link
from mldserver.workers.runtime import WorkerRuntime

ACTS: Final = ("pause", "resume", "flush", "drain-shard", "log-level", "reload")
_PATIENCE_SECONDS: Final = 4.0
"""How long the client waits for the ledger or a daemon. The act continues after that."""
_LEVELS: Final = get_args(Level)


async def carry_out(parts: Parts | None, clock: Clock, act: str, argument: str) -> tuple[bool, str]:
    """Carry out an act; return whether it is done, and the result as a sentence or two.

    ``parts`` is None while the server starts or stops.
    """
    if parts is None:
        return False, "The server is starting or stopping and cannot be steered now."
    acts = _Acts(parts, clock)
    try:
        match act:
            case "pause":
                text = await acts.pause(argument)
            case "resume":
                text = await acts.resume(argument)
            case "drain-shard":
                text = await acts.drain_shard(argument)
            case "log-level":
                text = acts.log_level(argument)
            case "flush" if not argument:
                text = await acts.flush()
            case "reload" if not argument:
                text = await acts.reload()
            case _:
                asked = f"{act} {argument}".strip()
                return False, f"There is no act {asked!r}. Acts are {', '.join(ACTS)}."
    except (OperatorError, HandlerError) as error:
        return False, str(error)
    return True, text


class _Acts:
    """Steers the parts of one server. Each act returns its result, or raises OperatorError."""

    def __init__(self, parts: Parts, clock: Clock) -> None:
        self._parts = parts
        self._clock = clock
        self._shards = parts.coordinator.shards
        self._backpressure = parts.coordinator.shards.backpressure

    async def pause(self, shard_id: str) -> str:
        if shard_id:
            self._session(shard_id)
            self._backpressure.paused_shards.add(shard_id)
        else:
            self._backpressure.paused = True
        held = (
            f"shard {shard_id} waits for its next answer" if shard_id else "every shard waits for its answer"
        )
        again = f"`mldserver resume {shard_id}`".replace(" `", "`")
        return f"From its next batch on {held}; {again} ends that. Leases stay, and no window closes past a shard that waits."

    async def resume(self, shard_id: str) -> str:
        held = self._backpressure
        if shard_id and held.paused:
            raise OperatorError(
                "All shards are paused.", advice="Resume without a shard lets all of them go on."
            )
        if shard_id and shard_id not in held.paused_shards:
            paused = ", ".join(sorted(held.paused_shards)) or "none"
            raise OperatorError(f"Shard {shard_id} is not paused.", advice=f"There are {paused}.")
        if not shard_id and not (held.paused or held.paused_shards):
            return "Nothing was paused."
        held.paused = False
        gone = {shard_id} if shard_id else set(held.paused_shards)
        held.paused_shards -= gone
        held.draining -= gone
        await held.release()
        return f"Shard {shard_id} goes on." if shard_id else "All shards go on."

    async def flush(self) -> str:
        if not await in_time(self._shards.flush("operator"), self._clock, _PATIENCE_SECONDS):
            raise OperatorError(
                "Rows cannot be made durable now.",
                did="They stay in memory, and this is tried again.",
                advice="See the latest flush.failed.",
            )
        rows = self._parts.coordinator.status().rows_durable
        return f"Everything that was taken in is durable: {rows} rows since the start. Checkpoints follow with the next batches."

    async def drain_shard(self, shard_id: str) -> str:
        session, held = self._session(shard_id), self._backpressure
        held.paused_shards.add(shard_id)
        held.draining.add(shard_id)
        await held.release()
        again = f"`mldserver resume {shard_id}` lets it go on."
        drained = held.until(lambda: shard_id not in held.draining)
        if not await in_time(drained, self._clock, _PATIENCE_SECONDS):
            await in_time(self._shards.flush("drain"), self._clock, _PATIENCE_SECONDS)
            return (
                f"Shard {shard_id} is drained with its next batch: the server then makes its rows durable and checkpoints it, "
                f"and its daemon waits. Before that batch the server cannot send its daemon anything. {again}"
            )
        if session.position.due() is not None:
            raise OperatorError(
                f"What shard {shard_id} gave is durable, but its daemon has not stored the checkpoint.",
                did="Its daemon waits for an answer.",
                advice=f"See checkpoint.failed. {again}",
            )
        return (
            f"Shard {shard_id} is durable and checkpointed at {session.position.checkpointed}, and its daemon waits: it may be "
            f"ended, or the lease moved, and nothing is delivered again. {again}"
        )

    def log_level(self, level: str) -> str:
        if level not in _LEVELS:
            raise OperatorError(f"There is no level {level!r}.", advice=f"Levels are {', '.join(_LEVELS)}.")
        number, before = logging.getLevelNamesMapping()[level.upper()], Logger.level
        set_level(number)
        Link.debugging = number <= logging.DEBUG
        runtime = self._parts.runtime
        if isinstance(runtime, WorkerRuntime):
            runtime.set_log_level(number)
        return f"What is at {level} or above is logged from now on (before: {logging.getLevelName(before).lower()})."

    async def reload(self) -> str:
        """Raises HandlerError, too."""
        runtime, engine = self._parts.runtime, self._parts.engine
        if not isinstance(runtime, WorkerRuntime):
            raise OperatorError(
                "The handler runs in the server's own process, which cannot load it twice.",
                advice="Stop and start the server, or give it workers (`--workers 1`).",
            )
        before = runtime.spec.version
        try:
            await runtime.reload()
        except HandlerError as error:
            error.did = error.did or "Nothing has changed: the old version goes on."
            raise
        text = f"Workers run {runtime.spec.path} as it is now ({runtime.spec.version}; before: {before})."
        if engine is None:
            return text
        engine.renew(runtime.spec.code)
        return (
            f"{text} Spark's driver starts afresh with it once the windows that are being computed are done."
        )

    def _session(self, shard_id: str) -> Session:
        """Raise OperatorError for a shard that this server does not have."""
        session = self._shards.sessions.live(shard_id)
        if session is None:
            where = f"No shard {shard_id!r} is connected to this server." if shard_id else "Which shard?"
            connected = sorted(node.id for node in self._shards.lineage.connected())
            raise OperatorError(where, advice=f"There are {', '.join(connected) or 'none'}.")
        return session
