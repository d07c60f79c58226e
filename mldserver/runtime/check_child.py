"""The process that ``mldserver check`` imports a handler in: ``python -m mldserver.runtime.check_child``.

The module under check may print, hang, or end the interpreter; so the result goes into a file, never to standard
output, and the parent (``check.py``) makes sense of its absence.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import orjson

from mldserver.errors import HandlerError
from mldserver.runtime.inspection import inspect_handler
from mldserver.runtime.loader import load, relative
from mldserver.runtime.spec import Finding, HandlerKind, HandlerSpec, windows_text

__all__ = ["main", "report"]


def report(path: str, retention_ms: int | None) -> dict[str, Any]:
    """Import and check the handler at ``path``; return plain values for ``check.Report``."""
    try:
        spec, findings = inspect_handler(load(path), retention_ms=retention_ms)
    except HandlerError as error:
        where = error.where
        text = " ".join(part for part in (error.what, error.advice) if part)
        file, line = where.get("file") or "", where.get("line") or 0
        text = text.removeprefix(f"{relative(file)}:{line}: ")
        found = Finding(text, relative(file) if file else "", line)
        return {"findings": [_plain(found)], "summary": [], "traceback": where.get("traceback", "")}
    return {
        "findings": [_plain(finding) for finding in findings],
        "summary": _summary(spec) if spec else [],
        "traceback": "",
    }


def _plain(finding: Finding) -> dict[str, Any]:
    return {"text": finding.text, "file": finding.file, "line": finding.line, "is_error": finding.is_error}


def _summary(spec: HandlerSpec) -> list[tuple[str, str]]:
    """Return what was found, as (name, text) lines."""
    hooks = [f"async {hook.name}" if hook.is_async else hook.name for hook in spec.hooks.values()]
    lines = [("kind", _kind(spec)), ("hooks", ", ".join(hooks))]
    if spec.concurrency > 1:
        lines.append(
            ("concurrency", f"{spec.concurrency} records of a batch at a time, in order for each key")
        )
    if spec.schema is None:
        return [*lines, ("schema", "none: it has only side effects")]
    for place, column in enumerate(spec.schema.columns):
        null = "" if column.nullable else " NOT NULL"
        lines.append(("" if place else "schema", f"{column.name} {column.sql}{null}"))
    return [*lines, ("windows", windows_text(spec.windows))]


def _kind(spec: HandlerSpec) -> str:
    if spec.kind is HandlerKind.PROCESSOR:
        return f"record processor of amazon_kclpy, version {spec.target.version}, made once per shard"
    return (
        f"{spec.kind}, {'made once per shard' if spec.kind is HandlerKind.CLASS else 'shared by all shards'}"
    )


def main(arguments: list[str]) -> None:
    """Check the handler named by ``arguments`` (result file, dotted path, retention in ms or '') and end at once.

    It ends without waiting for threads that the module may have started.
    """
    result, path, retention = arguments
    told = report(path, int(retention) if retention else None)
    sys.stdout.flush()
    sys.stderr.flush()
    Path(result).write_bytes(orjson.dumps(told))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
