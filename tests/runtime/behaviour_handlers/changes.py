"""Handlers of DynamoDB changes: a module, and classes with each kind of hook; each row says what was called with what."""

from __future__ import annotations

from typing import Any

from mldserver import Batch, BatchResult, Retry, Shard, tumbling
from mldserver.dynamodb_streams import Change

schema = "told STRING, at TIMESTAMP, n BIGINT"
windows = tumbling("1 hour", on="at", lateness="1 minute")
plain_numbers = True
tries: list[str] = []


def row(hook: str, change: Change) -> tuple[str, Any, int | None]:
    old, new = change.old or {}, change.new or {}
    told = f"{hook} {change.keys['id']} {old.get('n')!r} {new.get('n')!r}"
    return told, change.created_at, change.sequence_number


def on_insert(change: Change) -> tuple[Any, ...]:
    return row("on_insert", change)


def on_update(change: Change) -> list[tuple[Any, ...]]:
    """Return one row from the item before, and one from the item after."""
    assert change.old is not None
    assert change.new is not None
    return [
        (f"{sign}{item['n']!r}", change.created_at, None)
        for sign, item in (("-", change.old), ("+", change.new))
    ]


class Deletes:
    """Updates and inserts give no row; a delete succeeds when it is tried again."""

    schema = schema
    windows = windows

    def __init__(self) -> None:
        self.opened: list[str] = []

    def initialize(self, shard: Shard) -> None:
        self.opened.append(shard.id)

    def on_delete(self, change: Change) -> tuple[Any, ...]:
        key = change.keys["id"]
        if key == "never":
            raise ZeroDivisionError(key)
        if key == "later" and key not in tries:
            tries.append(key)
            raise Retry("not yet", after=0)
        told, at, _ = row(f"on_delete {'expired' if change.expired else 'deleted'}", change)
        return told, at, len(self.opened)


class Async:
    """Every kind, asynchronously."""

    schema = schema
    windows = windows

    async def on_insert(self, change: Change) -> tuple[Any, ...]:
        return row("on_insert", change)

    async def on_delete(self, change: Change) -> tuple[Any, ...]:
        return row("on_delete", change)


class One:
    """One hook for all kinds."""

    changes = True
    schema = schema
    windows = windows
    concurrency = 2

    def process_record(self, change: Change) -> tuple[Any, ...]:
        return row(change.kind, change)


class OneAsync(One):
    async def process_record(self, change: Change) -> tuple[Any, ...]:  # type: ignore[override]  # the same, async
        return row(change.kind, change)


class Batches:
    """A whole batch of changes; one without a price is named as failed."""

    changes = True
    schema = schema

    def process_records(self, batch: Batch) -> BatchResult:
        changes: list[Any] = list(batch)
        failed = {change: "no n" for change in changes if "n" not in (change.new or change.old or {})}
        return BatchResult(
            [row(f"{batch.millis_behind_latest} {change.kind}", change) for change in changes], failed
        )


class BatchesAsync(Batches):
    async def process_records(self, batch: Batch) -> BatchResult:  # type: ignore[override]  # the same, async
        return super().process_records(batch)
