"""The page in a real browser: what it tells and does, whatever the server tells and whatever becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.browser import Browser, browsing, serving
from support.statuses import NOW, failing, function, healthy, hour_before, lagging, server

from mldserver.admin import routes as module
from mldserver.status_document import (
    DeadLetters,
    LetterRow,
    ShardRow,
    Spark,
    Status,
    WatermarkSection,
    WindowRow,
    Windows,
    WorkerRow,
)

pytestmark = pytest.mark.services

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as one:
        yield one


def simple(**changes: Any) -> Status:
    """A server that has only just begun."""
    about: dict[str, Any] = {
        "taken_ms": NOW,
        "pipeline": "departures",
        "handler": "handlers.departures",
        "version": "1",
        "host": "here",
        "pid": 1,
        "server_id": "one",
        "started_ms": NOW - 2_000,
        "ready": True,
    }
    return Status(**about | changes)


# What it tells


def test_what_is_the_matter_is_told_in_words_the_worst_first(browser: Browser, tmp_path: Path) -> None:
    with serving(hour_before(failing)) as stage:
        browser.open(stage.url)
        browser.until_health("Not ready")
        reasons = browser.text("#reasons").splitlines()
        for part in (
            "Window 2026-11-23T02-01-00Z keeps failing and every other waits for it",
            "Shard shardId-000000000005 stands still (behind)",
            "Spark computes no window.",
            "2 shards are behind, the most shardId-000000000005: by 12 min 40 s.",
            "1 shard has no connection: shardId-000000000006.",
            "2 windows have failed, and are tried again. 2026-11-23T02-00-00Z: ConnectionError",
            "ingest-4-1208 has not been heard of for 3 min 4 s.",
            "1 shard holds due timers, shardId-000000000005 for 11 min 40 s",
            "2 timers without a callback",
            "37 records failed for good and wait for a person.",
        ):
            assert any(part in line for line in reasons), part
        assert reasons[0].startswith("Not ready")
        assert reasons[-1].startswith("Dead letters")
        assert browser.run("return document.title") == "✕ departures: Not ready"


def test_each_part_of_the_server_is_there(browser: Browser, tmp_path: Path) -> None:
    with serving(hour_before(failing)) as stage:
        browser.open(stage.url)
        browser.until_health("Not ready")
        browser.until("document.querySelector('.chart .path')")
        first, second, third = browser.text("#shards-table tbody").split("shardId-")[1:4]
        assert ("missing" in first, "not told" in first) == (True, True)
        assert ("held" in second, "12 min 40 s" in second) == (True, True)
        assert ("connected" in third, "4 min 11 s" in third or "4 min 1" in third) == (True, True)
        widths = browser.run(
            "return [...document.querySelectorAll('#shards .gauge i')].map((bar) => parseFloat(bar.style.width))"
        )
        assert widths[:2] == [0, 100]
        assert 30 < widths[2] < 36
        assert "done 57" in browser.text("#legend")
        assert "open 9" in browser.text("#legend")
        assert browser.run("return document.querySelectorAll('#timeline .bar.failed').length") == 2
        assert browser.run("return document.querySelectorAll('#timeline .late').length") == 1
        assert "ConnectionError: the database answers nothing" in browser.text("#windows-table")
        assert "48 s" in browser.text("#workers-table")
        assert "The driver ended with exit code 137" in browser.text("#spark")
        assert "963 MiB of 1 GiB (94 %)" in browser.text("#budgets")
        assert "ingest-3-4711 (this)" in browser.text("#servers-table")
        assert "37 waiting · 37 since the start · ValueError 29, KeyError 8" in browser.text("#letters")
        assert "000 pending · the next is due at" in browser.text("#timers-count")
        assert "1 shard, shardId-000000000005 for 11 min 40 s" in browser.text("#timers-facts")
        assert "13 min" in browser.text("#watermark .big")
        assert "listens on 127.0.0.1:7070" in browser.text("#about")
        # Times of outage are marked in every chart.
        assert browser.run("return document.querySelectorAll('.outage').length") == 4


def test_a_server_that_has_only_just_begun_has_a_page_too(browser: Browser, tmp_path: Path) -> None:
    with serving([simple(ready=False, reasons=("Spark's session starts",))]) as stage:
        browser.open(stage.url)
        browser.until_health("Not ready")
        browser.until("document.querySelector('#throughput svg text')")
        assert "Spark's session starts" in browser.text("#reasons")
        assert "The first point comes after ten seconds." in browser.text("#throughput")
        assert "No window has been cut yet." in browser.text("#windows")
        assert "No record has failed for good on this server." in browser.text("#letters")
        assert browser.complaints() == []


def test_the_charts_of_a_young_server_are_as_long_as_it_is_known(browser: Browser, tmp_path: Path) -> None:
    with serving([simple(taken_ms=NOW + ago) for ago in range(-120_000, 1, 10_000)]) as stage:
        browser.open(stage.url)
        browser.until("document.querySelector('#throughput .path')")
        below = browser.text("#throughput").splitlines()[-5:]
        assert below == ["01:59", "02:00", "02:01", "02:02", "02:03"]


@pytest.mark.parametrize(
    ("changes", "word", "sentence"),
    [
        ({"paused": True}, "Paused", "mldserver resume"),
        ({"stopping": True}, "Stopping", "ends"),
        ({"stream_ended": True}, "Finished", "The stream has ended"),
    ],
)
def test_what_is_meant_to_be_so_is_no_alarm(
    browser: Browser, tmp_path: Path, changes: dict[str, bool], word: str, sentence: str
) -> None:
    with serving([simple(**changes)]) as stage:
        browser.open(stage.url)
        browser.until_health(word)
        assert sentence in browser.text("#sentence")
        assert "bad" not in browser.run("return document.getElementById('health').className")


def test_pointing_at_a_chart_tells_what_was_then_in_all_of_them(browser: Browser, tmp_path: Path) -> None:
    with serving(hour_before(lagging)) as stage:
        browser.open(stage.url)
        browser.until("document.querySelector('.chart .path')")
        browser.run(
            """const svg = document.querySelector("#lag svg"), { right, top } = svg.getBoundingClientRect();
            svg.dispatchEvent(new PointerEvent("pointermove", { clientX: right - 1, clientY: top + 9 }));"""
        )
        assert browser.run("return document.querySelectorAll('.chart .at').length") == 4
        assert "02:03:" in browser.text("#throughput")
        assert "the shard that is most behind 12 min" in browser.text("#lag")
        assert "behind the clock 12 min 50 s" in browser.text("#watermark")


def test_many_shards_are_shown_when_asked_for_and_found_by_name(browser: Browser, tmp_path: Path) -> None:
    shards = tuple(ShardRow(id=f"shard-{n}", state="connected", lag_ms=10 * n) for n in range(300))
    with serving([simple(shards=shards)]) as stage:
        browser.open(stage.url)
        browser.until_health("Healthy")
        rows = "document.querySelectorAll('#shards-table tbody tr').length"
        assert browser.run(f"return {rows}") == 40
        assert browser.text("#all") == "Show all 300"
        browser.run("document.getElementById('all').click()")
        assert browser.run(f"return {rows}") == 300
        browser.driver.find_element("id", "filter").send_keys("d-29")
        browser.until(f"{rows} === 11")


# Whatever the server tells is text


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    "evil",
    ["<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>", "long" * 100],
    ids=["markup", "long"],
)
def test_what_users_name_and_write_never_becomes_markup_and_breaks_no_layout(
    browser: Browser, tmp_path: Path, evil: str, width: int
) -> None:
    status = simple(
        pipeline=evil,
        handler=evil,
        reasons=(evil,),
        ready=False,
        shards=(ShardRow(id=evil, state=evil, lag_ms=70_000),),
        watermark=WatermarkSection(at_ms=NOW, held_by=evil, reason=evil, stuck=True),
        windows=Windows(halted=(evil,), latest=(WindowRow(id=evil, state="failed", error=evil),)),
        workers=(WorkerRow(number=1),),
        spark=Spark(ready=True, master=evil, ui="javascript:window.hurt = 1"),
        dead_letters=DeadLetters(
            waiting=1, latest=(LetterRow(at_ms=NOW, shard=evil, sequence=evil, error=evil, traceback=evil),)
        ),
        failures={evil: 1},
    )
    with serving([status]) as stage:
        browser.open(stage.url, width=width)
        browser.until_health("Not ready")
        browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        for place in ("#pipeline", "#reasons", "#shards-table", "#windows-table", "#spark", "#letters pre"):
            assert evil in browser.text(place), place
        assert browser.run("return document.documentElement.scrollWidth") == width
        assert browser.run("return document.querySelectorAll('main script, img').length") == 0
        assert browser.run("return window.hurt") is None
        assert browser.run("return document.getElementById('spark-ui').hidden") is True
        assert browser.complaints() == []


def test_sparks_own_page_is_a_link_when_it_is_served(browser: Browser, tmp_path: Path) -> None:
    with serving([healthy()]) as stage:
        browser.open(stage.url)
        browser.until_health("Healthy")
        link = browser.driver.find_element("link text", "Spark's own page")
        assert link.get_attribute("href") == "http://127.0.0.1:4040/"


# As time passes


def test_each_document_is_shown_as_it_comes_and_what_was_opened_stays_open(
    browser: Browser, tmp_path: Path
) -> None:
    with serving([failing()]) as stage:
        browser.open(stage.url)
        browser.until_health("Not ready")
        assert browser.run("return document.querySelectorAll('#letters-list > li').length") == 2, (
            "two classes"
        )
        assert "29 since the start" in browser.text("#letters-list")
        browser.driver.find_element("css selector", "#letters summary").click()
        browser.driver.find_element("css selector", "#letters ul ul summary").click()
        assert "in on_record" in browser.text("#letters pre")
        news = LetterRow(at_ms=NOW + 900, shard="s", sequence="1", error="OSError: new", attempts=3)
        later = failing(NOW + 1_000)
        letters = replace(later.dead_letters, latest=(*later.dead_letters.latest, news))
        stage.show(replace(later, dead_letters=letters, shards=later.shards[:2]))
        browser.until("document.querySelectorAll('#letters ul ul li').length === 6")
        assert browser.text("#letters-list > li:first-child").count("OSError") == 1, "folded"
        opened = "return [...document.querySelectorAll('#letters details')].map((each) => each.open)"
        assert browser.run(opened) == [*[False] * 2, *(True, True), *[False] * 5]
        assert browser.run("return document.querySelectorAll('#shards-table tbody tr').length") == 2


def test_things_of_one_name_are_shown_as_often_as_they_are_told(browser: Browser, tmp_path: Path) -> None:
    window = WindowRow(id="w", state="failed")
    with serving([simple()]) as stage:
        browser.open(stage.url)
        browser.until_health("Healthy")
        for later in range(1, 4):
            stage.show(simple(taken_ms=NOW + later, windows=Windows(latest=(window, window))))
        browser.until_health("Needs a look")
        stage.show(simple(taken_ms=NOW + 9, windows=Windows(latest=(window, window)), pipeline="last"))
        browser.until("document.getElementById('pipeline').textContent === 'last'")
        assert browser.run("return document.querySelectorAll('#windows-table tbody tr').length") == 2


def test_where_no_events_come_it_asks(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_STREAMS", 0)
    with serving([simple()]) as stage:
        browser.open(stage.url)
        browser.until_health("Healthy")
        browser.until("stream.readyState === EventSource.CLOSED")
        stage.show(simple(taken_ms=NOW + 1_000, paused=True))
        browser.pass_seconds(4.5)
        browser.until_health("Paused")


def test_a_server_that_says_nothing_more_is_told_and_what_is_old_looks_so(
    browser: Browser, tmp_path: Path
) -> None:
    with serving([healthy()]) as stage:
        browser.open(stage.url)
        browser.until_health("Healthy")
        browser.pass_seconds(20)
        browser.until_health("No word")
        said = "The server has told nothing for 20 s. Below is what it told last, at 02:03:23 UTC."
        assert browser.text("#sentence") == said
        assert browser.run("return document.body.classList.contains('stale')") is True
        assert browser.text("#live") == "as it was at 02:03:23 UTC"
        stage.show(healthy(NOW + 1_000))
        browser.until_health("Healthy")
        assert browser.run("return document.body.classList.contains('stale')") is False


# Without eyes


def test_a_screen_reader_finds_landmarks_names_and_a_health_that_speaks(
    browser: Browser, tmp_path: Path
) -> None:
    with serving(hour_before(lagging)) as stage:
        browser.open(stage.url)
        browser.until_health("Needs a look")
        browser.until("document.querySelector('.chart .path')")
        found = browser.accessible()
        roles = [role for role, _ in found]
        assert [roles.count(role) for role in ("banner", "main", "contentinfo")] == [1, 1, 1]
        assert {name for role, name in found if role == "region"} >= {
            *("Needs a look", "Throughput", "Latency of batches", "Lag", "Watermark", "Windows", "Shards"),
            *("Workers", "Spark", "Memory and disk", "Servers on the ledger", "Dead letters"),
        }
        pictures = [name.replace("\u00a0", " ") for role, name in found if role == "image"]
        assert any(
            name.startswith("Lag, the shard that is most behind, over the last hour: now 12 min")
            for name in pictures
        )
        assert any(
            name.startswith("The latest 61 windows: 60 done, 1 computing, 2 open") for name in pictures
        )
        assert all(pictures)
        tables = [name for role, name in found if role == "table"]
        assert len(tables) == 5
        assert all(tables)
        assert browser.text("#spoken") == "Needs a look. Lag, Memory and disk, Timers"
        spoken = browser.run("return [spoken.getAttribute('role'), spoken.getAttribute('aria-live')]")
        assert spoken == ["status", "polite"]


def test_a_server_with_several_functions_lists_them_and_shows_the_chosen_one(browser: Browser) -> None:
    def both(at_ms: int) -> Status:
        departures = function("departures", shards=(ShardRow(id="d-1", state="connected", lag_ms=4_000),))
        arrivals = function(
            "arrivals",
            ready=False,
            lifecycle="failed",
            reasons=("the handler cannot be loaded",),
            shards=(ShardRow(id="a-1", state="connected", lag_ms=0),),
        )
        trips = function("trips", ready=False, lifecycle="undeployed", reasons=("it is undeployed",))
        return server(departures, arrivals, trips, taken_ms=at_ms, started_ms=NOW - 90_000)

    with serving([both(NOW - 20_000), both(NOW - 10_000), both(NOW)]) as stage:
        browser.open(stage.url)
        browser.until_health("Not ready")
        assert browser.text("#pipeline") == "arrivals", "the one that is not ready comes first"
        assert "a-1" in browser.text("#shards-table")
        rows = browser.text("#functions-table tbody")
        for part in ("departures", "deployed", "4 s", "failed", "the handler cannot be loaded", "undeployed"):
            assert part in rows.replace("\u00a0", " ")
        assert browser.text("#functions-count") == "1 of 2 that are wanted are ready"
        browser.run("document.querySelector('#functions-table a').click()")
        browser.until_health("Healthy")
        assert browser.text("#pipeline") == "departures"
        assert "d-1" in browser.text("#shards-table")
        browser.until("document.querySelectorAll('.chart .path').length >= 1")
        assert browser.run("return document.title") == "✓ departures: Healthy; not ready: arrivals"
        browser.run("location.hash = '#trips'")
        browser.until_health("Undeployed")
        assert browser.complaints() == []
