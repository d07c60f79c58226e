"""Made-up status documents of a server that is healthy, lags, or fails, and the hour before each."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from mldserver.status_document import (
    SECONDS,
    Budget,
    DeadLetters,
    FunctionStatus,
    Histogram,
    KeyedStateSection,
    LetterRow,
    Peer,
    ShardRow,
    Spark,
    Status,
    StoreRow,
    TimersSection,
    Totals,
    WatermarkSection,
    WindowRow,
    Windows,
    WorkerRow,
    status_of,
)

NOW: Final = 1_795_399_403_000
"""23 November 2026, 02:03:23 UTC."""
MINUTE: Final = 60_000
HOUR: Final = 60 * MINUTE


def healthy(at_ms: int = NOW) -> Status:
    """Eight shards at the tip, two workers, a window each minute."""
    return Status(
        taken_ms=at_ms,
        pipeline="departures",
        handler="handlers.departures",
        handler_version="9f2c41d8",
        version="1.0.0",
        host="ingest-3",
        pid=4711,
        server_id="ingest-3-4711",
        started_ms=NOW - 76 * HOUR,
        listening="127.0.0.1:7070",
        ready=True,
        loop_lag_seconds=0.0012,
        totals=_totals(at_ms, 1_240),
        batch_seconds=_batches(at_ms, 0),
        connections={"processing": 8},
        shards=tuple(_shard(n, at_ms, lag_ms=(180, 420, 0, 95, 1_300, 60, 240, 0)[n]) for n in range(8)),
        watermark=WatermarkSection(at_ms=at_ms - 14_000 - at_ms % 5_000, held_by="shardId-000000000004"),
        windows=Windows(
            open=2,
            waiting=1,
            published=4_560,
            rows_out=118_000,
            latest=(
                *(_window(at_ms, ago, revision=2 if ago == 31 else 1) for ago in range(62, 2, -1)),
                _window(at_ms, 2, state="computing", cut_ms=at_ms - 1_400),
            ),
        ),
        workers=(_worker(1), _worker(2)),
        spark=Spark(
            ready=True, master="local[2]", version="4.0.1", ui="http://127.0.0.1:4040", start_seconds=6.4
        ),
        dead_letters=DeadLetters(waiting=0),
        servers=(Peer(id="ingest-3-4711", this=True),),
        state=KeyedStateSection(
            keys=84_210,
            files=11,
            file_bytes=9 << 20,
            stores=tuple(
                StoreRow(
                    id=f"shardId-{n:012}", keys=11_000 - 500 * n, bytes=(6 << 20) - n, files=9, serial=5_470
                )
                for n in range(8)
            ),
        ),
        timers=_timers(at_ms),
        budgets=_budgets(0.21, 0.02, 0.34),
        resident_bytes=212 << 20,
    )


def lagging(at_ms: int = NOW) -> Status:
    """Two shards fall behind, and one of them holds the watermark of two servers; memory is nearly full."""
    behind = {3: 4 * MINUTE + 11_000, 5: 12 * MINUTE + 40_000}
    shards = tuple(
        _shard(n, at_ms, lag_ms=behind.get(n, 300 + 70 * n), state="held" if n == 5 else "connected")
        for n in range(8)
    )
    return msgspec.structs.replace(
        healthy(at_ms),
        shards=shards,
        batch_seconds=_batches(at_ms, 3),
        watermark=WatermarkSection(
            at_ms=NOW - 13 * MINUTE,
            held_by="shardId-000000000005",
            reason="behind",
        ),
        servers=(
            Peer(id="ingest-3-4711", this=True, watermark_ms=NOW - 13 * MINUTE),
            Peer(id="ingest-4-1208", this=False, beat_age_seconds=1.4, watermark_ms=NOW - 20_000),
        ),
        timers=msgspec.structs.replace(
            _timers(at_ms), held=1, held_by="shardId-000000000005", held_seconds=700.0, unknown=2
        ),
        budgets=_budgets(0.94, 0.4, 0.55),
    )


def failing(at_ms: int = NOW) -> Status:
    """Spark is gone, windows fail, a shard is missing, and records have failed for good."""
    base = lagging(at_ms)
    failed = tuple(
        _window(
            at_ms,
            ago,
            state="failed" if ago > 2 else "halted",
            error="ConnectionError: the database answers nothing",
        )
        for ago in (4, 3, 2)
    )
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "/srv/handlers/departures.py", line 41, in on_record\n'
        '    return {"delay": int(row["dep_delay"]), "carrier": row["carrier"]}\n'
        "                     ^^^^^^^^^^^^^^^^^^^^^^\n"
        "ValueError: invalid literal for int() with base 10: '<b>late</b>'\n"
    )
    letters = tuple(
        LetterRow(
            at_ms=NOW - ago * MINUTE,
            shard=f"shardId-00000000000{ago % 8}",
            sequence=f"4965{ago:04}87123409871234098712340987123409871234098712",
            error="ValueError: invalid literal for int() with base 10: '<b>late</b>'"
            if ago % 2
            else "KeyError: 'carrier'",
            traceback=traceback,
            attempts=3,
        )
        for ago in (44, 31, 17, 9, 2)
    )
    return msgspec.structs.replace(
        base,
        ready=False,
        reasons=(
            "window 2026-11-23T02-01-00Z keeps failing and every other waits for it",
            "shard shardId-000000000005 stands still (behind), and windows that are due wait for it",
            "Spark computes no window. The driver ended with exit code 137: windows wait for it, rows go on being stored",
        ),
        shards=(
            *base.shards[:6],
            msgspec.structs.replace(base.shards[6], state="missing", lag_ms=None, worker=None),
            base.shards[7],
        ),
        windows=Windows(
            open=9,
            waiting=3,
            published=4_557,
            halted=("2026-11-23T02-01-00Z",),
            rows_out=117_000,
            latest=(*base.windows.latest[:-4], *failed),
        ),
        spark=Spark(
            ready=False,
            trouble="The driver ended with exit code 137",
            master="local[2]",
            start_seconds=6.4,
        ),
        totals=msgspec.structs.replace(
            base.totals, dead_letters=37, workers_lost=3, spark_lost=4, spark_starts=4
        ),
        workers=(
            _worker(1),
            msgspec.structs.replace(_worker(2), restarts=3, running_seconds=48.2, resident_bytes=0),
        ),
        failures={"ValueError": 29, "KeyError": 8},
        dead_letters=DeadLetters(waiting=37, latest=letters),
        servers=(
            base.servers[0],
            msgspec.structs.replace(base.servers[1], beat_age_seconds=184.0, reason="silent"),
        ),
    )


def hour_before(make: Callable[[int], Status]) -> list[Status]:
    """An hour's documents, one each ten seconds: it was healthy until half an hour ago, and then grew as ``make`` makes it."""
    hour = []
    for at_ms in range(NOW - HOUR - 10_000, NOW + 1, 10_000):
        status = make(at_ms)
        if make is not healthy:
            worse = max(0.0, (at_ms - NOW + 24 * MINUTE) / (24 * MINUTE))
            shards = tuple(
                msgspec.structs.replace(each, lag_ms=round(worse * each.lag_ms + 300 + 150 * _wave(at_ms, 7)))
                if each.lag_ms is not None
                else each
                for each in status.shards
            )
            watermark = WatermarkSection(at_ms=min(NOW - 13 * MINUTE, at_ms - 14_000 - at_ms % 5_000))
            ready = status.ready or worse < 0.7
            status = msgspec.structs.replace(status, ready=ready, shards=shards, watermark=watermark)
        hour.append(status)
    return [*hour, make(NOW)]


def _totals(at_ms: int, rate: int) -> Totals:
    seconds = (at_ms - (NOW - 2 * HOUR)) / 1000
    # A day's swing, and small waves on it.
    records = round(
        rate * seconds
        + 60_000 * math.sin(seconds / 900)
        + 900 * math.sin(seconds / 31)
        + 500 * math.sin(seconds / 13)
    )
    return Totals(
        batches=records // 120,
        records=records,
        rows=round(records * 0.97),
        bytes=records * 410,
        rows_durable=round(records * 0.96),
        handler_seconds=seconds * 0.4,
        checkpoints=round(seconds / 6),
        spark_starts=1,
    )


def _batches(at_ms: int, slower: int) -> Histogram:
    """How long the batches took until an instant; of late ``slower`` buckets longer."""
    seconds = (at_ms - (NOW - 2 * HOUR)) / 1000
    shares = (0, 310, 380, 220, 70, 40, 4, 2, *(len(SECONDS) - 7) * (0,))
    late = max(0.0, seconds - 6_000) if slower else 0.0
    early = seconds - late
    counts = [
        int(share * (early + 60 * math.sin(early / (200 + 70 * place))) / 20 + 4 * share)
        for place, share in enumerate(shares)
    ]
    for place, share in enumerate(shares):
        counts[min(place + slower, len(SECONDS))] += int(share * late / 20)
    return Histogram(counts=tuple(counts), sum_seconds=seconds)


def _timers(at_ms: int) -> TimersSection:
    fired = round((at_ms - NOW + 2 * HOUR) / 1000)
    lateness = (0, 0, 0, 0, 0, 0, fired, *(len(SECONDS) - 6) * (0,))
    return TimersSection(
        set=3 * fired,
        cancelled=2 * fired - 1_000,
        fired=fired,
        skipped=2,
        failed=14,
        lateness=Histogram(counts=lateness, sum_seconds=0.07 * fired),
        pending=1_000,
        next_due_ms=at_ms + 4_000,
    )


def _wave(at_ms: int, period: float) -> float:
    return math.sin(at_ms / 1000 / period) + 0.6 * math.sin(at_ms / 1000 / period / 2.7)


def _shard(n: int, at_ms: int, *, lag_ms: int, state: str = "connected") -> ShardRow:
    return ShardRow(
        id=f"shardId-{n:012}",
        state=state,
        peer=f"127.0.0.1:{40_000 + n}",
        lag_ms=max(0, round(lag_ms + 0.3 * min(lag_ms, 400) * _wave(at_ms, 11 + n))),
        position="49650000871234098712340987123409871234",
        checkpoint="49650000871234098712340987123409871230",
        durable_age_seconds=2.1 + n / 3 if lag_ms < MINUTE else 21.0,
        checkpoint_age_seconds=4.0 + n,
        watermark_ms=at_ms - 14_000,
        records=round((at_ms - NOW + 2 * HOUR) * (0.1 + 0.015 * n)),
        rows=1_000,
        bytes=1 << 20,
        worker=1 + n % 2,
    )


def _window(
    at_ms: int,
    ago: int,
    *,
    state: str = "done",
    revision: int = 1,
    error: str | None = None,
    cut_ms: int | None = None,
) -> WindowRow:
    begin = at_ms - at_ms % MINUTE - ago * MINUTE
    cut = cut_ms or begin + MINUTE + 15_000
    seconds = 3.2 + 0.9 * math.sin(ago * 1.7) + (4 if ago % 17 == 0 else 0)
    id_ = datetime.fromtimestamp(begin / 1000, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    return WindowRow(
        id=id_,
        state=state,
        revision=revision,
        start_ms=begin,
        end_ms=begin + MINUTE,
        cut_ms=cut,
        done_ms=cut + round(seconds * 1000) if state == "done" else None,
        rows_in=71_000 + 130 * ago,
        rows_out=26 if state == "done" else None,
        seconds=seconds if state == "done" else None,
        spark_seconds=seconds * 0.6 if state == "done" else None,
        spark_jobs=(7, 8) if state == "done" else (),
        stage_seconds={12: 0.25} if state == "done" else {},
        late_rows=14 if revision > 1 else 0,
        error=error,
    )


def _worker(number: int) -> WorkerRow:
    return WorkerRow(
        number=number, pid=4711 + number, generation=1, shards=4, resident_bytes=(140 + 9 * number) << 20
    )


def _budgets(buffer: float, lines: float, segments: float) -> dict[str, Budget]:
    shares = {"buffer": (buffer, 1 << 30), "lines": (lines, 256 << 20), "segments": (segments, 10 << 30)}
    return {
        name: Budget(used_bytes=round(share * limit), limit_bytes=limit)
        for name, (share, limit) in shares.items()
    }


def function(name: str, **changes: Any) -> FunctionStatus:
    """A function that is ready."""
    given = {"pipeline": name, "handler": f"handlers.{name}", "ready": True, "totals": Totals(records=10)}
    return FunctionStatus(**given | changes)


def server(*functions: FunctionStatus, **changes: Any) -> Status:
    """The server of these functions."""
    given: dict[str, Any] = {"taken_ms": NOW, "version": "1", "host": "here", "pid": 1, "started_ms": NOW}
    return status_of({each.pipeline: each for each in functions}, **given | changes)
