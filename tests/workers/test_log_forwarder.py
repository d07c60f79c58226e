"""What a worker logs and prints, on its way to the server."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from mldserver.children.channel import pair, receive_now
from mldserver.observe.logging import LIMIT_LINES
from mldserver.workers import wire
from mldserver.workers.worker_reports import LONGEST, _plain, forwarding_logs


class Server:
    """The other end; it reads when it is asked."""

    def __init__(self) -> None:
        self.here, self.there = pair()
        self.there.setblocking(False)
        self.here.setblocking(False)

    def read(self, most: int = 100_000) -> list[tuple[str, str, dict[str, Any]]]:
        told = []
        while len(told) < most:
            try:
                (message,) = receive_now(self.there, wire.FromWorker)
            except BlockingIOError:
                break
            assert isinstance(message, wire.ForwardedLog)
            told.append((message.level, message.event, message.fields))
        return told


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.here.close()
    made.there.close()
    structlog.reset_defaults()


def test_texts_of_any_length_are_told_and_cut() -> None:
    told = _plain({"what": "x" * 10**6, "nested": {"y": ["z" * LONGEST]}})
    assert told["what"] == "x" * LONGEST + f" … and {10**6 - LONGEST} characters more"
    assert told["nested"] == {"y": ["z" * LONGEST]}


def test_prints_are_told_however_structlog_is_configured_meanwhile(server: Server) -> None:
    with forwarding_logs(server.here, logging.INFO):
        structlog.configure(logger_factory=structlog.PrintLoggerFactory())
        print("hello")
    assert server.read() == [("info", "handler.output", {"stream": "stdout", "text": "hello"})]


def test_prints_are_not_told_where_only_errors_are(server: Server) -> None:
    with forwarding_logs(server.here, logging.ERROR) as forwarder:
        print("hello")
        forwarder.send("error", "handler.slow", {})
    assert server.read() == [("error", "handler.slow", {})]


def test_events_prints_and_what_libraries_log_are_told_from_the_level_on(server: Server) -> None:
    log = structlog.get_logger("mldserver")
    with forwarding_logs(server.here, logging.INFO):
        log.debug("handler.retried")
        log.info("handler.loaded", hooks={"b"}, big=2**70, nested={1: (True, None)}, shard="s")
        print("hello")
        logging.getLogger("lib").warning("from %s", "afar")
    first, second, third = server.read()
    assert first == (
        "info",
        "handler.loaded",
        {"hooks": ["b"], "big": str(2**70), "nested": {"1": [True, None]}, "shard": "s"},
    )
    assert second == ("info", "handler.output", {"stream": "stdout", "text": "hello"})
    assert third[0] == "warning"


def test_what_a_handler_binds_hinders_no_event(server: Server) -> None:
    with forwarding_logs(server.here, logging.INFO), structlog.contextvars.bound_contextvars(self="me"):
        structlog.get_logger("mldserver").error("handler.failed", what="it")
    ((level, event, fields),) = server.read()
    with structlog.testing.capture_logs() as told:
        getattr(structlog.get_logger(), level)(event, **fields)
    assert told == [{"event": "handler.failed", "log_level": "error", "what": "it", "self_": "me"}]


def test_errors_come_with_their_traceback(server: Server) -> None:
    with forwarding_logs(server.here, logging.INFO):
        try:
            raise ValueError("here")  # noqa: TRY301  # to have a traceback
        except ValueError:
            structlog.get_logger("mldserver").error("handler.failed", exc_info=True)
    ((level, _, fields),) = server.read()
    assert level == "error"
    assert "ValueError: here" in fields["exception"]


@pytest.mark.parametrize(
    ("say", "event"),
    [
        (lambda: print("x"), "handler.output"),
        (lambda: logging.getLogger("lib").error("x"), "library.log"),
        (lambda: structlog.get_logger("mine").warning("its own"), "its own"),
    ],
    ids=["printed", "logged by a library", "logged by the handler"],
)
def test_what_is_said_beyond_a_flood_is_counted(
    server: Server, say: Callable[[], None], event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mldserver.observe.logging.LIMIT_SECONDS", 1e9)
    with forwarding_logs(server.here, logging.INFO) as forwarder:
        told = []
        for number in range(LIMIT_LINES + 500):
            say()
            if number % 100 == 0:
                told += server.read()
        forwarder.report_lost()
        told += server.read()
    said = sum(name == event for _, name, _ in told)
    lost = sum(fields["lines"] for _, name, fields in told if name == "log.lost")
    assert said == LIMIT_LINES
    assert said + lost == LIMIT_LINES + 500


def test_what_the_runtime_itself_tells_is_never_cut_and_floods_do_not_use_up_each_others_room(
    server: Server,
) -> None:
    with forwarding_logs(server.here, logging.INFO):
        told = []
        for number in range(LIMIT_LINES + 500):
            structlog.get_logger("mldserver").error("handler.dead_letter")
            logging.getLogger("lib").error("x")
            if number % 100 == 0:
                told += server.read()
        print("still")
        told += server.read()
    assert sum(name == "handler.dead_letter" for _, name, _ in told) == LIMIT_LINES + 500
    assert sum(name == "handler.output" for _, name, _ in told) == 1


def test_a_server_that_does_not_listen_costs_events_and_not_the_worker(server: Server) -> None:
    log = structlog.get_logger("mldserver")
    with forwarding_logs(server.here, logging.INFO) as forwarder:
        for _ in range(5000):
            log.info("shard.reopened", shard="s" * 500)
        assert len(server.read(3000)) < 3000
        forwarder.report_lost()
        ((level, event, fields),) = server.read()
    assert (level, event) == ("warning", "log.lost")
    assert fields["lines"] > 0


def test_a_warning_waits_until_there_is_room(server: Server) -> None:
    log = structlog.get_logger("mldserver")
    with forwarding_logs(server.here, logging.INFO):
        server.here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        for _ in range(200):
            log.info("shard.reopened", shard="s" * 500)
        thread = threading.Thread(target=log.warning, args=("handler.failed",))
        thread.start()
        told = server.read()
        thread.join()
        told += server.read()
    assert told[-1][1] == "handler.failed"


def test_with_the_server_gone_nothing_is_raised(server: Server) -> None:
    with forwarding_logs(server.here, logging.INFO):
        server.there.close()
        structlog.get_logger("mldserver").error("handler.failed")
