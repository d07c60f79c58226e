"""The queries of a worker process: both ends of the socket between the handler and the server.

It is not the socket of requests: a synchronous hook that waits for a query may hold up the worker's event loop, and a thread
reads the answers here. When a worker dies, the server cancels its queries.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, Protocol

from mldserver.children.channel import Channel, Descriptors, WireError, receive_with_files, send_now
from mldserver.errors import MldserverError, QueryFailed
from mldserver.handler.queries import Query, QueryResult, discard
from mldserver.workers import wire

_SEND_SECONDS = 5.0
"""How long a socket may be full: the server reads it all the time."""


class WorkerQueries:
    """The worker's end: a ``QueryRunner``."""

    def __init__(self, end: socket.socket) -> None:
        """Send queries through ``end``. The first one starts the thread that reads the answers."""
        self._end = end
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[QueryResult]] = {}
        self._reader: threading.Thread | None = None

    def is_needed_here(self) -> bool:
        """Return False: any thread of a worker may wait."""
        return False

    def submit(self, query: Query) -> Future[QueryResult]:
        """Send a query (see ``QueryRunner``)."""
        future: Future[QueryResult] = Future()
        with self._lock:
            number = next(self._ids)
            self._waiting[number] = future
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="mldserver-queries", daemon=True)
                self._reader.start()
        future.add_done_callback(partial(self._done, number))
        if not send_now(self._end, wire.AskQuery(number, query), wait_seconds=_SEND_SECONDS):
            raise QueryFailed("The server does not take queries now.", did="The query was not begun.")
        return future

    def _done(self, number: int, future: Future[QueryResult]) -> None:
        if future.cancelled():
            with self._lock:
                self._waiting.pop(number, None)
            send_now(self._end, wire.CancelRequest(number), wait_seconds=_SEND_SECONDS)

    def _read(self) -> None:
        """Read answers until the socket ends: then the process ends, too."""
        while True:
            try:
                messages, files = receive_with_files(self._end, wire.QueryAnswer)
            except (OSError, WireError):
                return
            if not messages:
                return
            for message in messages:
                with self._lock:
                    future = self._waiting.pop(message.id, None)
                if isinstance(message, wire.QueryAnswered):
                    _settle(future, QueryResult(files.pop(0), message.order))
                else:
                    _settle(future, wire.error_of(message))


def _settle(future: Future[QueryResult] | None, answer: QueryResult | MldserverError) -> None:
    """Give an answer to whoever waits for it. If the query was cancelled, drop it."""
    with contextlib.suppress(InvalidStateError):
        if future is not None and isinstance(answer, MldserverError):
            future.set_exception(answer)
        elif future is not None and isinstance(answer, QueryResult):
            future.set_result(answer)
            return
    if isinstance(answer, QueryResult):
        discard(answer)


class QueryPort(Protocol):
    """What runs the queries of workers."""

    def begin(
        self, query: Query, done: Callable[[QueryResult | MldserverError], None]
    ) -> Callable[[], object]:
        """Begin a query and return what cancels it. ``done`` is called once, unless it was cancelled."""


class QueryDesk:
    """The server's end of one worker's socket. It lasts as long as the worker."""

    def __init__(self, end: socket.socket, port: QueryPort) -> None:
        """Own ``end`` from now on."""
        self._port = port
        self._cancel: dict[int, Callable[[], object]] = {}
        """By number: what cancels the queries that run."""
        self._channel = Channel[wire.QueryRequest](
            end, wire.QueryRequest, receive=self._receive, ended=lambda _: self.close()
        )

    def _receive(self, message: Any, _files: Descriptors) -> None:
        if isinstance(message, wire.AskQuery):
            number = message.id
            self._cancel[number] = self._port.begin(message.query, partial(self._answer, number))
        elif (cancel := self._cancel.pop(message.id, None)) is not None:
            cancel()

    def _answer(self, number: int, answer: QueryResult | MldserverError) -> None:
        if self._cancel.pop(number, None) is None:
            if isinstance(answer, QueryResult):
                discard(answer)
        elif isinstance(answer, QueryResult):
            self._channel.send(wire.QueryAnswered(number, answer.order), (answer.file,))
        else:
            self._channel.send(wire.failed(number, answer))

    def close(self) -> None:
        """Close the socket, and cancel the queries that run."""
        self._channel.close()
        while self._cancel:
            self._cancel.popitem()[1]()


class LocalQueries:
    """The ``QueryRunner`` of a handler that the server's own process runs. Create it on the event loop."""

    def __init__(self, port: QueryPort) -> None:
        """Give queries to ``port``."""
        self._port, self._loop, self._thread = port, asyncio.get_running_loop(), threading.get_ident()

    def is_needed_here(self) -> bool:
        """Whether this is the thread of the event loop, which runs queries."""
        return threading.get_ident() == self._thread

    def submit(self, query: Query) -> Future[QueryResult]:
        """Begin a query on the event loop (see ``QueryRunner``)."""
        future: Future[QueryResult] = Future()

        def begin() -> None:
            cancel = self._port.begin(query, partial(_settle, future))
            future.add_done_callback(
                lambda each: self._loop.call_soon_threadsafe(cancel) if each.cancelled() else None
            )

        self._loop.call_soon_threadsafe(begin)
        return future
