"""Carries out steering requests in a running server, on its event loop.

    pause [SHARD]        hold the answers to all shards, or to one: their daemons wait and keep their leases
    resume [SHARD]       answer again, all shards or one
    flush                make all accepted rows durable now
    drain-shard SHARD    flush and checkpoint a shard, then hold its answers: after a move of its lease no record is delivered again
    cancel-timers WHICH  remove pending timers: WHICH is a ``TimerFilter`` as JSON
    log-level LEVEL      set the lowest level that the server and its workers log
    reload               replace the workers and Spark's driver by new ones that load the handler's present code

On a server with several functions a request names one function; ``log-level`` changes the level of all.

A pause of all shards is in the ledger: every server of the function follows it within a flush interval, and a restart keeps it. The
rest ends with the server: the next one logs at the configured level, and answers the shards that were paused by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final, Protocol, get_args

import msgspec

from mldserver.assembly import Parts
from mldserver.base.clock import Clock, in_time
from mldserver.config.settings import Level
from mldserver.coordinator.core.sessions import Session
from mldserver.errors import HandlerError, LedgerError, OperatorError
from mldserver.functions.lifecycle import Command
from mldserver.observe.logging import Logger, set_level
from mldserver.runtime.interface import TimerFilter
from mldserver.sources.link import Link
from mldserver.stores import hash_of, key_bytes
from mldserver.windows import counted
from mldserver.workers.runtime import WorkerRuntime

ACTS: Final = ("pause", "resume", "flush", "drain-shard", "cancel-timers", "log-level", "reload")
_PATIENCE_SECONDS: Final = 4.0
"""How long the client waits for the ledger or a daemon. The act continues after that."""
_LEVELS: Final = get_args(Level)


class Steered(Protocol):
    """A function, as acts need it (``function.py``)."""

    @property
    def parts(self) -> Parts | None:
        """Its parts; None while it does not run."""

    async def command(self, command: Command, *, keep: bool = False) -> bool:
        """Carry out a command of the life cycle. False: nothing was to be changed. Raises OperatorError or LedgerError."""


async def carry_out(
    functions: Mapping[str, Steered], clock: Clock, act: str, argument: str, function: str = ""
) -> tuple[bool, str]:
    """Carry out an operator's request ``act`` with its argument; return (whether it is done, the result in words).

    ``function`` is the name of the function that the request is for; empty: the only one.
    """
    try:
        if act == "log-level":
            running = (each.parts for each in functions.values())
            return True, _log_level([parts for parts in running if parts is not None], argument)
        acts = _Acts(*_running(functions, function), clock)
        match act:
            case "pause":
                text = await acts.pause(argument)
            case "resume":
                text = await acts.resume(argument)
            case "drain-shard":
                text = await acts.drain_shard(argument)
            case "cancel-timers":
                text = await acts.cancel_timers(argument)
            case "flush" if not argument:
                text = await acts.flush()
            case "reload" if not argument:
                text = await acts.reload()
            case _:
                request = f"{act} {argument}".strip()
                return False, f"There is no act {request!r}. Acts are {', '.join(ACTS)}."
    except (OperatorError, HandlerError, LedgerError) as error:
        return False, str(error)
    return True, text


def _running(functions: Mapping[str, Steered], name: str) -> tuple[Steered, Parts]:
    """Return the function ``name``, or the only one, and its parts. Raises OperatorError if it is not known or does not run."""
    if not name and len(functions) == 1:
        (name,) = functions
    if name not in functions:
        what = f"This server has no function {name!r}." if name else "This server has several functions."
        raise OperatorError(what, advice=f"Name one with --function: {', '.join(functions)}.")
    parts = functions[name].parts
    if parts is None:
        who = "The server" if len(functions) == 1 else f"The function {name}"
        raise OperatorError(f"{who} is starting or stopping and cannot be steered now.")
    return functions[name], parts


def _log_level(running: Iterable[Parts], level: str) -> str:
    """Set the lowest level that the server and the worker processes of these parts log. Raises OperatorError."""
    if level not in _LEVELS:
        raise OperatorError(f"There is no level {level!r}.", advice=f"Levels are {', '.join(_LEVELS)}.")
    number, former = logging.getLevelNamesMapping()[level.upper()], Logger.level
    set_level(number)
    Link.debugging = number <= logging.DEBUG
    for parts in running:
        if isinstance(parts.runtime, WorkerRuntime):
            parts.runtime.set_log_level(number)
    return (
        f"What is at {level} or above is logged from now on (before: {logging.getLevelName(former).lower()})."
    )


class _Acts:
    """Carries out requests on the parts of one function. Each method returns its result in words, or raises OperatorError.

    A shard that is paused: the server does not answer its daemon's next request, so the daemon waits. ``_backpressure``
    holds which shards are paused, and why.
    """

    def __init__(self, function: Steered, parts: Parts, clock: Clock) -> None:
        self._function = function
        self._parts = parts
        self._clock = clock
        self._shards = parts.coordinator.shards
        self._backpressure = parts.coordinator.shards.backpressure

    async def pause(self, shard_id: str) -> str:
        """Hold the answers to a shard, or to all if ``shard_id`` is empty, from the next batch on."""
        if shard_id:
            self._connected_session(shard_id)  # raises for an unknown shard
            self._backpressure.paused_shards.add(shard_id)
        else:
            await self._function.command(Command.PAUSE)
        effect = (
            f"shard {shard_id} waits for its next answer" if shard_id else "every shard waits for its answer"
        )
        resume = f"`mldserver resume {shard_id}`".replace(" `", "`")
        return f"From its next batch on {effect}; {resume} ends that. Leases stay, and no window closes past a shard that waits."

    async def resume(self, shard_id: str) -> str:
        """End the pause of a shard, or all pauses if ``shard_id`` is empty. The answers that were held are sent now."""
        backpressure = self._backpressure
        if shard_id and backpressure.paused:
            raise OperatorError(
                "All shards are paused.", advice="Resume without a shard lets all of them go on."
            )
        if shard_id and shard_id not in backpressure.paused_shards:
            paused = ", ".join(sorted(backpressure.paused_shards)) or "none"
            raise OperatorError(f"Shard {shard_id} is not paused.", advice=f"There are {paused}.")
        if (
            not shard_id
            and not await self._function.command(Command.RESUME)
            and not backpressure.paused_shards
        ):
            return "Nothing was paused."
        resumed = {shard_id} if shard_id else set(backpressure.paused_shards)
        backpressure.paused_shards -= resumed
        backpressure.draining -= resumed
        await backpressure.release()
        return f"Shard {shard_id} goes on." if shard_id else "All shards go on."

    async def flush(self) -> str:
        """Make all rows in memory durable: write their segments and register them in the ledger."""
        if not await in_time(self._shards.flush("operator"), self._clock, _PATIENCE_SECONDS):
            raise OperatorError(
                "Rows cannot be made durable now.",
                did="They stay in memory, and this is tried again.",
                advice="See the latest flush.failed.",
            )
        rows = self._parts.coordinator.status().rows_durable
        return f"Everything that was taken in is durable: {rows} rows since the start. Checkpoints follow with the next batches."

    async def drain_shard(self, shard_id: str) -> str:
        """Make a shard's rows durable, checkpoint it, then hold its daemon's next answer, so that its lease can move.

        The server can send a checkpoint only as the answer to a request of the daemon. If the daemon sends none within
        ``_PATIENCE_SECONDS``, the drain ends with its next batch.
        """
        session, backpressure = self._connected_session(shard_id), self._backpressure
        backpressure.paused_shards.add(shard_id)
        backpressure.draining.add(shard_id)
        await backpressure.release()
        resume = f"`mldserver resume {shard_id}` lets it go on."
        drained = backpressure.until(lambda: shard_id not in backpressure.draining)
        if not await in_time(drained, self._clock, _PATIENCE_SECONDS):
            await in_time(self._shards.flush("drain"), self._clock, _PATIENCE_SECONDS)
            return (
                f"Shard {shard_id} is drained with its next batch: the server then makes its rows durable and checkpoints it, "
                f"and its daemon waits. Before that batch the server cannot send its daemon anything. {resume}"
            )
        checkpoint_is_missing = session.position.due() is not None
        if checkpoint_is_missing:
            raise OperatorError(
                f"What shard {shard_id} gave is durable, but its daemon has not stored the checkpoint.",
                did="Its daemon waits for an answer.",
                advice=f"See checkpoint.failed. {resume}",
            )
        return (
            f"Shard {shard_id} is durable and checkpointed at {session.position.checkpointed}, and its daemon waits: it may be "
            f"ended, or the lease moved, and nothing is delivered again. {resume}"
        )

    async def cancel_timers(self, which: str) -> str:
        """Remove pending timers from the stores that this server has open. Raises LedgerError."""
        try:
            chosen = msgspec.json.decode(which, type=TimerFilter)
        except msgspec.MsgspecError as error:
            raise OperatorError(
                f"{which!r:.100} does not say which timers: {error}.", advice="Use `mldserver timers cancel`."
            ) from error
        if self._parts.firing is None:
            raise OperatorError("The handler has no timers.")
        text = f"{counted(await self._parts.firing.cancel(chosen), 'timer')} cancelled."
        state, here = self._shards.view.state, self._shards.sessions.live_stores()
        others = sorted(
            store.store_id
            for store in state.stores.values()
            if store.next_due_ms is not None
            and not store.closed
            and store.store_id not in here
            and (chosen.key is None or hash_of(key_bytes(chosen.key)) in store.key_range)
        )
        if others:
            text += f" This server does not have these stores with timers open: {', '.join(others)}. Ask their servers too."
        return text

    async def reload(self) -> str:
        """Replace the workers, and later Spark's driver, by new ones with the handler's present code.

        Raises HandlerError if that code cannot be loaded: the old workers stay.
        """
        return await self._parts.swap.reload()

    def _connected_session(self, shard_id: str) -> Session:
        """Return the session of a shard that is connected to this server. Raises OperatorError for any other shard."""
        session = self._shards.sessions.live(shard_id)
        if session is None:
            what = f"No shard {shard_id!r} is connected to this server." if shard_id else "Which shard?"
            connected = sorted(node.id for node in self._shards.lineage.connected())
            raise OperatorError(what, advice=f"There are {', '.join(connected) or 'none'}.")
        return session
