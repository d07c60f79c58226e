"""``mldserver sim``: a whole pipeline without AWS or Java, faults on request."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path  # cyclopts reads the annotations
from typing import TYPE_CHECKING, Annotated, Final, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from mldserver.cli import working_directory
from mldserver.cli.check import failure_lines, row_lines
from mldserver.windows import counted

if TYPE_CHECKING:
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
mldserver sim mypackage.orders --input events.jsonl --spark-master spark://HOST:7077 --out /shared/trial
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
        Path | None,
        Parameter(help="One record a line; .gz and .xz are unpacked. [default: the bundled departures]"),
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
    spark_master: Annotated[
        str | None,
        Parameter(
            help="Spark that computes the windows. A cluster must see --out. [default: the setting, if that is local; or local[*]]"
        ),
    ] = None,
    allow_dead_letters: Annotated[
        bool, Parameter(negative=(), help="Records that become dead letters do not change the exit code.")
    ] = False,
) -> int:
    """Play a stream through a server and return the exit code."""
    import pyarrow.parquet as pq  # noqa: PLC0415  # `--help` must not wait for the server's imports
    import uvloop  # noqa: PLC0415  # see above

    from mldserver.errors import ConfigError  # noqa: PLC0415  # see above
    from mldserver.handler.inspection import load_spec  # noqa: PLC0415  # see above
    from mldserver.observe.logging import logging_to  # noqa: PLC0415  # see above
    from mldserver.runtime.trial import by_class, first_rows  # noqa: PLC0415  # see above
    from mldserver.spark.session import is_local  # noqa: PLC0415  # see above
    from mldserver.testing import playground  # noqa: PLC0415  # see above
    from mldserver.testing.daemon import Form  # noqa: PLC0415  # see above
    from mldserver.testing.simulation import Faults, Simulation, build_stream  # noqa: PLC0415  # see above
    from mldserver.testing.stand_ins import LocalEngine  # noqa: PLC0415  # see above

    lines = playground.read_lines(input, limit=limit)
    if out is None and spark_master is not None and not is_local(spark_master):
        raise ConfigError(
            "A cluster cannot write its output into a temporary folder of this machine.",
            advice="Name a folder that Spark's executors see too: --out.",
        )
    folder = playground.fresh_folder(out, "sim")
    settings = playground.play_settings(
        handler, folder, environ=os.environ, folder=working_directory(), spark_master=spark_master
    )
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
    # What each published file holds, the earliest window first.
    tables = (pq.ParquetFile(file).read() for file in sorted(folder.glob("window=*/*.parquet")))
    for number, text in enumerate(row_lines(first_rows(tables))):
        tell.line("" if number else "first rows", text)
    failures: tuple[FailureClass, ...] = ()
    if report.status and report.status.dead_letters:
        failures = by_class(uvloop.run(playground.dead_letters(settings)))
        tell.failures(failures, handler, input)
    for failure in playground.told_failures(settings.log_file) if not report.ok else []:
        tell.line("the server said", failure)
    tell.result(report, 0 if allow_dead_letters else sum(failure.records for failure in failures))
    return report.exit_code or int(bool(failures) and not allow_dead_letters)


class _Teller:
    """Says how it goes and how it went, as plain lines."""

    def __init__(self) -> None:
        self._out = sys.stdout  # what handlers print goes to the log meanwhile
        self._began = self._told_at = time.monotonic()

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
        waiting = f", {status.windows_waiting:,} waiting for the engine to start" if idle else ""
        self.line(
            f"{now - self._began:.0f} s",
            f"{simulation.mld.records_sent:,} delivered, {counted(status.rows_durable, 'row')} durable, "
            f"{counted(status.windows_published, 'window')} published{waiting}",
        )

    def summary(self, simulation: Simulation, report: Report, folder: Path) -> None:
        stream = simulation.stream
        again = report.deliveries - stream.records
        self.line("records", f"{stream.records:,} in {counted(len(stream.shards), 'shard')}")
        self.line(
            "deliveries", f"{report.deliveries:,}" + (f", {again:,} of them again" if again > 0 else "")
        )
        for error, times in sorted(report.refused.items()):
            self.line("refused", f"{counted(times, 'checkpoint')} with {error}")
        self.line("daemon", "; ".join(report.exits) or "never ran")
        if status := report.status:
            totals = simulation.server.document().totals
            left_out = f", {totals.discarded:,} discarded" if totals.discarded else ""
            left_out += f", {totals.skipped:,} skipped" if totals.skipped else ""
            self.line(
                "rows",
                f"{status.rows_durable:,} durable, {status.rows_late:,} late, "
                f"{counted(status.dead_letters, 'dead letter')}{left_out}",
            )
            self.line(
                "windows",
                f"{status.windows_published:,} published, {status.windows_waiting:,} waiting, "
                f"{status.windows_set_aside:,} set aside",
            )
        for violation in report.violations:
            self.line("violation", violation)
        self.line("output", f"{folder}")
        self.line("log", f"mldserver logs {shlex.quote(str(folder / '_server.log'))}")

    def failures(self, failures: Sequence[FailureClass], handler: str, file: Path | None) -> None:
        for text in failure_lines(failures):
            self._out.write(f"{text}\n")
        if file is None:
            self.line("next", "`mldserver dead-letters list --ledger sqlite --out` with the output above")
        else:
            command = ["mldserver", "check", handler, "--input", str(file)]
            self.line("next", f"mend the handler, then: {shlex.join(command)}")

    def result(self, report: Report, unwanted: int) -> None:
        letters = "a dead letter" if unwanted == 1 else "dead letters"
        text = f"{counted(unwanted, 'record')} became {letters}" if unwanted else "ok"
        if report.violations:
            text = "the daemon complained"
        elif not report.finished:
            text = "not every shard's end was checkpointed"
        elif not report.ok:
            text = f"the server ended with {report.server_exit}, or windows are left"
        self.line("result", text)
