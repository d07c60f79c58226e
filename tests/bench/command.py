"""The benchmarks' command: arguments in, tables out."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import platform
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import structlog
from bench import (
    admin_load,
    checkpoints,
    functions,
    isolation,
    open_windows,
    per_row,
    poison,
    queries,
    retained,
    sessions,
    small_windows,
    state,
    streams,
    timers,
    windows,
)
from bench.hot import measure as hot
from bench.hot.lines import SHAPES
from bench.hot.matrix import CONNECTIONS, Chosen
from bench.hot.matrix_tables import matrix_tables
from bench.hot.runs import Effort
from bench.hot.tables import hot_tables
from bench.memory import available_bytes
from rich.console import Console
from rich.table import Table
from support.s3 import bucket, s3a_conf

from mldserver.base.uris import hadoop_settings
from mldserver.jobs.engine import Engine
from mldserver.spark.client import SparkEngine, make_engine
from mldserver.testing import LocalEngine
from mldserver.windows import Window

__all__ = ["main"]

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
PARTS = (
    "windows",
    "segments",
    "small_windows",
    "open_windows",
    "per_row",
    "checkpoints",
    "retained",
    "poison",
    "streams",
    "state",
    "timers",
    "sessions",
    "functions",
    "isolation",
    "queries",
    "admin_load",
    "hot",
)
MATRIX = "matrix"
"""A part of ``hot`` that can be asked for alone."""
FEW = (1, 4)
WIDTH = 200
"""Columns of tables that go into a file: enough for the widest."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, print it, and return the exit code."""
    given = _parser().parse_args(arguments)
    before = structlog.get_config()
    # A server's log is written to a file or a pipe; a terminal full of it would be measured instead.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        return _run(given)
    finally:
        structlog.configure(**before)


def _run(given: argparse.Namespace) -> int:
    console, hush = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH
    document: dict[str, Any] = {"machine": _machine()}
    parts = given.only or PARTS
    with tempfile.TemporaryDirectory(prefix="mldserver-bench-", dir=given.folder) as name:
        folder = Path(name)
        if "windows" in parts:
            document["windows"] = _windows(given, folder / "windows", hush.print)
            console.print(windows_table(document["windows"], given.engine))
        if "segments" in parts:
            document["segments"] = _segments(given, folder / "segments", hush.print)
            console.print(segments_table(document["segments"], given.segment_rows, given.engine))
        if "small_windows" in parts:
            document["small_windows"] = _small_windows(given, folder / "small_windows", hush.print)
            console.print(small_windows_table(document["small_windows"], given.engine))
        if "open_windows" in parts and given.engine == "spark":
            document["open_windows"] = open_windows.measure(
                given.open_rows, given.rounds, folder / "open_windows"
            )
            console.print(open_windows_table(document["open_windows"], given.open_rows))
        if "per_row" in parts:
            document["per_row"] = per_row.measure(given.per_row, given.rounds, folder / "per_row")
            console.print(per_row_table(document["per_row"], given.per_row))
        if "checkpoints" in parts:
            document["checkpoints"] = checkpoints.measure(given.seconds, folder / "checkpoints")
            console.print(checkpoints_table(document["checkpoints"], given.seconds))
        if "retained" in parts:
            document["retained"] = retained.measure(given.retained, folder / "retained")
            console.print(retained_table(document["retained"]))
        if "poison" in parts:
            document["poison"] = poison.measure(given.poison, given.rounds, folder / "poison")
            console.print(poison_table(document["poison"]))
        if "streams" in parts:
            document["streams"] = streams.measure(given.records, given.rounds)
            console.print(merge_table(document["streams"]["merge"], given.records))
            console.print(read_table(document["streams"]["read"]))
        if "state" in parts:
            document["state"] = state.measure(given.state_records, given.rounds, folder / "state")
            console.print(state_table(document["state"], given.state_records))
        if "sessions" in parts:
            document["sessions"] = sessions.measure(given.clicks, given.rounds, folder / "sessions")
            console.print(sessions_table(document["sessions"], given.clicks))
        if "timers" in parts:
            document["timers"] = timers.measure(given.timers, given.idle_timers, folder / "timers")
            console.print(timers_table(document["timers"], given.timers))
        if "functions" in parts:
            spark = given.engine == "spark"
            document["functions"] = functions.measure(given.load_seconds, folder / "functions", spark=spark)
            console.print(functions_table(document["functions"], given.load_seconds, given.engine))
        if "isolation" in parts:
            spark = given.engine == "spark"
            document["isolation"] = isolation.measure(
                given.phase_seconds, given.rounds, folder / "isolation", spark=spark
            )
            console.print(isolation_table(document["isolation"], given.phase_seconds))
        if "queries" in parts and given.engine == "spark":
            document["queries"] = queries.measure(given.rounds, given.query_rows, folder / "queries")
            console.print(queries_table(document["queries"], given.query_rows))
        if "admin_load" in parts:
            document["admin_load"] = admin_load.measure(given.rounds, given.share, given.requests)
            console.print(admin_table(document["admin_load"], given.requests))
        if "hot" in parts:
            document["hot"] = hot.everything(Effort(given.rounds, given.share), _cells(given), hush.print)
            for table in (*hot_tables(document["hot"]), *matrix_tables(document["hot"]["matrix"])):
                console.print(table)
        elif MATRIX in parts:
            document["hot"] = hot.only_matrix(Effort(given.rounds, given.share), _cells(given), hush.print)
            for table in matrix_tables(document["hot"]["matrix"]):
                console.print(table)
    if given.json is not None:
        given.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests/bench/run.py", description="Benchmarks: tables, and numbers as JSON."
    )
    parser.add_argument(
        "--only", action="append", choices=(*PARTS, MATRIX), help="this part; may be repeated"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 100_000, 1_000_000], help="of windows")
    parser.add_argument(
        "--warm-up", type=int, default=40, help="of these, jobs of each kind before the first round"
    )
    parser.add_argument("--pace", type=int, default=100_000, help="of these, rows a second; 0: unbounded")
    parser.add_argument(
        "--segments", type=int, nargs="+", default=[1, 100, 1_000, 4_000], help="of one window"
    )
    parser.add_argument("--segment-rows", type=int, default=1_000_000, help="of that window")
    parser.add_argument("--small-windows", type=int, default=120, help="windows that are ready together")
    parser.add_argument("--per-row", type=int, default=200_000, help="rows of one flush")
    parser.add_argument("--seconds", type=int, default=3600, help="of the virtual stream of checkpoints")
    parser.add_argument("--retained", type=int, default=86_400, help="windows that are retained")
    parser.add_argument("--poison", type=int, default=20_000, help="records of which each fails")
    parser.add_argument("--records", type=int, default=1_000_000, help="of DynamoDB Streams that are merged")
    parser.add_argument("--state-records", type=int, default=1_000_000, help="of keyed state")
    parser.add_argument("--open-rows", type=int, default=10_000_000, help="of an hour, sliding and early")
    parser.add_argument("--clicks", type=int, default=500_000, help="of which sessions are made")
    parser.add_argument("--timers", type=int, default=1_000_000, help="that are due within one second")
    parser.add_argument("--idle-timers", type=int, default=200, help="single ones, by poll interval")
    parser.add_argument("--load-seconds", type=float, default=60.0, help="of five functions")
    parser.add_argument(
        "--query-rows", type=int, default=1_000_000, help="of queries, windows beside them, and a lookup"
    )
    parser.add_argument("--phase-seconds", type=float, default=15.0, help="of isolation")
    parser.add_argument("--requests", type=int, default=2_000, help="to the admin endpoint")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the hot path's batches; less than 1: a quick look"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=[shape.key for shape in SHAPES],
        default=[shape.key for shape in SHAPES],
        help="of the matrix's batches, as records x bytes",
    )
    parser.add_argument(
        "--connections",
        type=int,
        nargs="+",
        help=f"of the matrix; default: {', '.join(map(str, CONNECTIONS))}, or {', '.join(map(str, FEW))} of a quick look",
    )
    parser.add_argument(
        "--memory", type=int, help="MiB that a cell of the matrix may use; default: half of what is available"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; the matrix has 3 at most")
    parser.add_argument("--engine", choices=("spark", "local"), default="spark", help="what computes windows")
    parser.add_argument("--folder", type=Path, help="where files go; default: the temporary directory")
    parser.add_argument("--json", type=Path, help="write all numbers to this file too")
    return parser


def _cells(given: argparse.Namespace) -> Chosen:
    return Chosen(
        shapes=[shape for shape in SHAPES if shape.key in given.shapes],
        connections=given.connections or (CONNECTIONS if given.share >= 1 else FEW),
        memory=available_bytes() // 2 if given.memory is None else given.memory << 20,
    )


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "python": platform.python_version(), "pyarrow": pa.__version__}


def _windows(
    given: argparse.Namespace, folder: Path, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    async def measure(engine: Engine) -> list[windows.Measured]:
        return await windows.measure(
            engine,
            given.rows,
            rounds=given.rounds,
            warm_up=given.warm_up,
            pace=given.pace,
            folder=folder,
            progress=progress,
        )

    measured = asyncio.run(_with_engine(given, measure))
    return [dataclasses.asdict(each) | {"rows_per_second": each.rows_per_second} for each in measured]


def _segments(given: argparse.Namespace, folder: Path, progress: Callable[[str], None]) -> dict[int, float]:
    async def measure(engine: Engine) -> dict[int, float]:
        return await windows.measure_segments(
            engine,
            given.segments,
            rows=given.segment_rows,
            rounds=given.rounds,
            folder=folder,
            progress=progress,
        )

    return asyncio.run(_with_engine(given, measure))


def _small_windows(
    given: argparse.Namespace, folder: Path, progress: Callable[[str], None]
) -> dict[str, float]:
    with bucket("bench") as query:
        s3 = f"s3://key:secret@bench?{query}"

        async def measure(engine: Engine) -> dict[str, float]:
            return await small_windows.measure(
                engine, given.small_windows, s3=s3, rounds=given.rounds, folder=folder, progress=progress
            )

        return asyncio.run(_with_engine(given, measure, s3))


async def _with_engine(
    given: argparse.Namespace, measure: Callable[[Engine], Awaitable[T]], s3: str = ""
) -> T:
    engine: Engine = LocalEngine(count, group_limit=16) if given.engine == "local" else _spark(s3)
    async with asyncio.TaskGroup() as group:
        living = group.create_task(engine.run())
        try:
            await engine.ready()
            return await measure(engine)
        finally:
            await engine.close()
            await living


def _spark(s3: str) -> SparkEngine:
    from handlers import departures

    conf = s3a_conf() if s3 else {}
    return make_engine(
        "bench.bare_job",
        departures.schema,
        conf=conf,
        storage=hadoop_settings(s3, conf),
        python_path=(str(ROOT), str(ROOT / "tests")),
        archive_after=None,
        group_limit=16,
    )


def count(rows: pa.Table, window: Window) -> pa.Table:
    """Do what ``handlers.departures`` does, without Spark."""
    counted = rows.group_by("carrier").aggregate([([], "count_all"), ("delay", "mean")])
    return counted.rename_columns({"count_all": "flights", "delay_mean": "mean_delay"})


def windows_table(measured: list[dict[str, Any]], engine: str) -> Table:
    """Show seconds from the last record to the published window."""

    def times(ratio: float, error: float | None) -> str:
        return f"{ratio:.2f}" + ("" if error is None else f" ± {error:.2f}")

    table = Table(title=f"From the last record to the published window ({engine})", title_justify="left")
    for name in ("rows", "seconds", "until cut", "job", "rows/s", "bare job", "ratio", "ready file", "ratio"):
        table.add_column(name, justify="right")
    for each in measured:
        table.add_row(
            f"{each['rows']:,}",
            f"{each['seconds']:.3f}",
            f"{each['flush_seconds']:.3f}",
            f"{each['job_seconds']:.3f}",
            f"{each['rows_per_second']:,.0f}",
            f"{each['floor_seconds']:.3f}",
            times(each["ratio"], each["error"]),
            f"{each['ready_seconds']:.3f}",
            times(each["ready_ratio"], each["ready_error"]),
        )
    return table


def segments_table(measured: dict[int, float], rows: int, engine: str) -> Table:
    """Show what the number of segments costs a job."""
    table = Table(title=f"The job of a window of {rows:,} rows ({engine})", title_justify="left")
    for name in ("segments", "seconds", "against the first"):
        table.add_column(name, justify="right")
    floor = next(iter(measured.values()))
    for segments, seconds in measured.items():
        table.add_row(f"{segments:,}", f"{seconds:.3f}", f"{seconds / floor:.2f}")
    return table


def small_windows_table(measured: dict[str, float], engine: str) -> Table:
    """Show windows a second, which for windows of a second is how many times faster than real time they are."""
    title = f"Small windows of {small_windows.ROWS_A_WINDOW} rows ({engine})"
    table = Table(title=title, title_justify="left")
    table.add_column("windows")
    table.add_column("a second", justify="right")
    table.add_column("against", justify="right")
    for place in ("", " on S3"):
        together, singly = measured[f"together{place}"], measured[f"singly{place}"]
        table.add_row(f"in shared jobs{place}", f"{together:.1f}", f"{together / singly:.1f} x singly")
        table.add_row(f"a job for each{place}", f"{singly:.1f}", "")
    table.add_row("floor: all as one, in a ready file", f"{measured['floor']:.1f}", "")
    return table


def per_row_table(measured: dict[str, float], rows: int) -> Table:
    """Show nanoseconds a row."""
    table = Table(title=f"Cost of a row in a flush of {rows:,} rows", title_justify="left")
    for name in ("step", "ns a row", "against"):
        table.add_column(name, justify="left" if name == "step" else "right")
    merge, heap, write = measured["merge"], measured["heap"], measured["write"]
    bare, snappy = measured["bare_write"], measured["bare_write_snappy"]
    table.add_row("merge: times, order, clock, windows, gather", f"{merge:.0f}", f"{merge / heap:.2f} x heap")
    table.add_row("naive heap of single records: order alone", f"{heap:.0f}", "")
    table.add_row("segment: written, synced to disk", f"{write:.0f}", f"{write / bare:.2f} x bare")
    both = merge + write
    table.add_row(
        "both: from accepted rows to a segment (<= 1.5 x)", f"{both:.0f}", f"{both / bare:.2f} x bare"
    )
    table.add_row("pyarrow's bare write, zstd", f"{bare:.0f}", "")
    table.add_row("pyarrow's bare write, its defaults", f"{snappy:.0f}", f"{snappy / bare:.2f} x bare")
    return table


def checkpoints_table(measured: dict[str, float], seconds: int) -> Table:
    """Show how far checkpoints lag."""
    table = Table(
        title=f"Checkpoint lag under windows of an hour, {seconds:,} s of stream", title_justify="left"
    )
    for name in ("batches", "median", "longest", "windows closed"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{measured['batches']:,}",
        f"{measured['median_seconds']:.1f} s",
        f"{measured['longest_seconds']:.1f} s",
        str(measured["windows"]),
    )
    return table


def retained_table(measured: dict[str, dict[str, float]]) -> Table:
    """Show what retained windows cost a start and a cycle."""
    table = Table(title="Retained windows, in SQLite", title_justify="left")
    for name in ("windows", "start", "cycle", "memory"):
        table.add_column(name, justify="right")
    for held, each in measured.items():
        table.add_row(
            f"{int(held):,}",
            f"{each['start_seconds']:.2f} s",
            f"{each['cycle_seconds'] * 1000:.1f} ms",
            f"{_mib(each['grown_bytes'])} MiB",
        )
    return table


def poison_table(measured: dict[str, float]) -> Table:
    """Show what a stream of dead letters costs."""
    table = Table(title="Streams in which every record fails, or none", title_justify="left")
    for name in ("records", "a second", "against"):
        table.add_column(name, justify="left" if name == "records" else "right")
    good, poisoned = measured["good"], measured["poison"]
    table.add_row("each a row", f"{good:,.0f}", "")
    table.add_row("each a dead letter", f"{poisoned:,.0f}", f"{poisoned / good:.2f} x good; at least 0.20")
    return table


def state_table(measured: dict[str, dict[str, dict[str, float]]], records: int) -> Table:
    """Show what a count for each key costs, and what others take for it."""
    table = Table(title=f"Keyed state: {records:,} records, a count for each key", title_justify="left")
    for name in (
        "keys",
        "",
        "records a second",
        "keyed is",
        "must be",
        "CPU, µs a record",
        "loop busy, ms",
        "open, s",
    ):
        table.add_column(name, justify="right" if name else "left")
    for keys, contenders in measured.items():
        keyed = contenders["keyed"]["records_s"]
        for name, each in contenders.items():
            rate, least = each["records_s"], state.LEAST.get(name)
            table.add_row(
                f"{int(keys):,}",
                name,
                f"{rate:,.0f}",
                f"{keyed / rate:.2f} x",
                "" if least is None else f"{least} x",
                f"{each['cpu_us']:.2f}",
                f"{each['busy_ms']:.1f}" if "busy_ms" in each else "",
                f"{each['open_seconds']:.2f}" if "open_seconds" in each else "",
            )
    return table


def sessions_table(measured: dict[str, dict[str, float]], clicks: int) -> Table:
    """Show what visits cost on keyed state, and as a job over the rows of one window."""
    table = Table(title=f"Session windows: {clicks:,} clicks of 10,000 users", title_justify="left")
    for name in ("", "clicks a second", "CPU, µs a click"):
        table.add_column(name, justify="right" if name else "left")
    for name, each in measured.items():
        table.add_row(name, f"{each['clicks_s']:,.0f}", f"{each['cpu_us']:.2f}")
    return table


def open_windows_table(measured: dict[str, float], rows: int) -> Table:
    """Show what windows cost that overlap, and what early results cost others."""
    table = Table(title=f"Open windows: {rows:,} rows an hour", title_justify="left")
    for name in ("", "seconds"):
        table.add_column(name, justify="right" if name else "left")
    for name, seconds in measured.items():
        table.add_row(name, f"{seconds:.3f}")
    return table


def timers_table(measured: dict[str, dict[str, float]], count: int) -> Table:
    """Show how fast timers are set and fired, how late they are, and what they take."""
    table = Table(title=f"Timers: {count:,}, set and then due within one second", title_justify="left")
    for name in ("", *(f"{each} a record" for each in measured), "must be", "Eventing says"):
        table.add_column(name, justify="right" if name else "left")
    late = {f"late_{ms}": f"idle, poll interval {ms} ms: late by (p99), ms" for ms in timers.POLLS_MS}
    names = {"set_s": "set a second", "fired_s": "fired a second", **late, "disk": "bytes on disk, each"}
    for key, name in (names | {"memory": "bytes in memory, each"}).items():
        kind = "late" if key in late else key
        target = None if key in late and key != f"late_{timers.POLLS_MS[0]}" else timers.TARGETS[kind]
        least = "" if target is None else f"{'>=' if key.endswith('_s') else '<='} {target:,}"
        found = (f"{each[key]:,.0f}" for each in measured.values())
        table.add_row(name, *found, least, timers.EVENTING.get(kind, ""))
    return table


def functions_table(measured: dict[str, dict[str, float]], seconds: float, engine: str) -> Table:
    """Show what five functions take in one server and in five."""
    five, one = measured["five"], measured["one"]
    title = f"{functions.COUNT} functions, {five['records'] / seconds:,.0f} records a second for {seconds:g} s ({engine})"
    table = Table(title=title, title_justify="left")
    for name in ("", "five servers", "one server", "ratio", "must be"):
        table.add_column(name, justify="right" if name else "left")
    for key, name, digits, divisor in (
        ("resident", "resident memory of all processes, MiB", 0, 1 << 20),
        ("peak", "the largest sample of it, MiB", 0, 1 << 20),
        ("proportional", "shared pages counted once, MiB", 0, 1 << 20),
        ("processes", "processes", 0, 1),
        ("cpu_s", "CPU, first record to last window, s", 1, 1),
        ("start_cpu_s", "CPU of the start, s", 1, 1),
    ):
        found = (f"{each[key] / divisor:,.{digits}f}" for each in (five, one))
        most = f"<= {functions.MOST[key]:.2f}" if key in functions.MOST else ""
        table.add_row(name, *found, f"{one[key] / five[key]:.2f}", most)
    return table


def isolation_table(measured: dict[str, dict[str, float]], seconds: float) -> Table:
    """Show what functions that misbehave do to a healthy one."""
    title = f"A healthy function beside others, in phases of {seconds:g} s"
    table = Table(title=title, title_justify="left")
    for name in ("beside", "answered, p50 ms", "p99 ms", "ratio", "must be", "latest window, s"):
        table.add_column(name, justify="left" if name == "beside" else "right")
    alone = measured["alone"]
    for phase, each in measured.items():
        ratio, most = each["p99_ms"] / alone["p99_ms"], f"<= {isolation.MOST_LATENCY}"
        told = ("", "") if each is alone else (f"{ratio:.2f}", most)
        table.add_row(
            phase, f"{each['p50_ms']:.2f}", f"{each['p99_ms']:.2f}", *told, f"{each['window_s']:.2f}"
        )
    return table


def queries_table(measured: dict[str, float], rows: int) -> Table:
    """Show what queries of handlers take, and what windows take beside them."""
    table = Table(title=f"Queries over {rows:,} rows, and a lookup of as many", title_justify="left")
    for name in ("", "measured", "must be"):
        table.add_column(name, justify="right" if name else "left")
    ratio = measured["window_beside_seconds"] / measured["window_alone_seconds"]
    for name, figure, most in (
        ("a query that groups, ms", 1000 * measured["small_seconds"], ""),
        ("a query of one row, ms", 1000 * measured["one row_seconds"], ""),
        ("queries that group, a second", measured["small_per_second"], ""),
        ("cached results, a second", measured["cached_per_second"], ""),
        ("the lookup: its query, s", measured["lookup_query_seconds"], ""),
        ("the lookup: its dict, s", measured["lookup_fill_seconds"], ""),
        ("lookups, a second", measured["lookups_per_second"], ""),
        ("a window alone, s", measured["window_alone_seconds"], ""),
        ("a window beside queries, s", measured["window_beside_seconds"], ""),
        ("ratio", ratio, f"<= {queries.MOST_WINDOWS}"),
    ):
        table.add_row(name, f"{figure:,.2f}", most)
    return table


def admin_table(measured: dict[str, float], requests: int) -> Table:
    """Show what clients of the admin endpoint cost."""
    table = Table(
        title="Fifty clients of the admin endpoint, beside saturating daemons", title_justify="left"
    )
    for name in ("", "without", "with", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    for name, key in zip(
        ("records a second", "best round", "the server's CPU, ns a record", "best round"),
        admin_load.KEYS,
        strict=True,
    ):
        alone, beside = measured[f"alone {key}"], measured[f"beside {key}"]
        table.add_row(name, f"{alone:,.0f}", f"{beside:,.0f}", f"{beside / alone:.3f}")
    for name, key in (("/livez, median ms", "livez_seconds"), ("longest", "longest_livez_seconds")):
        table.add_row(name, "", f"{measured[key] * 1000:.1f}", "")
    before, after = measured["bytes before"], measured["bytes after"]
    title = f"MiB before and after {requests:,} requests"
    table.add_row(title, f"{before / 2**20:.1f}", f"{after / 2**20:.1f}", f"{after / before:.3f}")
    return table


def merge_table(measured: dict[int, dict[str, float]], records: int) -> Table:
    """Show what merges the shards of a stream."""
    table = Table(
        title=f"Shards merged by time, {records:,} records, a second of processor", title_justify="left"
    )
    for name in ("shards", "merge", "heap of single records", "ratio; at least 5"):
        table.add_column(name, justify="right")
    for shards, each in measured.items():
        merge, heap = each["merge"], each["heap"]
        table.add_row(str(shards), f"{merge:,.0f}", f"{heap:,.0f}", f"{merge / heap:.1f}")
    return table


def read_table(measured: dict[int, dict[str, float]]) -> Table:
    """Show how fast shards are read."""
    table = Table(
        title="DynamoDB Streams read from the fake, at most 4 pages a second and shard", title_justify="left"
    )
    for name in ("shards", "records/s", "us of processor a record"):
        table.add_column(name, justify="right")
    for shards, each in measured.items():
        table.add_row(str(shards), f"{each['records_s']:,.0f}", f"{each['cpu_us']:.0f}")
    return table


def _mib(size: float) -> str:
    return f"{size / (1 << 20):.1f}"
