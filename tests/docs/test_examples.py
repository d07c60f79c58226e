"""Every example on the pages: Python runs, commands are understood, settings are settings, messages are messages."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.pages import PAGES, ROOT, Example, examples

from mldserver.cli import command_line
from mldserver.config.resolve import resolve_functions
from mldserver.dynamodb_streams import streams_api
from mldserver.handler.inspection import load_spec
from mldserver.protocol.codec import decode, encode, encode_status
from mldserver.protocol.messages import CheckpointRequest, Version
from mldserver.records import Record, Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import BatchOutcome, Delivery, Records
from mldserver.runtime.trial import report
from mldserver.testing import FakeStreams, HandlerRun, VirtualClock, simulation
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
    "number": 1,
    "celsius": 21.5,
    "customer": "c1",
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
        "DeltaTable",  # sinks/test_delta.py
        "pyiceberg",  # sinks/test_iceberg.py
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
    cls = re.search(r"^class (\w+)", example.text, re.MULTILINE)
    path = f"{module}:{cls[1]}" if cls else module
    if "ctx.sql" in example.text:  # a check has no Spark to ask
        assert not report(path, None).findings
        assert len(asyncio.run(rows_with_answers(path, record))) == 1
        return
    found = report(path, None, [json.dumps(record).encode()])
    rows = 0 if "@timer" in example.text else 1  # a check fires no timer
    assert (found.findings, found.trial and (found.trial.rows, found.trial.failures)) == ((), (rows, ()))


async def rows_with_answers(path: str, record: Any) -> list[dict[str, Any]]:
    """Return the rows of a handler whose queries are answered with a row."""
    answer = {"carrier": "UA", "orders": 1}
    async with HandlerRun(path, clock=VirtualClock(), sql=lambda _, **__: [answer]) as run:
        return await run.put(record, key="k")


def rows_of(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *records: tuple[int, dict[str, Any]]
) -> list[list[Any]]:
    """Run an example with state over records of the key a7, each with its minute of arrival; return the rows' own columns."""
    (example,) = (
        one for one in EXAMPLES if one.page == "handlers.md" and "ctx.state" in one.text and word in one.text
    )
    module = f"keyed_{example.line}"
    (tmp_path / f"{module}.py").write_text(example.text)
    monkeypatch.syspath_prepend(tmp_path)
    spec = load_spec(module)
    made = [
        Record(
            shard_id="s",
            sequence_number=str(number),
            data=json.dumps(RECORD | payload).encode(),
            partition_key="a7",
            arrival_ms=60_000 * minute,
        )
        for number, (minute, payload) in enumerate(records, 1)
    ]

    async def run() -> BatchOutcome:
        runtime = InlineRuntime(spec, policy=FailurePolicy(), clock=VirtualClock(), random=lambda: 0.0)
        await runtime.start()
        await runtime.open(Shard("s"))
        try:
            return await runtime.process(Delivery("s", Records(made), 0, None))
        finally:
            await runtime.close()

    outcome = asyncio.run(run())
    assert outcome.effects.dead_letters == ()
    assert outcome.effects.rows is not None
    own = [name for name in outcome.effects.rows.column_names if not name.startswith("_")]
    return [[row[name] for name in own] for row in outcome.effects.rows.to_pylist()]


def test_readings_that_were_seen_before_give_no_row_until_a_day_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = 24 * 60
    given = [(minute, {"number": number}) for minute, number in ((0, 1), (1, 2), (2, 1), (3, 2), (4, 3))]
    rows = rows_of("seen before", tmp_path, monkeypatch, *given, (5 + day, {"number": 1, "celsius": 3.5}))
    assert rows == [["a7", 21.5]] * 3 + [["a7", 3.5]]


def test_totals_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [(number, {"celsius": celsius}) for number, celsius in enumerate((1.0, 2.0, 6.0))]
    assert rows_of("total", tmp_path, monkeypatch, *given) == [["a7", 1, 1.0], ["a7", 2, 1.5], ["a7", 3, 3.0]]


def test_a_click_half_an_hour_after_the_last_begins_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(
        "session TIMESTAMP", tmp_path, monkeypatch, *((minute, {}) for minute in (0, 20, 45, 75, 76))
    )
    minutes = [(begin.hour * 60 + begin.minute, clicks) for _, begin, clicks, _ in rows]
    assert minutes == [(0, 1), (0, 2), (0, 3), (75, 1), (75, 2)]


@pytest.fixture
def timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_handler: Callable[..., HandlerRun]
) -> Callable[..., HandlerRun]:
    """Runs the example with timers that has a word in it, of handlers.md unless another page is named."""

    def run(word: str, page: str = "handlers.md") -> HandlerRun:
        (example,) = (
            one for one in EXAMPLES if one.page == page and "@timer" in one.text and word in one.text
        )
        module = f"timed_{example.line}"
        (tmp_path / f"{module}.py").write_text(example.text)
        monkeypatch.syspath_prepend(tmp_path)
        cls = re.search(r"^class (\w+)", example.text, re.MULTILINE)
        return run_handler(f"{module}:{cls[1]}" if cls else module)

    return run


async def test_an_alarm_comes_half_an_hour_after_a_late_departure(timed: Callable[..., HandlerRun]) -> None:
    flight = {"carrier": "UA", "flight": 1545}
    async with timed("LATE_MINUTES") as run:
        assert await run.put(flight | {"dep_delay": 61}, key="UA-1545") == []
        assert await run.advance("29 minutes") == []
        assert await run.put(flight | {"dep_delay": 90}, key="UA-1545") == [], "it begins again"
        assert await run.advance("29 minutes") == []
        (row,) = await run.advance("1 minute")
        assert (row["flight"], row["delay"], row["times"]) == (1545, 90.0, 2)
        await run.put(flight | {"dep_delay": 61}, key="UA-1545")
        await run.put(flight | {"dep_delay": None}, key="UA-1545")
        assert (await run.advance("1 day"), run.pending, run.dead_letters) == ([], 0, [])


def test_the_example_of_late_departures_is_the_handler_that_is_shipped() -> None:
    (example,) = (one for one in EXAMPLES if "LATE_MINUTES" in one.text)
    shown, shipped = (
        ast.parse(example.text),
        ast.parse((ROOT / "handlers/late_departures.py").read_text("utf-8")),
    )
    shipped.body = shipped.body[1:]
    for each in shipped.body:
        if isinstance(each, ast.FunctionDef):
            each.body = each.body[1:]
    assert ast.unparse(shown) == ast.unparse(shipped)


@pytest.mark.parametrize(("word", "page"), [("last TIMESTAMP", "handlers.md"), ("silent", "README.md")])
async def test_a_key_that_falls_silent_gives_a_row_once(
    word: str, page: str, timed: Callable[..., HandlerRun], virtual_clock: VirtualClock
) -> None:
    async with timed(word, page) as run:
        for _ in range(3):
            assert await run.put(RECORD, key="a7") == []
            last_ms = virtual_clock.now_ms()
            assert await run.advance("9 minutes") == []
        (row,) = await run.advance("1 hour")
        assert next(iter(row.values())) == "a7"
        assert row["at"].timestamp() * 1000 == last_ms + 600_000
        assert await run.advance("1 day") == []


async def test_a_session_gives_one_row_when_it_ends(timed: Callable[..., HandlerRun]) -> None:
    async with timed('clicks BIGINT"\n\ndef') as run:
        for minutes in (20, 29):
            assert await run.put(RECORD, key="7") == []
            assert await run.advance(60 * minutes) == []
        assert await run.put(RECORD, key="8") == []
        rows = await run.advance("2 hours")
        assert [(row["user"], row["clicks"]) for row in rows] == [("7", 2), ("8", 1)]
        await run.put(RECORD, key="7")
        (row,) = await run.advance("2 hours")
        assert row["clicks"] == 1


async def test_an_order_that_is_not_paid_is_reminded_of(timed: Callable[..., HandlerRun]) -> None:
    new, key = ORDER | {"id": {"S": "b"}}, '{"id":{"S":"b"}}'
    insert: dict[str, Any] = {
        "eventName": "INSERT",
        "dynamodb": {
            "ApproximateCreationDateTime": 1_357_035_300,
            "Keys": {"id": {"S": "b"}},
            "NewImage": new,
        },
    }
    images = {"OldImage": new, "NewImage": new | {"paid": {"BOOL": True}}}
    paid = {"eventName": "MODIFY", "dynamodb": {**insert["dynamodb"], **images}}
    async with timed("class Reminders") as run:
        await run.put(insert, key=key)
        (row,) = await run.advance("2 days")
        assert (row["item"], row["customer"]) == (key, "Ada")
        await run.put(insert, key=key)
        await run.put(paid, key=key)
        assert (await run.advance("3 days"), run.dead_letters) == ([], [])


@each("python", "async def test_")
async def test_a_test_passes(
    example: Example, virtual_clock: VirtualClock, run_handler: Callable[..., HandlerRun]
) -> None:
    names: dict[str, Any] = {}
    exec(example.text, names)
    (test,) = (value for name, value in names.items() if name.startswith("test_"))
    there = {"virtual_clock": virtual_clock, "run_handler": run_handler}
    await test(**{name: there[name] for name in inspect.signature(test).parameters})


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
            case ["python3", "-m", "pytest"] | ["python3", "play.py"]:  # docs/test_functions_page.py
                pass
            case _:
                pytest.fail(f"nothing tests {shlex.join(words)}")


# Settings


@each("toml")
def test_settings_can_be_read(example: Example, tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text(example.text)
    table = tomllib.loads(example.text)
    handlers = () if "functions" in table else ("handlers.raw",)
    settings = resolve_functions({}, environ={}, folder=tmp_path, handlers=handlers)[0]
    assert table.keys() - {"functions", "handler"} <= settings.origins.keys()


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
