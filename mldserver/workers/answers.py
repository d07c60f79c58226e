"""What workers answer, as what the server knows: a handler's spec, the outcome of a batch, or of its parts."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import pyarrow as pa

from mldserver.handler.schema import parse_schema
from mldserver.handler.spec import Finding, HandlerKind, HandlerSpec, HookSpec, RecordHook
from mldserver.records import DeadLetter
from mldserver.runtime.interface import BatchOutcome, BatchOutline
from mldserver.windows import Batches, Tumbling
from mldserver.workers import wire
from mldserver.workers.shared_memory import rows_from

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["done_of", "joined", "outcome_of", "spec_of"]


def spec_of(handler: str, loaded: wire.Loaded) -> HandlerSpec:
    """Return a handler's spec without its code."""
    windows = (
        Tumbling(*loaded.tumbling)
        if loaded.tumbling
        else Batches(*loaded.batches)
        if loaded.batches
        else None
    )
    return HandlerSpec(
        path=handler,
        kind=HandlerKind(loaded.kind),
        target=None,
        record_hook=RecordHook(loaded.record_hook),
        hooks={name: HookSpec(name, is_async) for name, is_async in loaded.hooks.items()},
        schema=None if loaded.schema is None else parse_schema(loaded.schema),
        windows=windows,
        warnings=tuple(Finding(text, file, line, is_error=False) for text, file, line in loaded.warnings),
        concurrency=loaded.concurrency,
    )


def done_of(request: int, outcome: BatchOutcome, *, rows: bytes | None, rows_bytes: int) -> wire.Done:
    """Return what became of a batch as it crosses; its rows are in ``rows``, or in a file of ``rows_bytes``."""
    outline = outcome.outline
    return wire.Done(
        request,
        wire.Outline(
            outline.records,
            outline.duplicates,
            wire.sequence_text(outline.first),
            wire.sequence_text(outline.last),
            outline.latest_arrival_ms,
            outline.millis_behind_latest,
        ),
        [wire.plain(letter) for letter in outcome.dead_letters],
        rows,
        rows_bytes,
        attempts=outcome.attempts,
        skipped=outcome.skipped,
        discarded=outcome.discarded,
        keeps_position=outcome.keeps_position,
        position=wire.sequence_text(outcome.position),
        owes=outcome.owes,
    )


def outcome_of(done: wire.Done, files: list[int]) -> BatchOutcome:
    """Return what became of a batch; its rows lie where the worker wrote them. ``files`` are closed."""
    rows = None
    if done.rows is not None:
        rows = rows_from(done.rows)
    elif done.rows_bytes:
        rows = rows_from(mmap.mmap(files[0], done.rows_bytes, prot=mmap.PROT_READ))
    for file in files:
        os.close(file)
    told = done.outline
    return BatchOutcome(
        outline=BatchOutline(
            records=told.records,
            duplicates=told.duplicates,
            first=wire.sequence_of(told.first),
            last=wire.sequence_of(told.last),
            latest_arrival_ms=told.latest_arrival_ms,
            millis_behind_latest=told.millis_behind_latest,
        ),
        rows=rows,
        dead_letters=tuple([wire.restored(DeadLetter, letter) for letter in done.letters]),
        attempts=done.attempts,
        skipped=done.skipped,
        discarded=done.discarded,
        keeps_position=done.keeps_position,
        position=wire.sequence_of(done.position),
        owes=done.owes,
    )


def joined(parts: list[BatchOutcome]) -> BatchOutcome:
    """Return one outcome of parts that stand in order."""
    rows = [part.rows for part in parts if part.rows is not None]
    last = parts[-1]
    positions = [part.position for part in parts if part.position is not None]
    return BatchOutcome(
        outline=last.outline,
        rows=pa.concat_tables(rows).combine_chunks() if rows else None,
        dead_letters=tuple(_letters(parts)),
        attempts=max(part.attempts for part in parts),
        skipped=sum(part.skipped for part in parts),
        discarded=sum(part.discarded for part in parts),
        keeps_position=last.keeps_position,
        position=max(positions, default=None),
        owes=last.owes,
    )


def _letters(parts: list[BatchOutcome]) -> Iterator[DeadLetter]:
    for part in parts:
        yield from part.dead_letters
