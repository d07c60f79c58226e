"""Checks a handler in a separate process, so that nothing it does reaches the caller: its import, and trial records.

That process is this module too (``python -m mldserver.runtime.trial``). The module under check may print, hang, or end the
interpreter; so the result goes into a file, never to standard output, and the parent makes sense of its absence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from mldserver.base.clock import SystemClock
from mldserver.errors import HandlerError, QueryFailed
from mldserver.handler.context import NO_SETTINGS
from mldserver.handler.inspection import inspect_handler
from mldserver.handler.loader import is_library, load, relative
from mldserver.handler.queries import Query, QueryResult
from mldserver.handler.spec import Finding, HandlerKind, HandlerSpec, windows_text
from mldserver.records import DeadLetter, Record, Shard
from mldserver.windows import span_text

_DUMP_SECONDS: Final = 5.0
"""How long a hanging process may take to dump where it hangs."""
_ABORTED: Final = "Fatal Python error: Aborted"
"""How the dump begins."""
_FRAME: Final = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in ', re.MULTILINE)
"""A frame of ``faulthandler``'s dump."""
_RAISED: Final = re.compile(r'^[ |+]*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
"""A frame of a traceback."""
_BATCH: Final = 500
"""Records that the handler gets at a time."""
_OWN_FOLDER: Final = f"{Path(__file__).parents[1]}{os.sep}"
_OUTPUT_LIMIT: Final = 10_000
_ROWS_SHOWN: Final = 5
_COLUMNS_SHOWN: Final = 8
_CELL_WIDTH: Final = 32
_EXAMPLE_WIDTH: Final = 200


@dataclass(frozen=True, slots=True)
class FailureClass:
    """Records that failed with one class of error, and the first one's details."""

    name: str
    records: int
    error: str
    """The example's message, its first line."""
    place: str
    """The line of the user's code that raised it, ``file:line``; empty when the server refused what it was given, or returned."""
    data: str
    """The beginning of the example's payload."""


def by_class(letters: Iterable[DeadLetter]) -> tuple[FailureClass, ...]:
    """Return dead letters by class of error, the most frequent first."""
    counts: dict[str, int] = {}
    examples: dict[str, DeadLetter] = {}
    for letter in letters:
        name = letter.error.partition(":")[0]
        counts[name] = counts.get(name, 0) + 1
        examples.setdefault(name, letter)
    classes = []
    for name, one in sorted(examples.items(), key=lambda item: -counts[item[0]]):
        # The innermost place outside libraries: an error inside one is placed where the user's code called it.
        found = [frame for frame in _RAISED.finditer(one.traceback) if not frame["file"].startswith("<")]
        frames = [frame for frame in found if not is_library(frame["file"])] or found
        if frames and frames[-1]["file"].startswith(_OWN_FOLDER):
            frames = []
        place = f"{relative(frames[-1]['file'])}:{frames[-1]['line']}" if frames else ""
        error = _cut(" ".join(one.error.splitlines()[:1]), _EXAMPLE_WIDTH)
        data = _cut(one.data[:1000].decode("utf-8", "backslashreplace"), _EXAMPLE_WIDTH)
        classes.append(FailureClass(name, counts[name], error, place, data))
    return tuple(classes)


def first_rows(tables: Iterable[Any]) -> tuple[tuple[str, ...], ...]:
    """Return the first rows of Arrow tables of one schema as text of bounded width, below the columns' names.

    The server's own columns are left out, if there are others. Empty without rows.
    """
    shown: list[tuple[str, ...]] = []
    names: list[str] = []
    for table in tables:
        names = names or [name for name in table.column_names if not name.startswith("_")][:_COLUMNS_SHOWN]
        rows = table.slice(0, _ROWS_SHOWN - len(shown)).to_pylist()
        shown += [tuple(_cut(str(row.get(name)), _CELL_WIDTH) for name in names) for row in rows]
        if len(shown) == _ROWS_SHOWN:
            break
    return (tuple(_cut(name, _CELL_WIDTH) for name in names), *shown) if shown else ()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of real records."""

    records: int
    rows: int
    first: tuple[tuple[str, ...], ...]
    """As ``first_rows`` returns them."""
    failures: tuple[FailureClass, ...]
    timers: int = 0
    """How many timers are set at the end; the trial calls none of them."""
    queries: int = 0
    """How many queries were made. A trial answers none: it has no Spark."""

    @property
    def failed(self) -> int:
        """How many records failed."""
        return sum(each.records for each in self.failures)


@dataclass(frozen=True, slots=True)
class TrialReport:
    """What a check found."""

    findings: tuple[Finding, ...]
    summary: tuple[tuple[str, str], ...] = ()
    """What the handler has, as (name, text); empty when it cannot be run."""
    traceback: str = ""
    """Of an error that the module raised while it was imported."""
    output: str = ""
    """What the handler printed: while it was imported, and while records ran through it."""
    trial: Trial | None = None
    """None without records, or when the handler cannot be run."""

    @property
    def ok(self) -> bool:
        """Whether the handler can be run, and took every record that it was tried with."""
        return self.can_run and not (self.trial and self.trial.failed)

    @property
    def can_run(self) -> bool:
        """Whether the handler can be run."""
        return not any(finding.is_error for finding in self.findings)


class _Around(msgspec.Struct, frozen=True):
    """What belongs to the records of a trial, in the order of ``check_handler``'s arguments."""

    keys: list[str] = []
    settings: dict[str, str] = {}


_NOTHING: Final = _Around()


def check_handler(
    path: str,
    *,
    retention_ms: int | None = None,
    timeout: float = 60.0,
    lines: Sequence[bytes] = (),
    keys: Sequence[str] = (),
    settings: Mapping[str, str] = NO_SETTINGS,
) -> TrialReport:
    """Import and check the handler at a dotted path in a fresh interpreter; takes at most ``timeout`` seconds.

    ``lines``: records that it is tried with, each once, as one shard's. ``keys``: their partition keys; empty: each record
    has a different one. ``settings``: what it reads as ``ctx.settings``.
    """
    doing = "importing it and running the records" if lines else "importing it"
    with tempfile.TemporaryDirectory(prefix="mldserver-check-") as folder:
        result, printed = Path(folder, "result.json"), Path(folder, "output.txt")
        arguments = [str(result), path, "" if retention_ms is None else str(retention_ms)]
        if lines:
            Path(folder, "records").write_bytes(b"\n".join(lines))
            Path(folder, "around").write_bytes(msgspec.json.encode(_Around(list(keys), dict(settings))))
            arguments += [str(Path(folder, "records")), str(Path(folder, "around"))]
        command = [sys.executable, "-X", "faulthandler", "-m", "mldserver.runtime.trial", *arguments]
        with (
            printed.open("wb") as output,
            subprocess.Popen(  # noqa: S603  # our own interpreter and module
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as child,
        ):
            code: int | None = None
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                # faulthandler answers SIGABRT with the place that each thread is at.
                child.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_DUMP_SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        text = printed.read_text("utf-8", "replace")
        if result.exists():
            report = msgspec.json.decode(result.read_bytes(), type=TrialReport)
        else:
            report = TrialReport((_unfinished(code, text, timeout, doing),))
            if code is None:  # the dump was asked for; its place is in the finding
                text = text.partition(_ABORTED)[0]
    return replace(report, output=text[-_OUTPUT_LIMIT:])


def _unfinished(code: int | None, output: str, timeout: float, doing: str) -> Finding:
    """Tell how the child ended without a result: where, is the innermost place in its dump that is not the library's or ours."""
    own = (_OWN_FOLDER, str(Path(os.__file__).parent), "<")
    places = ((frame["file"], frame["line"]) for frame in _FRAME.finditer(output))
    theirs = (place for place in places if "site-packages" in place[0] or not place[0].startswith(own))
    file, line = next(theirs, ("", "0"))
    if code is None:
        text = f"takes longer than {timeout:g} s; the process was stopped: move what waits or takes long into `initialize`"
    elif code < 0:
        names = {number.value: number.name for number in signal.Signals}
        text = f"crashes the interpreter ({names.get(-code, f'signal {-code}')})"
    else:
        text = f"ends the process, without an exception (exit code {code})"
    return Finding(f"{doing} {text}", relative(file) if file else "", int(line))


def report(
    path: str, retention_ms: int | None, lines: Sequence[bytes] = (), around: _Around = _NOTHING
) -> TrialReport:
    """Import and check the handler at ``path``, and run records through it (see ``check_handler``)."""
    tried = None
    try:
        spec, findings = inspect_handler(load(path, seconds=None), retention_ms=retention_ms)
        if spec and lines and not any(finding.is_error for finding in findings):
            tried = asyncio.run(_try(spec, lines, around))
    except HandlerError as error:
        where = error.where
        text = " ".join(part for part in (error.what, error.advice) if part)
        file, line = where.get("file") or "", where.get("line") or 0
        text = text.removeprefix(f"{relative(file)}:{line}: ")
        found = Finding(text, relative(file) if file else "", line)
        return TrialReport((found,), traceback=where.get("traceback", ""))
    summary = _summary(spec) if spec else ()
    if tried and spec and spec.keyed and spec.changes is None and not around.keys:
        summary += (("keys", "a different one for each record: --key-field NAME takes them from a field"),)
    return TrialReport(tuple(findings), summary, trial=tried)


async def _try(spec: HandlerSpec, lines: Sequence[bytes], around: _Around) -> Trial:
    """Run records through the handler, each once, as the server would. Raises HandlerHalted when it cannot be opened.

    They go as records that run once more: those become dead letters under every policy, while ``initialize`` halts.
    """
    from mldserver.runtime.failure_policy import FailurePolicy, OnFailure  # noqa: PLC0415  # only the child pays for them
    from mldserver.runtime.inline import InlineRuntime  # noqa: PLC0415  # see above
    from mldserver.runtime.interface import Delivery, Records  # noqa: PLC0415  # see above

    clock = SystemClock()
    policy = FailurePolicy(attempts=1, on_failure=OnFailure.HALT)
    queries = _CountedQueries()
    runtime = InlineRuntime(
        replace(spec, lookups=()),  # nothing computes them: their tables stay empty
        policy=policy,
        clock=clock,
        random=lambda: 0.0,
        deadline_seconds=None,
        settings=around.settings,
        queries=queries,
    )
    shard = Shard("shardId-000000000000", "TRIM_HORIZON")
    outcomes = []
    await runtime.start()
    try:
        await runtime.open(shard)
        for first in range(0, len(lines), _BATCH):
            now_ms = clock.now_ms()
            records = [
                Record(
                    shard_id=shard.id,
                    sequence_number=str(place),
                    data=line,
                    partition_key=around.keys[place - 1] if around.keys else f"key-{place}",
                    arrival_ms=now_ms,
                )
                for place, line in enumerate(lines[first : first + _BATCH], first + 1)
            ]
            delivery = Delivery(shard.id, Records(records), now_ms, after=None, redriven=True)
            outcomes.append(await runtime.process(delivery))
    finally:
        await runtime.close()
    tables = [rows for outcome in outcomes if (rows := outcome.effects.rows) is not None]
    letters = [letter for outcome in outcomes for letter in outcome.effects.dead_letters]
    report = outcomes[-1].timers
    pending = 0 if report is None else report.pending
    rows = sum(map(len, tables))
    return Trial(len(lines), rows, first_rows(tables), by_class(letters), pending, queries.count)


class _CountedQueries:
    """Counts queries and answers none: a ``QueryRunner``."""

    count = 0

    def is_needed_here(self) -> bool:
        """Return False: each query fails at once."""
        return False

    def submit(self, query: Query) -> Future[QueryResult]:  # noqa: ARG002  # a runner's signature
        """Return a future that has failed."""
        self.count += 1
        future: Future[QueryResult] = Future()
        future.set_exception(
            QueryFailed("A check has no Spark session.", advice="`mldserver sim` runs the handler with one.")
        )
        return future


def _summary(spec: HandlerSpec) -> tuple[tuple[str, str], ...]:
    """Return what was found, as (name, text) lines."""
    stands_in = spec.changes is not None and spec.record_hook not in spec.changes.names
    written = [hook for hook in spec.hooks.values() if not (stands_in and hook.name == spec.record_hook)]
    hooks = [f"async {hook.name}" if hook.is_async else hook.name for hook in written]
    kind = (
        f"{spec.kind}, {'made once per shard' if spec.kind is HandlerKind.CLASS else 'shared by all shards'}"
    )
    if spec.kind is HandlerKind.PROCESSOR:
        kind = f"record processor of amazon_kclpy, version {spec.target.version}, made once per shard"
    lines = [("kind", kind), ("hooks", ", ".join(hooks))]
    if spec.changes is not None:
        lines.append(("changes", str(spec.changes)))
    if spec.keyed:
        ttl = (
            "" if spec.state_ttl_ms is None else f", for {span_text(spec.state_ttl_ms)} after its last change"
        )
        lines.append(("state", f"kept for each partition key{ttl}"))
        if spec.changes is None:
            lines.append(
                ("", "start the server with --stream NAME: the stream's listing says which keys a shard has")
            )
    for place, timer in enumerate(spec.timers.values()):
        late_ms = timer.max_lateness_ms
        skipped = "" if late_ms is None else f", skipped when it is more than {span_text(late_ms)} late"
        lines.append(("" if place else "timers", timer.name + skipped))
    for place, lookup in enumerate(spec.lookups):
        required = "" if lookup.required else ", not required"
        text = f"{lookup.name}, each {span_text(lookup.every_ms)}{required}; empty in a check"
        lines.append(("" if place else "lookups", text))
    if spec.concurrency > 1:
        lines.append(
            ("concurrency", f"{spec.concurrency} records of a batch at a time, in order for each key")
        )
    if spec.schema is None:
        return (*lines, ("schema", "none: it has only side effects"))
    for place, column in enumerate(spec.schema.columns):
        null = "" if column.nullable else " NOT NULL"
        lines.append(("" if place else "schema", f"{column.name} {column.sql}{null}"))
    return (*lines, ("windows", windows_text(spec.windows)))


def main(arguments: list[str]) -> None:
    """Check the handler named by ``arguments`` and end at once.

    They are the result's file, the dotted path, the retention in ms or '', and perhaps a file of records and one of what belongs
    to them.

    It ends without waiting for threads that the module may have started.
    """
    result, path, retention, *files = arguments
    # What the runtime logs of a failure is in the report.
    structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
    lines, around = list[bytes](), _NOTHING
    if files:
        lines = Path(files[0]).read_bytes().split(b"\n")
        around = msgspec.json.decode(Path(files[1]).read_bytes(), type=_Around)
    told = report(path, int(retention) if retention else None, lines, around)
    sys.stdout.flush()
    sys.stderr.flush()
    Path(result).write_bytes(msgspec.json.encode(told))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
