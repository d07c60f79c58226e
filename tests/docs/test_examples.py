"""Every example on the pages: Python runs, commands are understood, settings are settings, messages are messages."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.pages import PAGES, ROOT, Example, examples

from mldserver.cli import command_line
from mldserver.config.resolve import resolve
from mldserver.dynamodb_streams import streams_api
from mldserver.protocol.codec import decode, encode, encode_status
from mldserver.protocol.messages import CheckpointRequest, Version
from mldserver.runtime.trial import report
from mldserver.testing import FakeStreams, VirtualClock, simulation
from mldserver.testing.playground import read_lines

pytestmark = pytest.mark.quick

EXAMPLES = examples()
RECORD = {
    "carrier": "UA",
    "dep_delay": 2.0,
    "scheduled": "2013-01-01T10:15:00Z",
    "kind": "view",
    "page": "/home",
    "user": 7,
    "at": "2013-01-01T10:15:00Z",
    "sensor": "a7",
}
"""What every handler on the pages makes a row of."""
ORDER = {"id": {"S": "a"}, "customer": {"S": "Ada"}, "total": {"N": "7.25"}}
CHANGE = {
    "eventName": "MODIFY",
    "dynamodb": {
        "ApproximateCreationDateTime": 1_357_035_300,
        "Keys": {"id": {"S": "a"}},
        "OldImage": ORDER,
        "NewImage": ORDER | {"total": {"N": "8"}},
    },
}
"""What every handler of changes on the pages makes a row of."""


def each(language: str, word: str = "") -> Any:
    """Parametrize a test with the examples of a language, those that hold a word."""
    found = [one for one in EXAMPLES if one.language == language and word in one.text]
    return pytest.mark.parametrize("example", found, ids=str)


def test_no_block_of_code_is_left_out() -> None:
    fences = sum(line.startswith("```") for page in PAGES for line in page.read_text("utf-8").splitlines())
    assert len(EXAMPLES) * 2 == fences
    tested = {"sh", "python", "toml", "json", "properties"}
    # Drawings, output, and what tests/protocol (the diagram) and tests/admin (Prometheus' configuration) hold.
    shown = {"", "mermaid", "yaml"}
    assert {one.language for one in EXAMPLES} == tested | shown
    assert [one for one in EXAMPLES if not one.language and one.text.startswith("mldserver ")] == []
    python = [one.text for one in EXAMPLES if one.language == "python"]
    kinds = (
        "def process_record",
        "def on_insert",
        "async def test_",
        "current_files",
        "FakeMLD",
        "async def follow",
    )
    assert [text for text in python if not any(kind in text for kind in kinds)] == []


# Python


@each("python", "def process_record")
def test_a_handler_passes_the_check_and_makes_rows(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes_a_row(example, RECORD, tmp_path, monkeypatch)


@each("python", "def on_insert")
def test_a_handler_of_changes_passes_the_check_and_makes_rows(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes_a_row(example, CHANGE, tmp_path, monkeypatch)


def makes_a_row(example: Example, record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"example_{example.page.partition('.')[0]}_{example.line}"
    (tmp_path / f"{module}.py").write_text(example.text)
    monkeypatch.syspath_prepend(tmp_path)
    path = f"{module}:Clicks" if "class Clicks" in example.text else module
    found = report(path, None, [json.dumps(record).encode()])
    assert (found.findings, found.trial and (found.trial.rows, found.trial.failures)) == ((), (1, ()))


@each("python", "async def test_")
async def test_a_test_passes(example: Example, virtual_clock: VirtualClock) -> None:
    names: dict[str, Any] = {}
    exec(example.text, names)
    (test,) = (value for name, value in names.items() if name.startswith("test_"))
    wanted = inspect.signature(test).parameters
    assert wanted.keys() <= {"virtual_clock"}
    await (test(virtual_clock) if wanted else test())


@each("python", "current_files")
def test_the_files_that_count_are_found(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = tmp_path / "out" / "departures" / "window=2013-01-01T10-00-00Z"
    window.mkdir(parents=True)
    pq.write_table(pa.table({"flights": [1]}), window / "part-0.parquet")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example.text, names)
    (path,) = names["found"].paths
    assert names["found"].filesystem.get_file_info(path).is_file


@each("python", "async def follow")
async def test_a_program_follows_a_stream_and_goes_on_behind_its_token(
    example: Example,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    virtual_clock: VirtualClock,
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example.text, names)
    table = FakeStreams("orders", clock=virtual_clock)
    for number, told in enumerate(("insert {'id': 'a'}", "update {'id': 'a'}")):
        table.put({"id": "a", "n": number})
        following = asyncio.create_task(
            names["follow"]("orders", make_client=table.client, clock=virtual_clock)
        )
        while not (printed := capsys.readouterr().out):
            await virtual_clock.advance(1)
        assert [line.partition("+00:00 ")[2] for line in printed.splitlines()] == [told]
        following.cancel()
        await asyncio.wait({following})
    assert json.loads((tmp_path / "token.json").read_text())["stream"] == table.arn


# Permissions


@each("json", "Statement")
def test_a_policy_allows_what_the_reader_asks_for(example: Example) -> None:
    (statement,) = json.loads(example.text)["Statement"]
    asked = re.findall(r"_call\(\s*\"(\w+)\"", inspect.getsource(streams_api))
    allowed = {f"dynamodb:{action.title().replace('_', '')}" for action in asked}
    assert set(statement["Action"]) == allowed
    assert len(allowed) == 4


# Commands


def commands(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        for command in line.split("&&"):
            if words := shlex.split(command, comments=True):
                yield words


@each("sh")
def test_a_command_is_understood(example: Example) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for words in commands(example.text):
        match words:
            case ["mldserver", *arguments]:
                command_line(arguments).parse_args(arguments, exit_on_error=False, print_error=False)
            case ["python3", "-m", "pip", "install", what]:
                assert what == "." or what.removeprefix(".").strip("[]") in extras
            case ["python3", "-m", "pytest"]:
                pass
            case _:
                pytest.fail(f"nothing tests {shlex.join(words)}")


# Settings


@each("toml")
def test_settings_can_be_read(example: Example, tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text(example.text)
    settings = resolve({"handler": "handlers.raw"}, environ={}, folder=tmp_path)
    assert set(tomllib.loads(example.text)) <= settings.origins.keys()


@each("properties")
def test_properties_are_those_that_are_shipped(example: Example) -> None:
    shipped = (ROOT / "deploy" / "mld.properties").read_text("utf-8").splitlines()
    assert [line for line in example.text.splitlines() if line not in shipped] == []


# Messages


@each("json", "initialize")
def test_messages_are_read_and_written_as_they_stand(example: Example) -> None:
    if "responseFor" not in example.text:
        for line in example.text.splitlines():
            assert decode(line.encode())
        return
    written = [encode_status("initialize"), encode(CheckpointRequest("7", 0, Version.V2))]
    assert [json.loads(line) for line in written] == [json.loads(line) for line in example.text.splitlines()]


# Output


def test_the_demos_output_is_what_the_demo_says_of_these_flights() -> None:
    (shown,) = (
        one.text for one in EXAMPLES if one.page == "README.md" and "every window is published" in one.text
    )
    source = inspect.getsource(simulation)
    doing = re.findall(r"^ +[\d.]+ s  (.+?)(?:  [\d,]+ rows durable, \d+ windows)?$", shown, re.MULTILINE)
    assert len(doing) == 5
    assert [each for each in doing if each not in source] == []
    delays: dict[tuple[str, str], list[float]] = {}
    flights: Counter[str] = Counter()
    for line in read_lines(None):
        flight = json.loads(line)
        day = flight["scheduled"][:10]
        flights[day] += 1
        late = delays.setdefault((day, flight["carrier"]), [])
        if flight["dep_delay"] is not None:
            late.append(flight["dep_delay"])
    rows = re.findall(r"^(\S+) +(\d+) +(\d+) +(\S+ \S+) min +(\S+ \S+) min$", shown, re.MULTILINE)
    assert rows
    for day, count, carriers, most, least in rows:
        means = {carrier: late for (when, carrier), late in delays.items() if when == day}
        mean = {carrier: sum(late) / len(late) for carrier, late in means.items() if late}
        assert (int(count), int(carriers)) == (flights[day], len(means))
        for told, pick in ((most, max), (least, min)):
            carrier = pick(mean, key=mean.__getitem__)
            assert told == f"{carrier} {mean[carrier]:+.1f}"
    assert f"{sum(flights.values()):,} of {sum(flights.values()):,} flights in {len(delays)} rows" in shown
