"""``mldserver top``: what is shown, in which order, and what keys do."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console, Group
from support.admin_endpoint import DOCUMENT, Endpoint, endpoint
from support.store import SqliteStore

from mldserver import cli
from mldserver.admin.document import Shard, Totals
from mldserver.admin.http_client import Refused
from mldserver.cli.status import Rates, ServerOptions
from mldserver.cli.top import Screen, ShardsView
from mldserver.errors import OperatorError
from mldserver.output.layout import LEDGER

PATIENT = """
import sys
from mldserver import cli
from mldserver.admin.http_client import Client

Client.__init__.__kwdefaults__["seconds"] = 600.0
sys.exit(cli.run(sys.argv[1:]))
"""
"""The command, as a program that gives a slow machine time to answer."""
SHARDS = (
    Shard(id="a-1", state="connected", lag_ms=10, durable_age_seconds=3.0),
    Shard(id="a-2", state="connected", lag_ms=500),
    Shard(id="b-3", state="missing"),
)
RATES = {"a-1": Rates(5, 50, 1), "a-2": Rates(7, 1, 1)}


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as served:
        yield served


def pressed(keys: str, view: ShardsView | None = None) -> ShardsView:
    view = view or ShardsView()
    for key in keys:
        view = view.pressed(key)
    return view


def ids(view: ShardsView) -> list[str]:
    return [shard.id for shard in view.of(SHARDS, RATES)]


# Keys


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        ("", ["a-2", "a-1", "b-3"]),
        ("s", ["a-2", "a-1", "b-3"]),
        ("ss", ["a-1", "a-2", "b-3"]),
        ("sss", ["a-1", "a-2", "b-3"]),
        ("ssss", ["a-1", "a-2", "b-3"]),
        ("sssss", ["a-2", "a-1", "b-3"]),
        ("r", ["b-3", "a-1", "a-2"]),
        ("ssssr", ["b-3", "a-2", "a-1"]),
        ("x", ["a-2", "a-1", "b-3"]),
    ],
)
def test_shards_are_sorted_by_lag_records_rows_age_and_name_the_greatest_first(
    keys: str, order: list[str]
) -> None:
    assert ids(pressed(keys)) == order


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ("/a\r", ["a-2", "a-1"]),
        ("/-1\n", ["a-1"]),
        ("/a*2\r", ["a-2"]),
        ("/sr", []),
        ("/ax\x7f", ["a-2", "a-1"]),
        ("/a\r\x1b", ["a-2", "a-1", "b-3"]),
        ("/a\x1b", ["a-2", "a-1", "b-3"]),
        ("/a\r/b", ["b-3"]),
        ("/a\rr", ["a-1", "a-2"]),
    ],
)
def test_a_part_of_the_name_is_typed_after_a_slash(keys: str, shown: list[str]) -> None:
    assert ids(pressed(keys)) == shown


def test_the_keys_and_what_they_have_done_are_shown() -> None:
    assert str(ShardsView()) == "q quit   s sort: lag   r reverse   / shards: all"
    assert (
        str(pressed("sr/a")) == "q quit   s sort: records/s, the other way round   r reverse   / shards: a_"
    )


# The screen


def screen(server: Endpoint | None, out: str | None = None) -> Screen:
    at = ServerOptions(admin=server.address if server else "127.0.0.1:1", out=out)
    return Screen(at, at.client(), at.meant_pipeline())


def text(screen: Screen, view: ShardsView | None = None, height: int = 50) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(Group(*screen.shown(view or ShardsView(), height)))
    assert isinstance(console.file, StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_rates_are_what_came_between_two_documents(server: Endpoint) -> None:
    shown = screen(server)
    assert shown.look() == 1.0
    assert "each second   0 records" in text(shown)
    more = [
        msgspec.structs.replace(shard, records=shard.records + 300, rows=shard.rows + 50)
        for shard in DOCUMENT.shards
    ]
    totals = msgspec.structs.replace(
        DOCUMENT.totals, records=DOCUMENT.totals.records + 900, bytes=DOCUMENT.totals.bytes + 4096
    )
    server.document = msgspec.structs.replace(
        DOCUMENT, taken_ms=DOCUMENT.taken_ms + 2000, shards=(*more[:2],), totals=totals
    )
    shown.look()
    assert "450 records, 0 rows, 2.0 KiB" in text(shown)
    (line,) = (line for line in text(shown).splitlines() if line.startswith("shardId-0"))
    assert line.split() == ["shardId-0", "connected", "1.5", "s", "-", "150", "25", "0", "B"]
    # The same document once more tells nothing new, but that the server has not made another.
    shown.look()
    assert "450 records" in text(shown)
    server.answers["/livez"] = 503, {"reason": "The event loop has not turned for 9 s."}
    shown.look()
    assert "The event loop has not turned for 9 s." in text(shown)


def test_another_server_at_the_address_begins_afresh(server: Endpoint) -> None:
    shown = screen(server)
    shown.look()
    server.document = msgspec.structs.replace(
        DOCUMENT, taken_ms=DOCUMENT.taken_ms + 1000, server_id="two", totals=Totals()
    )
    shown.look()
    assert "each second   0 records" in text(shown)


def test_what_does_not_fit_is_said(server: Endpoint) -> None:
    server.document = msgspec.structs.replace(
        DOCUMENT, shards=tuple(Shard(id=f"s-{n:03}", state="connected", lag_ms=n) for n in range(200))
    )
    shown = screen(server)
    shown.look()
    seen = text(shown, height=24)
    assert "shards: the first 5 of 200\n" in seen
    assert [line.split()[0] for line in seen.splitlines() if line.startswith("s-")] == [
        f"s-{n}" for n in (199, 198, 197, 196, 195)
    ]
    assert "shards: 10, of 200 in all\n" in text(shown, ShardsView(part="s-01"), height=80)


def test_a_small_terminal_shows_shards_first(server: Endpoint) -> None:
    shards = tuple(
        Shard(id=f"shardId-{n:012}", state="connected", lag_ms=n, durable_age_seconds=61.0) for n in range(40)
    )
    server.document = msgspec.structs.replace(DOCUMENT, shards=shards)
    shown = screen(server)
    shown.look()
    screen_text = StringIO()
    Console(file=screen_text, width=70).print(Group(*shown.shown(ShardsView(), 20, 70)))
    lines = screen_text.getvalue().splitlines()[:20]
    assert sum(line.startswith("shardId-0000000000") for line in lines) >= 5, "each in a line of its own"
    assert any(line.startswith("state") for line in lines)


def test_without_a_server_the_ledger_is_shown_until_one_answers(server: Endpoint, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "out" / LEDGER, pipeline="trips", server_id="one")
    store.open(now_ms=0)
    store.open_shard("shardId-7")
    store.close()
    shown = screen(None, out="out")
    assert shown.look() == 5.0
    assert "No server answers at 127.0.0.1:1" in text(shown)
    assert "shardId-7" in text(shown)
    back = screen(server)
    shown.client = back.client
    assert shown.look() == 1.0
    assert "shardId-7" not in text(shown)
    assert "shardId-0" in text(shown)


def test_with_neither_at_the_start_it_ends_and_later_it_goes_on_asking(server: Endpoint) -> None:
    with pytest.raises(OperatorError, match="Nor can the ledger be read"):
        screen(None, out="nowhere").look()
    shown = screen(server, out="nowhere")
    shown.look()
    server.answers["/status"] = 503, {"error": "It starts."}
    assert shown.look() == 5.0
    assert shown.look() == 5.0
    assert "Nor can the ledger be read" in text(shown)
    assert "q quit" in text(shown)


def test_a_server_that_refuses_ends_it(server: Endpoint) -> None:
    server.answers["/status"] = 401, {"error": "This needs the token."}
    with pytest.raises(Refused, match="This needs the token"):
        screen(server).look()


# The terminal


def test_where_there_is_no_terminal_it_names_the_command_for_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["top"]) == 2
    assert "`mldserver status` shows the same once" in capsys.readouterr().err


def test_in_a_terminal_keys_count_at_once_and_it_is_left_as_it_was(server: Endpoint) -> None:
    """A real terminal: a slash and a part of a name leave one shard; q ends it."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 150))
    before = termios.tcgetattr(theirs)
    child = subprocess.Popen(
        [sys.executable, "-c", PATIENT, "top", "--admin", server.address],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    )
    try:
        shown_until(ours, b"shards: 3")
        os.write(ours, b"/d-0\r")
        shown_until(ours, b"shards: 1, of 3 in all")
        os.write(ours, b"\x1b[Asq")  # an arrow is no Escape, and several keys may come together
        shown_until(ours, b"\x1b[?1049l")
        assert child.wait() == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        child.kill()
        child.wait()
        os.close(ours)
        os.close(theirs)


def shown_until(terminal: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        assert select.select([terminal], [], [], 600)[0], seen
        seen += os.read(terminal, 65536)
    return seen
