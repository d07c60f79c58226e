"""The runtime inside the server's own process: for tests and small set-ups.

Asynchronous hooks run on the event loop. With ``at_once`` synchronous ones do too: a batch is then done when the call
returns. A handler that says ``blocking = True``, lanes, and record processors of amazon_kclpy (which may wait for
much) have threads (``base/threads.py``): one for the pipeline, for each lane, or for each shard. What a hook does
cannot reach the wire (``calls.py``, ``failure.py``). Memory and crashes are shared with the server: a hook that ends
the interpreter (``os._exit``, a crash in C) ends the server, whose ledger makes up for it at the next start.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import pyarrow as pa
import structlog
from msgspec import structs

from mldserver.base.clock import Clock
from mldserver.base.folding import Folding
from mldserver.base.threads import ShardThreads, WorkerThread
from mldserver.errors import HandlerInvalid, InternalError, StateMoved
from mldserver.handler.context import NO_SETTINGS
from mldserver.handler.failure import Failure
from mldserver.handler.kclpy.processor import Processor
from mldserver.handler.queries import Queries, QueryResult, QueryRunner, batches_of
from mldserver.handler.spec import HandlerKind, HandlerSpec, RecordHook, windows_text
from mldserver.protocol.batch_decoder import BatchDecoder
from mldserver.records import Batch, Hook, Sequence, Shard
from mldserver.runtime.calls import TIMER_HOOK, BoundHook, Caller, Deadlines, timer_hook
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure
from mldserver.runtime.interface import BatchOutcome, Delivery, DueTimers
from mldserver.runtime.keyed_state import STATE_BYTES, CallContext, KeyedState
from mldserver.runtime.lane import Tools
from mldserver.runtime.lookups import RequiredLookups
from mldserver.runtime.outcome import halted
from mldserver.runtime.rows import RowBuilder
from mldserver.runtime.timer_table import TimerTable
from mldserver.runtime.work import BatchWork
from mldserver.stores import SnapshotSource, StateSnapshot, StoreSize, largest, nearly_full

log = structlog.get_logger("mldserver")

_CLOSE_SECONDS = 1.0
_MANY_ENTRIES: Final = 10_000
"""Snapshots with more entries are read on a thread."""


@dataclass(slots=True)
class _Store:
    """The store of a keyed handler, which several shards may share."""

    state: KeyedState
    """The live copy. A new snapshot replaces it: an abandoned call may still write to the old one."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the batch that uses it."""


@dataclass(frozen=True, slots=True)
class _OpenHandler:
    """A shard and the hooks of its handler."""

    shard: Shard
    tools: Tools
    hooks: dict[str, BoundHook]
    decoder: BatchDecoder
    processor: Processor | None = None
    """The record processor, if the handler is one of amazon_kclpy."""
    parked: dict[str, Sequence] = field(default_factory=dict)
    """The keys whose records wait behind a dead letter, each with its sequence."""
    store: _Store | None = None
    """The shard's store, if the handler is keyed."""
    snapshot: SnapshotSource | None = None


class InlineRuntime:
    """Runs one pipeline's handler in this process (see ``Runtime``)."""

    def __init__(
        self,
        spec: HandlerSpec,
        *,
        policy: FailurePolicy,
        clock: Clock,
        random: Callable[[], float],
        deadline_seconds: float | None = None,
        concurrency: int | None = None,
        at_once: bool = False,
        watched: bool = False,
        mark: Callable[[int], None] = lambda _: None,
        state_bytes: int = STATE_BYTES,
        settings: Mapping[str, str] = NO_SETTINGS,
        queries: QueryRunner | None = None,
        query_seconds: float = 30.0,
    ) -> None:
        """Run a loaded handler. Raises HandlerInvalid when it does not support the requested lanes, or limit of times.

        ``concurrency``: records of a batch, of different keys, at the same time; None: as many as the handler says.
        ``random`` gives floats in [0, 1) for the jitter of retries. A call may take ``deadline_seconds`` (None: any
        time): then an asynchronous call is cancelled and has failed, and a synchronous one is logged. ``at_once``:
        call synchronous hooks on the event loop, unless the handler is ``blocking``. ``watched`` and
        ``mark``: as ``Caller`` has them. ``state_bytes``: the memory that the state of all stores may take here.
        ``settings``: what the handler reads as ``ctx.settings``. ``queries`` runs its queries, each for ``query_seconds`` at
        most; None: queries fail.
        """
        lanes, is_async = concurrency or spec.concurrency, spec.hooks[spec.record_hook].is_async
        if lanes > 1 and spec.record_hook is not RecordHook.RECORD:
            raise HandlerInvalid(
                f"concurrency is {lanes}, but the handler takes all records of a batch at once ({spec.record_hook}).",
                advice="Leave the setting concurrency out, or give the handler process_record.",
                handler=spec.path,
            )
        if spec.keyed and lanes > 1:
            raise HandlerInvalid(
                f"concurrency is {lanes}, but the handler keeps state (ctx).",
                did="It is not run.",
                advice="Leave the setting concurrency out: calls of a handler with state follow one another.",
                handler=spec.path,
            )
        if spec.keyed and policy.max_ahead_ms is not None:
            raise HandlerInvalid(
                "on_ahead is fail, but the handler keeps state (ctx): its rows are checked after its state has changed.",
                did="It is not run.",
                advice="Leave on_ahead out, or compare the row's time with ctx.now in the handler.",
                handler=spec.path,
            )
        if spec.timers and policy.parks:
            raise HandlerInvalid(
                "on_key_failure is park, but the handler has timers: the records of a parked key would wait, and its timers would "
                "overtake them.",
                did="It is not run.",
                advice="Leave on_key_failure out.",
                handler=spec.path,
            )
        processor = spec.kind is HandlerKind.PROCESSOR
        here = at_once and not (spec.blocking or is_async or processor or lanes > 1)
        self._policy, self._clock, self._random = policy, clock, random
        # What is parked is known only when a batch is over: such batches are awaited.
        self._at_once = here and not policy.parks
        self._thread = WorkerThread("mldserver-handler")
        own = range(1, 1 if is_async else lanes)
        self._threads = [self._thread, *(WorkerThread(f"mldserver-lane-{place}") for place in own)]
        self._shard_threads = ShardThreads()
        self._shards: dict[str, _OpenHandler] = {}
        self._stores: dict[str, _Store] = {}
        self.state_bytes = state_bytes
        """The memory that the state of all stores may take here. The server changes it in a worker."""
        self._settings = MappingProxyType(dict(settings))
        self._queries, self._required = None, RequiredLookups(() if queries is None else spec.lookups)
        if queries is not None:
            self._queries = Queries(
                queries, seconds=query_seconds, deadline=deadline_seconds, steady_ms=clock.steady_ms
            )
        self.deadlines = Deadlines(handler=spec.path, clock=clock, seconds=deadline_seconds)
        self._tools = tools = Tools(
            spec=spec,
            caller=Caller(
                thread=None if here else self._thread,
                deadlines=self.deadlines,
                clock=clock,
                watched=watched,
                mark=mark,
            ),
            threads=self._threads,
            clock=clock,
            policy=policy,
            random=random,
            rows=RowBuilder(spec.schema, time_column=spec.time_column, at_once=policy.parks or spec.keyed),
            folding=Folding(clock.steady_ms),
            late_rows=RowBuilder(spec.schema, time_column=spec.time_column) if spec.keyed else None,
            lanes=lanes,
        )
        self._firing = replace(tools, policy=policy.firing())
        self._redriving = replace(tools, policy=policy.redriving())

    async def start(self) -> None:
        """Start the threads of synchronous hooks."""
        for thread in self._threads:
            thread.start()
        spec = self._tools.spec
        if spec.schema is not None and not self._tools.caller.watched:
            # Arrow imports pandas with the first array of a process. That takes 0.2 s, and would block the event loop in the first
            # batch with rows. In a worker process only the first batch waits for it.
            pa.array((0,))
        log.info(
            "handler.loaded",
            handler=spec.path,
            hooks=sorted(spec.hooks),
            schema=spec.schema.ddl if spec.schema else None,
            windows=windows_text(spec.windows),
            **({"advice": " ".join(map(str, spec.warnings))} if spec.warnings else {}),
        )

    async def open(self, shard: Shard, snapshot: SnapshotSource | None = None) -> None:
        """Make the shard's handler and run its ``initialize`` hook, repeatedly until it succeeds.

        Under the policy ``halt`` it raises HandlerHalted after the policy's attempts; otherwise the shard waits,
        since it has no record to set aside yet, and from then on its failures are logged as errors.
        """
        await self._required.wait()
        await self.forget(shard.id)
        await self._lanes_free()
        tools, failures = self._tools, 0
        if tools.spec.kind is HandlerKind.PROCESSOR:
            # It may block for long, so it runs on a separate thread.
            thread = await self._shard_threads.start(shard.id)
            tools = replace(tools, caller=copy.copy(tools.caller), threads=(thread,))
            tools.caller.thread = thread
        while (failed := await self._try_open(shard, tools)) is not None:
            hook, failure = failed
            failures += 1
            if self._policy.on_failure is OnFailure.HALT and failures >= self._policy.attempts:
                spec = tools.spec
                raise halted(
                    failure,
                    hook,
                    shard=shard.id,
                    handler=spec.path,
                    attempts=failures,
                    messages=self._policy.log_error_messages,
                )
            await self._wait(shard, hook, failure, failures, grave=failures >= self._policy.attempts)
        if tools.spec.keyed:
            await self._load(self._opened(shard.id), snapshot)

    def begin(self, delivery: Delivery) -> BatchOutcome | Coroutine[None, None, BatchOutcome]:
        """Process a batch at once as far as possible (see ``Runtime.begin``)."""
        if not self._at_once or delivery.redriven:
            return self.process(delivery)
        opened = self._shards.get(delivery.shard_id) or self._opened(delivery.shard_id)
        hook, turn = opened.hooks[opened.tools.spec.record_hook], None
        if opened.store is not None:
            stands = opened.store.state.stands_at(delivery.shard_id, delivery.number)
            if not stands or isinstance(delivery.payload, DueTimers):
                return self.process(delivery)
            turn = self._turn_of(opened.store)
        return BatchWork(opened.tools, hook, delivery, opened.decoder, turn=turn).begin()

    async def process(self, delivery: Delivery) -> BatchOutcome:
        """Decode a batch and run the handler over its records (see ``Runtime.process``)."""
        opened, turn = self._opened(delivery.shard_id), None
        if opened.store is not None:
            await self._catch_up(opened, opened.store, delivery.number)
            turn = self._turn_of(opened.store)
        hook = opened.hooks[opened.tools.spec.record_hook]
        tools, parked = opened.tools, opened.parked
        if isinstance(delivery.payload, DueTimers):
            hook = opened.hooks.get(TIMER_HOOK, hook)
            tools = self._redriving if delivery.payload.letters else self._firing
        elif delivery.redriven:
            tools, parked = replace(tools, policy=tools.policy.redriving()), {}
        work = BatchWork(tools, hook, delivery, opened.decoder, parked, turn=turn)
        outcome = await work.run()
        for lane in work.lanes:
            opened.parked.update(lane.plan.parked)
        return outcome if opened.processor is None else await self._kept(outcome, opened, opened.processor)

    async def notify(self, shard_id: str, hook: Hook) -> Sequence | None:
        """Run a life-cycle hook, if the handler has it. Its failures are retried, then logged, never raised."""
        opened = self._opened(shard_id)
        bound, processor = opened.hooks.get(hook), opened.processor
        await self._lanes_free()
        attempt = 0
        while bound is not None and attempt < self._policy.attempts:
            attempt += 1
            returned = await opened.tools.caller.run(bound, [opened.shard], shard=shard_id)
            if returned.failure is None:
                break
            if attempt < self._policy.attempts:
                await self._wait(opened.shard, bound.name, returned.failure, attempt)
            else:
                tell = opened.tools.failure_logger(shard_id)
                tell("error", "handler.hook_failed", returned.failure, hook=bound.name, attempts=attempt)
        if processor is None:
            return None
        if hook is Hook.SHARD_ENDED and not processor.progress.end_checkpointed:
            log.warning(
                "handler.end_not_checkpointed",
                shard=shard_id,
                handler=self._tools.spec.path,
                did="The server checkpoints the end, so that the shard's children can begin.",
                advice="amazon_kclpy demands checkpoint() there; without it the shard is never done.",
            )
        return processor.progress.position

    async def park(self, shard_id: str, keys: Mapping[str, Sequence]) -> None:
        """Hold back the later records of these keys of an open shard (see ``Runtime.park``)."""
        if self._policy.parks:
            self._opened(shard_id).parked.update(keys)

    async def unpark(self, shard_id: str, key: str) -> None:
        """Process the later records of a key again (see ``Runtime.unpark``)."""
        opened = self._shards.get(shard_id)
        if opened is not None:
            opened.parked.pop(key, None)

    async def fill_lookup(self, name: str, result: QueryResult) -> None:
        """Replace the table of a lookup (see ``Runtime``)."""

        def fill() -> None:
            self._tools.spec.tables[name].fill(pa.Table.from_batches(list(batches_of(result))))

        # It may be a million rows; calls go on with the old table meanwhile.
        await asyncio.to_thread(fill)
        self._required.note(name)

    async def forget(self, shard_id: str) -> None:
        """Drop the shard's handler."""
        opened = self._shards.pop(shard_id, None)
        if opened is not None and opened.processor is not None:
            opened.processor.progress.closed = True  # a hook that still runs cannot checkpoint any more
        self._shard_threads.release(shard_id)
        if opened is not None and opened.store is not None:
            state = opened.store.state
            state.forget(shard_id)
            if not self._sharing(opened.store):
                self._stores.pop(state.store_id, None)

    def threads(self, shard_id: str) -> tuple[WorkerThread, ...]:
        """Return the threads that process a shard's batches, if it is open."""
        opened = self._shards.get(shard_id)
        return () if opened is None else tuple(opened.tools.threads)

    @property
    def trouble(self) -> str | None:
        """Return whether keyed state is nearly full. A crash of the handler also ends the server, which then reports nothing."""
        return nearly_full(self.state_sizes(), self.state_bytes)

    def state_sizes(self) -> tuple[StoreSize, ...]:
        """Return how much keyed state is held here (see ``Runtime.state_sizes``). Any thread may call it."""
        states = [store.state for store in list(self._stores.values())]
        return largest(StoreSize(state.store_id, len(state), state.memory) for state in states)

    async def run(self) -> None:
        """Enforce the deadlines of calls."""
        await self.deadlines.run()

    async def close(self) -> None:
        """Stop the worker threads; a hook that hangs is left behind after a few seconds."""
        self._shards.clear()
        self._stores.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._shard_threads.close(_CLOSE_SECONDS))
            for thread in self._threads:
                group.create_task(thread.close(_CLOSE_SECONDS))

    async def _lanes_free(self) -> None:
        """Wait until no lane runs an abandoned call of a cancelled batch: hooks of a shard never overlap.

        The first thread needs no wait: hooks queue for it.
        """
        async with asyncio.TaskGroup() as group:
            for thread in self._threads[1:]:
                group.create_task(thread.run(lambda: None))

    async def _try_open(self, shard: Shard, tools: Tools) -> tuple[str, Failure] | None:
        """Make a handler and run ``initialize``; return the hook that failed, and why."""
        spec = tools.spec
        instance: Any = spec.target
        names = (*spec.hooks, *spec.timers)

        def make(_: Shard) -> list[Any]:
            # What a class makes, and what that has, is up to the user's code. It comes back in a list of one: hooks may
            # not return objects of their own to the runtime.
            made = spec.target()
            return [(made, {name: getattr(made, name) for name in names})]

        if spec.kind is HandlerKind.MODULE:
            functions = {name: getattr(instance, name) for name in names}
        else:
            made = await tools.caller.run(
                BoundHook("__init__", make, is_async=False), [shard], shard=shard.id
            )
            if made.failure is not None:
                return "__init__", made.failure
            instance, functions = made.values[0][0]
        hooks = {name: BoundHook(name, functions[name], hook.is_async) for name, hook in spec.hooks.items()}
        name = spec.record_hook
        if name is RecordHook.RECORD:
            hooks[name] = replace(hooks[name], plain=tools.rows.plain, convert=tools.rows.convert)
        if spec.timers:
            callbacks = {each: functions[each] for each in spec.timers}
            timer = timer_hook(callbacks, is_async=spec.hooks[name].is_async, steady_ms=self._clock.steady_ms)
            hooks[timer.name] = replace(timer, plain=tools.rows.plain, convert=tools.rows.convert)
        if name is not RecordHook.TABLE:
            bounded = tools.policy.max_ahead_ms is not None and spec.time_column is not None
            hooks[name] = replace(hooks[name], plainly=tools.lanes == 1 and not bounded)
        initialize = hooks.get("initialize")
        if initialize is not None:
            returned = await tools.caller.run(initialize, [shard], shard=shard.id)
            if returned.failure is not None:
                return initialize.name, returned.failure
        processor = instance if isinstance(instance, Processor) else None
        self._shards[shard.id] = _OpenHandler(shard, tools, hooks, BatchDecoder(shard.id), processor)
        return None

    async def _load(self, opened: _OpenHandler, snapshot: SnapshotSource | None) -> None:
        """Load the store of a shard that was opened. Its other open shards use the new copy, too."""
        taken = None if snapshot is None else await snapshot()
        store_id = opened.shard.id if taken is None else taken.store_id
        store = self._stores.get(store_id) or _Store(KeyedState(store_id))
        async with store.turn:
            if self._shards.get(opened.shard.id) is opened:
                self._stores[store_id] = store
                opened = self._shards[opened.shard.id] = replace(opened, store=store, snapshot=snapshot)
                await self._replace(store, opened, taken)

    async def _catch_up(self, opened: _OpenHandler, store: _Store, number: int | None) -> None:
        """Replace the live copy of a shard's store if the batch with this number needs another. Raises StateMoved."""
        shard_id = opened.shard.id
        async with store.turn:
            if store.state.stands_at(shard_id, number):
                return
            if opened.snapshot is not None:
                log.warning("state.moved", shard=shard_id, handler=self._tools.spec.path, number=number)
                await self._replace(store, opened, await opened.snapshot())
            if not store.state.stands_at(shard_id, number):
                raise StateMoved(
                    f"Batch {number} of the shard came, but its state contains {store.state.applied.get(shard_id, 0)}.",
                    did="The batch was not processed.",
                    shard=shard_id,
                )

    async def _replace(self, store: _Store, opened: _OpenHandler, taken: StateSnapshot | None) -> None:
        """Replace a store's live copy by a snapshot that was read for a shard; None: by an empty one."""
        spec, shard_id = self._tools.spec, opened.shard.id
        ttl_ms, timers = spec.state_ttl_ms, spec.timers
        sharing = self._sharing(store)
        clocks = {name: ms for name, ms in store.state.clocks.items() if name in sharing}
        if taken is None:
            state = KeyedState(
                store.state.store_id, ttl_ms=ttl_ms, timers=TimerTable(timers) if timers else None
            )
        else:
            load = partial(KeyedState.loaded, taken, shard_id, ttl_ms=ttl_ms, clocks=clocks, hooks=timers)
            state = await asyncio.to_thread(load) if taken.entries.num_rows > _MANY_ENTRIES else load()
        state.applied = {name: state.applied.get(name, 0) for name in sharing}
        store.state = state
        late_rows = self._tools.late_rows
        assert late_rows is not None, "only keyed handlers have stores"
        for each in sharing.values():
            context = CallContext(state, each.shard.id, self._settings, timers, self._queries)
            for name in (spec.record_hook, TIMER_HOOK) if timers else (spec.record_hook,):
                hook = replace(each.hooks[name], context=context, unchecked=None)
                unchecked = replace(hook, plain=late_rows.plain, convert=late_rows.convert)
                each.hooks[name] = replace(hook, unchecked=unchecked)
        if state.timers is not None and (unknown := state.timers.report().unknown):
            log.warning("timer.unknown", shard=shard_id, handler=spec.path, timers=unknown)

    def _sharing(self, store: _Store) -> dict[str, _OpenHandler]:
        """Return the open shards that have this store."""
        return {name: opened for name, opened in self._shards.items() if opened.store is store}

    def _turn_of(self, store: _Store) -> asyncio.Lock:
        """Return a store's turn, for a batch; note how much memory its state may take."""
        others = [each.state.memory for each in self._stores.values() if each is not store]
        store.state.room = self.state_bytes - sum(others)
        return store.turn

    async def _kept(self, outcome: BatchOutcome, opened: _OpenHandler, processor: Processor) -> BatchOutcome:
        """Return the outcome of a batch that moves its shard's position only as far as the processor has checkpointed."""
        shard, outline = opened.shard, outcome.outline
        if not outline.records:
            # Some processors do on every call what is due by the clock, so they are called without records too.
            empty = Batch((), shard_id=shard.id, millis_behind_latest=outline.millis_behind_latest)
            hook = opened.hooks[RecordHook.RECORDS]
            returned = await opened.tools.caller.run(hook, [empty], shard=shard.id)
            if returned.failure is not None:
                tell = opened.tools.failure_logger(shard.id)
                tell("error", "handler.hook_failed", returned.failure, hook=hook.name, attempts=1)
        progress = processor.progress
        progress.end_call()
        late_ms = progress.overdue_ms(self._clock.steady_ms())
        if late_ms is not None:
            # It takes records, and never says that it is done with them.
            log.warning(
                "handler.not_checkpointing",
                shard=shard.id,
                handler=opened.tools.spec.path,
                seconds=late_ms / 1000,
                position=None if progress.position is None else str(progress.position),
                advice="Records are delivered again from there after a restart: call checkpointer.checkpoint().",
            )
        owes = progress.delivered != progress.position
        return structs.replace(outcome, keeps_position=True, position=progress.position, owes=owes)

    async def _wait(
        self, shard: Shard, hook: str, failure: Failure, failures: int, *, grave: bool = False
    ) -> None:
        after = failure.after_seconds
        delay = self._policy.delay(failures, self._random()) if after is None else after
        did = "The shard waits; the hook is tried again until it succeeds."
        self._tools.failure_logger(shard.id)(
            "error" if grave else "warning",
            "handler.failed",
            failure,
            hook=hook,
            attempt=failures,
            delay_seconds=delay,
            **({"did": did} if grave else {}),
        )
        await self._clock.sleep(delay)

    def _opened(self, shard_id: str) -> _OpenHandler:
        opened = self._shards.get(shard_id)
        if opened is None:
            raise InternalError("A shard is used that is not open.", shard=shard_id)
        return opened
