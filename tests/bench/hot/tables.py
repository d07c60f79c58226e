"""The hot path's numbers as tables, and what they must reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.hot.runs import BARE
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["hot_tables", "targets"]

KCLPY_SHARES: Final = {"500 x 100 B": 6, "500 x 1 KiB": 4.5, "10,000 x 1 KiB": 4, "1 x 100 B": 2}
"""How many times less CPU a record than amazon_kclpy's, inline."""


def targets(measured: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Return (what, what it must be, what it is, whether it is): ratios of each contender's best round."""
    found = []
    by_shape = measured["shapes"]
    for name, times in KCLPY_SHARES.items():
        peers = by_shape[name]
        best = min(peers["inline"]["least_cpu_ns"], peers["inline, async"]["least_cpu_ns"])
        ratio = peers["amazon_kclpy"]["least_cpu_ns"] / best
        found.append(
            (
                f"CPU a record against amazon_kclpy, {name}",
                f">= {times:g} x less",
                f"{ratio:.1f} x",
                ratio >= times,
            )
        )
    middle = by_shape["500 x 1 KiB"]
    share = middle["one worker"]["least_parent_ns"] / middle["one worker"]["least_cpu_ns"]
    found.append(("the server's share with a worker, 500 x 1 KiB", "<= 15 %", f"{share:.0%}", share <= 0.15))
    ratio = middle["one worker"]["least_parent_ns"] / middle["raw echo"]["least_cpu_ns"]
    found.append(
        ("framing and hand-over against the echo, 500 x 1 KiB", "<= 2.5 x", f"{ratio:.1f} x", ratio <= 2.5)
    )
    ratio = measured["scaling"]["2"] / measured["scaling"]["1"]
    found.append(("two workers against one", ">= 1.6 x", f"{ratio:.2f} x", ratio >= 1.6))
    ratio = measured["latency_us"]["inline"] / measured["latency_us"]["raw echo"]
    found.append(
        ("p99 of one record at 64 connections against the echo", "<= 3 x", f"{ratio:.1f} x", ratio <= 3)
    )
    idle = {int(count): size for count, size in measured["memory"]["one worker, its server"].items()}
    first, last = min(idle), max(idle)
    each = (idle[last] - idle[first]) / (last - first)
    found.append(("an idle shard in the server", "<= 16 KiB", f"{each / 1024:.1f} KiB", each <= 16 << 10))
    found.append(
        (f"the server at {last:,} shards", "< 300 MiB", f"{idle[last] >> 20} MiB", idle[last] < 300 << 20)
    )
    line = measured["long_line"]
    found.append(("peak memory of a long line, in lines", "< 1.5", f"{line['peak']:.2f}", line["peak"] < 1.5))
    busy = line["busy_ms"]
    found.append(
        ("the event loop's longest work in one go meanwhile", "<= 20 ms", f"{busy:.0f} ms", busy <= 20)
    )
    return found


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
    for name in ("", "target", "measured", "reached"):
        table.add_column(name, justify="left" if not name else "right")
    for what, wanted, is_, reached in targets(measured):
        table.add_row(what, wanted, is_, "yes" if reached else "no")
    yield table
