"""``mldserver top``: a server that is asked again and again, in a terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.admin_endpoint import DOCUMENT, Endpoint, endpoint
from support.statuses import function
from support.statuses import server as several
from support.store import SqliteStore

from mldserver.admin.http_client import Refused
from mldserver.cli.render import as_bytes
from mldserver.cli.status import ServerOptions
from mldserver.cli.top import Order, Screen
from mldserver.errors import OperatorError
from mldserver.output.layout import LEDGER
from mldserver.status_document import ShardRow, Totals

PATIENT = """
import signal
import sys
from mldserver import cli
from mldserver.admin.http_client import Client

Client.__init__.__kwdefaults__["seconds"] = 600.0
cli.protect_standard_streams()
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that serve in this process leave it ignored
sys.exit(cli.run(sys.argv[1:]))
"""
"""The command, as a program that gives a slow machine time to answer."""


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as served:
        yield served


def screen(server: Endpoint | None, out: str | None = None, order: Order = "lag", part: str = "") -> Screen:
    at = ServerOptions(admin=server.address if server else "127.0.0.1:1", out=out)
    return Screen(at, at.client(), at.expected_pipeline(), order, part)


def text(screen: Screen) -> str:
    return as_bytes(screen).decode()


def later(seconds: float, **changes: object) -> object:
    return msgspec.structs.replace(DOCUMENT, taken_ms=DOCUMENT.taken_ms + round(seconds * 1000), **changes)


@pytest.mark.parametrize(
    ("order", "part", "shown"),
    [
        ("lag", "", ["a-2", "a-1", "b-3"]),
        ("records", "", ["a-2", "a-1", "b-3"]),
        ("rows", "", ["a-1", "a-2", "b-3"]),
        ("age", "", ["a-1", "a-2", "b-3"]),
        ("shard", "", ["a-1", "a-2", "b-3"]),
        ("lag", "-1", ["a-1"]),
        ("lag", "a*2", ["a-2"]),
    ],
)
def test_shards_are_chosen_by_id_and_sorted_by_a_column_the_greatest_first(
    server: Endpoint, order: Order, part: str, shown: list[str]
) -> None:
    first = (
        ShardRow(id="a-1", state="connected", lag_ms=10, durable_age_seconds=3.0),
        ShardRow(id="a-2", state="connected", lag_ms=500),
        ShardRow(id="b-3", state="missing"),
    )
    more = {"a-1": (5, 50), "a-2": (7, 1), "b-3": (0, 0)}
    then = [msgspec.structs.replace(s, records=more[s.id][0], rows=more[s.id][1]) for s in first]
    at = screen(server, order=order, part=part)
    server.document = later(0, shards=first)
    at.refresh()
    server.document = later(1, shards=tuple(then))
    at.refresh()
    assert [line[:3] for line in text(at).splitlines() if line[:2] in {"a-", "b-"}] == shown


def test_rates_are_what_came_between_two_documents(server: Endpoint) -> None:
    shown = screen(server)
    assert shown.refresh() == 1.0
    more = [
        msgspec.structs.replace(
            shard, records=shard.records + 300, rows=shard.rows + 50, bytes=shard.bytes + 4096
        )
        for shard in DOCUMENT.shards[:2]
    ]
    server.document = later(2, shards=tuple(more))
    shown.refresh()
    (line,) = (line for line in text(shown).splitlines() if line.startswith("shardId-0"))
    assert line.split() == ["shardId-0", "connected", "1.5", "s", "-", "150", "25", "2.0", "KiB"]
    # The same document again has no new counts.
    shown.refresh()
    assert line in text(shown)
    # Another server at the address counts from zero.
    server.document = later(3, server_id="two", totals=Totals())
    shown.refresh()
    (line,) = (line for line in text(shown).splitlines() if line.startswith("shardId-0"))
    assert line.split()[-3:] == ["-", "-", "-"]


def test_shards_get_half_of_the_terminal(server: Endpoint) -> None:
    server.document = later(
        0, shards=tuple(ShardRow(id=f"s-{n:03}", state="connected", lag_ms=n) for n in range(200))
    )
    shown = screen(server)
    shown.refresh(height=24)
    assert "shards: 12 of 200\n" in text(shown)
    lines = text(shown).splitlines()[:24]
    assert [line[:5] for line in lines if line.startswith("s-")] == [f"s-{n}" for n in range(199, 187, -1)]
    assert any(line.startswith("state") for line in lines)


def test_without_a_server_the_ledger_is_shown_until_one_answers(server: Endpoint, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "out" / LEDGER, pipeline="trips", server_id="one")
    store.open(now_ms=0)
    store.open_shard("shardId-7")
    store.close()
    shown = screen(None, out="out")
    assert shown.refresh() == 5.0
    assert "No server answers at 127.0.0.1:1" in text(shown)
    assert "shardId-7" in text(shown)
    shown.client = screen(server).client
    assert shown.refresh() == 1.0
    assert "shardId-7" not in text(shown)
    assert "shardId-0" in text(shown)


def test_with_neither_at_the_start_it_ends_and_later_it_goes_on_asking(server: Endpoint) -> None:
    with pytest.raises(OperatorError, match="Nor can the ledger be read"):
        screen(None, out="nowhere").refresh()
    shown = screen(server, out="nowhere")
    shown.refresh()
    server.answers["/status"] = 503, {"error": "It starts."}
    assert [shown.refresh(), shown.refresh()] == [5.0, 5.0]
    assert "Nor can the ledger be read" in text(shown)


def test_a_server_that_refuses_ends_it(server: Endpoint) -> None:
    server.answers["/status"] = 403, {"error": "This needs a certificate."}
    with pytest.raises(Refused, match="This needs a certificate"):
        screen(server).refresh()


def test_in_a_terminal_it_is_live_until_it_is_interrupted(server: Endpoint) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 150))
    command = [sys.executable, "-c", PATIENT, "top", "--admin", server.address]
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    )
    try:
        shown_until(ours, b"shards: 3 of 3")
        server.document = later(1, shards=DOCUMENT.shards[:2])
        shown_until(ours, b"shards: 2 of 2")
        child.send_signal(signal.SIGINT)
        shown_until(ours, b"\x1b[?1049l")
        assert child.wait() == 130
    finally:
        child.kill()
        child.wait()
        os.close(ours)
        os.close(theirs)


def test_in_a_pipe_one_status_follows_the_other_without_escapes_until_the_reader_ends(
    server: Endpoint,
) -> None:
    command = [sys.executable, "-c", PATIENT, "top", "--admin", server.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        seen = b""
        while seen.count(b"shards: 3 of 3") < 2:
            seen += child.stdout.readline()
        child.stdout.close()
        assert (child.wait(), child.stderr.read()) == (141, b"")
    assert b"\x1b" not in seen


def shown_until(terminal: int, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        assert select.select([terminal], [], [], 600)[0], seen
        seen += os.read(terminal, 65536)


def test_several_functions_are_a_table_instead_of_shards(server: Endpoint) -> None:
    server.document = several(function("trips"), function("stops"))
    watching = screen(server)
    watching.refresh()
    shown = text(watching)
    assert "shards: " not in shown
    assert "trips" in shown
    assert "stops" in shown
