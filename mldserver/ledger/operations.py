"""The ledger: the one durable record of positions, segments, windows and dead letters.

It is the only place that decides what counts. Rows count when the transaction that moves their shard's position
registers their segment; a window's output counts when the transaction that commits it succeeds. Every method of
``Ledger`` is one transaction: it happens wholly or not at all, whatever dies.

A transaction is a *rule* (``rules.py``, ``row_rules.py``, ``state_rules.py``): plain code that reads and
changes a draft of the ledger's next version (``book.py``). A store (``sqlite.py``, for servers of one host; ``dynamodb.py``)
keeps a book up to date with what other servers write, and writes down what a draft changes.

Several servers may share a ledger. Each registers under its id and beats. Another server *expires* a server
that has not beaten for long: it removes the server's row, so that the ledger refuses its later writes
(``ServerExpired``). Servers adopt its windows, and only then delete its unregistered files. A server that opens the
ledger under a registered id expires the previous holder. Shards are fenced by epochs, windows by attempts.

A server registers with ``open``; then every call may follow. A tool opens the ledger with ``peek``; then only
``peek``, ``find``, ``end_shards``, ``decide``, ``accept_gap``, ``reset``, ``forget_shards``, ``drain``, ``change_life``, ``forget``, ``close`` and those
of dead letters may, else InternalError. After a server expired or left, every writing call of it raises ServerExpired, except
``leave`` and those.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from mldserver.base.clock import Clock
from mldserver.errors import InternalError, LedgerError, ServerExpired
from mldserver.ledger import row_rules, rules, state_rules
from mldserver.ledger.book import Book, Draft
from mldserver.ledger.contract import (
    LETTERS_AT_ONCE,
    Commit,
    Decision,
    Flush,
    FlushResult,
    FunctionLife,
    LedgerState,
    Segment,
    ServerState,
    ShapeChange,
    ShardState,
    StateFile,
    StoredLetter,
    WindowEntry,
    WindowState,
)
from mldserver.records import DeadLetter, Sequence
from mldserver.stores import KeyRange, StoreClaim

_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S")


@dataclass(frozen=True, slots=True)
class Transaction(Generic[_T]):
    """A rule and what it is called with."""

    rule: Callable[..., _T]
    args: tuple[Any, ...] = ()
    fields: Mapping[str, Any] | None = None
    member: tuple[str, int] | None = None
    """The server, and its life, that must be registered still."""

    def run(self, draft: Draft) -> _T:
        """Apply the rule to a draft. Raises ServerExpired unless the member's registration is still the same."""
        if self.member is not None:
            server_id, life = self.member
            server = draft.servers.get(server_id)
            if server is None or server.life != life:
                raise ServerExpired(
                    f"Server {server_id} is not registered any more: another expired it, has its id,"
                    " or has claimed the ledger again (--new-ledger).",
                    did="Nothing was written.",
                    advice="It must start again; if it hung for long, look at the machine, or raise the time-out.",
                    server=server_id,
                )
        return self.rule(draft, *self.args, **(self.fields or {}))


class Ledger(abc.ABC):
    """One pipeline's ledger. Every method is one transaction, done when it returns. Raises LedgerError."""

    def __init__(self, server_id: str, clock: Clock) -> None:
        """``server_id``: the id under which this server is, or will be, registered."""
        self.server_id = server_id
        self._clock = clock
        self._time: tuple[int, int] | None = None
        """The ledger's time as it was seen last, and the steady time of that."""
        self._life: int | None = None
        """Which registration of its id this server is; None for a tool."""
        self.calls = self.faults = self.spent_ms = 0
        """How many transactions there were, how many of them failed, and how long they took together."""

    # What a store does.

    @abc.abstractmethod
    async def _connect(self, *, create: bool) -> None:
        """Reach for the store, unless that is done; ``create``: make the ledger where there is none."""

    @abc.abstractmethod
    async def _read_book(self, read: Callable[[Book], _T]) -> _T:
        """Return what ``read`` finds in the latest book."""

    @abc.abstractmethod
    async def _transact(self, transaction: Transaction[_T], read: Callable[[Book], _S]) -> tuple[_T, _S]:
        """Run a transaction on the latest book; return its result, and what ``read`` returns of the book after it."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close after every call that was made before; no call may follow (InternalError). May be repeated."""

    async def _timed(self, call: Awaitable[_T]) -> _T:
        """Return what a call to the store does, and count it."""
        began_ms = self._clock.steady_ms()
        self.calls += 1
        try:
            return await call
        except LedgerError as error:
            self.faults += not isinstance(error, ServerExpired)
            raise
        finally:
            self.spent_ms += self._clock.steady_ms() - began_ms

    # Time.

    def time_ms(self) -> int:
        """Return the ledger's time, by which windows are retained; this host's time of day before the ledger was read.

        Heartbeats carry it on by the servers' steady time, never by a time of day: a host whose clock is wrong, or is set,
        expires nothing too early. It stands still while no server runs.
        """
        if self._time is None:
            return self._clock.now_ms()
        time_ms, steady_ms = self._time
        return time_ms + self._clock.steady_ms() - steady_ms

    def _seen(self, state: LedgerState) -> LedgerState:
        """Go on from the time of a state, if it is later; return the state."""
        if state.time_ms is not None:
            time_ms = state.time_ms if self._time is None else max(state.time_ms, self.time_ms())
            self._time = time_ms, self._clock.steady_ms()
        return state

    # Servers.

    async def open(self) -> LedgerState:
        """Create or open the ledger, register this server, and return what the ledger holds. Closed after an error.

        A previous server with this id is expired. Without a first ``sync`` this server holds the watermark (None, not
        idle). Raises LedgerVersionError for a newer or foreign ledger, LedgerError for a damaged one; never repairs.
        """
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            if self._life is not None:
                raise InternalError("The ledger is open already.")
            await self._connect(create=True)
            enter = Transaction(rules.enter, (self.server_id, self._clock.now_ms()))
            life, state = await self._timed(self._transact(enter, Book.state))
            self._life = life
            undo.pop_all()
        return self._seen(state)

    async def peek(self) -> LedgerState:
        """Return what the ledger holds, opening it when it is not open, without registering: for tools.

        Creates nothing: raises LedgerMissing when no ledger exists, otherwise as ``open``. Close it also after an error.
        """
        await self._connect(create=False)
        return self._seen(await self._timed(self._read_book(Book.state)))

    async def sync(self, own: ServerState, since: int = 0) -> LedgerState:
        """Beat: keep this server's ``own`` state (``beat_ms`` too), and return what the ledger holds now.

        ``since``: the ``version`` of a state that the caller has already: of windows only the news are returned, unless
        some that it may not have heard of are gone; the answer's ``since`` says which. So it is cheap however many
        windows are retained. Raises InternalError when ``own`` is of another server.
        """
        beat = Transaction(rules.beat, (own, self.server_id), member=self._registered())
        return self._seen((await self._timed(self._transact(beat, lambda book: book.state(since))))[1])

    async def find(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        """Return windows as they are, also those that are published and not retained; unknown ones are left out."""
        find = self._read_book(lambda book: tuple(filter(None, map(book.windows.get, window_ids))))
        return await self._timed(find)

    async def visible_windows(self) -> tuple[WindowEntry, ...]:
        """Return the windows that have been published, also those that are not retained, until they are pruned."""
        visible = self._read_book(lambda book: tuple(e for e in book.windows.values() if e.is_visible))
        return await self._timed(visible)

    async def open_windows(self) -> tuple[tuple[WindowEntry, ...], frozenset[str]]:
        """Return the windows that are OPEN, and the ids of the registered servers."""

        def read(book: Book) -> tuple[tuple[WindowEntry, ...], frozenset[str]]:
            found = (entry for entry in book.windows.values() if entry.state is WindowState.OPEN)
            return tuple(found), frozenset(book.servers)

        return await self._timed(self._read_book(read))

    async def expire_servers(self, seen: Mapping[str, int]) -> frozenset[str]:
        """Remove servers whose last beat (ms) is still the one that was seen; return those that are gone.

        One that has beaten since lives, whatever the clocks say: beats are compared for equality alone. Those that were
        gone already, or never there, are returned too. Their shards lose their owner; their windows (CUT, COMMITTED)
        may be adopted. A server never expires itself.
        """
        return await self._member(rules.expire_servers, dict(seen), self.server_id)

    async def claim(self, folder: str, *, instead_of: str | None = None) -> LedgerState:
        """Be the ledger of an output folder, unless it is another's; return what it holds then.

        ``instead_of``: if the ``ledger_id`` is still this one, the ledger gets a new id and the folder: files of the
        old id that it does not name are foreign then. All other servers are removed, as if expired.
        """
        claim = Transaction(rules.claim, (folder, instead_of, self.server_id), member=self._registered())
        return (await self._timed(self._transact(claim, Book.state)))[1]

    async def leave(self) -> None:
        """Take this server's row out: an orderly stop. Its shards and windows lose their owner.

        Without effect when it is out already.
        """
        await self._tool(rules.leave, *self._registered())

    async def declare(self, change: ShapeChange, *, version: int) -> bool:
        """Note the shape of this server's rows (``coordinator/core/shape.py``), which from now on is the pipeline's.

        False, without a change: it differs from the pipeline's, and the ledger has changed since ``version``. So a
        caller that checked all servers and segments of that version has decided on present data, and servers that run
        at the same time have the same shape. Where no other server has declared one, a drain is over. A pipeline that
        has its former name still gets the new one.
        """
        return await self._member(rules.declare, self.server_id, change, version, self._clock.now_ms())

    async def drain(self) -> None:
        """Ask all servers to drain: to take nothing more in, publish what they have, and leave."""
        await self._tool(rules.drain)

    # The function's life.

    async def change_life(self, before: FunctionLife, after: FunctionLife) -> bool:
        """Change what is wanted of the function, for all of its servers. False, without a change: it is not ``before`` any more.

        Entering ``UNDEPLOYED`` asks all servers to drain, too. After a deploy the drain is over once a server declares its shape.
        """
        return await self._tool(rules.change_life, before, after)

    async def forget(self) -> bool:
        """Forget positions, keyed state, timers and dead letters of an undeployed function, unless they are kept.

        Published windows stay. Each shard keeps the position up to which everything was forgotten: its next opening may begin
        there or after it, which is logged once. False: the function is not undeployed, keeps all that, or has a server. The dead letters go
        first, some at a time; the rest is one transaction.
        """
        state = await self.peek()
        if not rules.may_forget(state.life, state.shards):
            return False
        while letters := await self.letters(limit=LETTERS_AT_ONCE):
            await self.purge(tuple(letter.id for letter in letters))
        return await self._tool(rules.forget, self.time_ms())

    # Shards.

    async def open_shard(
        self,
        shard_id: str,
        parents: tuple[str, ...] = (),
        *,
        store: StoreClaim | None = None,
        start: Sequence | None = None,
    ) -> ShardState:
        """Raise the shard's epoch (creating the shard when it is new), own it, and return its state with that epoch.

        ``gap_accepted`` is returned once and cleared; the ledger's position then moves to ``start``, after which the connection
        reads, if that is beyond it. The state that is returned has the position from before. ``store``: for a pipeline with keyed
        state. A shard with a range begins with the parts of its parents' stores that lie in the range, and closes those stores;
        a shard without a range shares its parent's store. Raises PeerError when the range differs from that of the shard's store.
        """
        return await self._member(rules.open_shard, shard_id, parents, self.server_id, store, start)

    async def adopt_store(self, store_id: str) -> ShardState | None:
        """Raise the epoch of a store's last shard, own it, and return it, so that this server can fire the store's timers.

        All shards of the store must have ended, and no other server may own one. None, without a change: that does not hold, or
        the store has no timers, or a child has taken over its state. A child that is opened later makes flushes of the adopter
        refused (``FlushResult.lost_shards``).
        """
        return await self._member(state_rules.adopt, store_id, self.server_id)

    async def release_shard(self, shard_id: str, epoch: int) -> None:
        """Give up owning a shard whose lease or connection is gone; nothing happens under another epoch."""
        await self._member(rules.release_shard, shard_id, epoch)

    async def end_shards(self, shard_ids: frozenset[str]) -> None:
        """Mark shards as ended that the operator or the stream says will never come back."""
        await self._tool(rules.end_shards, sorted(shard_ids), self.time_ms())

    async def accept_gap(self, shard_id: str) -> bool:
        """Allow the next opening of a shard to start beyond its position. False: the shard is unknown."""
        return await self._tool(rules.accept_gap, shard_id)

    async def reset(self, shard_ids: frozenset[str], *, forget_state: bool = False) -> frozenset[str]:
        """Forget positions, times and ends of shards without an owner, so that they are read again.

        Returns which those were. Their epochs are raised, so that nothing that is under way moves them. Records that are read
        again would count twice in keyed state. So shards with state are left out, unless ``forget_state``: that forgets their
        stores, on DynamoDB Streams with the state of all shards of the family, and leaves out those whose family a server
        holds a shard of.
        """
        return await self._tool(rules.reset, sorted(shard_ids), self.time_ms(), forget_state=forget_state)

    async def forget_shards(self, shard_ids: frozenset[str], *, forget_state: bool = False) -> frozenset[str]:
        """Forget shards without an owner, for names that are not shards of the stream. Return the forgotten ids.

        Shards with keyed state: as in ``reset``.
        """
        return await self._tool(
            rules.forget_shards, sorted(shard_ids), self.time_ms(), forget_state=forget_state
        )

    # Rows.

    async def register(self, flush: Flush) -> FlushResult:
        """Register a flush as a whole, or refuse it as a whole before anything is written.

        A window is cut when its entry says so or, without an entry, when it ends at or before ``cut_below_ms``.
        RECOMPUTE segments of a retained window (SET_ASIDE ones too) become ``pending``. The rows of ``batches`` are
        added to those that other servers have put in since the plan. Raises InternalError when a
        position would go down, a path is registered twice, a segment's bounds are not those of its window, or a
        RECOMPUTE segment's window is OPEN.
        """
        return await self._member(row_rules.register, flush, self.time_ms())

    async def compact_state(
        self, file: StateFile, replaced: Mapping[str, Mapping[str, tuple[KeyRange, ...]]]
    ) -> bool:
        """Name a state file in place of others, for the stores and ranges that ``file.needed`` lists.

        ``replaced``: the other files by path, each with its ``needed`` when the caller planned. They are needed only for the
        rest from now on, or are gone. False, without a change: ``needed`` of one has changed, or a store was closed or
        forgotten. True also when the file is named already, so that a call whose answer was lost can be repeated.
        """
        return await self._member(state_rules.compact, file, replaced, self.time_ms())

    async def forget_state_files(self, paths: tuple[str, ...]) -> None:
        """Forget state files that were deleted; those that a store needs stay."""
        await self._member(state_rules.forget_files, paths)

    async def late_published(self, paths: tuple[str, ...]) -> None:
        """Note that files of the late dataset are visible."""
        await self._member(rules.late_published, paths)

    # Windows.

    async def cut(
        self, window_ids: tuple[str, ...], *, all_until_ms: int | None = None
    ) -> tuple[WindowEntry, ...]:
        """Fix the segments of windows and own them; those that cannot be cut are left out of the answer.

        An OPEN window becomes CUT at revision 1; a PUBLISHED one with pending segments becomes CUT at the next
        revision, over all its segments; ``files``, ``rows_out`` and ``published_ms`` stay those of the revision
        that is visible, until the commit. ``batch_progress`` goes on behind a ``batches`` window that is cut: its
        number, told by its id, is never given again. ``all_until_ms``: every OPEN window that ends by then is cut, too, and
        in front, and ``cut_below_ms`` rises to there: rows for a window that ends before one that was cut are late.
        """
        return await self._member(rules.cut, window_ids, self.server_id, all_until_ms=all_until_ms)

    async def preceding(self, window_id: str) -> tuple[WindowEntry | None, bool]:
        """Return the published window that ends last before a window does, and whether a window before it is CUT or COMMITTED.

        None if none is published, or this window is unknown. Windows that were set aside or skipped do not count.
        """
        return await self._timed(self._read_book(lambda book: rules.preceding(book.windows, window_id)))

    async def adopt(self) -> tuple[WindowEntry, ...]:
        """Own every CUT or COMMITTED window that has no owner, and return them."""
        return await self._member(rules.adopt, self.server_id)

    async def begin_attempts(self, window_ids: tuple[str, ...]) -> dict[str, int]:
        """Count an attempt at each of these windows that is CUT and this server's still; return their numbers."""
        return await self._member(rules.begin_attempts, window_ids, self.server_id)

    async def commit(self, commits: tuple[Commit, ...]) -> frozenset[str]:
        """Make attempts' outputs count, together; return the windows for which it happened.

        Left out are windows that are not CUT any more, not ours, or have a newer attempt.
        """
        return await self._member(rules.commit, commits, self.server_id)

    async def published(self, attempts: Mapping[str, int], *, retain: bool = True) -> tuple[Segment, ...]:
        """Note that outputs are visible; return the segments that are now free to delete (of windows not retained).

        ``attempts``: of each window the attempt whose output was made visible. Skips windows that are not COMMITTED
        with that attempt, or not this server's, any more: repeating a call whose answer was lost does not affect a
        revision that another server has committed meanwhile. ``retain=False``: late rows lead to no revision, so only
        windows with pending segments are retained. Entries stay until they are pruned.
        """
        now_ms = self.time_ms()
        return await self._member(
            rules.published, dict(attempts), self.server_id, retain=retain, now_ms=now_ms
        )

    async def set_aside(self, window_id: str, error: str) -> None:
        """Put a window aside with its segments, after its last attempt, if it is CUT and this server's still."""
        await self._member(rules.set_aside, window_id, error, self.server_id)

    async def halt(self, window_id: str, error: str, *, first: bool) -> bool:
        """Keep why a CUT or COMMITTED window of this server is halted, until it commits or is published.

        False: it is neither, or not ours, any more; or not ``first``, and the error is gone: an operator wants a retry.
        """
        return await self._member(rules.halt, window_id, error, self.server_id, first=first)

    async def decide(self, window_id: str, decision: Decision) -> bool:
        """Do what an operator decides about a window that is halted or SET_ASIDE, or PUBLISHED. False: it is none.

        ``retry`` forgets the error: its server tries a halted one at once, any may adopt the other, which is CUT again.
        ``set_aside`` is for halted ones that are CUT. ``skip`` makes a window that is CUT or SET_ASIDE PUBLISHED, with no
        new output: what its last revision wrote stays. It keeps its error; its pending segments join the present
        revision, which is retained as any other; rows that come later go to the late dataset (``expired_windows``).
        ``recompute`` makes a PUBLISHED window whose segments are retained CUT again, at its next revision, with its pending
        segments; any server may adopt it. False for one that is not retained, or was skipped.
        """
        return await self._tool(rules.decide, window_id, decision, self.time_ms())

    async def expire(
        self, *, published_before_ms: int, keep_bytes: int, limit: int = 1000
    ) -> tuple[Segment, ...]:
        """Stop retaining PUBLISHED windows, and return the segments to delete.

        First all published before a time, then those published longest ago until the segments of all PUBLISHED
        windows take at most ``keep_bytes``. Windows with pending segments stay. At most ``limit`` windows a call: when
        the answer is of so many, more may follow.
        """
        return await self._member(
            rules.expire, published_before_ms=published_before_ms, keep_bytes=keep_bytes, limit=limit
        )

    async def prune(
        self,
        *,
        windows_before_ms: int,
        shards_before_ms: int,
        keep_shards: frozenset[str] = frozenset(),
        limit: int = 10_000,
        ends_before_ms: int | None = None,
        keep_last: bool = False,
    ) -> int:
        """Forget windows published and not retained, and shards ended, before those times (ms), except ``keep_shards``.

        A window that ends after ``ends_before_ms`` (event time; None: ``windows_before_ms``) stays, whenever it was
        published (a row from the future, and a quiet stream): ``cut_below_ms`` would close every window up to its end for
        good. ``keep_last``: of the windows that end by then the last published one stays, for ``preceding``.
        Returns how many rows went. At most ``limit`` windows a call, those published longest ago: when so many rows
        went, more may follow. Windows that are retained stay (``expire`` them first).
        A pruned shard that comes back is a new one, all of whose records count again: ``shards_before_ms`` must lie
        further back than the stream keeps records, unless all of which it keeps any are among ``keep_shards``.
        """
        return await self._member(
            rules.prune,
            windows_before_ms=windows_before_ms,
            shards_before_ms=shards_before_ms,
            keep_shards=keep_shards,
            limit=limit,
            ends_before_ms=ends_before_ms,
            keep_last=keep_last,
        )

    # Dead letters. Tools may call all these methods.

    async def dead_letters(self, limit: int = 100) -> tuple[DeadLetter, ...]:
        """Return stored dead letters, oldest first."""
        return tuple(stored.letter for stored in await self.letters(limit=limit))

    @abc.abstractmethod
    async def letters(
        self, *, after: str | None = None, limit: int = 100, wanted: bool = False
    ) -> tuple[StoredLetter, ...]:
        """Return a page of letters in order of storage: those behind the id ``after``; ``wanted``: only marked ones."""

    @abc.abstractmethod
    async def parked_keys(self, shard_id: str) -> dict[str, Sequence]:
        """Return the partition keys of a shard's stored dead letters, each with the sequence of the first.

        The letters of its ancestors count too, as far as the ledger has them: a child goes on with its parent's keys. The first
        in the shard's order, not in that of storage: a letter that failed again is stored as a new letter.

        Later records of these keys wait (``on_key_failure = park``). Letters without a key park nothing.
        """

    async def redrive(self, ids: tuple[str, ...], *, wanted: bool = True) -> frozenset[str]:
        """Mark letters to be redriven, or (``wanted=False``) take the mark away; return those that are there."""
        return await self._tool(row_rules.mark, ids, wanted=wanted)

    async def purge(self, ids: tuple[str, ...]) -> frozenset[str]:
        """Delete letters for good, at most LETTERS_AT_ONCE; return those that were there."""
        return await self._tool(row_rules.remove, ids)

    async def add_letters(self, new: tuple[DeadLetter, ...], *, wanted: bool = False) -> None:
        """Store letters that come from elsewhere, marked or not."""
        await self._tool(row_rules.store, new, wanted=wanted)

    # Permissions.

    def _registered(self) -> tuple[str, int]:
        """Return the server and its life. Raises InternalError for a tool."""
        if self._life is None:
            raise InternalError("The ledger was not opened by a server.")
        return self.server_id, self._life

    async def _member(
        self, rule: Callable[Concatenate[Draft, _P], _T], *args: _P.args, **fields: _P.kwargs
    ) -> _T:
        """Run a rule that only a registered server may use."""
        transaction = Transaction(rule, args, fields, self._registered())
        return (await self._timed(self._transact(transaction, lambda _: None)))[0]

    async def _tool(
        self, rule: Callable[Concatenate[Draft, _P], _T], *args: _P.args, **fields: _P.kwargs
    ) -> _T:
        """Run a rule that anyone may use."""
        return (await self._timed(self._transact(Transaction(rule, args, fields), lambda _: None)))[0]
