"""The matrix as tables, a shape each: absolute numbers, beside them how many times the raw echo's, and amazon_kclpy's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bench.hot.matrix import ECHO, KCLPY, WORKERS
from rich.table import Table

__all__ = ["matrix_tables"]

_NUMBERS: Final = (
    ("CPU ns a record", "cpu_ns", 1, ",.0f"),
    ("CPU s a GiB", "cpu_s_gib", 1, ".2f"),
    ("records/s", "records_s", 1, ",.0f"),
    ("p50 ms", "p50_us", 1000, ",.2f"),
    ("p99 ms", "p99_us", 1000, ",.2f"),
    ("MiB busy", "resident_bytes", 2**20, ",.0f"),
)
"""What a column is called, where it is, its unit, and how it is shown."""
_AGAINST: Final = ("cpu_ns", "resident_bytes")
"""What is compared with amazon_kclpy's too."""


def matrix_tables(measured: dict[str, Any]) -> Iterator[Table]:
    """Show every cell, measured or not."""
    names = {WORKERS: f"{measured['workers']} worker{'s' if measured['workers'] > 1 else ''}"}
    for shape, by_count in measured["cells"].items():
        yield _shape_table(shape, by_count, names)
    before, after = measured["load"]
    table = Table(title="The matrix", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("load average before")
    table.add_column("after")
    table.add_row(f"{measured['seconds']:,.0f}", f"{before:.1f}", f"{after:.1f}")
    yield table


def _shape_table(shape: str, by_count: Mapping[int, dict[str, Any]], names: Mapping[str, str]) -> Table:
    table = Table(title=f"{shape}, in brackets: times the raw echo's", title_justify="left")
    for name in ("connec-\ntions", "rounds x\nbatches", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, *_ in _NUMBERS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("amazon_kclpy:\nCPU", justify="right", no_wrap=True)
    table.add_column("its\nmemory", justify="right", no_wrap=True)
    reasons: list[str] = []
    for count, cell in by_count.items():
        table.add_section()
        rounds = max((each["rounds"] for each in cell["measured"].values() if "rounds" in each), default=0)
        place = (f"{count:,}", f"{rounds:.0f} x {cell['batches']}" if rounds else "")
        for name, each in cell["measured"].items():
            table.add_row(*place, names.get(name, name), *_numbers(name, each, cell["measured"]))
            place = ("", "")
        for reason in dict.fromkeys(cell["left_out"].values()):
            reasons += [reason] if reason not in reasons else []
            peers = [names.get(name, name) for name, why in cell["left_out"].items() if why == reason]
            told = "all" if not cell["measured"] else ", ".join(peers)
            table.add_row(*place, told, f"not measured ({reasons.index(reason) + 1})")
    if reasons:
        listed = (f"({number}) {reason}" for number, reason in enumerate(reasons, 1))
        table.caption, table.caption_justify = "\n".join(listed), "left"
    return table


def _numbers(name: str, each: Mapping[str, float], peers: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for _, key, unit, shown in _NUMBERS:
        if key not in each:
            yield ""
        elif name == ECHO:
            yield format(each[key] / unit, shown)
        else:
            yield f"{format(each[key] / unit, shown)} ({_ratio(each[key] / peers[ECHO][key])})"
    for key in _AGAINST:
        known = KCLPY in peers and name != KCLPY and key in each
        yield f"{_ratio(peers[KCLPY][key] / each[key])} x" if known else ""


def _ratio(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
