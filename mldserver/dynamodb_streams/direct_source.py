"""A DynamoDB stream as a source of the server: its shards found, shared with other servers, read and handed in.

    listing ──▶ tree ──▶ sharing (what the ledger says of others) ──▶ a task for each shard that is read here
    a shard: its place from the ledger ──▶ page, the next one fetched meanwhile ──▶ handler ──▶ coordinator

The ledger's position of a shard is where it is read on: nothing else is stored, and nothing checkpointed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import structlog

from mldserver.base.backoff import Backoff
from mldserver.base.clock import first_of
from mldserver.consumer.intake import KnownShard, LedgerSnapshot, ShardIntake, ShardListing, ShardOpening
from mldserver.consumer.progress_log import ProgressLog
from mldserver.consumer.shard import Consumer, ConsumerParts
from mldserver.dynamodb_streams.positions import Beginning, inherited, storable, stored
from mldserver.dynamodb_streams.reader import CLOCKS_APART_MS, Page, Reading, ShardReader
from mldserver.dynamodb_streams.shard_tree import LATEST, ShardTree, StreamShard
from mldserver.dynamodb_streams.sharing import Plan, Unread, share
from mldserver.dynamodb_streams.stream_listing import AGAIN_SECONDS, StreamListing
from mldserver.dynamodb_streams.streams_api import READABLE, MakeClient, NoStream, StreamsApi
from mldserver.errors import InternalError, MldserverError, OperatorError, leaves
from mldserver.records import Shard
from mldserver.runtime.interface import Records
from mldserver.sources.source import SourceStatus
from mldserver.stores import StoreClaim

log = structlog.get_logger("mldserver")

_PAGES_AHEAD: Final = 128
"""While the pages of so many shards are worked on, none is fetched before it is wanted. A page has 1 MB (AWS limit)."""
_LONGEST_POLLS: Final = 5
"""Poll intervals between two requests of a shard that has been quiet for long."""
_SURE: Final = 3
"""Looks in a row at which nothing is left of a stream, until it is over."""
_AGAIN_SECONDS: Final = (1.0, 60.0)
"""First and longest wait until a shard that failed is started again."""


class DirectSource:
    """Reads a stream until it is stopped."""

    def __init__(
        self,
        stream: str,
        make_client: MakeClient,
        parts: ConsumerParts,
        *,
        random: Callable[[], float],
        beginning: Beginning | None = None,
        accept_gap: bool = False,
        poll_seconds: float = 1.0,
        list_seconds: float = 30.0,
        look_seconds: float = 5.0,
        unclaimed_seconds: float = 30.0,
    ) -> None:
        """``stream``: a table's name, or a stream's ARN.

        ``poll_seconds``: between requests at the tip of a shard, up to five times as long while it is quiet;
        ``list_seconds``: between listings of the shards; ``look_seconds``: between looks at what other
        servers have, and between log lines on a shard's records; ``unclaimed_seconds``: any server may take a shard that
        no server has read for longer.
        """
        self._stream = stream
        self._parts, clock = parts, parts.clock
        self._intake = parts.intake
        self._clock = clock
        self._random = random
        self._api = StreamsApi(make_client, clock=clock, random=random, civil=parts.civil)
        self._beginning = beginning or Beginning()
        self._accept_gap = accept_gap
        self._poll_seconds = poll_seconds
        self._list_seconds = list_seconds
        self._look_seconds = look_seconds
        self._unread = Unread(round(unclaimed_seconds * 1000))
        self._counts = ProgressLog(clock=clock, seconds=look_seconds)
        self._arn = ""
        self._listing = StreamListing(self._api, "", clock=clock)
        self._pipeline_is_new = False
        """Whether the pipeline had read no record when this server began."""
        self._begin_ms = 0  # the time of day at which it began, at the earliest
        self._starts_to_store: set[str] = set()
        """The shards that this server began with and whose start is not durable yet."""
        self._starts_are_stored = asyncio.Event()
        """Set once ``_starts_to_store`` is empty: records may be delivered."""
        self._reading: dict[str, Reading] = {}
        self._failed: dict[str, tuple[Backoff, int]] = {}
        """Shards that failed, and the steady time at which they may be started again."""
        self._pages_in_progress = 0  # pages that are being processed
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = asyncio.Event()
        self._started = asyncio.Event()
        self._listed = False
        self._no_changes_reason: str | None = None
        """Why no more changes of the table can come; None: they can."""
        self._lost_logged: tuple[str, str | None] | None = None
        """The stream and its successor, as logged last."""

    # What the server asks.

    @property
    def waits_for(self) -> str | None:
        """Why no shard can come now: the shards are not listed yet, the stream was disabled, or the server stops. Else None."""
        if self._stopping.is_set():
            return "no shard is taken any more"
        return self._no_changes_reason if self._listed else "DynamoDB has not listed the stream's shards yet"

    def status(self) -> SourceStatus:
        """Return the stream's ARN, the counts, and since when each shard's current page is being processed."""
        return SourceStatus(
            self._arn if self._listed and not self._stopping.is_set() else None,
            since_ms={
                name: ms for name, one in self._reading.items() if (ms := one.consumer.since_ms) is not None
            },
            counts=self._counts,
            retries=self._api.retries,
        )

    @property
    def connections(self) -> int:
        """How many shards are read here."""
        return len(self._reading)

    async def listening(self) -> str:
        """Return the stream's ARN once its shards are known. Raises OperatorError when it cannot be read."""
        await self._started.wait()
        if not self._listed:
            raise OperatorError(f"The stream {self._stream} is not read.")
        return self._arn

    async def run(self) -> None:
        """Read the stream until ``stop_accepting``, and then until the last shard is let go.

        Raises OperatorError when it cannot be read, or is not the one that the ledger knows.
        """
        try:
            async with self._api:
                await self._find()
                async with asyncio.TaskGroup() as group:
                    background = [group.create_task(self._counts.run()), group.create_task(self._list())]
                    await self._share(group)
                    await self._idle.wait()
                    for task in background:
                        task.cancel()
        finally:
            self._started.set()

    def stop_accepting(self) -> None:
        """Take no more shards; those that are there go on."""
        self._stopping.set()
        self._wake.set()

    async def drain(self) -> None:
        """Finish each shard's page in hand, then release all shards; return when this is done."""
        self.stop_accepting()
        for reading in tuple(self._reading.values()):
            await reading.leave()
        await self._idle.wait()

    # Which shards there are, and which are read here.

    @property
    def _tree(self) -> ShardTree:
        return self._listing.tree

    async def _find(self) -> None:
        """Find the stream and its shards. Raises OperatorError if the ledger has shards, but none of this stream's."""
        self._arn = await self._api.resolve(self._stream)
        # By AWS's clock, which stamps the records: no record from now on is earlier.
        self._begin_ms = self._api.now_ms() - CLOCKS_APART_MS
        self._listing = listing = StreamListing(self._api, self._arn, clock=self._clock)
        while not await listing.refresh():
            await self._clock.sleep(self._poll_seconds)
        listed, known_shards = listing.tree.listing(), self._intake.ledger_snapshot().shards
        self._pipeline_is_new = self._beginning.is_ahead(known_shards)
        if self._pipeline_is_new:
            if (token := self._beginning.token) is not None:
                token.require(self._arn)
            self._beginning.mark(listing.tree)
            # Without a token all shards begin together (see ``_starts_to_store``), so all must be known.
            while token is None and listing.tree.unresolved():
                await self._clock.sleep(AGAIN_SECONDS)
                await listing.refresh()
        listed_or_parent = {*listed, *(parent for parents in listed.values() for parent in parents)}
        if known_shards and not listed_or_parent & known_shards.keys() and not self._accept_gap:
            raise OperatorError(
                f"The stream {self._arn} has none of the shards that the ledger knows.",
                did="Nothing was read, and no position was changed.",
                advice="It is another stream than before: another table's, or the table's stream was disabled and "
                "enabled again; or the pipeline stood still for more than a day. Name the earlier stream by its ARN to "
                "read what is left of it (24 hours), or go on with this one by --accept-gap.",
                stream=self._arn,
            )
        self._listing_changed(())
        self._listed = True
        self._started.set()
        log.info("server.listening", address=self._arn)

    def _listing_changed(self, new: tuple[str, ...]) -> None:
        """Pass the listing on to the coordinator. If there are new shards, plan at once which to read here."""
        if new:
            self._wake.set()
        listing = self._tree.listing()
        self._intake.add_listing({shard_id: ShardListing(parents) for shard_id, parents in listing.items()})

    async def _list(self) -> None:
        """List the shards at an interval, until cancelled. Log when the stream was disabled or deleted, and replace it.

        AWS's answers can be incomplete: the stream is over only after several listings in a row with nothing left to read.
        """
        # A stream that is named by its ARN may be disabled already: then the remaining records are read, and no other stream.
        ended_before = self._stream == self._arn and self._listing.status not in READABLE
        over = 0  # listings in a row after which nothing is left to read
        refused = False
        while True:
            unresolved = self._tree.unresolved()
            soon = (unresolved and not refused) or 0 < over < _SURE
            await self._clock.sleep(AGAIN_SECONDS if soon else self._list_seconds)
            refused = False
            try:
                self._listing_changed(await self._listing.refresh() or unresolved)
            except NoStream:
                over += 1
                if over >= _SURE:
                    await self._replace(status="", is_over=True)
            except OperatorError as error:
                refused = True
                log.warning("stream.unlisted", stream=self._arn, **error.told())
            else:
                if ended_before or (status := self._listing.status) in READABLE:
                    over, self._no_changes_reason = 0, None
                    continue
                is_read_out = not (self._reading or self._tree.readable() or self._tree.unresolved())
                over = over + 1 if is_read_out else 0
                await self._replace(status=status, is_over=over >= _SURE)

    async def _replace(self, *, status: str, is_over: bool) -> None:
        """Log that the stream was disabled or deleted. If gaps are accepted, continue with the table's new stream.

        ``status``: the stream's; empty if it does not exist. ``is_over``: the old stream has no more records to read.
        """
        try:
            newest = await self._api.successor(self._arn)
        except OperatorError as error:
            log.warning("stream.unlisted", stream=self._arn, **error.told())
            return
        if newest == self._arn:  # it is enabled: the answer that it was disabled is outdated
            return
        follows = self._accept_gap and self._stream != self._arn
        state = "was disabled" if status else "does not exist any more"
        self._no_changes_reason = f"the stream {self._arn} {state}, and its table has no enabled one"
        if newest is not None:
            self._no_changes_reason = (
                f"the stream {self._arn} {state}, and its table's new one, {newest}, is not read"
            )
        if self._lost_logged != (self._arn, newest):
            self._lost_logged = self._arn, newest
            log.error(
                "stream.replaced",
                stream=self._arn,
                status=status,
                newest=newest or "",
                did="What is left of the stream is read to its end. "
                + ("Then the table's new one is read." if follows else "No other stream is read."),
                advice="Enable a stream of the table."
                if newest is None
                else "Changes between the two streams are lost. To read the new one, name the table as source and give --accept-gap.",
            )
        if not follows or newest is None:
            return
        self._no_changes_reason = None
        if is_over:
            listing = StreamListing(self._api, newest, clock=self._clock)
            if await listing.refresh():
                log.warning("stream.gap_accepted", stream=self._arn, newest=newest)
                self._arn, self._listing = newest, listing
                self._listing_changed(tuple(listing.tree.listing()))
                log.info("server.listening", address=newest)

    async def _share(self, group: asyncio.TaskGroup) -> None:
        """Start and stop to read shards, so that all servers of the ledger have equally many, until ``stop_accepting``."""
        first_plan = True
        while not self._stopping.is_set():
            self._wake.clear()
            plan = self._plan(self._intake.ledger_snapshot())
            if first_plan:
                first_plan, self._starts_to_store = False, set(plan.take) if self._pipeline_is_new else set()
                self._note_start_stored("")  # no shard: if there are none to wait for, reading starts at once
            for shard_id in plan.take:  # before any await: a stop must find them in ``_reading``
                consumer = Consumer(self._parts, counts=self._counts, log=log.bind(shard=shard_id))
                reading = self._reading[shard_id] = Reading(shard_id, consumer)
                self._idle.clear()
                group.create_task(self._serve(reading), name=shard_id)
            for reading in [self._reading[shard_id] for shard_id in plan.give_up]:
                await reading.leave()
            await first_of(self._wake.wait(), self._clock.sleep(self._look_seconds))

    def _plan(self, ledger: LedgerSnapshot) -> Plan:
        """Return the shards to start reading here now, and those to give up, by the ledger's shards, owners and servers.

        A shard that failed waits for its back-off. A shard that this server took lately because no server read it is kept.
        """
        tree, me, now_ms = self._tree, ledger.server_id, self._clock.steady_ms()
        # Also shards that AWS no longer lists: reading finds their end. Otherwise they would hold the windows open.
        opened_before = [name for name, shard in ledger.shards.items() if not shard.ended or name in tree]
        tree.begin(map(StreamShard, opened_before))
        for name in opened_before:
            if ledger.shards[name].ended:
                tree.finished(name)
        readable = tree.readable()
        ledger_owners = {name: ledger.shards[name].owner for name in readable if name in ledger.shards}
        owners = dict.fromkeys(readable) | ledger_owners | dict.fromkeys(self._reading, me)
        unread = {name for name, owner in owners.items() if owner in {None, me} and name not in self._reading}
        unclaimed = self._unread.update(unread, now_ms)
        leaving = {name for name, reading in self._reading.items() if reading.leaving.is_set()}
        # For the sharing, unclaimed shards have no owner: any server may take them.
        owners |= dict.fromkeys(unclaimed)
        plan = share(
            owners,
            ledger.servers,
            me,
            families=self._families(owners, ledger.shards),
            leaving=leaving | unread,
            unclaimed=unclaimed,
            kept=self._unread.kept_until_ms.keys(),
        )
        return Plan(
            tuple(name for name in plan.take if now_ms >= self._failed.get(name, (None, 0))[1]),
            tuple(name for name in plan.give_up if name not in leaving | unread),
        )

    def _families(self, shard_ids: Iterable[str], known: Mapping[str, KnownShard]) -> dict[str, str]:
        """Return the store that each shard has, or will have once it is opened. Empty if the handler keeps no state."""
        if not self._parts.keyed:
            return {}
        families = {}
        for shard_id in shard_ids:
            line = (known.get(name) for name in (shard_id, *self._tree.parents(shard_id)))
            families[shard_id] = next((each.store for each in line if each and each.store), shard_id)
        return families

    async def _find_children(self, shard_id: str) -> None:
        """Look for the children of a shard that ended: they may be named only some time later."""

        def failed(error: MldserverError) -> None:
            log.warning("stream.unlisted", stream=self._arn, **error.told())

        await self._listing.find_children(shard_id, failed, leave=self._stopping.is_set)
        self._listing_changed(self._tree.children(shard_id))

    # One shard.

    async def _serve(self, reading: Reading) -> None:
        """Read a shard until it ends, is given up, or fails; then release it."""
        shard_id = reading.shard_id
        try:
            if await self._read(reading):
                self._tree.finished(shard_id)
        except* Exception as errors:  # no failure may end more than this shard
            failures, _ = self._failed.get(shard_id, (Backoff(*_AGAIN_SECONDS), 0))
            delay, error = failures.failed(self._random()), next(leaves(errors))
            self._failed[shard_id] = failures, self._clock.steady_ms() + round(delay * 1000)
            # A traceback only for a bug: errors of our own classes explain themselves.
            is_bug = not isinstance(error, MldserverError)
            logged = error if isinstance(error, MldserverError) else InternalError(f"Unexpected {error!r}")
            log.error(
                "shard.failed",
                shard=shard_id,
                delay_seconds=round(delay, 3),
                exc_info=error if is_bug else None,
                **logged.told(),
            )
        finally:
            self._note_start_stored(shard_id)
            await reading.consumer.forget()
            del self._reading[shard_id]
            if not self._reading:
                self._idle.set()
            self._wake.set()

    async def _read(self, reading: Reading) -> bool:
        """Open a shard and deliver its pages; return whether its end was reached and is durable."""
        consumer = reading.consumer
        await first_of(self._open(reading), reading.leaving.wait())
        if (reader := reading.reader) is None or not consumer.is_open:
            return False
        await self._starts_are_stored.wait()  # a new pipeline first stores where each shard starts
        if await self._deliver_pages(reading, reader):
            # Find the children before the shard is marked as ended: they must hold the windows from then on.
            await first_of(self._find_children(reading.shard_id), reading.leaving.wait())
            if not reading.leaving.is_set():
                return await consumer.end()
        if consumer.alive:
            # When the server stops, its last flush makes all shards durable at once.
            await consumer.drain(flush=not self._stopping.is_set())
        else:  # another server has opened it
            await consumer.lose()
        return False

    async def _open(self, reading: Reading) -> None:
        """Open a shard, and make a reader at the place where the shard is read on (see ``_place``)."""
        parents = self._tree.parents(reading.shard_id)
        store = StoreClaim(None) if self._parts.keyed else None
        opening = ShardOpening(
            reading.shard_id, None, tells_lag=True, parents=parents, polled=True, store=store
        )
        await reading.consumer.open(opening, partial(self._place, reading))

    async def _place(self, reading: Reading, shard: ShardIntake) -> Shard:
        """Make a reader at the place where an opened shard is read on; return the shard for the handler.

        If the ledger has no position and a restart could choose another start, the chosen one is made durable first.
        """
        shard_id = reading.shard_id
        known, parents = self._intake.ledger_snapshot().shards, self._tree.parents(shard_id)
        if shard.after is not None:
            start = stored(shard.after)
        elif not self._pipeline_is_new or any(
            known[parent].position for parent in parents if parent in known
        ):
            start = inherited(parents, known)
        else:  # the pipeline begins here
            late = shard_id not in self._starts_to_store
            start = self._beginning.start(shard_id, found_ms=self._begin_ms if late else None)
        reading.reader = reader = ShardReader(
            self._api,
            self._arn,
            shard_id,
            start,
            clock=self._clock,
            random=self._random,
            poll_seconds=self._poll_seconds,
            longest_seconds=self._poll_seconds * _LONGEST_POLLS,
        )
        if start is LATEST:
            await reader.heartbeat()  # gets an iterator: every record from now on is read
        if shard.after is None and (position := storable(start, self._begin_ms)) is not None:
            shard.begin(position)
            await shard.drain()
        self._note_start_stored(shard_id)
        return Shard(
            shard_id, str(shard.after.number) if shard.after and shard.after.number else "TRIM_HORIZON"
        )

    def _note_start_stored(self, shard_id: str) -> None:
        """Note that a shard's start is durable, or that the shard failed. After the last one, all shards may deliver records."""
        self._starts_to_store.discard(shard_id)
        if not self._starts_to_store:
            self._starts_are_stored.set()

    async def _deliver_pages(self, reading: Reading, reader: ShardReader) -> bool:
        """Deliver each page while the next is fetched. Return True at the shard's end, False if the shard must be left before.

        If many pages are being processed (``_PAGES_AHEAD``), the next page is fetched only after the current one.
        """
        consumer = reading.consumer
        async with asyncio.TaskGroup() as group:
            leaving, page = group.create_task(reading.leaving.wait()), None
            fetch = group.create_task(reader.next())
            while consumer.alive and not (page and page.end):
                await asyncio.wait({leaving, fetch}, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done() or not consumer.alive:
                    break
                page = fetch.result()
                fetch_ahead = self._pages_in_progress < _PAGES_AHEAD and not page.end
                if fetch_ahead:
                    fetch = group.create_task(reader.next())
                self._pages_in_progress += 1
                try:
                    await self._deliver(consumer, page)
                finally:
                    self._pages_in_progress -= 1
                if not fetch_ahead and not page.end:
                    fetch = group.create_task(reader.next())
            leaving.cancel()
            fetch.cancel()
        consumer.progress.tell()
        return page is not None and page.end

    async def _deliver(self, consumer: Consumer, page: Page) -> None:
        """Deliver a page to the consumer; return when the next page may be delivered. Empty pages count only at the tip."""
        if not page.records:
            if page.at_tip:
                await consumer.at_tip(page.began_ms)
            return
        aws_ms = self._api.now_ms()
        # AWS does not report the lag. It is AWS's time now, less the time of the last record; at least 1 ms.
        lag_ms = max(1, aws_ms - (page.records[-1].arrival_ms or aws_ms))
        payload = Records(page.records, lag_ms)
        consumer.deliver(payload, payload.size)
        await consumer.acknowledged()
        self._failed.pop(consumer.shard_id, None)
