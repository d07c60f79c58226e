"""What a record hook with a second parameter receives: the record's key, its time, and the state of its key.

A hook takes a context if its second parameter is called ``ctx`` or annotated ``Context``::

    def process_record(record: Record, ctx: Context):
        ctx.state["times"] = ctx.state.get("times", 0) + 1

Calls for one key never overlap, so a handler needs no lock around its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

from mldserver.errors import NoKey, QueryFailed
from mldserver.handler.queries import CannedAnswers, Queries, Rows, RowStream
from mldserver.handler.timers import Timers, ms_at, time_at

NO_SETTINGS: Final[Mapping[str, str]] = MappingProxyType({})


def no_key() -> NoKey:
    """Return the error of a call that asks for the key of a record without one."""
    return NoKey(
        "The record has no partition key.",
        did="The call failed.",
        advice="Give the records partition keys, or return before using ctx.key, ctx.state and ctx.timers.",
    )


def replace_state(state: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Give a state another content, as ``ctx.state = …`` and ``ctx.state |= …`` do."""
    if new is not state:
        content = dict(new)
        state.clear()
        state.update(content)


class Context:
    """The context of one call. It is valid during the call only."""

    __slots__ = ("_key", "_now", "_queries", "_state", "_timers", "settings", "streams")

    settings: Mapping[str, str]
    """The server's setting ``handler_settings``, read-only: constants that differ from one environment to another."""

    def __init__(
        self,
        key: str | None = None,
        *,
        now: datetime | None = None,
        state: dict[str, Any] | None = None,
        settings: Mapping[str, str] = NO_SETTINGS,
        sql: Callable[..., Iterable[Mapping[str, Any]]] | None = None,
    ) -> None:
        """Create a context, for example in a test of a handler. ``now`` is an aware datetime; None: the Unix epoch.

        ``sql`` answers queries: called with the text, and with the values as keywords, it returns the rows as dicts.
        """
        self._key = key
        self._now = now or time_at(0)
        self._state = {} if state is None else state
        self._timers = Timers(lambda: ms_at(self._now))
        self.settings = settings
        self._queries: Queries | None = None
        if sql is not None:
            self._queries = Queries(CannedAnswers(sql), steady_ms=lambda: ms_at(self._now))
        self.streams: list[RowStream] = []
        """The streams that the present call has begun. The server closes them after it."""

    @property
    def key(self) -> str:
        """The record's partition key; for changes read directly from DynamoDB Streams, the item's key as JSON.

        Raises NoKey if the record has none.
        """
        if self._key is None:
            raise no_key()
        return self._key

    @property
    def now(self) -> datetime:
        """The record's arrival time, or the timer's due time: an aware UTC datetime, the same in every replay.

        If the source reports no arrival times (version 1 of the protocol), it is the time of receipt.
        """
        return self._now

    @property
    def state(self) -> dict[str, Any]:
        """The state of the record's key: an empty dict for a new key. Changes count when the call succeeds.

        Values: None, bool, int of 64 bits, float, str, bytes, Decimal, aware datetime, and lists, tuples and dicts with text
        keys of these. Tuples come back as lists. An empty dict deletes the key's state. Assign a dict to replace it.

        Raises NoKey if the record has no key, KeyElsewhere if the key does not belong to the record's shard. The server checks
        the state after the call. The call fails with TypeError for a value of another type, with StateTooLarge for more than
        256 KiB, and with StateFull for a new key when the server has no memory left for state.
        """
        self.key  # noqa: B018  # raises NoKey
        return self._state

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        replace_state(self.state, state)

    @property
    def timers(self) -> Timers:
        """The timers of the record's key (see ``Timers``). Changes count when the call succeeds.

        Raises NoKey and KeyElsewhere as ``state`` does.
        """
        self.key  # noqa: B018  # raises NoKey
        return self._timers

    def sql(
        self,
        text: str,
        /,
        *,
        max_rows: int = 1000,
        cache: str | float | timedelta | None = None,
        stream: bool = False,
        timeout: str | float | timedelta | None = None,
        **values: Any,
    ) -> Any:
        """Run a query on the server's Spark session, wait for it, and return its ``Rows``.

        ``:name`` in the text stands for one of ``values``: None, bool, int, float, str, bytes, Decimal, date or aware datetime.
        It is never a part of the SQL text; the name of a table or column may be one through ``IDENTIFIER(:name)``.
        The published windows of each function of the server are a view with the function's name.

        The result has at most ``max_rows`` rows (up to 100,000) and 16 MiB. ``stream=True`` returns a ``RowStream`` of any number
        of rows instead, up to ``query_spill_bytes``. ``cache`` is a duration: the process may answer with a result of the
        same text and values from within that time. ``timeout`` is a duration that shortens the setting ``query_timeout``.

        Raises QueryTooLarge beyond these limits, and QueryFailed if Spark refuses the query or the time is over; TypeError
        for values, and ValueError for limits, that Spark cannot take.
        """
        rows = self._spark().sql(text, values, max_rows=max_rows, cache=cache, stream=stream, timeout=timeout)
        return self._kept(rows)

    async def asql(
        self,
        text: str,
        /,
        *,
        max_rows: int = 1000,
        cache: str | float | timedelta | None = None,
        stream: bool = False,
        timeout: str | float | timedelta | None = None,  # noqa: ASYNC109  # the server enforces it
        **values: Any,
    ) -> Any:
        """Do as ``sql`` does in an ``async`` hook. Cancelling the call cancels the query."""
        rows = await self._spark().asql(
            text, values, max_rows=max_rows, cache=cache, stream=stream, timeout=timeout
        )
        return self._kept(rows)

    def _spark(self) -> Queries:
        if self._queries is None:
            raise QueryFailed(
                "No Spark session is there to answer the query.",
                advice="Give the handler a schema: without one the server starts no Spark. In a test, give Context the argument sql.",
            )
        return self._queries

    def _kept(self, rows: Rows | RowStream) -> Rows | RowStream:
        if isinstance(rows, RowStream):
            self.streams.append(rows)
        return rows

    def close_streams(self) -> None:
        """Close the streams of the call, the latest first: the traceback of an error may keep their loops alive."""
        while self.streams:
            self.streams.pop().close()
