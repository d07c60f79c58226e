"""QueryService of one function's handler, in the server: each with its deadline; and the lookup tables, computed again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock
from mldserver.engine_jobs import FunctionView
from mldserver.errors import LedgerError, MldserverError, QueryFailed, SparkError
from mldserver.handler.queries import LookupSpec, Query, QueryResult, values_of
from mldserver.jobs.engine import RETRY_SECONDS
from mldserver.jobs.published import PublishedWindows

log = structlog.get_logger("mldserver")

AskSpark = Callable[[Query, tuple[FunctionView, ...], int], Awaitable[QueryResult]]
"""Runs a query with views; the result has at most so many bytes. Raises QueryFailed and SparkError."""

FillLookup = Callable[[str, QueryResult], Awaitable[None]]
"""``Runtime.fill_lookup``."""

RESULT_BYTES: Final = 16 << 20
"""The largest result in memory."""
LOOKUP_BYTES: Final = 64 << 20
"""The largest lookup table."""
_RED_AFTER: Final = 3
"""After so many intervals without a new table the server is not ready."""
_GONE: Final = ("FILE_NOT_EXIST", "PATH_NOT_FOUND", "FAILED_READ_FILE")
"""What Spark says of a file that a later revision has replaced."""
_MINUTE_MS: Final = 60_000
_MOST_A_MINUTE: Final = 600
"""More queries than that are more than the Spark session of a server can run beside windows."""
_FEW: Final = 60
_RECORDS_A_QUERY: Final = 10


class QueryService:
    """Runs a handler's queries, and keeps its lookup tables fresh. ``begin`` works while ``run`` does."""

    def __init__(self, published: dict[str, PublishedWindows], *, spill_bytes: int, clock: Clock) -> None:
        """``published``: of the server's functions, by name. ``spill_bytes``: the largest result of any number of rows."""
        self.ask: AskSpark | None = None
        """Set before ``run``; None: the server has no Spark session for the handler."""
        self.records: Callable[[], int] = lambda: 0
        """Returns how many records have come. Set before ``run``."""
        self.published = published
        """By name; each function adds its own."""
        self._spill_bytes = spill_bytes
        self._clock = clock
        self._group: asyncio.TaskGroup | None = None
        self._due: dict[str, int] = {}
        """By lookup: the steady time (ms) after which the server is not ready, unless there is a new table."""
        self.done = self.failed = 0
        """How many queries had a result, and how many had none."""
        self._minute = (clock.steady_ms(), 0, 0)
        """Since when queries are counted, and how many queries and records there were by then."""
        self._advised = False

    @property
    def trouble(self) -> str | None:
        """Which lookup table is too old, as a clause; None while all are fresh."""
        now_ms = self._clock.steady_ms()
        old = [name for name, due_ms in self._due.items() if now_ms > due_ms]
        return (
            f"the lookup {', '.join(old)} has not been computed for too long: see lookup.failed"
            if old
            else None
        )

    async def run(self, lookups: tuple[LookupSpec, ...], fill: FillLookup) -> None:
        """Run queries, and fill lookups with tables that are computed again and again, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for lookup in lookups:
                    self._group.create_task(self._keep_fresh(lookup, fill), name=f"lookup {lookup.name}")
                await asyncio.Event().wait()
        finally:
            self._group = None

    def begin(
        self, query: Query, done: Callable[[QueryResult | MldserverError], None]
    ) -> Callable[[], object]:
        """Begin a query (see ``QueryPort``)."""

        async def run() -> None:
            limit = RESULT_BYTES if query.max_rows is not None else self._spill_bytes
            try:
                result = await self._answer(query, limit)
            except QueryFailed as error:
                self.failed += 1
                done(error)
            else:
                self.done += 1
                done(result)
            self._advise()

        if self._group is None:
            done(QueryFailed("The function is starting or stopping.", did="The query was not begun."))
            return lambda: None
        return self._group.create_task(run(), name="query").cancel

    async def _answer(self, query: Query, max_bytes: int) -> QueryResult:
        """Run a query within its time. Raises QueryFailed."""
        if self.ask is None:
            raise QueryFailed("The server has no Spark session for this handler.")
        try:
            async with asyncio.timeout(query.seconds):
                try:
                    return await self.ask(query, await self._views(query), max_bytes)
                except QueryFailed as error:
                    if not any(mark in error.what for mark in _GONE):
                        raise
                # A later revision of a window has replaced its files since the views were made.
                return await self.ask(query, await self._views(query, fresh=True), max_bytes)
        except TimeoutError:
            raise QueryFailed(
                f"The query had no result after {query.seconds:g} seconds.",
                did="It was cancelled.",
                advice="Queries wait for each other and for Spark: see query_concurrency and query_timeout.",
            ) from None
        except (
            SparkError,
            LedgerError,
            OSError,
            ValueError,
        ) as error:  # ValueError: of a manifest, or of Arrow
            raise QueryFailed(str(error)) from error

    async def _views(self, query: Query, *, fresh: bool = False) -> tuple[FunctionView, ...]:
        """Return the views that a query may name."""
        texts = (query.text, *(each for each in values_of(query).values() if isinstance(each, str)))
        named = [each for name, each in self.published.items() if any(name in text for text in texts)]
        views = [await each.view(fresh=fresh) for each in named]
        return tuple(view for view in views if view is not None)

    async def _keep_fresh(self, lookup: LookupSpec, fill: FillLookup) -> None:
        """Compute a lookup table at each interval; after a failure sooner."""
        backoff, seconds = Backoff(*RETRY_SECONDS), lookup.every_ms / 1000
        patience_ms = _RED_AFTER * lookup.every_ms
        self._due[lookup.name] = self._clock.steady_ms() + patience_ms
        while True:
            try:
                result = await self._answer(lookup.query, LOOKUP_BYTES)
                await fill(lookup.name, result)
            except QueryFailed as error:
                wait = min(seconds, backoff.failed())
                log.warning("lookup.failed", lookup=lookup.name, delay_seconds=wait, **error.told())
            else:
                wait = seconds
                backoff.worked()
                self._due[lookup.name] = self._clock.steady_ms() + patience_ms
                log.debug("lookup.done", lookup=lookup.name)
            await self._clock.sleep(wait)

    def _advise(self) -> None:
        """Log once that there are too many queries for one session."""
        began_ms, queries, records = self._minute
        now_ms, count = self._clock.steady_ms(), self.done + self.failed
        if self._advised or now_ms - began_ms < _MINUTE_MS:
            return
        came = self.records()
        self._minute = now_ms, count, came
        made, came = count - queries, came - records
        minutes = (now_ms - began_ms) / _MINUTE_MS
        if made > _MOST_A_MINUTE * minutes or (made >= _FEW and made * _RECORDS_A_QUERY > came):
            self._advised = True
            log.warning(
                "query.per_record",
                queries=made,
                records=came,
                seconds=round(minutes * 60),
                what="The handler makes a query for nearly every record; a query takes tens to hundreds of milliseconds.",
                advice="Use a Lookup, `cache=`, keyed state, or join in on_window.",
            )
