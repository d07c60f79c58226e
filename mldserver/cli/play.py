"""``mldserver sim`` and ``demo``: a whole pipeline without AWS or Java, with faults on request; real departures through it."""

from __future__ import annotations

import os
import shlex
import sys
import time
from contextlib import contextmanager
from pathlib import Path  # cyclopts reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from mldserver.cli import working_directory
from mldserver.cli.check import failure_lines, row_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

    import pyarrow as pa
    from rich.console import Console
    from rich.table import Table

    from mldserver.jobs.engine import Engine
    from mldserver.runtime.trial import FailureClass
    from mldserver.testing.simulation import Report, Simulation

_HELP = """
Run a whole pipeline without AWS or Java, faults on request.

The real server runs in this process; a fake MultiLangDaemon, as strict as Amazon's, connects over loopback TCP, one
connection a shard, and plays a file's lines as records.

```
mldserver sim handlers.departures_daily --shards 3 --seed 1
mldserver sim mypackage.orders --input events.jsonl --splits 2 --merges 1
mldserver sim mypackage.orders --input events.jsonl --lost-leases 3 --throttle 0.2 --crashes 2 --engine local
```

The same seed gives the same stream and the same faults. Exit code 0 means: every record was delivered, every shard's
end checkpointed, every window computed, no record became a dead letter (unless `--allow-dead-letters`), and the daemon
had nothing to complain of.
"""

_PROGRESS_SECONDS: Final = 2.0

app = App(name="sim", help=_HELP, help_format="markdown")


@app.default
def sim(
    handler: Annotated[str, Parameter(help="The handler's dotted path.")],
    /,
    *,
    input: Annotated[  # noqa: A002  # the option's name
        Path | None, Parameter(help="One record a line; .gz is unpacked. [default: the bundled departures]")
    ] = None,
    limit: Annotated[
        int | None, Parameter(help="Play this many lines at most.", validator=Number(gte=1))
    ] = None,
    out: Annotated[
        str | None,
        Parameter(help="Local folder for output and ledger; new or empty. [default: a temporary one]"),
    ] = None,
    shards: Annotated[int, Parameter(help="Shards at the beginning.", validator=Number(gte=1))] = 3,
    seed: Annotated[int, Parameter(help="Decides sequence numbers, batch borders, splits and faults.")] = 0,
    batch: Annotated[int, Parameter(help="Most records in one batch.", validator=Number(gte=1))] = 1000,
    rate: Annotated[
        float, Parameter(help="Records a second, in arrival times.", validator=Number(gt=0))
    ] = 1000.0,
    time_field: Annotated[
        str | None,
        Parameter(
            help="Field of JSON records that holds their arrival times: ISO 8601, or ms since the epoch. [default: --rate]"
        ),
    ] = None,
    speed: Annotated[
        float | None,
        Parameter(
            help="Play by arrival times, so many seconds of them in one: 60 plays a minute in a second. [default: all at once]",
            validator=Number(gte=1),
        ),
    ] = None,
    splits: Annotated[int, Parameter(help="Shards that split on the way.", validator=Number(gte=0))] = 0,
    merges: Annotated[
        int, Parameter(help="Pairs of shards that merge on the way.", validator=Number(gte=0))
    ] = 0,
    lost_leases: Annotated[
        int, Parameter(help="Leases that another worker takes and gives back.", validator=Number(gte=0))
    ] = 0,
    throttle: Annotated[
        float, Parameter(help="Probability that a checkpoint is throttled.", validator=Number(gte=0, lt=1))
    ] = 0.0,
    crashes: Annotated[
        int, Parameter(help="How often the daemon is killed and started again.", validator=Number(gte=0))
    ] = 0,
    format: Annotated[  # noqa: A002  # the option's name
        Literal["kcl3", "v2", "v1"],
        Parameter(help="The daemon's generation: KCL 2 and 3, KCL 1.7.1 and later, or before."),
    ] = "kcl3",
    engine: Annotated[
        Literal["spark", "local"],
        Parameter(help="spark, or local: rows are written as they are, at once, without `on_window`."),
    ] = "spark",
    allow_dead_letters: Annotated[
        bool, Parameter(negative=(), help="Records that become dead letters do not change the exit code.")
    ] = False,
) -> int:
    """Play a stream through a server and return the exit code."""
    import uvloop  # noqa: PLC0415  # `--help` must not wait for the server's imports

    from mldserver.handler.inspection import load_spec  # noqa: PLC0415  # see above
    from mldserver.observe.logging import logging_to  # noqa: PLC0415  # see above
    from mldserver.runtime.trial import by_class, first_rows  # noqa: PLC0415  # see above
    from mldserver.testing import playground  # noqa: PLC0415  # see above
    from mldserver.testing.daemon import Form  # noqa: PLC0415  # see above
    from mldserver.testing.simulation import Faults, Simulation, build_stream  # noqa: PLC0415  # see above
    from mldserver.testing.stand_ins import LocalEngine  # noqa: PLC0415  # see above

    lines = playground.read_lines(input, limit=limit)
    folder = playground.fresh_folder(out, "sim")
    settings = playground.play_settings(handler, folder, environ=os.environ, folder=working_directory())
    stream = build_stream(
        lines,
        shards=shards,
        seed=seed,
        splits=splits,
        merges=merges,
        records_per_second=rate,
        start_ms=time.time_ns() // 1_000_000 - round(len(lines) / rate * 1000),
        arrivals=None if time_field is None else playground.arrival_times(lines, time_field),
    )
    tell = _Teller()
    with logging_to(settings):
        simulation = Simulation(
            settings,
            stream,
            form=Form(format),
            seed=seed,
            max_records=batch,
            faults=Faults(lost_leases, throttle, crashes),
            engine=LocalEngine(window_columns=load_spec(handler).window_columns)
            if engine == "local"
            else playground.quick_spark(settings),
            speed=speed,
        )
        report = uvloop.run(simulation.run(tell.progress))
    tell.summary(simulation, report, folder)
    for number, text in enumerate(row_lines(first_rows(playground.window_rows(folder)))):
        tell.line("" if number else "first rows", text)
    failures: tuple[FailureClass, ...] = ()
    if report.status and report.status.dead_letters:
        failures = by_class(playground.dead_letters(settings))
        tell.failures(failures, handler, input)
    for failure in playground.told_failures(settings.log_file) if not report.ok else []:
        tell.line("the server said", failure)
    tell.result(report, 0 if allow_dead_letters else sum(failure.records for failure in failures))
    return report.exit_code or int(bool(failures) and not allow_dead_letters)


class _Teller:
    """Says how it goes and how it went, as plain lines."""

    def __init__(self) -> None:
        self._out = sys.stdout  # what handlers print goes to the log meanwhile
        self._told_at = time.monotonic()

    def line(self, name: str, text: str) -> None:
        self._out.write(f"{name:<16} {text}\n")
        self._out.flush()

    def progress(self, simulation: Simulation) -> None:
        now = time.monotonic()
        status = simulation.status
        if now - self._told_at < _PROGRESS_SECONDS or status is None:
            return
        self._told_at = now
        # At the end the server is not ready either, but nothing waits any more.
        idle = status.windows_waiting and not simulation.server.is_ready
        waiting = f", {status.windows_waiting} waiting for the engine to start" if idle else ""
        self.line(
            "…",
            f"{simulation.mld.records_sent} delivered, {status.rows_durable} rows durable, "
            f"{status.windows_published} windows published{waiting}",
        )

    def summary(self, simulation: Simulation, report: Report, folder: Path) -> None:
        stream = simulation.stream
        again = report.deliveries - stream.records
        self.line("records", f"{stream.records} in {len(stream.shards)} shards")
        self.line("deliveries", f"{report.deliveries}" + (f", {again} of them again" if again > 0 else ""))
        for error, times in sorted(report.refused.items()):
            self.line("refused", f"{times} checkpoints with {error}")
        self.line("daemon", "; ".join(report.exits) or "never ran")
        if status := report.status:
            self.line(
                "rows",
                f"{status.rows_durable} durable, {status.rows_late} late, {status.dead_letters} dead letters",
            )
            self.line(
                "windows",
                f"{status.windows_published} published, {status.windows_waiting} waiting, "
                f"{status.windows_set_aside} set aside",
            )
        for violation in report.violations:
            self.line("violation", violation)
        self.line("output", f"{folder}")

    def failures(self, failures: Sequence[FailureClass], handler: str, file: Path | None) -> None:
        for text in failure_lines(failures):
            self._out.write(f"{text}\n")
        if file is None:
            self.line("next", "`mldserver dead-letters list --ledger sqlite --out` with the output above")
        else:
            command = ["mldserver", "check", handler, "--input", str(file)]
            self.line("next", f"mend the handler, then: {shlex.join(command)}")

    def result(self, report: Report, unwanted: int) -> None:
        text = f"{unwanted} records became dead letters" if unwanted else "ok"
        if report.violations:
            text = "the daemon complained"
        elif not report.finished:
            text = "not every shard's end was checkpointed"
        elif not report.ok:
            text = f"the server ended with {report.server_exit}, or windows are left"
        self.line("result", text)


HANDLER: Final = "handlers.departures_daily"
SHARDS: Final = 3
_PLAIN_SECONDS: Final = 5.0

_DEMO_HELP = """
Play real departures through the server and show the windows.

27,004 flights that left New York in January 2013 go as records of three shards through a fake MultiLangDaemon, over
TCP, into the server; the handler `handlers.departures_daily` makes rows of them, and Spark counts flights and averages
delays, once per closed day. Ends by itself.

```
mldserver demo
mldserver demo --out departures
```
"""

demo_app = App(name="demo", help=_DEMO_HELP, help_format="markdown")


@demo_app.default
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
    if not report.ok:
        for text in (*playground.told_failures(settings.log_file), *report.violations, *report.exits):
            console.print(text, markup=False)
        console.print(f"The demonstration failed; its log is {folder / '_server.log'}")
        return report.exit_code
    rows = read_windows(folder)
    counted, seconds = sum(row["flights"] for row in rows.to_pylist()), time.monotonic() - began
    console.print(results(rows))
    console.print(f"{counted:,} of {len(lines):,} flights in {rows.num_rows} rows; {seconds:.1f} s in all")
    console.print(f"Parquet: {folder}{os.sep}window=…{os.sep}*.parquet", soft_wrap=True)
    console.print(f"Log:     mldserver logs {folder / '_server.log'}", soft_wrap=True)
    return 0 if counted == len(lines) else 1


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
        ends = (
            [f"{name} {minutes:+.1f} min" for minutes, name in (max(delays), min(delays))] if delays else []
        )
        flights = sum(row["flights"] for row in carriers)
        table.add_row(
            f"{start:%Y-%m-%d}",
            f"{flights:,}",
            str(len(carriers)),
            *(ends or ["every flight was cancelled"] * 2),
        )
    return table


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
        began = told_at = time.monotonic()
        told = ""

        def tell(simulation: Simulation) -> None:
            """Write a line when the phase changes, and every few seconds while it does not."""
            nonlocal told, told_at
            now, doing = time.monotonic(), phase(simulation)
            if doing == told and now - told_at < _PLAIN_SECONDS:
                return
            told, told_at = doing, now
            status = simulation.status
            counts = (
                f"{status.rows_durable:,} rows durable, {status.windows_published} windows" if status else ""
            )
            console.print(f"{now - began:5.1f} s  {doing}  {counts}".rstrip(), soft_wrap=True)

        yield tell
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
