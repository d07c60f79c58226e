"""The page's hour: rates and quantiles between documents, and never more than an hour of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mldserver.admin.history import POINTS, History, quantile
from mldserver.status_document import SECONDS, Histogram, ShardRow, Status, Totals, WatermarkSection

pytestmark = pytest.mark.quick

BEGIN = 1_700_000_000_000


def status(second: float, *, lags: tuple[int | None, ...] = (), **fields: Any) -> Status:
    shards = tuple(ShardRow(id=f"s{n}", state="connected", lag_ms=lag) for n, lag in enumerate(lags))
    given = {"ready": True, "started_ms": BEGIN, "shards": shards} | fields
    return Status(
        taken_ms=BEGIN + round(second * 1000),
        pipeline="departures",
        handler="handlers.departures",
        version="1",
        host="here",
        pid=1,
        server_id="a",
        **given,
    )


def batches(**counts: int) -> Histogram:
    """So many that took at most a bound: ``bucket_3=5`` are five within the fourth bound."""
    per_bucket = [0] * (len(SECONDS) + 1)
    for name, count in counts.items():
        per_bucket[int(name.removeprefix("bucket_"))] = count
    return Histogram(counts=tuple(per_bucket))


def add(history: History, document: Status) -> None:
    """Add a server with one function, whose fields are at the top."""
    history.add(document, document)


def told(history: History) -> dict[str, list[Any]]:
    return msgspec.json.decode(history.json(), type=dict[str, list[Any]])


def test_ten_seconds_of_documents_are_one_point_of_rates() -> None:
    history = History()
    for second in range(20):
        add(
            history,
            status(
                second,
                totals=Totals(
                    records=100 * second, rows=50 * second, bytes=2_000 * second, dead_letters=second
                ),
                watermark=WatermarkSection(at_ms=BEGIN + second),
                resident_bytes=7,
            ),
        )
    points = told(history)
    assert points["at_ms"] == [BEGIN + 10_000]
    assert points["records_per_second"] == [100.0]
    assert points["rows_per_second"] == [50.0]
    assert points["bytes_per_second"] == [2_000.0]
    assert points["dead_letters"] == [10]
    assert points["watermark_ms"] == [BEGIN + 10]
    assert points["resident_bytes"] == [7]
    assert points["median_seconds"] == [None]
    assert points["lag_ms"] == [None]


def test_the_worst_of_the_ten_seconds_is_kept() -> None:
    history = History()
    add(history, status(0))
    add(history, status(3, ready=False, lags=(None, 900), loop_lag_seconds=0.25))
    add(history, status(10, lags=(40, 30), loop_lag_seconds=0.001))
    add(history, status(20, lags=(40, 30), loop_lag_seconds=0.002))
    points = told(history)
    assert points["ready"] == [False, True]
    assert points["lag_ms"] == [900, 40]
    assert points["loop_lag_seconds"] == [0.25, 0.002]


def test_a_document_that_comes_late_makes_a_rate_of_the_time_that_passed() -> None:
    history = History()
    add(history, status(0))
    add(history, status(40, totals=Totals(records=400)))
    assert told(history)["records_per_second"] == [10.0]


def test_an_hour_is_kept_and_no_more() -> None:
    history = History()
    for second in range(0, 4_000, 10):
        add(history, status(second))
    at_ms = told(history)["at_ms"]
    assert len(at_ms) == POINTS
    assert at_ms[-1] - at_ms[0] == 3_590_000
    assert at_ms[-1] == BEGIN + 3_990_000


@pytest.mark.parametrize(
    "other", [status(12, started_ms=BEGIN + 11_000), status(3)], ids=["restarted", "clock-set-back"]
)
def test_counts_of_another_server_and_a_clock_set_back_begin_the_hour_anew(other: Status) -> None:
    history = History()
    add(history, status(0, totals=Totals(records=1_000_000)))
    add(history, status(10, totals=Totals(records=1_000_000)))
    add(history, other)
    assert told(history)["at_ms"] == []
    add(history, msgspec.structs.replace(other, taken_ms=other.taken_ms + 10_000, totals=Totals(records=50)))
    assert told(history)["records_per_second"] == [5.0]


def test_batches_between_two_documents_have_a_median_and_a_99th_percentile() -> None:
    history = History()
    add(history, status(0, batch_seconds=batches(bucket_20=500)))
    add(history, status(10, batch_seconds=batches(bucket_3=98, bucket_9=2, bucket_20=500)))
    points = told(history)
    assert points["median_seconds"] == [pytest.approx(0.005 + 0.005 * 50 / 98, abs=1e-6)]
    assert points["p99_seconds"] == [pytest.approx(0.75)]


@pytest.mark.parametrize(
    ("counted", "share", "seconds"),
    [
        (batches(bucket_0=10), 0.5, 0.0005),
        (batches(bucket_0=10), 1.0, 0.001),
        (batches(bucket_0=1, bucket_14=1), 1.0, 60.0),
        (batches(bucket_20=4), 0.5, 3600.0),
    ],
)
def test_a_quantile_lies_within_its_bounds_and_what_is_longer_is_told_as_the_longest(
    counted: Histogram, share: float, seconds: float
) -> None:
    assert quantile(share, Histogram(), counted) == pytest.approx(seconds)


@pytest.mark.parametrize("now", [batches(bucket_3=8), batches(bucket_3=7)])
def test_where_nothing_more_was_counted_there_is_no_quantile(now: Histogram) -> None:
    assert quantile(0.5, batches(bucket_3=8), now) is None
