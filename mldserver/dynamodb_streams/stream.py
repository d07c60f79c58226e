"""A DynamoDB stream as one sequence of changes, for programs that need no server.

    async with Stream("orders", "trim_horizon") as stream:
        async for change in stream:
            print(change.kind, change.keys)
            save(stream.token)

Each shard has a separate reader, which reads a page or two ahead. ``merge`` puts their records into one order. A token
covers only the changes that the program has received. All shards together read at most 64 MiB, and one page a shard, ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from random import random as any_random
from types import TracebackType
from typing import Final, Self

import structlog

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock, SystemClock
from mldserver.change import Change
from mldserver.dynamodb_streams.merge import Merge
from mldserver.dynamodb_streams.positions import Position, ReadPosition, Token, parse_position
from mldserver.dynamodb_streams.reader import CLOCKS_APART_MS, Page, ShardReader
from mldserver.dynamodb_streams.shard_tree import (
    LATEST,
    TRIM_HORIZON,
    After,
    At,
    Sentinel,
    Since,
    StreamShard,
)
from mldserver.dynamodb_streams.stream_listing import AGAIN_SECONDS, StreamListing
from mldserver.dynamodb_streams.streams_api import MakeClient, StreamsApi, streams_client
from mldserver.errors import MldserverError, NotThereYet
from mldserver.records import Record

log = structlog.get_logger("mldserver")

_AHEAD: Final = 1000
"""A shard with this many undelivered records is not read: with the next page, it holds at most two pages."""
_AHEAD_BYTES: Final = 64 << 20
"""Above this many undelivered bytes, a shard is read only if the merge has none of its records."""
_OPEN_SECONDS: Final = 30.0
"""Time without an answer after which opening a position fails. Once reading has begun, it waits for any outage to end."""
_SILENT_SECONDS: Final = 60.0
"""Time without an answer after which the other shards no longer wait for a shard."""
_SILENT_LOOK_SECONDS: Final = 10.0
_TAKEN: Final = 4000
"""Records that are merged at a time; the loop gets a turn between."""
_LISTED_SECONDS: Final = 30.0
"""Between two listings, which find shards that are new."""
_SURE: Final = 3
"""Listings in a row of a disabled stream without a shard to read, until that is its end."""


class Stream:
    """The changes of a table in order: ``async for`` gives each once, as a ``Change``.

    The order is that of the times of creation; inside a shard, and between a shard and its children, it is DynamoDB's
    own, which keeps all changes of an item in their order. A shard that has not answered for a minute holds the others
    back no longer: its changes come later than their times say. The iteration ends when the stream was disabled and is
    read to its end. What DynamoDB Streams refuses is raised by it, as OperatorError; it may go on after that.
    """

    def __init__(
        self,
        table: str,
        position: object,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        poll_seconds: float = 1.0,
        plain_numbers: bool = False,
        make_client: MakeClient | None = None,
        clock: Clock | None = None,
        random: Callable[[], float] = any_random,
    ) -> None:
        """Name a table, or a stream by its ARN, and where to begin.

        ``position``: ``trim_horizon`` (the oldest change that is still there), ``latest``, an aware datetime, or a token;
        raises ConfigError for all else. ``poll_seconds``: how often a shard without news is asked.
        """
        self._table = table
        self._position = parse_position(position)
        self._poll_seconds = poll_seconds
        self._plain_numbers = plain_numbers
        self._clock: Clock = clock or SystemClock()
        self._random = random
        make_client = make_client or partial(streams_client, region=region, endpoint_url=endpoint_url)
        self._api = StreamsApi(make_client, clock=self._clock, random=random)
        self._resources = contextlib.AsyncExitStack()
        self._arn = ""
        self._current: _StreamReading | None = None

    async def __aenter__(self) -> Self:
        """Find the table's stream and move to the position that was given, which may be a token from an earlier ``Stream``.

        Raises ConfigError if that is a token of another stream, and OperatorError for others. The API object raises NotThereYet (an
        OperatorError) if DynamoDB Streams does not name the stream within about 30 seconds.
        """
        async with contextlib.AsyncExitStack() as resources:
            await resources.enter_async_context(self._api)
            self._arn = await self._api.within(_OPEN_SECONDS).resolve(self._table)
            await self.move_to(self._position)
            self._resources = resources.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all readers."""
        reading, self._current = self._reading, None
        async with self._resources:
            await reading.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        """Return the next change. A cancelled call loses none."""
        while True:
            reading = self._reading
            if (record := reading.next()) is not None:
                return Change(record, plain_numbers=self._plain_numbers)
            if reading.over:
                raise StopAsyncIteration
            await reading.merge_on()

    @property
    def token(self) -> str:
        """Where the stream was handed over up to: JSON that is a position, here and for ``mldserver serve --from``."""
        return str(self._reading.token())

    @property
    def gaps(self) -> int:
        """How often records were trimmed before they could be read, since this position. Each is logged."""
        return self._reading.gaps

    async def move_to(self, position: object) -> None:
        """Go on from another position. Raises ConfigError or OperatorError before anything changes."""
        place = parse_position(position)
        if isinstance(place, Token):
            place.require(self._arn)
        following = _StreamReading(
            self._api, self._arn, clock=self._clock, random=self._random, poll_seconds=self._poll_seconds
        )
        await following.begin(place)
        former, self._current = self._current, following
        if former is not None:
            await former.close()

    async def heartbeat(self) -> None:
        """Return once every shard that has brought nothing yet was asked again.

        The readers do that by themselves while the loop runs: this is for programs that must be sure that they could,
        for a position in a shard without a record holds for 15 minutes only.
        """
        reading = self._reading
        before = dict(reading.idle())
        while reading is self._current and before.items() & reading.idle().items():
            await reading.changed()

    @property
    def _reading(self) -> _StreamReading:
        if self._current is None:
            raise RuntimeError("the stream is not open: use it inside `async with Stream(...) as stream`")
        return self._current


def _size(records: list[Record]) -> int:
    return sum([len(record.data or b"") for record in records])


class _StreamReading:
    """All shards of a stream, read from one position on."""

    def __init__(
        self, api: StreamsApi, arn: str, *, clock: Clock, random: Callable[[], float], poll_seconds: float
    ) -> None:
        self.gaps = 0
        self.over = False
        """Whether the stream was disabled and is read to its end."""
        self._api = api
        self._arn = arn
        self._clock = clock
        self._random = random
        self._new_reader = partial(
            ShardReader, api, arn, clock=clock, random=random, poll_seconds=poll_seconds
        )
        self._listing = StreamListing(api, arn, clock=clock)
        self._tree = self._listing.tree
        self._merge: Merge[Record] = Merge()
        self._positions: dict[str, ReadPosition] = {}
        """Positions of the shards that are read, and of shards that were read to their end and whose children are not open yet."""
        self._since_ms: int | None = None
        self._latest: set[str] = set()
        """Shards that are read from LATEST."""
        self._readers: dict[str, ShardReader] = {}
        self._page_counts: dict[str, int] = {}
        """How many pages each reader has returned."""
        self._opened: set[str] = set()
        self._ready_records: list[Record] = []
        """Merged records, in order."""
        self._ready_bytes = 0
        self._undelivered_bytes = 0
        """Bytes of the records that were read. Those of ``_ready_records`` are subtracted when its last record was delivered."""
        self._next_index = 0
        """Index in ``_ready_records`` of the first record that was not delivered."""
        self._covered_index = 0
        """Index in ``_ready_records`` of the first record that ``_positions`` does not cover."""
        self._failure: MldserverError | None = None
        self._news = asyncio.Event()
        self._waiting_readers: dict[str, asyncio.Event] = {}
        """An event for each reader that waits: it is far enough ahead, or at its shard's end."""
        self._ending_ms: dict[str, int] = {}
        """Shards whose last record was delivered: the steady time since which their children are looked for."""
        self._task: asyncio.Task[None]

    # What the consumer does.

    def next(self) -> Record | None:
        """Return the next merged record and remove it; None if there is none, until ``merge_on`` has merged more."""
        if not self.ready():
            return None
        record = self._ready_records[self._next_index]
        self._next_index += 1
        if not self.ready():
            self._undelivered_bytes -= self._ready_bytes
            self._wake_readers()
        return record

    def ready(self) -> bool:
        """Return whether ``next`` has a record."""
        return self._next_index < len(self._ready_records)

    async def merge_on(self) -> None:
        """Merge the records that the readers have read, for ``next``. If none may be delivered yet, wait for a reader's page.

        Raises the error of a reader that failed, once no record of the other readers is left to deliver.
        """
        await asyncio.sleep(0)  # give the readers a turn
        if not self.ready():
            self._advance_positions()
            self._ready_records = self._merge.take(_TAKEN)
            self._ready_bytes = _size(self._ready_records)
            self._next_index = self._covered_index = 0
            self._wake_readers()
        if not self.ready():
            await self.changed()

    async def changed(self) -> None:
        """Wait until a page was read, shards were found, a reader failed, or reading has ended.

        Raises a reader's error once; the reader tries again by itself. Raises any other exception, a bug, that ended
        all readers.
        """
        if self._task.done() and not self._task.cancelled():
            self._task.result()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if not self._task.done():
            self._news.clear()
            await self._news.wait()

    def token(self) -> Token:
        """Return the token that covers every delivered record."""
        self._advance_positions()
        return Token(self._arn, tuple(sorted(self._positions.values())), self._since_ms)

    def idle(self) -> dict[str, int]:
        """Return how many pages were read of each shard that has had no record yet."""
        return {name: self._page_counts[name] for name, one in self._readers.items() if one.after is None}

    def _advance_positions(self) -> None:
        """Move each shard's position to its last record that the program has received: a token then covers it."""
        last: dict[str, Record] = {}
        latest_ms: dict[str, int] = {}
        for record in self._ready_records[self._covered_index : self._next_index]:
            shard_id = record.shard_id
            last[shard_id] = record
            latest_ms[shard_id] = max(latest_ms.get(shard_id, 0), record.arrival_ms or 0)
        self._covered_index = self._next_index
        for shard_id, record in last.items():
            position = self._positions[shard_id]
            effective_ms = max(position.effective_ms or 0, latest_ms[shard_id])
            start = After(record.sequence_number)
            self._positions[shard_id] = position._replace(start=start, effective_ms=effective_ms)

    def _wake_readers(self) -> None:
        """Wake the readers that waited until the program had received more of their records (see ``_is_far_ahead``)."""
        for shard_id in [name for name in self._waiting_readers if not self._is_far_ahead(name)]:
            self._waiting_readers.pop(shard_id).set()

    def _is_far_ahead(self, shard_id: str) -> bool:
        """Return whether a shard must not be read now.

        A shard without a record in the merge is always read: the merge may wait for it.
        """
        waiting = self._merge.waiting(shard_id)
        return waiting >= _AHEAD or (waiting > 0 and self._undelivered_bytes >= _AHEAD_BYTES)

    # How shards are found.

    async def begin(self, position: Position) -> None:
        """List the stream's shards, and start to read them. Raises OperatorError."""
        began_ms = self._clock.steady_ms()
        while not await self._listing.refresh(within=_OPEN_SECONDS):
            if self._clock.steady_ms() - began_ms >= _OPEN_SECONDS * 1000:
                raise NotThereYet(
                    f"The stream {self._arn} ({self._listing.status}) lists no shard.",
                    did=f"It was asked for {_OPEN_SECONDS:.0f} seconds.",
                    advice="If it was disabled for a day, its records are gone. Else try again.",
                )
            await self._clock.sleep(AGAIN_SECONDS)
        shards: tuple[ReadPosition, ...] = ()
        match position:
            case Token():
                self._since_ms, shards = position.since_ms, position.shards
            case Since(ms):
                self._since_ms = ms
            case Sentinel.LATEST:
                # No wanted record is earlier than this, by AWS's clock, which stamps the records.
                self._since_ms = self._api.now_ms() - CLOCKS_APART_MS
                self._latest = {name for name in self._tree.listing() if not self._tree.children(name)}
                shards = tuple(map(self._first_position, self._latest))
            case Sentinel.TRIM_HORIZON:
                pass
        self._tree.begin([StreamShard(shard.id, shard.parent) for shard in shards])
        while not shards and self._tree.unresolved():
            # If a shard's parent were found only later, their records would be out of order.
            await self._clock.sleep(AGAIN_SECONDS)
            await self._listing.refresh(within=_OPEN_SECONDS)
        self._positions = {shard.id: shard for shard in shards}
        self._task = asyncio.create_task(self._run(self._open_readable()))
        self._task.add_done_callback(lambda _: self._news.set())

    async def close(self) -> None:
        """End all readers, and raise what had ended them before: a bug."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    async def _run(self, first: list[ShardReader]) -> None:
        """Run all readers and list new shards, until cancelled or until a disabled stream is read to its end.

        ``first``: readers of the shards to begin with.
        """
        async with asyncio.TaskGroup() as tasks:
            self._start(first, tasks)
            passing_over = tasks.create_task(self._pass_over_the_silent())
            read_out_listings = 0  # in a row, of a disabled stream
            while not self.over:
                soon = read_out_listings or self._tree.unresolved()
                await self._clock.sleep(AGAIN_SECONDS if soon else _LISTED_SECONDS)
                try:
                    await self._listing.refresh()
                except MldserverError as error:
                    self._fail(error)
                    continue
                self._start(self._open_readable(), tasks)
                read_out = all(map(self._tree.is_finished, self._positions)) and not self._tree.unresolved()
                is_last = read_out and self._listing.status == "DISABLED"
                read_out_listings = read_out_listings + 1 if is_last else 0
                self.over = read_out_listings >= _SURE
            await self._report_successor()
            passing_over.cancel()
            self._news.set()

    async def _report_successor(self) -> None:
        """Log the stream that the table has instead of the one that has ended."""
        with contextlib.suppress(MldserverError):
            newest = await self._api.within(_OPEN_SECONDS).successor(self._arn)
            if newest is not None:
                log.error(
                    "stream.replaced",
                    stream=self._arn,
                    status=self._listing.status,
                    newest=newest,
                    did="The stream was read to its end, and the iteration ends.",
                    advice="Open another Stream for the table, at trim_horizon, to read the new stream.",
                )

    async def _pass_over_the_silent(self) -> None:
        """Stop waiting for shards that have not answered for a minute, or whose children were not found for a minute. Runs until cancelled."""
        while True:
            await self._clock.sleep(_SILENT_LOOK_SECONDS)
            now_ms = self._clock.steady_ms()
            unanswered_ms = {name: reader.asked_ms for name, reader in self._readers.items()}
            for shard_id, since_ms in (unanswered_ms | self._ending_ms).items():
                if since_ms is None or now_ms - since_ms < _SILENT_SECONDS * 1000:
                    continue
                if self._merge.pass_over(shard_id):
                    log.warning(
                        "stream.shard_passed_over",
                        shard=shard_id,
                        stream=self._arn,
                        seconds=(now_ms - since_ms) / 1000,
                        did="Changes of other shards no longer wait for this shard. Requests to it are repeated; no change "
                        "is lost. Its changes will come later than their times say.",
                        advice="If DynamoDB throttles the shard, look for a third reader of the stream.",
                    )
                    self._news.set()

    def _start(self, readers: list[ShardReader], tasks: asyncio.TaskGroup) -> None:
        """Start a task for each reader."""
        for reader in readers:
            tasks.create_task(self._read(reader, tasks))

    def _open_readable(self) -> list[ShardReader]:
        """Open every shard that may be read now; return the new readers.

        Once all children of a finished shard are open, its position is removed: the children's positions replace it.
        """
        new = [name for name in self._tree.readable() if name not in self._opened]
        positions = [self._positions.get(name) or self._first_position(name) for name in new]
        for position in positions:
            self._opened.add(position.id)
            self._positions[position.id] = position
            self._merge.open(position.id, floor_ms=position.effective_ms)
            self._page_counts[position.id] = 0
            self._readers[position.id] = self._new_reader(
                position.id, LATEST if position.id in self._latest else position.start
            )
        for name in tuple(filter(self._tree.is_finished, self._positions)):
            children = self._tree.children(name)
            if children and self._opened.issuperset(children):
                del self._positions[name]
        return [self._readers[name] for name in new]

    def _first_position(self, shard_id: str) -> ReadPosition:
        """Return where a shard begins that was never read: at its oldest record, or at the time that reading began at.

        A child of a shard that was read begins at its oldest record. Only if the parent had no record since that time,
        the child begins at the time too.
        """
        # An unlisted parent was not read; it may be listed later.
        (parent,) = tuple(filter(self._tree.__contains__, self._tree.parents(shard_id))) or (None,)
        if parent in self._positions:
            before = self._positions[parent]
            start = before.start if isinstance(before.start, Since) else TRIM_HORIZON
            return ReadPosition(shard_id, parent, start, before.effective_ms)
        since_ms = self._since_ms
        return ReadPosition(shard_id, parent, TRIM_HORIZON if since_ms is None else Since(since_ms))

    # How one shard is read.

    async def _read(self, reader: ShardReader, tasks: asyncio.TaskGroup) -> None:
        """Read a shard to its end. Once all its records are delivered, find its children and start to read them."""
        shard_id, failures, page = reader.shard_id, Backoff(1.0, 60.0), None
        while page is None or not page.end:
            while self._is_far_ahead(shard_id):
                await self._waiting_readers.setdefault(shard_id, asyncio.Event()).wait()
            try:
                page = await reader.next()
            except MldserverError as error:
                self._fail(error)
                await self._clock.sleep(failures.failed(self._random()))
            else:
                failures.worked()
                self._add_page(shard_id, page)
        del self._readers[shard_id], self._page_counts[shard_id]
        while self._merge.waiting(shard_id) or self.ready():
            await self._waiting_readers.setdefault(shard_id, asyncio.Event()).wait()
        self._ending_ms[shard_id] = self._clock.steady_ms()
        await self._listing.find_children(shard_id, self._fail)
        del self._ending_ms[shard_id]
        self._advance_positions()
        self._tree.finished(shard_id)
        children = self._open_readable()
        self._merge.close(shard_id)
        if page.gap and not self._tree.children(shard_id) and len(self._positions) > 1:
            # AWS no longer knows it: children that appear later count as new. A token without shards would start over.
            self._positions.pop(shard_id, None)
        self._start(children, tasks)
        self._news.set()

    def _add_page(self, shard_id: str, page: Page) -> None:
        """Feed a page to the merge, and note the tip or the end of its shard."""
        records, position = page.records, self._positions[shard_id]
        self.gaps += page.gap
        self._page_counts[shard_id] += 1
        if records:
            if isinstance(position.start, Since):
                # From now on the position is a sequence number, which is exact, even before a record is delivered.
                self._positions[shard_id] = position._replace(start=At(records[0].sequence_number))
            times = [record.arrival_ms or 0 for record in records]
            self._undelivered_bytes += _size(records)
            self._merge.feed(shard_id, records, times, now_ms=self._clock.steady_ms())
        if page.end:
            self._merge.end(shard_id)
        elif page.at_tip:
            self._merge.tip(shard_id, began_ms=page.began_ms)
        self._news.set()

    def _fail(self, error: MldserverError) -> None:
        """Keep an error for ``changed``, which raises it in the program."""
        self._failure = error
        self._news.set()
