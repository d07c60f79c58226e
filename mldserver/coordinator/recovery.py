"""What a start finds in the ledger, and what it does about it: finish, restart, clean up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from mldserver.coordinator.layout import SEGMENTS, STAGING, late_path
from mldserver.state.ledger import WindowState

if TYPE_CHECKING:
    from collections.abc import Container

    from mldserver.coordinator.store import OutputStore
    from mldserver.coordinator.window_runner import WindowRunner
    from mldserver.state.ledger import Ledger, LedgerState, Segment

__all__ = ["publish_late", "recover"]

log = structlog.get_logger("mldserver")


async def recover(state: LedgerState, ledger: Ledger, store: OutputStore, runner: WindowRunner | None) -> int:
    """Publish what is committed, queue what is cut, delete files that no entry names.

    Return the bytes of the segments that stay. ``runner`` is None for pipelines without rows.
    """
    committed = [each for each in state.windows.values() if each.state is WindowState.COMMITTED]
    cut = sorted(
        (each for each in state.windows.values() if each.state is WindowState.CUT),
        key=lambda each: (each.start_ms or 0, each.window_id),
    )
    if runner is not None:
        for entry in committed:
            await runner.publish(entry.window_id, entry.staging, has_files=bool(entry.files))
        runner.submit(cut)
    await publish_late(state.late_segments, ledger, store)
    published = {entry.window_id for entry in committed}
    kept = {
        segment.path: segment.bytes
        for entry in state.windows.values()
        if entry.window_id not in published
        for segment in entry.segments
    }
    deleted = await asyncio.to_thread(_sweep, store, kept.keys())
    log.info(
        "recovery.done",
        shards=len(state.shards),
        windows_published=len(committed),
        windows_restarted=len(cut),
        late_published=len(state.late_segments),
        files_deleted=deleted,
        clock=state.clock,
    )
    return sum(kept.values())


async def publish_late(segments: tuple[Segment, ...], ledger: Ledger, store: OutputStore) -> None:
    """Move registered files of the late dataset to where readers see them. Repeatable."""
    for segment in segments:
        await asyncio.to_thread(store.publish, segment.path, late_path(segment.path))
    if segments:
        await ledger.late_published(tuple(segment.path for segment in segments))


def _sweep(store: OutputStore, kept: Container[str]) -> int:
    """Delete segment files that the ledger does not name, and every staging folder: no attempt runs at start."""
    deleted = 0
    for path, _ in list(store.files(SEGMENTS)):
        if path not in kept:
            store.delete(path)
            deleted += 1
    for folder in list(store.folders(SEGMENTS)):
        store.drop_empty(folder)
    for path, _ in list(store.files(STAGING)):
        store.delete(path)
        deleted += 1
    for folder in list(store.folders(STAGING)):
        store.delete(folder)
    return deleted
