"""The hot path's numbers as tables, and what they must reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from bench.hot.runs import BARE
from rich.table import Table

__all__ = ["hot_tables", "targets"]

INLINE: Final = {"1 x 100 B": 1, "500 x 100 B": 4.5, "500 x 1 KiB": 4, "10,000 x 1 KiB": 5.5}
"""How many times less CPU a record than amazon_kclpy's: a prototype's figures, rounded up."""
WORKER: Final = {"1 x 100 B": 0.6, "500 x 100 B": 4, "500 x 1 KiB": 3.2, "10,000 x 1 KiB": 4}
BEFORE: Final = {
    "1 x 100 B": (0.09, 0.05, "176 µs"),
    "500 x 100 B": (2.5, 2.0, "212 µs"),
    "500 x 1 KiB": (2.9, 2.4, "33 %"),
    "10,000 x 1 KiB": (4.4, 3.0, "24 %"),
}
"""Inline, with a worker, and the server's part then: when a batch was two tasks' wake-ups and 283 Python calls."""
SERVER_US: Final = {"1 x 100 B": 25, "500 x 100 B": 80}
"""The server's part of a batch with a worker, on the machine of that prototype, where amazon_kclpy took so long:"""
KCLPY_US: Final = {"1 x 100 B": 16.6, "500 x 100 B": 1133}
SERVER_SHARE: Final = {"500 x 1 KiB": 0.2, "10,000 x 1 KiB": 0.15}


class Target(NamedTuple):
    """What must be reached: ratios of each contender's best round, so that they hold on any machine."""

    what: str
    wanted: str
    measured: str
    reached: bool
    before: str = ""
    """What it was before a batch was one call."""


def targets(measured: dict[str, Any]) -> list[Target]:
    """Return what must be reached, and what is."""
    found = []
    for shape, by_name in measured["shapes"].items():
        kclpy = by_name["amazon_kclpy"]["least_cpu_ns"]
        inline_before, worker_before, server_before = BEFORE[shape]
        for who, name, times, before in (
            ("inline", "inline", INLINE[shape], inline_before),
            ("with a worker", "one worker", WORKER[shape], worker_before),
        ):
            ratio = kclpy / by_name[name]["least_cpu_ns"]
            found.append(
                Target(
                    f"CPU against amazon_kclpy, {shape}, {who}",
                    f">= {times:g} x less",
                    f"{ratio:.2f} x",
                    ratio >= times,
                    f"{before:g} x",
                )
            )
        worker = by_name["one worker"]
        what = f"the server's part with a worker, {shape}"
        if (most := SERVER_SHARE.get(shape)) is not None:
            share = worker["least_parent_ns"] / worker["least_cpu_ns"]
            found.append(Target(what, f"<= {most:.0%}", f"{share:.0%}", share <= most, server_before))
        else:
            records = 1 if shape.startswith("1 ") else 500
            here = kclpy * records / 1000 / KCLPY_US[shape]
            part = worker["least_parent_ns"] * records / 1000 / here
            wanted = SERVER_US[shape]
            found.append(Target(what, f"<= {wanted} µs", f"{part:.0f} µs", part <= wanted, server_before))
    small, latency = measured["shapes"]["1 x 100 B"], measured["latency_us"]
    for what, ratio, most, before in (
        (
            "inline, 1 connection",
            small["inline"]["least_p99_us"] / small["raw echo"]["least_p99_us"],
            5,
            "28 x",
        ),
        (
            "with a worker, 1 connection",
            small["one worker"]["least_p99_us"] / small["raw echo"]["least_p99_us"],
            11,
            "34 x",
        ),
        ("inline, 64 connections", latency["inline"] / latency["raw echo"], 4, "10.5 x"),
    ):
        found.append(
            Target(
                f"p99 of one record against the echo, {what}",
                f"<= {most} x",
                f"{ratio:.1f} x",
                ratio <= most,
                before,
            )
        )
    slower = small["amazon_kclpy"]["least_cpu_ns"] / 1000 / KCLPY_US["1 x 100 B"]
    for name, share in measured["quiet"].items():
        there = share / slower
        what = f"a batch a second on each of {name} connections, of one core of that machine"
        found.append(Target(what, "< 15 %", f"{there:.0%} ({share:.0%} here)", there < 0.15))
    ratio = measured["scaling"]["2"] / measured["scaling"]["1"]
    found.append(Target("two workers against one", ">= 1.6 x", f"{ratio:.2f} x", ratio >= 1.6))
    idle = {int(count): size for count, size in measured["memory"]["one worker, its server"].items()}
    first, last = min(idle), max(idle)
    each = (idle[last] - idle[first]) / (last - first)
    line = measured["long_line"]
    busy = line["busy_ms"]
    return [
        *found,
        Target("an idle shard in the server", "<= 16 KiB", f"{each / 1024:.1f} KiB", each <= 16 << 10),
        Target(
            f"the server at {last:,} shards", "< 300 MiB", f"{idle[last] >> 20} MiB", idle[last] < 300 << 20
        ),
        Target("peak memory of a long line, in lines", "< 1.5", f"{line['peak']:.2f}", line["peak"] < 1.5),
        Target("the event loop's longest work in one go meanwhile", "<= 20 ms", f"{busy:.0f} ms", busy <= 20),
    ]


def hot_tables(measured: dict[str, Any]) -> Iterator[Table]:
    """Show what was measured, and what of it is as it must be."""
    for shape, peers in measured["shapes"].items():
        table = Table(title=f"{shape}: one connection", title_justify="left")
        for name in ("", "CPU ns a record", "of it server", "CPU s a GiB", "records/s", "p50 µs", "p99 µs"):
            table.add_column(name, justify="right" if name else "left")
        for name, each in ((name, each) for name, each in peers.items() if name != BARE):
            table.add_row(
                name,
                f"{each['cpu_ns']:,.0f}",
                f"{each['parent_ns']:,.0f}" if name in {"raw relay", "one worker"} else "",
                f"{each['cpu_s_gib']:.2f}",
                f"{each['records_s']:,.0f}",
                f"{each['p50_us']:,.0f}",
                f"{each['p99_us']:,.0f}",
            )
        bare, echo = peers[BARE]["cpu_ns"], peers["raw echo"]["cpu_ns"]
        table.add_row(BARE, f"{bare:,.0f}")
        table.add_row("floor of inline: echo and decode", f"{bare + echo:,.0f}")
        yield table
    table = Table(title="Resident memory, idle shards", title_justify="left")
    table.add_column("")
    counts = sorted({int(count) for each in measured["memory"].values() for count in each})
    for count in counts:
        table.add_column(f"{count:,}", justify="right")
    for name, each in measured["memory"].items():
        sizes = {int(count): size for count, size in each.items()}
        table.add_row(
            name, *(f"{sizes[count] / 2**20:.1f} MiB" if count in sizes else "" for count in counts)
        )
    yield table
    calls = dict(measured["calls"])
    each_ns = calls.pop("ns a call")
    table = Table(title="Python calls for a batch of one record, inline, by part", title_justify="left")
    table.add_column("")
    table.add_column("calls", justify="right")
    for part, number in calls.items():
        table.add_row(part, f"{number:.0f}")
    table.add_row("in all", f"{sum(calls.values()):.0f}")
    table.add_row("ns of a call that does nothing", f"{each_ns:.0f}")
    yield table
    line = measured["long_line"]
    table = Table(title="A long line: the longest answer to another shard", title_justify="left")
    table.add_column("without")
    table.add_column("meanwhile (its client and its worker want both processors)")
    table.add_row(f"{line['calm_ms']:.1f} ms", f"{line['longest_ms']:.1f} ms")
    yield table
    table = Table(title="What it must reach", title_justify="left")
    for name in ("", "target", "measured", "reached", "before"):
        table.add_column(name, justify="left" if not name else "right")
    for each in targets(measured):
        table.add_row(each.what, each.wanted, each.measured, "yes" if each.reached else "no", each.before)
    yield table
