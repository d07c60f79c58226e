"""What a start finds in the ledger, what a dead server leaves to others, and what is done about it.

Windows that nobody computes are adopted and go on where they stood; late rows that are registered become visible; files
that no entry names are deleted, but for those of servers that live: these may be about to be registered.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from typing import TYPE_CHECKING

import structlog

from mldserver.base.kill_points import kill_point
from mldserver.ledger.contract import WindowState
from mldserver.output.layout import (
    PRIVATE,
    QUARANTINE,
    SEGMENTS,
    late_path,
    ledger_of,
    server_tag,
    tag_of,
    writer_tag,
)
from mldserver.output.publish import Publisher

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from mldserver.jobs.runner import WindowRunner
    from mldserver.ledger.contract import LedgerState, Segment, WindowEntry
    from mldserver.ledger.operations import Ledger
    from mldserver.output.store import OutputStore

log = structlog.get_logger("mldserver")


async def recover(
    state: LedgerState, ledger: Ledger, store: OutputStore, runner: WindowRunner | None
) -> None:
    """At a start, before anything of this server runs: take over what nobody does, and clean up.

    ``runner`` is None for pipelines without rows. Raises LedgerError, OSError, and OperatorError when late rows are to
    be recomputed where outputs cannot be replaced.
    """
    adopted: tuple[WindowEntry, ...] = ()
    if runner is not None:
        runner.begin(state)
        if runner.recompute:
            await asyncio.to_thread(runner.publisher.check)
        kill_point("recovery.opened")
        adopted = await ledger.adopt()
        kill_point("recovery.adopted")
        runner.submit(_in_order(adopted))
    late, deleted = await _inherit(ledger, store, own=False)
    log.info(
        "recovery.done",
        shards=len(state.shards),
        windows_published=sum(entry.state is WindowState.COMMITTED for entry in adopted),
        windows_restarted=sum(entry.state is WindowState.CUT for entry in adopted),
        late_published=late,
        files_deleted=deleted,
        clock=state.clock,
    )


async def take_over(
    under_way: Mapping[str, WindowEntry],
    working: Collection[str],
    ledger: Ledger,
    store: OutputStore,
    runner: WindowRunner,
    *,
    inherit: bool,
) -> None:
    """While the server runs: adopt windows that lost their server, and clean up after servers that are gone.

    ``under_way``: what the ledger has cut or committed. ``working``: the windows that the runner had before that was
    read. One that is this server's and not among them was cut by a call whose answer was lost. ``inherit``: whether
    servers came or went since this one last cleaned up. Raises LedgerError and OSError; repeatable.
    """
    entries = under_way.values()
    mine = [entry for entry in entries if entry.owner == ledger.server_id and entry.window_id not in working]
    if inherit or any(entry.owner is None for entry in entries):
        mine += await ledger.adopt()
        kill_point("windows.adopted")
    runner.submit(_in_order(mine))
    if inherit:
        await _inherit(ledger, store, own=True)


def _in_order(entries: Iterable[WindowEntry]) -> list[WindowEntry]:
    """What counts already comes first, then the oldest window."""
    return sorted(
        entries,
        key=lambda entry: (entry.state is not WindowState.COMMITTED, entry.start_ms or 0, entry.window_id),
    )


async def _inherit(ledger: Ledger, store: OutputStore, *, own: bool) -> tuple[int, int]:
    """Publish late files, and delete nameless ones, of servers that live no more; return how many of each.

    This server's own nameless segments go too: whoever freed them may have died before it deleted them, and nobody else
    was told. It writes none meanwhile. Nameless files that were not written for this ledger are not its to delete: they
    are moved to quarantine.

    ``own``: whether this server may have attempts under way. What is deleted was listed before the ledger is read: a file
    whose server is not registered then was written by one that is gone, and will never be registered. What manifests
    name is read after it: an output that was published since the listing is visible by then.
    """
    publisher = Publisher(store)
    segments = await asyncio.to_thread(lambda: [path for path, _ in store.files(SEGMENTS)])
    attempts = await asyncio.to_thread(publisher.attempts)
    scratch = await asyncio.to_thread(store.scratch)
    state = await ledger.peek()
    servers = [server_id for server_id in state.servers if own or server_id != ledger.server_id]
    alive = {writer_tag(state.ledger_id, server_id) for server_id in servers}
    late = tuple(segment for segment in state.late_segments if tag_of(segment.path) not in alive)
    await publish_late(late, ledger, store)
    named: set[str | None] = {segment.path for segment in state.late_segments}
    for entry in state.windows.values():
        named |= {entry.staging, *(segment.path for segment in (*entry.segments, *entry.pending))}

    def nameless(paths: list[str], writing: set[str]) -> list[str]:
        return [path for path in paths if path not in named and tag_of(path) not in writing]

    unread = await asyncio.to_thread(publisher.unread, attempts, nameless(attempts, alive))
    others = alive - {writer_tag(state.ledger_id, ledger.server_id)}
    garbage = [*nameless(segments, others), *unread]
    gone = [path for path in garbage if ledger_of(path) == state.ledger_id]
    strangers = [path for path in garbage if ledger_of(path) != state.ledger_id]
    kill_point("recovery.sweeping")
    await asyncio.to_thread(
        _sweep, store, gone, strangers, quarantine=f"{QUARANTINE}/{state.ledger_id}-{state.claims}"
    )
    running = {server_tag(server_id) for server_id in servers}
    for folder in scratch:
        if folder.name not in running:
            # Of a dead server's Spark driver; another server may be at it too.
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    kill_point("recovery.swept")
    return len(late), len(gone)


def _sweep(store: OutputStore, gone: list[str], strangers: list[str], *, quarantine: str) -> None:
    for path in gone:
        store.delete(path)
    for folder in {path.rpartition("/")[0] for path in gone} | set(store.folders(SEGMENTS)):
        store.drop_empty(folder)
    for path in strangers:
        with contextlib.suppress(FileNotFoundError):  # another server that starts has moved it
            store.move(path, f"{quarantine}{path.removeprefix(PRIVATE)}")
        store.drop_empty(path.rpartition("/")[0])
    if strangers:
        log.warning("recovery.quarantined", count=len(strangers), path=store.uri(quarantine))


async def publish_late(segments: tuple[Segment, ...], ledger: Ledger, store: OutputStore) -> None:
    """Move registered files of the late dataset to where readers see them. Repeatable."""
    for segment in segments:
        await asyncio.to_thread(store.publish, segment.path, late_path(segment.path))
        await asyncio.to_thread(store.drop_empty, segment.path.rpartition("/")[0])
    if segments:
        kill_point("late.moved")
        await ledger.late_published(tuple(segment.path for segment in segments))
        kill_point("late.published")
