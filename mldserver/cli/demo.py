"""``mldserver demo``: real departures through the real server, and the windows that come out."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from mldserver.cli.stdio import working_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime
    from pathlib import Path

    import pyarrow as pa
    from rich.console import Console
    from rich.table import Table

    from mldserver.jobs.engine import Engine
    from mldserver.testing.simulation import Report, Simulation

HANDLER: Final = "handlers.departures_daily"
SHARDS: Final = 3
_PLAIN_SECONDS: Final = 5.0

_HELP = """
Play real departures through the server and show the windows.

27,004 flights that left New York in January 2013 go as records of three shards through a fake MultiLangDaemon, over
TCP, into the server; the handler `handlers.departures_daily` makes rows of them, and Spark counts flights and averages
delays, once per closed day. Ends by itself.

```
mldserver demo
mldserver demo --out departures
```
"""

app = App(name="demo", help=_HELP, help_format="markdown")


@app.default
def demo(
    *,
    out: Annotated[
        str | None, Parameter(help="Local folder for the output; new or empty. [default: a temporary one]")
    ] = None,
) -> int:
    """Run the demonstration and return the exit code."""
    from rich.console import Console  # noqa: PLC0415  # `--help` must not wait for it

    # The stream is named: what handlers print meanwhile goes to the log, by way of another ``sys.stdout``.
    return play(Console(file=sys.stdout, highlight=False), out)


def play(console: Console, out: str | Path | None, *, engine: Engine | None = None) -> int:
    """Play the departures; ``engine`` takes Spark's place (tests). Raises OperatorError."""
    import uvloop  # noqa: PLC0415  # `--help` must not wait for the server's imports

    from mldserver.observe.logging import logging_to  # noqa: PLC0415  # see above
    from mldserver.testing import playground  # noqa: PLC0415  # see above
    from mldserver.testing.simulation import Simulation, build_stream  # noqa: PLC0415  # see above

    began = time.monotonic()
    lines = playground.read_lines(None)
    folder = playground.fresh_folder(out, "demo")
    settings = playground.play_settings(HANDLER, folder, environ=os.environ, folder=working_directory())
    console.print(
        f"{len(lines):,} departures from New York, January 2013 → {SHARDS} shards → fake MultiLangDaemon → TCP → "
        f"{HANDLER} → Spark → Parquet"
    )
    start_ms = time.time_ns() // 1_000_000 - len(lines)
    stream = build_stream(lines, shards=SHARDS, seed=1, start_ms=start_ms)
    with logging_to(settings):
        simulation = Simulation(settings, stream, engine=engine or playground.quick_spark(settings))
        with _progress(console, len(lines)) as watch:
            report = uvloop.run(simulation.run(watch))
    failures = playground.told_failures(settings.log_file) if not report.ok else []
    return _conclude(console, report, folder, failures, flights=len(lines), seconds=time.monotonic() - began)


def _conclude(
    console: Console, report: Report, folder: Path, failures: list[str], *, flights: int, seconds: float
) -> int:
    if not report.ok:
        for text in (*failures, *report.violations, *report.exits):
            console.print(text, markup=False)
        console.print(f"The demonstration failed; its log is {folder / '_server.log'}")
        return report.exit_code
    rows = read_windows(folder)
    counted = sum(row["flights"] for row in rows.to_pylist())
    console.print(results(rows))
    console.print(f"{counted:,} of {flights:,} flights in {rows.num_rows} rows; {seconds:.1f} s in all")
    console.print(f"Parquet: {folder}{os.sep}window=…{os.sep}*.parquet", soft_wrap=True)
    console.print(f"Log:     mldserver logs {folder / '_server.log'}", soft_wrap=True)
    return 0 if counted == flights else 1


def read_windows(folder: Path) -> pa.Table:
    """Return the published windows: what any reader of the folder sees."""
    import pyarrow.dataset as ds  # noqa: PLC0415  # `--help` must not wait for it

    return ds.dataset(folder, format="parquet").to_table()


def results(rows: pa.Table) -> Table:
    """Return the windows as a table for people: one line a window."""
    from rich.table import Table  # noqa: PLC0415  # `--help` must not wait for it

    table = Table("day (UTC)", title="One line a window, read from the committed Parquet")
    for name in ("flights", "carriers"):
        table.add_column(name, justify="right")
    table.add_column("most delayed, on average")
    table.add_column("least delayed")
    windows: dict[datetime, list[dict[str, Any]]] = {}
    for row in rows.to_pylist():
        windows.setdefault(row["window_start"], []).append(row)
    for start, carriers in sorted(windows.items()):
        delays = [(row["mean_delay"], row["carrier"]) for row in carriers if row["mean_delay"] is not None]
        flights = sum(row["flights"] for row in carriers)
        table.add_row(
            f"{start:%Y-%m-%d}", f"{flights:,}", str(len(carriers)), _delay(delays, max), _delay(delays, min)
        )
    return table


def _delay(delays: list[tuple[float, str]], pick: Callable[..., tuple[float, str]]) -> str:
    if not delays:
        return "every flight was cancelled"
    minutes, carrier = pick(delays)
    return f"{carrier} {minutes:+.1f} min"


def phase(simulation: Simulation) -> str:
    """Return what the demonstration is doing, or waiting for, in words."""
    status = simulation.status
    if status is None:
        return "starting the server"
    if not simulation.mld.finished:
        return "delivering records"
    if status.windows_halted:
        return "stopped: a window has failed for good"
    # At the end the server is not ready either, but nothing waits any more.
    if status.windows_waiting and not simulation.server.is_ready:
        return "every record is durable and checkpointed; waiting for Spark to start"
    if not status.stream_ended:
        return "waiting for other shards to show up: the stream may not be over yet"
    return "computing windows" if status.windows_waiting else "every window is published"


@contextmanager
def _progress(console: Console, records: int) -> Iterator[Callable[[Simulation], None]]:
    """Show progress: bars on a terminal, elsewhere a line whenever something changes."""
    if not console.is_terminal:
        yield _PlainProgress(console)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415  # only on terminals

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        durable = progress.add_task("rows durable", total=records)
        windows = progress.add_task("windows", total=None)

        def watch(simulation: Simulation) -> None:
            progress.update(windows, description=phase(simulation))
            if status := simulation.status:
                progress.update(durable, completed=status.rows_durable)
                known = status.windows_published + status.windows_waiting + status.windows_open
                progress.update(windows, completed=status.windows_published, total=known or None)

        yield watch


class _PlainProgress:
    """A line when the phase changes, and every few seconds while it does not."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._told_at = time.monotonic()
        self._told = ""

    def __call__(self, simulation: Simulation) -> None:
        now, doing = time.monotonic(), phase(simulation)
        if doing == self._told and now - self._told_at < _PLAIN_SECONDS:
            return
        self._told, self._told_at = doing, now
        status = simulation.status
        counts = f"{status.rows_durable:,} rows durable, {status.windows_published} windows" if status else ""
        self._console.print(f"{now - self._began:5.1f} s  {doing}  {counts}".rstrip(), soft_wrap=True)
