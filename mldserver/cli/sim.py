"""``mldserver sim``: a whole pipeline without AWS or Java, faults on request."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path  # cyclopts reads the annotations
from typing import TYPE_CHECKING, Annotated, Literal

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
mldserver sim handlers.late_departures --key-field carrier,flight --fire-timers
mldserver sim mypackage.orders --input events.jsonl --lost-leases 3 --throttle 0.2 --crashes 2 --engine local
mldserver sim mypackage.orders --input events.jsonl --spark-master spark://HOST:7077 --out /shared/trial
```

The same seed gives the same stream and the same faults. Exit code 0 means: every record was delivered, every shard's
end checkpointed, every window computed, no record became a dead letter (unless `--allow-dead-letters`), and the daemon
had nothing to complain of.
"""

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
    key_field: Annotated[
        str | None,
        Parameter(
            help="Fields of JSON records that make their partition keys, such as carrier,flight. [default: a key for each record]"
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
    fire_timers: Annotated[
        bool,
        Parameter(
            negative=(),
            help="At the end, fire pending timers in the order of their due times, also those that callbacks set meanwhile: at most "
            "ten times as many as were pending. [default: count them]",
        ),
    ] = False,
    allow_dead_letters: Annotated[
        bool, Parameter(negative=(), help="Records that become dead letters do not change the exit code.")
    ] = False,
) -> int:
    """Play a stream through a server and return the exit code."""
    import pyarrow.parquet as pq  # noqa: PLC0415  # `--help` must not wait for the server's imports
    import uvloop  # noqa: PLC0415  # see above

    from mldserver.cli.render import details, write_text  # noqa: PLC0415  # see above
    from mldserver.errors import ConfigError  # noqa: PLC0415  # see above
    from mldserver.handler.inspection import load_spec  # noqa: PLC0415  # see above
    from mldserver.observe.logging import logging_to  # noqa: PLC0415  # see above
    from mldserver.runtime.trial import by_class, first_rows  # noqa: PLC0415  # see above
    from mldserver.spark.session import is_local  # noqa: PLC0415  # see above
    from mldserver.testing import playground  # noqa: PLC0415  # see above
    from mldserver.testing.daemon import Form  # noqa: PLC0415  # see above
    from mldserver.testing.simulation import Faults, ProgressLines, Simulation, build_stream  # noqa: PLC0415  # see above
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
    spec = load_spec(handler)
    settings = playground.fitted(settings, spec)
    stream = build_stream(
        lines,
        shards=shards,
        seed=seed,
        splits=splits,
        merges=merges,
        records_per_second=rate,
        start_ms=time.time_ns() // 1_000_000 - round(len(lines) / rate * 1000),
        arrivals=None if time_field is None else playground.arrival_times(lines, time_field),
        keys=() if key_field is None else playground.partition_keys(lines, key_field),
        ends=not fire_timers,
    )
    progress = ProgressLines(sys.stdout)  # what handlers print meanwhile goes to the log
    with logging_to(settings):
        simulation = Simulation(
            settings,
            stream,
            form=Form(format),
            seed=seed,
            max_records=batch,
            faults=Faults(lost_leases, throttle, crashes),
            engine=LocalEngine(window_columns=spec.window_columns)
            if engine == "local"
            else playground.quick_spark(settings),
            speed=speed,
            fire_timers=fire_timers,
        )
        report = uvloop.run(simulation.run(progress))
    facts = _run_facts(simulation, report, folder)
    if spec.timers:
        facts["timers"] = _timers_text(simulation, fired=fire_timers)
    if spec.keyed:
        facts["state"] = f"mldserver state show --out {shlex.quote(str(folder))}"
        if key_field is None:
            facts["keys"] = "a different one for each record: --key-field NAME takes them from a field"
    # The rows of each published file, the earliest window first.
    tables = (pq.ParquetFile(file).read() for file in sorted(folder.glob("window=*/*.parquet")))
    facts["first rows"] = "\n".join(row_lines(first_rows(tables)))
    failures: tuple[FailureClass, ...] = ()
    if report.status and report.status.dead_letters:
        failures = by_class(uvloop.run(playground.dead_letters(settings)))
        facts["failed"] = "\n".join(failure_lines(failures))
        facts["next"] = "`mldserver dead-letters list --ledger sqlite --out` with the output above"
        if input is not None:
            command = ["mldserver", "check", handler, "--input", str(input)]
            command += [] if key_field is None else ["--key-field", key_field]
            facts["next"] = f"correct the handler, then: {shlex.join(command)}"
    if not report.ok:
        facts["the server logged"] = "\n".join(playground.logged_failures(settings.log_file))
    failed = sum(failure.records for failure in failures)
    facts["result"] = _result_text(report, 0 if allow_dead_letters else failed)
    write_text(details(facts))
    return report.exit_code or int(bool(failures) and not allow_dead_letters)


def _run_facts(simulation: Simulation, report: Report, folder: Path) -> dict[str, str]:
    """Return a simulation's results as texts by label: what was played, delivered, refused and computed."""
    stream = simulation.stream
    redelivered = report.deliveries - stream.records
    rows = windows = ""
    if status := report.status:
        totals = simulation.server.document().totals
        left_out = f", {totals.discarded:,} discarded" if totals.discarded else ""
        left_out += f", {totals.skipped:,} skipped" if totals.skipped else ""
        rows = f"{status.rows_durable:,} durable, {status.rows_late:,} late, "
        rows += counted(status.dead_letters, "dead letter") + left_out
        windows = f"{status.windows_published:,} published, {status.windows_waiting:,} waiting, "
        windows += f"{status.windows_set_aside:,} set aside"
    refused = (
        f"{counted(times, 'checkpoint')} with {error}" for error, times in sorted(report.refused.items())
    )
    return {
        "records": f"{stream.records:,} in {counted(len(stream.shards), 'shard')}",
        "deliveries": f"{report.deliveries:,}"
        + (f", {redelivered:,} of them again" if redelivered > 0 else ""),
        "refused": "\n".join(refused),
        "daemon": "; ".join(report.exits) or "never ran",
        "rows": rows,
        "windows": windows,
        "violations": "\n".join(report.violations),
        "output": str(folder),
        "log": f"mldserver logs {shlex.quote(str(folder / '_server.log'))}",
    }


def _timers_text(simulation: Simulation, *, fired: bool) -> str:
    """Return what became of timers, in words. Those that are pending are read from the files, since the server has stopped."""
    from mldserver.assembly import store_of  # noqa: PLC0415  # `--help` must not wait for the server's imports
    from mldserver.cli.ledger_tool import open_ledger  # noqa: PLC0415  # see above
    from mldserver.cli.state import stored_entries  # noqa: PLC0415  # see above

    settings, counts = simulation.server.settings, simulation.server.document().timers
    with open_ledger(settings) as (_, state, _):
        entries = stored_entries(state, store_of(settings), None)
        pending = sum(entry["timer"] is not None for entry in entries)
    names = ("set", "cancelled", "fired", "skipped", "failed")
    words = [f"{getattr(counts, name, 0):,} {name}" for name in names]
    text = f"{', '.join(words)}, {pending:,} pending"
    if pending and not fired:
        text += " (--fire-timers fires them)"
    return text


def _result_text(report: Report, failed_records: int) -> str:
    """Return the run's result in words: the first thing that went wrong, or "ok". Dead letters count unless allowed."""
    if report.violations:
        return "the daemon complained"
    if not report.finished:
        return "not every shard's end was checkpointed"
    if not report.ok:
        return f"the server ended with {report.server_exit}, or windows are left"
    letters = "a dead letter" if failed_records == 1 else "dead letters"
    return f"{counted(failed_records, 'record')} became {letters}" if failed_records else "ok"
