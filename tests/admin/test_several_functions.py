"""A server with several functions: what its status says of each, and of all together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from admin.served import served
from support.serving import quick
from support.statuses import function, server

from mldserver.admin.gather import EventTally, Gatherer
from mldserver.admin.history import History
from mldserver.admin.http_listener import Access
from mldserver.admin.status_feed import StatusFeed
from mldserver.assembly import Parts
from mldserver.status_document import FunctionStatus, Spark, Status, Totals
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick


def test_a_server_is_ready_if_each_of_its_functions_is() -> None:
    status = server(function("departures"), function("arrivals"))
    assert (status.ready, status.reasons) == (True, ())
    red = function("arrivals", ready=False, reasons=("Spark is not running", "a shard is stuck"))
    status = server(function("departures"), red)
    assert not status.ready
    assert status.reasons == ("arrivals: Spark is not running", "arrivals: a shard is stuck")
    assert status.functions["departures"].ready


@pytest.mark.parametrize("lifecycle", ["undeploying", "undeployed"])
def test_a_function_that_nobody_wants_does_not_make_the_server_unready(lifecycle: str) -> None:
    gone = function("arrivals", ready=False, lifecycle=lifecycle, reasons=("it is undeployed",))
    assert server(function("departures"), gone).ready
    alone = server(gone)
    assert (alone.ready, alone.reasons) == (True, ())
    assert alone.functions["arrivals"].reasons == ("it is undeployed",)


def test_the_only_function_is_also_the_top_of_the_document() -> None:
    status = server(function("departures", listening="here:7070", paused=True))
    only = status.functions["departures"]
    assert [getattr(status, name) for name in FunctionStatus.__struct_fields__] == [
        getattr(only, name) for name in FunctionStatus.__struct_fields__
    ]


def shown(status: Status) -> dict[str, Any]:
    """What the endpoint's clients get."""
    feed = StatusFeed(lambda _: None, str)
    feed.show(status)
    document: dict[str, Any] = msgspec.json.decode(feed.json())
    return document


def test_with_several_functions_the_top_has_only_what_is_of_the_server() -> None:
    spark = Spark(ready=True)
    two = shown(server(function("departures"), function("arrivals"), totals=Totals(records=20), spark=spark))
    assert not {"pipeline", "handler", "shards", "windows", "lifecycle"} & two.keys()
    assert (two["schema"], two["ready"], two["reasons"], two["totals"]["records"]) == (2, True, [], 20)
    assert two["spark"]["ready"]
    assert list(two["functions"]) == ["departures", "arrivals"]
    assert two["functions"]["arrivals"]["totals"]["records"] == 10
    one = shown(server(function("departures")))
    assert {"pipeline", "shards", "windows"} < one.keys()
    assert one["pipeline"] == "departures"


def test_text_that_is_not_unicode_does_not_hide_a_function() -> None:
    broken = function("departures", ready=False, reasons=("\ud800",))
    assert shown(server(broken, function("arrivals")))["functions"]["departures"]["reasons"] == ["\\ud800"]


def test_logged_events_count_for_their_function_and_those_of_the_server_for_all() -> None:
    tally = EventTally()
    for event, pipeline in (("flush.failed", "a"), ("flush.failed", "b"), ("flush.failed", "b")):
        tally({"event": event, "pipeline": pipeline})
    tally({"event": "spark.starting"})
    assert (tally.by_function["a"]["flush.failed"], tally.by_function["b"]["flush.failed"]) == (1, 2)
    gatherer = Gatherer(clock=VirtualClock(), tally=tally)
    a, b = (
        function("a", totals=Totals(records=3)),
        function("b", totals=Totals(records=4, handler_seconds=0.5)),
    )
    totals = gatherer.status({"a": a, "b": b}).totals
    assert (totals.records, totals.handler_seconds, totals.flushes_failed, totals.spark_starts) == (
        7,
        0.5,
        3,
        1,
    )
    alone = gatherer.status({"a": a})
    assert alone.totals == alone.functions["a"].totals
    assert (alone.totals.records, alone.totals.flushes_failed, alone.totals.spark_starts) == (3, 3, 1)


def test_a_document_of_an_older_server_has_one_function() -> None:
    older = msgspec.convert(
        {
            "schema": 1,
            "taken_ms": 1,
            "pipeline": "departures",
            "handler": "handlers.departures",
            "version": "1",
            "host": "here",
            "pid": 1,
            "server_id": "here:1",
            "started_ms": 0,
            "ready": True,
        },
        Status,
    )
    assert list(older.by_name) == ["departures"]
    assert older.by_name["departures"].ready


async def test_each_function_has_its_readiness_and_its_hour(tmp_path: Path) -> None:
    red = function("arrivals", ready=False, reasons=("Spark is not running",))
    both = server(function("departures"), red)
    async with served(tmp_path) as endpoint:
        starting = await endpoint.ask("/readyz/departures")
        assert starting.code == 503
        for document in (both, msgspec.structs.replace(both, taken_ms=both.taken_ms + 10_000)):
            endpoint.feed.show(document)
        assert (await endpoint.ask("/readyz")).json == {
            "ready": False,
            "reasons": ["arrivals: Spark is not running"],
        }
        ready, unready = await endpoint.ask("/readyz/departures"), await endpoint.ask("/readyz/arrivals")
        assert (ready.code, ready.json) == (200, {"ready": True, "reasons": []})
        assert (unready.code, unready.json["reasons"]) == (503, ["Spark is not running"])
        hours = [
            (await endpoint.ask(f"/history/{name}")).json["ready"] for name in ("departures", "arrivals")
        ]
        assert hours == [[True], [False]]
        for path in ("/readyz/trips", "/history", "/history/trips"):
            refused = await endpoint.ask(path)
            assert (refused.code, refused.json["error"].rpartition(": ")[2]) == (404, "departures, arrivals.")
        endpoint.feed.show(server(function("departures")))
        assert (await endpoint.ask("/history")).code == 200, "there is only one"


async def test_the_address_for_metrics_has_the_readiness_of_each_function_without_reasons(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, Access.METRICS) as endpoint:
        endpoint.feed.show(server(function("departures"), function("arrivals", ready=False, reasons=("no",))))
        assert (await endpoint.ask("/readyz/arrivals")).json == {"ready": False}
        assert (await endpoint.ask("/readyz/departures")).code == 200


def test_a_function_that_begins_again_has_no_negative_rates() -> None:
    history = History()
    full = Totals(records=1_000_000, batches=10)
    for second, totals in ((0, full), (10, full), (20, Totals(records=50, batches=1))):
        document = server(function("a", totals=totals), taken_ms=second * 1000)
        history.add(document, document.functions["a"])
    assert msgspec.json.decode(history.json())["records_per_second"] == [0, 5]


def test_a_function_whose_status_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    gatherer = Gatherer(clock=VirtualClock(), tally=EventTally())
    settings = quick(tmp_path, "handlers.departures")
    broken = cast("Parts", SimpleNamespace())  # has no source that could be asked
    for _ in range(2):
        one = gatherer.function(settings, broken)
    assert (one.ready, one.reasons[0].split(":")[0]) == (False, "the status cannot be collected")
    assert [event["event"] for event in logged] == ["admin.failed"], "logged once"
    status = gatherer.status({"departures": one, "arrivals": function("arrivals")})
    assert status.functions["arrivals"].ready
