"""The ledger on DynamoDB, for servers on several hosts: ``Ledger`` over one partition of a table.

Every transaction is one ``TransactWriteItems`` on condition of the version that it was decided on; what it changes is
one item of a log (``dynamodb_journal.py``), which every server reads into a book of its own (``dynamodb_book.py``) and
decides over, in plain code. Pipelines may share a table.

Limits (AWS: 100 items and 4 MB a transaction, 400 KB an item, no item twice). A flush is never split: its segments
belong to several shards at once. Whatever it holds, its transaction has at most 5 items and 0.8 MB: ``meta``, its
changes (compressed), its dead letters (compressed), and the marks of what is kept apart. Of changes, or dead letters,
that take more than 350 KB compressed, all is written before the transaction in items of 350 KB under its unique id, and
named by it; what no transaction came to name is swept later. A segment in a window of its own takes some 37 bytes: a
flush is kept apart from some 9,000 files on.

Cost: a transaction writes 2 or 3 items, each 2 write units while it takes less than 1 KB (a flush of ten shards and ten
files: 0.6 KB), and reads the news first. A partition takes 1,000 write units a second: some 200 transactions.

Throttling, lost connections and conflicts are retried with jittered pauses on the injected clock; then LedgerError. One
request is sent at most 6 times (some 5 s of refusals; half a minute of silence), one decision is taken at most 40
times. After a LedgerError, and after a cancellation, a transaction may have taken place: epochs, ``previous`` and
attempts keep a repetition from counting twice.

Permissions on the table: ``dynamodb:GetItem``, ``Query``, ``PutItem``, ``UpdateItem``, ``DeleteItem``,
``BatchWriteItem`` (may be narrowed to pipelines by ``dynamodb:LeadingKeys``); to create it also ``CreateTable`` and
``DescribeTable``. Point-in-time recovery is worth turning on: a ledger cannot be made again from the output.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from mldserver.base.aws import aws_client
from mldserver.errors import InternalError, LedgerError
from mldserver.state import dynamodb_flushes as flushes
from mldserver.state import dynamodb_letters
from mldserver.state import dynamodb_members as members
from mldserver.state import dynamodb_windows as windows
from mldserver.state.dynamodb_book import Draft
from mldserver.state.dynamodb_journal import Journal
from mldserver.state.dynamodb_snapshot import Compaction
from mldserver.state.dynamodb_table import Table, backoff_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from mldserver.base.clock import Clock
    from mldserver.records import DeadLetter, Sequence
    from mldserver.state.ledger import (
        Commit,
        Decision,
        Flush,
        FlushResult,
        LedgerState,
        Segment,
        ServerState,
        ShardState,
        WindowEntry,
    )
    from mldserver.state.letters import StoredLetter
    from mldserver.state.shapes import ShapeChange

__all__ = ["DynamoLedger"]

log = structlog.get_logger("mldserver")

_T = TypeVar("_T")

_JITTER: Final = random.SystemRandom().random

_DECISIONS: Final = 40
"""How often a transaction is decided anew because another was faster."""


class DynamoLedger:
    """The ``Ledger`` of one server, in a table that servers of other hosts share. Calls take turns."""

    def __init__(
        self,
        table: str,
        *,
        pipeline: str,
        server_id: str,
        clock: Clock,
        rename_from: str | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        create: bool = False,
        session: Any = None,
        compact_bytes: int = 1_000_000,
        jitter: Callable[[], float] = _JITTER,
        unique: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """Name the table, the pipeline and this server; ``open`` reaches for them.

        ``rename_from``: the name that the pipeline may have still. ``create``: make the table when it is not there. ``session``: an aioboto3 session; None: credentials and region
        come from where boto3 finds them. ``compact_bytes``: the log is never shortened below it.
        """
        self._name = table
        self._pipeline, self._former = pipeline, rename_from
        self._server_id = server_id
        self._clock = clock
        self._where: dict[str, Any] = {"region": region, "endpoint_url": endpoint_url, "session": session}
        self._make = create
        self._compact_bytes = compact_bytes
        self._jitter = jitter
        self._unique = unique
        self._turn = asyncio.Lock()
        self._resources = contextlib.AsyncExitStack()
        self._table: Table | None = None
        self._journal: Journal | None = None
        self._compaction: Compaction | None = None
        self._life: int | None = None
        """Which registration of its id this server is; None for a tool."""
        self._readers = 0
        """Calls that read beside the turns of others."""
        self._read = asyncio.Event()
        """Set when one of them has ended."""
        self._closed = False

    @property
    def server_id(self) -> str:
        """The id under which this server is known."""
        return self._server_id

    async def open(self) -> LedgerState:
        """Create or open the ledger, and register. After an error it is closed."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            async with self._taking_turns():
                state = await self._enter()
            undo.pop_all()
        return state

    async def _enter(self) -> LedgerState:
        if self._life is not None:
            raise InternalError("The ledger is open already.", table=self._name)
        await self._connect(create=True)
        now_ms = self._clock.now_ms()
        self._life = await self._decide(lambda draft: members.enter(draft, self._server_id, now_ms))
        return self._held()

    async def peek(self) -> LedgerState:
        """Return what the ledger holds without registering; close it afterwards, also after an error."""
        async with self._taking_turns():
            await self._connect(create=False)
            await self._reached().refresh()
            return self._held()

    async def create_table(self) -> None:
        """Create the table unless it is there, and wait until it can be used (at most a minute)."""
        async with self._taking_turns():
            await (await self._reach()).create()

    async def _connect(self, *, create: bool) -> None:
        if self._journal is not None:
            return
        table = await self._reach()
        names = self._pipeline, self._former
        journal = Journal(table, names, clock=self._clock, jitter=self._jitter, unique=self._unique)
        if create and self._make:
            await table.create()
        if create and self._former is None:
            await journal.create(self._clock.now_ms())
        if not await journal.load():
            name = self._former or self._pipeline
            missing = f"There is no ledger of the pipeline {name} in the table {self._name}."
            raise LedgerError(missing, advice="Name a pipeline that ran, and its table.", table=self._name)
        self._journal = journal
        self._compaction = Compaction(
            journal,
            table,
            server_id=self._server_id,
            at_least=self._compact_bytes,
            turn=self._turn,
            clock=self._clock,
            jitter=self._jitter,
            unique=self._unique,
        )

    async def _reach(self) -> Table:
        if self._table is None:
            # One sending a call: ``Table.send`` knows which errors pass, and pauses on the injected clock.
            once = {"total_max_attempts": 1}
            made = aws_client("dynamodb", connect_timeout=3, read_timeout=5, retries=once, **self._where)
            client = await self._resources.enter_async_context(made)
            self._table = Table(client, self._name, self._pipeline, clock=self._clock, jitter=self._jitter)
        return self._table

    @contextlib.asynccontextmanager
    async def _taking_turns(self) -> AsyncIterator[None]:
        if self._closed:
            raise InternalError("The ledger is closed.", table=self._name)
        async with self._turn:
            yield

    def _reached(self) -> Journal:
        if self._journal is None:
            raise InternalError("The ledger is not open.", table=self._name)
        return self._journal

    def _held(self, since: int = 0) -> LedgerState:
        return self._reached().book.state(since)

    async def _decide(self, rule: Callable[[Draft], _T]) -> _T:
        """Run a rule over the latest version and write what it changes, until nobody else was faster."""
        journal = self._reached()
        for turn in range(_DECISIONS):
            await journal.refresh()
            draft = Draft(journal.book)
            told = rule(draft)
            if not draft.changes() or await journal.append(draft):
                return told
            await self._clock.sleep(backoff_s(turn, self._jitter(), base=0.02, cap=0.5))
        raise LedgerError(
            f"Other servers were faster {_DECISIONS} times.",
            did="Nothing was written.",
            advice="Flush less often (--flush-interval), or run fewer servers on one pipeline.",
            table=self._name,
        )

    async def _tool(self, rule: Callable[[Draft], _T]) -> _T:
        """Run a rule that anyone may use."""
        async with self._taking_turns():
            return await self._decide(rule)

    async def _member(self, rule: Callable[[Draft], _T]) -> _T:
        """Run a rule that only a registered server may use."""
        async with self._taking_turns():
            return await self._decide_as_member(rule)

    async def _decide_as_member(self, rule: Callable[[Draft], _T]) -> _T:
        life = self._lives()

        def guarded(draft: Draft) -> _T:
            members.require(draft, self._server_id, life)
            return rule(draft)

        return await self._decide(guarded)

    def _lives(self) -> int:
        if self._life is None:
            raise InternalError("The ledger was not opened by a server.", table=self._name)
        return self._life

    async def sync(self, told: ServerState, since: int = 0) -> LedgerState:
        """Beat, and return what the ledger holds now. Shortens the log when it is long, while others take turns."""
        members.own(told, self._server_id)
        async with self._taking_turns():
            life = self._lives()
            await self._decide_as_member(lambda draft: members.beat(draft, told, life))
            state, compaction = self._held(since), self._compaction
            if compaction is None or not compaction.due():
                return state
        try:
            await compaction.run()
        except LedgerError as error:
            # A long log costs the next start time, and nothing else: no row waits for it.
            compaction.put_off()
            log.warning("ledger.not_shortened", **error.told())
            return state
        async with self._turn:
            return self._held(since)

    async def find(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        """Return windows as they are."""
        async with self._taking_turns():
            await self._reached().refresh()
            windows = self._reached().book.windows
            return tuple(windows[each] for each in window_ids if each in windows)

    async def bury(self, seen: Mapping[str, int]) -> frozenset[str]:
        """Remove servers whose beat is still the one that was seen; return those that are gone."""
        others = {each: beat_ms for each, beat_ms in seen.items() if each != self._server_id}
        return await self._member(lambda draft: members.bury(draft, others))

    async def claim(self, folder: str, *, instead_of: str | None = None) -> LedgerState:
        """Be the ledger of an output folder, unless it is another's; return what it holds then."""
        await self._member(lambda draft: members.claim(draft, folder, instead_of, self._server_id))
        return self._held()

    async def leave(self) -> None:
        """Take this server's row out."""
        life = self._lives()
        await self._tool(lambda draft: members.leave(draft, self._server_id, life))

    async def declare(self, change: ShapeChange, *, version: int) -> bool:
        """Note this server's shape, unless it is another than the pipeline's and somebody wrote since a version."""
        told = self._server_id, change, version, self._clock.now_ms()
        return await self._member(lambda draft: members.declare(draft, *told))

    async def drain(self) -> None:
        """Ask all servers to drain."""
        await self._tool(members.drain)

    async def open_shard(self, shard_id: str, parents: tuple[str, ...] = ()) -> ShardState:
        """Raise the shard's epoch, own it, and return its state."""
        return await self._member(lambda draft: members.open_shard(draft, shard_id, parents, self._server_id))

    async def release_shard(self, shard_id: str, epoch: int) -> None:
        """Give up owning a shard."""
        await self._member(lambda draft: members.release_shard(draft, shard_id, epoch))

    async def know_shards(self, parents_by_shard: dict[str, tuple[str, ...]]) -> None:
        """Note shards and their parents."""
        known = dict(parents_by_shard)
        await self._member(lambda draft: members.know_shards(draft, known))

    async def end_shards(self, shard_ids: frozenset[str]) -> None:
        """Mark shards as ended."""
        now_ms = self._clock.now_ms()
        await self._tool(lambda draft: members.end_shards(draft, shard_ids, now_ms))

    async def register(self, flush: Flush) -> FlushResult:
        """Register a flush as a whole, or refuse it as a whole."""
        now_ms = self._clock.now_ms()
        return await self._member(lambda draft: flushes.register(draft, flush, now_ms))

    async def cut(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        """Fix the segments of windows and own them."""
        return await self._member(lambda draft: windows.cut(draft, window_ids, self._server_id))

    async def adopt(self) -> tuple[WindowEntry, ...]:
        """Own every cut or committed window without an owner."""
        return await self._member(lambda draft: windows.adopt(draft, self._server_id))

    async def begin_attempts(self, window_ids: tuple[str, ...]) -> dict[str, int]:
        """Count an attempt at each cut window of this server, together."""
        return await self._member(lambda draft: windows.begin_attempts(draft, window_ids, self._server_id))

    async def commit(self, commits: tuple[Commit, ...]) -> frozenset[str]:
        """Make attempts' outputs count, together."""
        return await self._member(lambda draft: windows.commit(draft, commits, self._server_id))

    async def published(self, attempts: Mapping[str, int], *, retain: bool = True) -> tuple[Segment, ...]:
        """Note that outputs are visible; return the segments that are free to delete."""
        now_ms, told = self._clock.now_ms(), dict(attempts)
        return await self._member(
            lambda draft: windows.published(draft, told, self._server_id, retain=retain, now_ms=now_ms)
        )

    async def expire(
        self, *, published_before_ms: int, keep_bytes: int, limit: int = 1000
    ) -> tuple[Segment, ...]:
        """Stop retaining windows by age, then by size; return the segments to delete."""
        bounds = {"published_before_ms": published_before_ms, "keep_bytes": keep_bytes, "limit": limit}
        return await self._member(lambda draft: windows.expire(draft, **bounds))

    async def late_published(self, paths: tuple[str, ...]) -> None:
        """Note that files of the late dataset are visible."""
        await self._member(lambda draft: windows.late_published(draft, paths))

    async def set_aside(self, window_id: str, error: str) -> None:
        """Put a cut window of this server aside with its segments."""
        await self._member(lambda draft: windows.set_aside(draft, window_id, error, self._server_id))

    async def halt(self, window_id: str, error: str, *, first: bool) -> bool:
        """Keep why a window of this server is halted."""
        told = window_id, error, self._server_id
        return await self._member(lambda draft: windows.halt(draft, *told, first=first))

    async def decide(self, window_id: str, decision: Decision) -> bool:
        """Do what an operator decides about a window that is halted or set aside."""
        told = window_id, decision, self._clock.now_ms()
        return await self._tool(lambda draft: windows.decide(draft, *told))

    async def accept_gap(self, shard_id: str) -> bool:
        """Let the next opening of a shard start beyond its position."""
        return await self._tool(lambda draft: members.accept_gap(draft, shard_id))

    async def reset(self, shard_ids: frozenset[str]) -> frozenset[str]:
        """Forget where shards without an owner stand; return which those were."""
        return await self._tool(lambda draft: members.reset(draft, shard_ids))

    async def prune(
        self,
        *,
        windows_before_ms: int,
        shards_before_ms: int,
        keep_shards: frozenset[str] = frozenset(),
        limit: int = 10_000,
    ) -> int:
        """Forget windows published and not retained, and shards ended, before those times (ms)."""

        def rule(draft: Draft) -> int:
            over = windows.prune(draft, before_ms=windows_before_ms, limit=limit)
            return over + members.prune(draft, before_ms=shards_before_ms, keep=keep_shards)

        return await self._member(rule)

    async def dead_letters(self, limit: int = 100) -> tuple[DeadLetter, ...]:
        """Return stored dead letters, oldest first."""
        return tuple(each.letter for each in await self.letters(limit=limit))

    async def letters(
        self, *, after: str | None = None, limit: int = 100, wanted: bool = False
    ) -> tuple[StoredLetter, ...]:
        """Return a page of letters in order of storage."""
        found: list[StoredLetter] = []
        async with self._taking_turns():
            journal = self._reached()
            await journal.refresh()
            async with contextlib.aclosing(journal.letters(after, wanted=wanted)) as stored:
                while len(found) < limit and (each := await anext(stored, None)) is not None:
                    found.append(each)
        return tuple(found)

    async def parked_keys(self, shard_id: str) -> dict[str, Sequence]:
        """Return the keys of a shard's dead letters, each with the sequence of the first."""
        async with self._taking_turns():
            journal = self._reached()
            await journal.refresh()
            told = journal.book.letters.copy()
            self._readers += 1
        try:
            # Beside the turns of others: there may be many letters, and each shard that is opened asks.
            return await journal.parked_keys(told, shard_id)
        finally:
            self._readers -= 1
            self._read.set()

    async def redrive(self, ids: tuple[str, ...], *, wanted: bool = True) -> frozenset[str]:
        """Mark letters to be redriven, or not."""
        return await self._tool(lambda draft: dynamodb_letters.mark(draft, ids, wanted=wanted))

    async def purge(self, ids: tuple[str, ...]) -> frozenset[str]:
        """Delete letters."""
        return await self._tool(lambda draft: dynamodb_letters.remove(draft, ids))

    async def add_letters(self, letters: tuple[DeadLetter, ...], *, wanted: bool = False) -> None:
        """Store letters that come from elsewhere."""
        await self._tool(lambda draft: dynamodb_letters.store(draft, letters, wanted=wanted))

    async def close(self) -> None:
        """Close after every call that was made before. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._compaction is not None:
            await self._compaction.close()
        async with self._turn:
            while self._readers:
                self._read.clear()
                await self._read.wait()
            await self._resources.aclose()
