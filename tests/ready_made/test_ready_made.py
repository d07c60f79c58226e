"""Every ready-made handler passes the check and does what its docstring says, through the inline runtime."""

from __future__ import annotations

import base64
import json
import pkgutil
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers import clicks, dynamodb_changes
from mldserver.dynamodb_streams import Change
from mldserver.handler.inspection import load_spec
from mldserver.protocol.messages import Version
from mldserver.records import Hook, Record, Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import Delivery, MLDLine
from mldserver.testing.stand_ins import VirtualClock

PATHS = [
    "handlers.departures",
    "handlers.departures_daily",
    "handlers.clicks:Clicks",
    "handlers.columns",
    "handlers.late_departures",
    "handlers.visits",
    "handlers.unusual_delays",
    "handlers.raw",
    "handlers.audit",
    "handlers.dynamodb_changes",
    "handlers.shop",
]
AT = datetime(2013, 1, 1, 10, 15, tzinfo=UTC)


def line(*payloads: Any) -> Any:
    records = [
        {
            "data": base64.b64encode(p if isinstance(p, bytes) else json.dumps(p).encode()).decode(),
            "partitionKey": None,
            "sequenceNumber": str(number),
            "approximateArrivalTimestamp": 1_000 * number,
            "subSequenceNumber": 0,
            "action": "record",
        }
        for number, p in enumerate(payloads, 1)
    ]
    return json.dumps({"action": "processRecords", "records": records, "millisBehindLatest": 0}).encode()


@pytest.fixture
async def run() -> Any:
    runtimes = []

    async def run(path: Any, *payloads: Any, hook: Any = None) -> Any:
        runtime = InlineRuntime(
            load_spec(path),
            policy=FailurePolicy(attempts=1),
            clock=VirtualClock(),
            random=lambda: 0.0,
            deadline_seconds=None,
        )
        runtimes.append(runtime)
        await runtime.start()
        await runtime.open(Shard("s"))
        outcome = await runtime.process(Delivery("s", MLDLine(line(*payloads), Version.V2), 0, None))
        if hook:
            await runtime.notify("s", hook)
        return outcome

    yield run
    for runtime in runtimes:
        await runtime.close()


def rows(outcome: Any) -> Any:
    own = (
        []
        if outcome.effects.rows is None
        else [name for name in outcome.effects.rows.column_names if name[0] != "_"]
    )
    return (
        []
        if outcome.effects.rows is None
        else [tuple(row.values()) for row in outcome.effects.rows.select(own).to_pylist()]
    )


@pytest.mark.parametrize("path", PATHS)
def test_it_passes_the_check_without_a_warning_and_tells_what_it_shows(path: Any) -> None:
    spec = load_spec(path)
    assert spec.warnings == ()
    module = pkgutil.resolve_name(path.partition(":")[0])
    assert "Shows " in module.__doc__


def test_every_ready_made_handler_is_listed_and_tested() -> None:
    found = {module.name for module in pkgutil.iter_modules(handlers.__path__, "handlers.")}
    assert found >= {path.partition(":")[0] for path in PATHS}
    for path in PATHS:
        assert path.removeprefix("handlers.") in handlers.__doc__


async def test_departures_are_rows_and_cancelled_flights_have_no_delay(run: Any) -> None:
    flight = {"carrier": "UA", "dep_delay": 2.0, "scheduled": "2013-01-01T10:15:00Z", "flight": 1}
    cancelled = flight | {"dep_delay": None}
    for path in ("handlers.departures", "handlers.departures_daily"):
        assert rows(await run(path, flight, cancelled)) == [("UA", 2.0, AT), ("UA", None, AT)]


async def test_clicks_are_views_with_the_names_that_the_shard_loaded(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "users.json").write_text('{"7": "Ada"}')
    monkeypatch.setattr(clicks, "NAMES", tmp_path / "users.json")
    view = {"page": "/home", "user": 7, "at": "2013-01-01T10:15:00Z", "kind": "view"}
    payloads = (view, view | {"kind": "scroll"}, view | {"user": 8})
    outcome = await run("handlers.clicks:Clicks", *payloads, hook=Hook.SHARD_ENDED)
    assert rows(outcome) == [("/home", "Ada", AT), ("/home", None, AT)]
    assert capsys.readouterr().out == "s: 1 names\ns: 2 views\n"


async def test_clicks_work_without_names(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(clicks, "NAMES", tmp_path / "users.json")
    view = {"page": "/", "user": 7, "at": "2013-01-01T10:15:00Z", "kind": "view"}
    assert rows(await run("handlers.clicks:Clicks", view)) == [("/", None, AT)]


async def test_readings_come_by_columns_and_those_without_a_value_are_dropped(run: Any) -> None:
    outcome = await run(
        "handlers.columns",
        {"sensor": "a", "celsius": 21.5, "more": 1},
        {"sensor": "b", "celsius": None},
        b'{"sensor":\n "c", "celsius": 3}',
    )
    assert [row[:2] for row in rows(outcome)] == [("a", 21.5), ("c", 3.0)]
    assert outcome.effects.rows["_sequence"].to_pylist() == ["1", "3"]
    assert rows(outcome)[0][2] == datetime.fromtimestamp(1, UTC)


async def test_a_damaged_reading_is_one_dead_letter(run: Any) -> None:
    good = {"sensor": "a", "celsius": 1.0}
    for bad in (b"{", b"", b'{"sensor": "x"} {"sensor": "y"}'):
        outcome = await run("handlers.columns", good, bad, good)
        assert [letter.data for letter in outcome.effects.dead_letters] == [bad]
        assert len(rows(outcome)) == 2


async def test_raw_keeps_everything(run: Any) -> None:
    outcome = await run("handlers.raw", b"\x00\xff", b"")
    arrived = [datetime.fromtimestamp(second, UTC) for second in (1, 2)]
    assert rows(outcome) == [(b"\x00\xff", None, arrived[0]), (b"", None, arrived[1])]


async def test_audit_prints_a_line_a_record_and_makes_no_rows(run: Any, capsys: Any) -> None:
    outcome = await run("handlers.audit", b"abc")
    assert outcome.effects.rows is None
    assert capsys.readouterr().out == "s 1 None 3 bytes\n"


async def test_changes_of_a_table_are_rows(run: Any) -> None:
    change = {
        "eventName": "MODIFY",
        "dynamodb": {
            "Keys": {"id": {"S": "a"}},
            "OldImage": {"id": {"S": "a"}, "n": {"N": "1"}},
            "NewImage": {"id": {"S": "a"}, "n": {"N": "2.5"}},
            "ApproximateCreationDateTime": AT.timestamp(),
        },
    }
    removal = {
        "eventName": "REMOVE",
        "dynamodb": {"Keys": {"id": {"S": "a"}}, "ApproximateCreationDateTime": AT.timestamp() * 1000},
    }
    insert = {
        "eventName": "INSERT",
        "dynamodb": {"Keys": {"id": {"S": "é"}}, "ApproximateCreationDateTime": "2013-01-01T10:15:00Z"},
    }
    assert rows(await run("handlers.dynamodb_changes", change, removal, insert)) == [
        ("update", '{"id": "a"}', '{"id": "a", "n": 1}', '{"id": "a", "n": 2.5}', AT),
        ("delete", '{"id": "a"}', None, None, AT),
        ("insert", '{"id": "\\u00e9"}', None, None, AT),
    ]


async def test_a_shop_takes_back_what_an_order_gave_before_it_was_changed_or_cancelled(run: Any) -> None:
    def order(total: str) -> dict[str, Any]:
        return {"id": {"S": "a"}, "product": {"S": "espresso"}, "total": {"N": total}}

    def change(event: str, **images: Any) -> dict[str, Any]:
        seconds = {"ApproximateCreationDateTime": AT.timestamp()}
        return {"eventName": event, "dynamodb": {"Keys": {"id": {"S": "a"}}, **seconds, **images}}

    placed = change("INSERT", NewImage=order("2.40"))
    changed = change("MODIFY", OldImage=order("2.40"), NewImage=order("4.80"))
    cancelled = change("REMOVE", OldImage=order("4.80"))
    assert rows(await run("handlers.shop", placed, changed, cancelled)) == [
        ("espresso", 1, Decimal("2.40"), AT),
        ("espresso", -1, Decimal("-2.40"), AT),
        ("espresso", 1, Decimal("4.80"), AT),
        ("espresso", -1, Decimal("-4.80"), AT),
    ]


@pytest.mark.parametrize(
    ("value", "held"),
    [
        ({"S": "a"}, "a"),
        ({"N": "7"}, 7),
        ({"N": "-0.25"}, -0.25),
        ({"N": "0.1000000000000000000000000000000001"}, "0.1000000000000000000000000000000001"),
        ({"NS": ["1", "2.5"]}, [1, 2.5]),
        ({"B": "AP8="}, "00ff"),
        ({"BS": ["AA=="]}, ["00"]),
        ({"BOOL": False}, False),
        ({"NULL": True}, None),
        ({"SS": ["a"]}, ["a"]),
        ({"L": [{"S": "a"}, {"NULL": True}]}, ["a", None]),
        ({"M": {"x": {"M": {"y": {"N": "1"}}}}}, {"x": {"y": 1}}),
    ],
)
def test_dynamodbs_values_become_json(value: Any, held: Any) -> None:
    item = Change(change_of(value)).new
    assert json.loads(dynamodb_changes.text(item) or "") == {"x": held}


def change_of(value: Any) -> Record:
    images = {"Keys": {}, "NewImage": {"x": value}}
    data = json.dumps({"eventName": "INSERT", "dynamodb": images}).encode()
    return Record(shard_id="s", sequence_number="1", data=data)


async def test_an_unusually_late_departure_is_a_row_with_the_rows_of_its_carrier_that_day(
    run_handler: Any,
) -> None:
    asked: list[dict[str, Any]] = []

    def answer(text: str, **values: Any) -> list[dict[str, Any]]:
        if "VALUES" in text:
            return [{"carrier": "UA", "minutes": 12.0}]
        asked.append(values)
        return [{"rows": 7}]

    flight = {"carrier": "UA", "flight": 1545}
    async with run_handler("handlers.unusual_delays", sql=answer) as handler:
        await handler.put(flight | {"dep_delay": 71.9}, key="UA-1545")
        assert await handler.advance("1 hour") == []
        await handler.put(flight | {"dep_delay": 90.0}, key="UA-1545")
        await handler.put(flight | {"dep_delay": 72.0}, key="UA-1545")
        (row,) = await handler.advance("30 minutes")
        assert (row["delay"], row["usual"], row["earlier"]) == (90.0, 12.0, 7)
        await handler.put(flight | {"dep_delay": 90.0}, key="UA-1545")
        await handler.put(flight | {"dep_delay": 0.0}, key="UA-1545")
        await handler.put({"carrier": "??", "flight": 1, "dep_delay": 500.0}, key="??-1")
        assert (await handler.advance("1 day"), handler.dead_letters) == ([], [])
    assert [(each["carrier"], each["today"].hour) for each in asked] == [("UA", 0)]
