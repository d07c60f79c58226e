"""Read one shard page by page: renew iterators, log gaps, and stay below AWS's request limits.

After a page with records the reader requests the next one at once. Five empty pages in a row cross any gap of an open
shard: the fifth, and only the fifth, proves that the reader is at the tip. Until then it requests them without a pause.
At the tip it pauses for a poll interval before each request; while no record comes, the pause grows to a tenth of the quiet
time, up to ``longest_seconds``.

A reader counts as caught up if it was at the tip within the last minute, or has just read a record that was created within
the last minute (where changes never pause for long, five empty pages in a row never come). No long gap can lie before it, so
it pauses after the first empty page already.

An iterator expires after 15 minutes. The new one starts after the last sequence number that was read. Before the first
record it starts where reading began, which loses nothing. Only ``LATEST`` would mean a different place by then: the
reader continues with the records that were created since its last request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

import orjson
import pybase64
import structlog

from mldserver.base.backoff import Backoff, TokenBucket
from mldserver.base.clock import Clock
from mldserver.consumer.shard import Consumer
from mldserver.dynamodb_streams.shard_tree import LATEST, TRIM_HORIZON, After, Since, Start
from mldserver.dynamodb_streams.streams_api import IteratorExpired, ShardGone, StreamsApi, Trimmed
from mldserver.records import Record

log = structlog.get_logger("mldserver")

_AT_TIP: Final = 5
"""Empty pages in a row that prove the tip of an open shard."""
_CALLS_PER_SECOND: Final = 4.0
"""GetRecords of one shard. AWS throttles beyond five in any second, for all readers of the shard together."""
_SHORT_GAP_MS: Final = 60_000
"""A reader that was at the tip this recently counts as caught up."""
_QUIET_PART: Final = 10
"""The pause grows to the quiet time divided by this: a change after a quiet minute is found six seconds late on average."""
_LONGEST_WAIT_SECONDS: Final = 12 * 60.0
"""Between two calls, so that the iterator does not expire."""
CLOCKS_APART_MS: Final = 5000
"""By how much the time of AWS's answers may be ahead of the time with which it stamps records."""
_GONE_SECONDS: Final = 15.0
"""A shard has ended once AWS has for this long neither listed it nor known it by its name."""
_UNKNOWN_LOGGED_MS: Final = 60_000


class Page(NamedTuple):
    """One answer to a request for records."""

    records: list[Record]
    end: bool
    """Whether the shard is closed and read to its end: ``records`` are its last ones, if any."""
    at_tip: bool
    """Whether this is at least the fifth empty page in a row: no record was left when the request began."""
    began_ms: int
    """Steady time at which the request began."""
    gap: bool
    """Whether earlier records were trimmed unread. The reader has logged it; the caller counts it."""


@dataclass(slots=True)
class _Unknown:
    """The state of a shard for which AWS answers that it does not exist."""

    logged_ms: int
    since_ms: int | None = None
    """Steady time since which the listing lacks the shard too; None: the latest listing has it."""
    backoff: Backoff = field(default_factory=lambda: Backoff(0.5, 5.0))


class ShardReader:
    """Reads one shard. Its methods are for one task at a time."""

    def __init__(
        self,
        api: StreamsApi,
        arn: str,
        shard_id: str,
        start: Start,
        *,
        clock: Clock,
        random: Callable[[], float],
        poll_seconds: float,
        longest_seconds: float | None = None,
    ) -> None:
        """``poll_seconds``: the mean pause between two requests at the tip.

        ``longest_seconds``: the mean pause after a long time without records; None: the same.
        """
        self.shard_id = shard_id
        self.after = start.number if isinstance(start, After) else None
        """The last sequence number that was read."""
        self._api = api
        self._arn = arn
        self._iterator_start = start
        """Where a new iterator begins."""
        self._clock = clock
        self._random = random
        self._poll_seconds = poll_seconds
        self._longest_seconds = longest_seconds or poll_seconds
        self._bucket = TokenBucket(_CALLS_PER_SECOND)
        self._iterator: str | None = None
        self._empty_pages = 0
        """Empty pages in a row."""
        self._tip_ms: int | None = None
        """Steady time of the latest request that found the tip, or a record that had just been written; None: none has.

        If this host's clock is wrong, gaps are crossed more slowly, or a shard is polled at the full rate.
        """
        self._arrival_ms: int | None = None
        """When the latest record was created."""
        self._record_ms = clock.steady_ms()
        """Steady time of the latest page with records."""
        self._request_ms = api.now_ms()
        """Time of day of the latest request: every record that existed then was read, or is not wanted."""
        self._since_ms = start.ms if isinstance(start, Since) else None
        """Skip records until the first that was created at this time or later; None: skip none."""
        self.asked_ms: int | None = None
        """Steady time since which the reader has been without an answer; None: the latest request was answered."""
        self.gaps = 0
        """How often something was trimmed before it could be read."""
        self._gap = False
        """Whether the next page comes after a gap."""
        self._ended = False
        self._heartbeat_page: Page | None = None
        """The page that a heartbeat has read, for ``next``."""

    async def next(self) -> Page:
        """Return the next page: with records, or an empty one at the tip, or the end.

        Waits as the poll interval and AWS's limits demand. Raises OperatorError. A cancelled call loses no records.
        """
        page, self._heartbeat_page = self._heartbeat_page, None
        while page is None or not (page.records or page.end or page.at_tip):
            await self._pause()
            page = await self._read()
        gap, self._gap = self._gap, False
        return page._replace(gap=gap)

    async def _pause(self) -> None:
        """Wait before the next request, unless records are likely to follow at once (see the module's docstring)."""
        seconds, now_ms = self._poll_seconds, self._clock.steady_ms()
        if self._empty_pages >= _AT_TIP:  # no record is left: wait longer the longer the shard has been quiet
            quiet_seconds = (now_ms - self._record_ms) / 1000 / _QUIET_PART
            seconds = max(seconds, min(quiet_seconds, self._longest_seconds))
        elif not self._empty_pages or not self._is_caught_up(now_ms):
            return
        await self._clock.sleep(min(seconds * (0.5 + self._random()), _LONGEST_WAIT_SECONDS))

    def _is_caught_up(self, now_ms: int) -> bool:
        return self._tip_ms is not None and now_ms - self._tip_ms < _SHORT_GAP_MS

    async def heartbeat(self) -> None:
        """Keep the place of a reader that has read no record yet, while ``next`` is not called.

        Call it at least every 12 minutes, since the iterator expires after 15. ``next`` returns the page that it reads.
        """
        if self._heartbeat_page is None and self.after is None and not self._ended:
            page = await self._read()
            self._heartbeat_page = page if page.records or page.end else None

    async def _read(self) -> Page:
        """Request the next page, and return it even if it is empty.

        Renews the iterator if it expired or its place was trimmed. Waits while AWS does not know the shard.
        """
        unknown = _Unknown(self._clock.steady_ms())
        while not self._ended:
            await self._clock.sleep(self._bucket.reserve(self._clock.steady_ms()))
            began_ms, now_ms = self._note_request()
            try:
                if self._iterator is None:
                    self._iterator = await self._api.iterator(self._arn, self.shard_id, self._iterator_start)
                    self._request_ms = now_ms
                raw, following = await self._api.records(self._iterator)
            except (IteratorExpired, Trimmed) as error:
                self._iterator = None
                if self._iterator_start is LATEST:
                    # A new LATEST would skip what was created since: start at the oldest record, and skip up to this time.
                    self._since_ms = self._request_ms - CLOCKS_APART_MS
                    self._iterator_start = Since(self._since_ms)
                elif isinstance(error, Trimmed):
                    self._log_gap("stream.gap", "Reading goes on at the oldest record that is still there.")
                    self._iterator_start = TRIM_HORIZON
            except ShardGone:
                self._iterator = None
                await self._wait_while_unknown(unknown, began_ms)
            else:
                records = self._take_records(raw)
                self._request_ms, self.asked_ms = now_ms, None
                self._iterator, self._ended = following, following is None
                at_tip = self._count_page(raw, began_ms, now_ms) and not self._ended
                return Page(records, self._ended, at_tip, began_ms, gap=False)
        return Page([], end=True, at_tip=False, began_ms=self._clock.steady_ms(), gap=False)

    def _note_request(self) -> tuple[int, int]:
        """Note since when an answer is awaited; return the steady time and AWS's time of day at the request's start."""
        began_ms = self._clock.steady_ms()
        if self.asked_ms is None:
            self.asked_ms = began_ms
        return began_ms, self._api.now_ms()

    def _count_page(self, raw: list[dict[str, Any]], began_ms: int, now_ms: int) -> bool:
        """Count empty pages in a row, note when the reader was at the tip last, and return whether this page proves the tip."""
        if raw:
            self._empty_pages, self._record_ms = 0, began_ms
            if now_ms - (self._arrival_ms or 0) < _SHORT_GAP_MS:
                self._tip_ms = began_ms
            return False
        self._empty_pages += 1
        if self._empty_pages >= _AT_TIP or self._is_caught_up(began_ms):
            self._tip_ms = began_ms
        return self._empty_pages >= _AT_TIP

    def _take_records(self, raw: list[dict[str, Any]]) -> list[Record]:
        """Return a page's records that must be delivered, and move the reader's place after the page.

        A reader that begins at a time delivers every record after the first that was created at that time or later, also
        records with an earlier time: the order inside a shard wins over times.
        """
        records = [to_record(self.shard_id, each) for each in raw]
        if self.after is not None and records and records[0].sequence_number <= self.after:
            # After a gap, or from an emulator that begins one too early.
            records = [record for record in records if record.sequence_number > self.after]
        if records:
            self.after = records[-1].sequence_number
            self._iterator_start = After(self.after)
            self._arrival_ms = records[-1].arrival_ms
        if (since_ms := self._since_ms) is None:
            return records
        # AWS cuts times to whole seconds: a record with such a time may have been created at any moment of that second.
        second_ms = since_ms - since_ms % 1000
        for place, record in enumerate(records):
            created_ms = record.arrival_ms
            if created_ms is None or created_ms >= (since_ms if created_ms % 1000 else second_ms):
                self._since_ms = None
                return records[place:]
        return []

    async def _wait_while_unknown(self, unknown: _Unknown, began_ms: int) -> None:
        """Wait after an answer that the shard does not exist, or end the shard.

        The shard ends only if the listing has lacked it for 15 seconds too: each of the two answers can be wrong for a
        while.
        """
        delay = unknown.backoff.failed(self._random())
        if await self._api.lists(self._arn, self.shard_id):
            unknown.since_ms = None
        elif unknown.since_ms is None:
            unknown.since_ms = began_ms
        elif began_ms - unknown.since_ms >= _GONE_SECONDS * 1000:
            self._log_gap("stream.shard_gone", "The shard ends here; reading goes on with its children.")
            self._ended = True
            return
        if began_ms - unknown.logged_ms >= _UNKNOWN_LOGGED_MS:
            unknown.logged_ms = began_ms
            self._log_unknown(unknown.backoff.failures)
        await self._clock.sleep(delay)

    def _log_unknown(self, attempt: int) -> None:
        log.warning(
            "stream.shard_unknown",
            shard=self.shard_id,
            stream=self._arn,
            position=str(self.after),
            attempt=attempt,
            did="The server keeps asking for the shard's records.",
            advice="If this lasts, ask AWS why GetRecords does not know a shard that DescribeStream lists.",
        )

    def _log_gap(self, event: str, did: str) -> None:
        """Count and log that records were lost; the next page reports the gap."""
        self._gap = True
        self.gaps += 1
        log.error(
            event,
            shard=self.shard_id,
            stream=self._arn,
            position=str(self.after),
            gaps=self.gaps,
            did=did,
            advice="A stream keeps its records for 24 hours: watch the lag.",
        )


def to_record(shard_id: str, raw: dict[str, Any]) -> Record:
    """Return a record of GetRecords. Its data is JSON as Lambda gets it, with binaries as base64."""
    change = dict(raw["dynamodb"])
    created: datetime | float | None = change.get("ApproximateCreationDateTime")
    arrival_ms = None
    if created is not None:
        arrival_ms = round(1000 * (created.timestamp() if isinstance(created, datetime) else created))
        seconds, rest = divmod(arrival_ms, 1000)
        change["ApproximateCreationDateTime"] = arrival_ms / 1000 if rest else seconds
    event = raw | {"dynamodb": change}
    if identity := raw.get("userIdentity"):
        event["userIdentity"] = {"type": identity.get("Type"), "principalId": identity.get("PrincipalId")}
    return Record(
        shard_id=shard_id,
        sequence_number=change["SequenceNumber"],
        data=orjson.dumps(event, default=_base64),
        partition_key=orjson.dumps(change["Keys"], default=_base64, option=orjson.OPT_SORT_KEYS).decode(),
        arrival_ms=arrival_ms,
    )


def _base64(binary: object) -> str:
    if not isinstance(binary, bytes):
        raise TypeError(f"no attribute value: {type(binary).__name__}")
    return pybase64.b64encode(binary).decode()


@dataclass(eq=False, slots=True)
class Reading:
    """A shard that is read here, or about to be."""

    shard_id: str
    consumer: Consumer
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    reader: ShardReader | None = None

    async def leave(self) -> None:
        """Stop reading after the current page, or at once if the shard is still being opened."""
        self.leaving.set()
        await self.consumer.stop_throttling()
