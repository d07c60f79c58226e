"""Queries of handlers (``ctx.sql``) with their results, and lookup tables.

The Spark session of the server runs a query. The process of the handler gets the result as an Arrow file, whose
descriptor nothing else holds: the file is gone when the last reader closes it, or dies.

A lookup table is a query whose result all processes of the handler keep as a dict; the server repeats it::

    carriers = Lookup("SELECT carrier, usual_delay FROM delays", key="carrier", every="15 minutes")

    def process_record(record):
        row = carriers.get(record.json()["carrier"])
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from mldserver.errors import QueryFailed
from mldserver.windows import duration_ms

if TYPE_CHECKING:
    import pyarrow as pa

MOST_ROWS: Final = 100_000
"""The largest ``max_rows``."""
_CACHED: Final = 1000
"""How many results a process caches."""
_MARGIN_SECONDS: Final = 2.0
"""How long before the deadline of its hook a query ends at the latest."""
_SHORTEST_SECONDS: Final = 0.5
LOOKUP_SECONDS: Final = 600.0
"""How long the query of a lookup may take."""


class Query(msgspec.Struct, frozen=True, array_like=True):
    """A query on its way to Spark."""

    text: str
    values: bytes
    """The values of its parameters by name, as one row of an Arrow stream; empty: it has none."""
    seconds: float
    """How long it may take, with all waiting."""
    max_rows: int | None = None
    """None: any number of rows."""


class QueryResult(NamedTuple):
    """An Arrow file of the result, in an open file that belongs to whoever has this."""

    file: int
    """Its descriptor."""
    order: tuple[int, ...]
    """The order of its record batches."""


class QueryRunner(Protocol):
    """Brings queries from the process of the handler to Spark. Any thread may call it."""

    def submit(self, query: Query) -> Future[QueryResult]:
        """Begin a query. The future raises QueryFailed; cancelling it cancels the query."""

    def is_needed_here(self) -> bool:
        """Whether the present thread must not wait for a query, because the runner needs it."""


def batches_of(result: QueryResult) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a result in their order. The file is closed at once, and its memory with the last batch."""
    import pyarrow as pa  # noqa: PLC0415  # handlers import this module, and most have no queries

    try:
        memory = mmap.mmap(result.file, 0, prot=mmap.PROT_READ)
    finally:
        os.close(result.file)
    reader = pa.ipc.open_file(pa.py_buffer(memory))
    if not result.order:
        yield pa.RecordBatch.from_pylist([], reader.schema)
    for place in result.order:
        yield reader.get_batch(place)


def rows_of(batch: pa.RecordBatch | pa.Table) -> Iterator[Any]:
    """Yield the rows as named tuples; a column without a usable name is called ``_0``, ``_1`` and so on by its place."""
    row = namedtuple("Row", batch.schema.names, rename=True)  # type: ignore[misc]  # noqa: PYI024  # the names come from a query
    return map(row._make, zip(*(column.to_pylist() for column in batch.columns), strict=True))


class Rows:
    """A result in memory: an iterable of named tuples, with ``len``."""

    def __init__(self, table: pa.Table) -> None:
        """Hold a table."""
        self._table = table

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows as named tuples."""
        return rows_of(self._table)

    def one(self) -> Any:
        """Return the row, None if there is none. Raises QueryFailed if there are several."""
        if len(self) > 1:
            raise QueryFailed(
                f"The query has {len(self)} rows where one was expected.",
                advice="Add LIMIT 1, or a condition.",
            )
        return next(iter(self), None)

    def arrow(self) -> pa.Table:
        """Return the result as an Arrow table."""
        return self._table


class RowStream:
    """A result that is read once, a record batch at a time: an iterable of named tuples.

    Its file is gone when the loop over it ends, however it ends; at the latest when the call of the hook does.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        """Read what ``batches_of`` yields."""
        self._batches: Iterator[pa.RecordBatch] | None = batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows as named tuples."""
        try:
            # No variable here holds a batch: an iterator that is kept must not keep the memory of the file.
            while (rows := self._next_rows()) is not None:
                yield from rows
        finally:
            self.close()

    def _next_rows(self) -> Iterator[Any] | None:
        batch = None if self._batches is None else next(self._batches, None)
        return None if batch is None else rows_of(batch)

    def close(self) -> None:
        """Close the file. Later loops find no row."""
        self._batches = None


def query_of(
    text: str,
    values: Mapping[str, Any],
    *,
    seconds: float,
    max_rows: int | None = None,
) -> Query:
    """Return a query. Raises TypeError for values that are no parameters of Spark's SQL, and ValueError for ``max_rows``."""
    import pyarrow as pa  # noqa: PLC0415  # see above

    if max_rows is not None and not 1 <= max_rows <= MOST_ROWS:
        raise ValueError(
            f"max_rows = {max_rows} is not from 1 to {MOST_ROWS:,}: use stream=True for more rows"
        )
    packed = b""
    if values:
        try:
            row = pa.RecordBatch.from_pylist([dict(values)])
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise TypeError(f"the values of a query cannot be sent: {error}") from error
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, row.schema) as writer:
            writer.write(row)
        packed = bytes(sink.getvalue())
    return Query(text, packed, seconds, max_rows)


def values_of(query: Query) -> dict[str, Any]:
    """Return the values of a query's parameters by name."""
    import pyarrow as pa  # noqa: PLC0415  # see above

    if not query.values:
        return {}
    values: dict[str, Any] = pa.ipc.open_stream(query.values).read_all().to_pylist()[0]
    return values


class Queries:
    """Runs the queries of a handler's calls in one process, and caches results. Any thread may call it."""

    def __init__(
        self,
        runner: QueryRunner,
        *,
        seconds: float = 30.0,
        deadline: float | None = None,
        steady_ms: Callable[[], int],
    ) -> None:
        """Run queries with ``runner``, each for ``seconds`` at most, and 2 s less than ``deadline``, that of the hooks."""
        self._runner = runner
        limit = seconds if deadline is None else min(seconds, deadline - _MARGIN_SECONDS)
        self._seconds = max(_SHORTEST_SECONDS, limit)
        self._steady_ms = steady_ms
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[object, ...], tuple[int, Rows]] = OrderedDict()
        """The latest results, with the steady time at which each expires."""

    def sql(self, text: str, values: Mapping[str, Any], **options: Any) -> Rows | RowStream:
        """See ``Context.sql``."""
        asked = self._ask(text, values, **options)
        if isinstance(asked, Rows):
            return asked
        if self._runner.is_needed_here():
            raise QueryFailed(
                "A synchronous hook in the server's process cannot wait for a query.",
                did="The query was not begun.",
                advice="Use `await ctx.asql` in an async hook, or write blocking = True in the handler, or set workers.",
            )
        future = self._runner.submit(asked.query)
        try:
            return self._accept(asked, future.result())
        except CancelledError as error:
            raise QueryFailed("The query was cancelled.") from error
        finally:
            future.cancel()

    async def asql(self, text: str, values: Mapping[str, Any], **options: Any) -> Rows | RowStream:
        """See ``Context.asql``."""
        import asyncio  # noqa: PLC0415  # slow to import, and pytest loads this module through our plugin

        asked = self._ask(text, values, **options)
        if isinstance(asked, Rows):
            return asked
        return self._accept(asked, await asyncio.wrap_future(self._runner.submit(asked.query)))

    def _ask(
        self,
        text: str,
        values: Mapping[str, Any],
        *,
        max_rows: int,
        cache: str | float | timedelta | None,
        stream: bool,
        timeout: str | float | timedelta | None,  # the server enforces it
    ) -> Rows | _Asked:
        """Return the cached rows, or what to ask Spark."""
        seconds = self._seconds if timeout is None else min(self._seconds, duration_ms(timeout) / 1000)
        query = query_of(text, values, seconds=seconds, max_rows=None if stream else max_rows)
        cache_ms = 0 if cache is None or stream else duration_ms(cache)
        asked = _Asked(query, cache_ms)
        with self._lock:
            expires_ms, rows = self._cache.get(asked.key, (0, None))
            if cache_ms and rows is not None and self._steady_ms() < expires_ms:
                self._cache.move_to_end(asked.key)
                return rows
        return asked

    def _accept(self, asked: _Asked, result: QueryResult) -> Rows | RowStream:
        import pyarrow as pa  # noqa: PLC0415  # see above

        batches = batches_of(result)
        if asked.query.max_rows is None:
            return RowStream(batches)
        rows = Rows(pa.Table.from_batches(list(batches)))
        if asked.cache_ms:
            with self._lock:
                self._cache[asked.key] = self._steady_ms() + asked.cache_ms, rows
                self._cache.move_to_end(asked.key)
                if len(self._cache) > _CACHED:
                    self._cache.popitem(last=False)
        return rows


class _Asked(NamedTuple):
    query: Query
    cache_ms: int

    @property
    def key(self) -> tuple[object, ...]:
        """What results are cached by."""
        return self.query.text, self.query.values, self.query.max_rows


class CannedAnswers:
    """Answers queries in tests of handlers: a ``QueryRunner`` without Spark."""

    def __init__(self, answer: Callable[..., Iterable[Mapping[str, Any]]]) -> None:
        """``answer`` returns the rows as dicts. It is called with the text, and with the values as keywords."""
        self._answer = answer

    def is_needed_here(self) -> bool:
        """Return False: each query is answered at once."""
        return False

    def submit(self, query: Query) -> Future[QueryResult]:
        """Return a future that holds the rows of ``answer`` as a result."""
        import pyarrow as pa  # noqa: PLC0415  # see above

        table = pa.Table.from_pylist(list(map(dict, self._answer(query.text, **values_of(query)))))
        file = os.memfd_create("mldserver-query", os.MFD_CLOEXEC)
        with pa.OSFile(f"/proc/self/fd/{file}", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        future: Future[QueryResult] = Future()
        future.set_result(QueryResult(file, tuple(range(len(table.to_batches())))))
        return future


class Lookup:
    """A table by key, which the server computes with Spark again and again. Write it into the handler's module or class."""

    def __init__(
        self,
        sql: str,
        /,
        *,
        key: str,
        every: str | float | timedelta = "15 minutes",
        required: bool = True,
        **values: Any,
    ) -> None:
        """Look up rows of ``sql`` by its column ``key``, which must be unique, computed again each ``every``.

        ``values`` are the values of the query's parameters. If ``required``, no record is processed before there is a table.
        Raises ValueError if ``every`` is not a duration above zero, and TypeError for values that are no parameters.
        """
        self.query = query_of(sql, values, seconds=LOOKUP_SECONDS)
        self.key, self.required = key, required
        self.every_ms = duration_ms(every)
        if not self.every_ms:
            raise ValueError("a lookup's `every` must be above zero")
        self._rows: dict[Any, Any] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the row of a key, a named tuple of all columns; ``default`` if there is none. It is a dict access."""
        return self._rows.get(key, default)

    def __contains__(self, key: object) -> bool:
        """Whether there is a row of a key."""
        return key in self._rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def fill(self, table: pa.Table | Iterable[Mapping[str, Any]]) -> None:
        """Replace the table: the server does, and tests of handlers may. Raises QueryFailed without the column, or if a key repeats."""
        import pyarrow as pa  # noqa: PLC0415  # see above

        if not isinstance(table, pa.Table):
            table = pa.Table.from_pylist(list(map(dict, table)))
        if table.column_names.count(self.key) != 1:
            raise QueryFailed(
                f"The lookup's query has the columns {', '.join(table.column_names)}, and its key is {self.key}.",
                advice="Select the key's column once.",
            )
        keys = table[self.key].to_pylist()
        rows = dict(zip(keys, rows_of(table), strict=True))
        if len(rows) != len(keys):
            raise QueryFailed(
                f"{len(keys) - len(rows)} rows of the lookup repeat a value of its key {self.key}.",
                advice="Aggregate in SQL, so that each key has one row.",
            )
        self._rows = rows


class LookupSpec(msgspec.Struct, frozen=True, array_like=True):
    """A lookup as the server knows it."""

    name: str
    """The attribute's."""
    query: Query
    every_ms: int
    required: bool


def lookups_of(target: Any) -> dict[str, Lookup]:
    """Return the lookups of a handler by name: attributes of its module, and of its class."""
    module = vars(sys.modules[target.__module__]) if isinstance(target, type) else {}
    own: dict[str, Any] = {}
    for each in reversed(target.__mro__) if isinstance(target, type) else (target,):
        own |= vars(each)
    return {name: each for name, each in {**module, **own}.items() if isinstance(each, Lookup)}


def spec_of(name: str, lookup: Lookup) -> LookupSpec:
    """Return what the server must know of a lookup."""
    return LookupSpec(name, lookup.query, lookup.every_ms, lookup.required)


def discard(result: QueryResult) -> None:
    """Close the file of a result that is not used."""
    with contextlib.suppress(OSError):
        os.close(result.file)
