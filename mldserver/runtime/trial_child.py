"""The process that ``mldserver check`` imports a handler in: ``python -m mldserver.runtime.trial_child``.

The module under check may print, hang, or end the interpreter; so the result goes into a file, never to standard
output, and the parent (``trial.py``) makes sense of its absence.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from mldserver.base.clock import SystemClock
from mldserver.errors import HandlerError
from mldserver.handler.inspection import inspect_handler
from mldserver.handler.loader import load, relative
from mldserver.handler.spec import Finding, HandlerKind, HandlerSpec, windows_text
from mldserver.records import Record, Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import Delivery, Records
from mldserver.runtime.trial import Report, Trial, by_class, first_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

_BATCH: Final = 500


def report(path: str, retention_ms: int | None, lines: Sequence[bytes] = ()) -> Report:
    """Import and check the handler at ``path``, and run records through it."""
    tried = None
    try:
        spec, findings = inspect_handler(load(path), retention_ms=retention_ms)
        if spec and lines and not any(finding.is_error for finding in findings):
            tried = asyncio.run(_try(spec, lines))
    except HandlerError as error:
        where = error.where
        text = " ".join(part for part in (error.what, error.advice) if part)
        file, line = where.get("file") or "", where.get("line") or 0
        text = text.removeprefix(f"{relative(file)}:{line}: ")
        found = Finding(text, relative(file) if file else "", line)
        return Report((found,), traceback=where.get("traceback", ""))
    return Report(tuple(findings), _summary(spec) if spec else (), trial=tried)


async def _try(spec: HandlerSpec, lines: Sequence[bytes]) -> Trial:
    """Run records through the handler, each once, as the server would. Raises HandlerHalted when it cannot be opened.

    They go as records that run once more: those become dead letters under every policy, while ``initialize`` halts.
    """
    clock = SystemClock()
    policy = FailurePolicy(attempts=1, on_failure=OnFailure.HALT)
    runtime = InlineRuntime(spec, policy=policy, clock=clock, random=lambda: 0.0, deadline_seconds=None)
    shard = Shard("shardId-000000000000", "TRIM_HORIZON")
    outcomes = []
    await runtime.start()
    try:
        await runtime.open(shard)
        for first in range(0, len(lines), _BATCH):
            now_ms = clock.now_ms()
            batch = _records(lines[first : first + _BATCH], shard.id, first + 1, now_ms)
            delivery = Delivery(shard.id, batch, now_ms, after=None, redriven=True)
            outcomes.append(await runtime.process(delivery))
    finally:
        await runtime.close()
    tables = [outcome.rows for outcome in outcomes if outcome.rows is not None]
    letters = [letter for outcome in outcomes for letter in outcome.dead_letters]
    return Trial(len(lines), sum(map(len, tables)), first_rows(tables), by_class(letters))


def _records(lines: Sequence[bytes], shard_id: str, number: int, now_ms: int) -> Records:
    """Return a record of each line; ``number``: the first one's sequence."""
    return Records(
        [
            Record(
                shard_id=shard_id,
                sequence_number=str(place),
                data=line,
                partition_key=f"key-{place}",
                arrival_ms=now_ms,
            )
            for place, line in enumerate(lines, number)
        ]
    )


def _summary(spec: HandlerSpec) -> tuple[tuple[str, str], ...]:
    """Return what was found, as (name, text) lines."""
    hooks = [f"async {hook.name}" if hook.is_async else hook.name for hook in spec.hooks.values()]
    lines = [("kind", _kind(spec)), ("hooks", ", ".join(hooks))]
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


def _kind(spec: HandlerSpec) -> str:
    if spec.kind is HandlerKind.PROCESSOR:
        return f"record processor of amazon_kclpy, version {spec.target.version}, made once per shard"
    return (
        f"{spec.kind}, {'made once per shard' if spec.kind is HandlerKind.CLASS else 'shared by all shards'}"
    )


def _drop(*_event: object) -> str:
    raise structlog.DropEvent


def main(arguments: list[str]) -> None:
    """Check the handler named by ``arguments`` and end at once.

    They are the result's file, the dotted path, the retention in ms or '', and perhaps a file of records.

    It ends without waiting for threads that the module may have started.
    """
    result, path, retention, *records = arguments
    structlog.configure(processors=[_drop])  # what the runtime logs of a failure is in the report
    lines = [line for name in records for line in Path(name).read_bytes().split(b"\n")]
    told = report(path, int(retention) if retention else None, lines)
    sys.stdout.flush()
    sys.stderr.flush()
    Path(result).write_bytes(msgspec.json.encode(told))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
