"""The coordinator's sections of the status document: shards, watermark, servers, keyed state, dead letters and budgets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.lineage import Presence
from mldserver.coordinator.progress import CoordinatorStatus
from mldserver.coordinator.redriving import RedriveIntake
from mldserver.coordinator.shards import CoordinatorIntake
from mldserver.coordinator.store_files import StateFiles
from mldserver.coordinator.timed_stores import TimerIntake
from mldserver.records import Sequence
from mldserver.sources.source import SourceStatus
from mldserver.status_document import (
    Budget,
    DeadLetters,
    KeyedStateSection,
    LetterRow,
    Peer,
    ShardRow,
    StoreRow,
    TimersSection,
    WatermarkSection,
    histogram,
)
from mldserver.stores import StoreSize

_ENDED: Final = 100
"""How many ended shards are shown, the latest."""
_SAMPLES: Final = 65


def waited_seconds(
    seen: list[tuple[int, Sequence]], reached: Sequence | None, settled: Sequence | None, now_ms: int
) -> float | None:
    """Return how long the oldest position up to ``reached`` has waited beyond ``settled``; None: none does.

    ``seen`` keeps when a position was first seen to be reached. It is sampled once a document, not with every batch.
    """
    if reached is not None and (not seen or seen[-1][1] < reached):
        seen.append((now_ms, reached))
        if len(seen) > _SAMPLES:  # an odd number: the first stays, and so does the last
            del seen[1::2]
    while seen and settled is not None and seen[0][1] <= settled:
        del seen[0]
    return (now_ms - seen[0][0]) / 1000 if seen else None


class Sections:
    """Makes the coordinator's sections from its parts."""

    def __init__(
        self,
        shards: CoordinatorIntake,
        view: LedgerView,
        state_files: StateFiles,
        redriving: RedriveIntake,
        timers: TimerIntake,
    ) -> None:
        """``shards`` shares the coordinator's parts."""
        self._shards, self._view = shards, view
        self._state_files, self._redriving, self._timers = state_files, redriving, timers
        self._undurable: defaultdict[str, list[tuple[int, Sequence]]] = defaultdict(list)
        """Of each shard, what ``waited_seconds`` has seen of positions that are not durable."""
        self._unstored: defaultdict[str, list[tuple[int, Sequence]]] = defaultdict(list)
        """And of durable ones that no checkpoint covers."""

    def all(
        self,
        status: CoordinatorStatus,
        source: SourceStatus,
        worker_of: Mapping[str, int],
        *,
        state_sizes: tuple[StoreSize, ...],
        state_bytes: int,
        has_timers: bool,
        shown: Callable[[str], str],
    ) -> dict[str, Any]:
        """Return fields of the status document.

        ``worker_of``: the worker of each shard. ``state_sizes``: the keyed state that is held here (``stores.largest``), which may
        take ``state_bytes``. ``shown``: what is shown of errors.
        """
        budgets, state = self._budgets(status, source), None
        if self._shards.claims.keyed:
            state = self._state(state_sizes)
            used = sum(size.bytes for size in state_sizes)
            budgets["state"] = Budget(used_bytes=used, limit_bytes=state_bytes)
        return {
            "paused": self._shards.backpressure.paused,
            "shards": self._all_shards(source, worker_of),
            "watermark": WatermarkSection(
                at_ms=status.watermark_ms,
                held_by=status.held_by,
                server=status.held_by_server,
                reason=status.reason,
                stuck=status.stuck,
            ),
            "dead_letters": self._dead_letters(status, shown),
            "servers": self._servers(),
            "state": state,
            "timers": self._timers_section() if has_timers else None,
            "budgets": budgets,
            "stream_ended": status.stream_ended,
            "unread_shards": status.unread_shards,
        }

    def _all_shards(self, source: SourceStatus, worker_of: Mapping[str, int]) -> tuple[ShardRow, ...]:
        """Return the shards that this server has or misses, and those that it has read to their end lately."""
        lineage, now_ms = self._shards.lineage, self._shards.clock.steady_ms()
        nodes, counts = lineage.nodes, source.counts
        counted: Mapping[str, Any] = {} if counts is None else counts.shards
        if counts is not None:
            counts.forget([shard_id for shard_id in counted if shard_id not in nodes])
        ended = [node for node in nodes.values() if node.presence is Presence.ENDED and node.id in counted]
        ended = sorted(ended, key=lambda node: node.since_ms)[-_ENDED:]
        connected = {node.id for node in lineage.connected()}
        left_out = [node for node in nodes.values() if node.presence is Presence.LEFT_OUT]
        for waiting in (self._undurable, self._unstored):
            for shard_id in waiting.keys() - connected:
                del waiting[shard_id]
        reached_ms = self._shards.watermark.reached_ms()
        rows = [
            self._connected(source, id_, reached_ms.get(id_), worker_of.get(id_), now_ms) for id_ in connected
        ]
        rows += [
            ShardRow(
                id=node.id,
                state=state,
                lag_ms=None if state == "ended" else now_ms - node.read_ms,
                **_counts(counted.get(node.id)),
            )
            for state, some in (("missing", lineage.missing()), ("left_out", left_out), ("ended", ended))
            for node in some
        ]
        return tuple(sorted(rows, key=lambda row: row.id))

    def _connected(
        self,
        source: SourceStatus,
        shard_id: str,
        watermark_ms: int | None,
        worker: int | None,
        now_ms: int,
    ) -> ShardRow:
        session, held = self._shards.sessions.live(shard_id), self._shards.backpressure
        peer = source.peers.get(shard_id)
        durable_age = checkpoint_age = durable = checkpoint = None
        if session is not None:
            position = session.position
            durable, checkpoint = position.durable, position.checkpointed
            durable_age = waited_seconds(self._undurable[shard_id], position.accepted, durable, now_ms)
            if peer is not None:  # only a daemon checkpoints
                checkpoint_age = waited_seconds(self._unstored[shard_id], position.due(), checkpoint, now_ms)
        if (since_ms := source.since_ms.get(shard_id)) is not None:
            durable_age = max(durable_age or 0.0, (now_ms - since_ms) / 1000)
        paused = session is not None and held.is_paused(shard_id) and not session.finishing
        return ShardRow(
            id=shard_id,
            state="paused" if paused else "held" if shard_id in held.waiting else "connected",
            peer=peer,
            lag_ms=self._shards.watermark.lag_ms(shard_id, now_ms),
            position=None if durable is None else str(durable),
            checkpoint=None if checkpoint is None else str(checkpoint),
            durable_age_seconds=durable_age,
            checkpoint_age_seconds=checkpoint_age,
            watermark_ms=watermark_ms,
            worker=worker,
            **_counts(None if source.counts is None else source.counts.shards.get(shard_id)),
        )

    def _servers(self) -> tuple[Peer, ...]:
        """Return the servers on the ledger, as this one looked at it last."""
        membership, own_id = self._shards.membership, self._view.server_id
        own, peers = self._view.state.servers.get(own_id), membership.peers
        silent_ms = {**peers.silent_ms, own_id: self._shards.clock.steady_ms() - membership.beat_at_ms}
        rows = [
            Peer(
                id=server.server_id,
                this=server is own,
                beat_age_seconds=silent_ms[server.server_id] / 1000,
                watermark_ms=server.watermark_ms,
                idle=server.idle,
                reason=server.reason,
            )
            for server in (*peers.states(), *([] if own is None else [own]))
        ]
        return tuple(sorted(rows, key=lambda row: row.id))

    def _dead_letters(self, status: CoordinatorStatus, shown: Callable[[str], str]) -> DeadLetters:
        state = self._view.state
        latest = tuple(
            LetterRow(
                at_ms=letter.at_ms,
                shard=letter.shard_id,
                sequence=str(letter.sequence),
                error=shown(letter.error),
                traceback=shown(letter.traceback) if letter.traceback else "",
                attempts=letter.attempts,
            )
            for letter in status.latest_letters
        )
        waiting = None if status.letters_elsewhere else state.dead_letters
        return DeadLetters(
            waiting=waiting, redriving=state.redrives, waits_for=self._redriving.waits_for, latest=latest
        )

    def _state(self, sizes: tuple[StoreSize, ...]) -> KeyedStateSection:
        held, done = self._view.state, self._state_files
        files = [file for file in held.state_files.values() if file.needed]
        return KeyedStateSection(
            keys=sum(size.keys for size in sizes),
            files=len(files),
            file_bytes=sum(file.bytes for file in files),
            snapshots=done.snapshots,
            snapshot_seconds=done.snapshot_ms / 1000,
            compactions=done.compactions,
            stores=tuple(
                StoreRow(
                    id=size.store_id,
                    keys=size.keys,
                    bytes=size.bytes,
                    files=sum(size.store_id in file.needed for file in files),
                    serial=store.serial,
                )
                for size in sizes
                if (store := held.stores.get(size.store_id)) is not None
            ),
        )

    def _timers_section(self) -> TimersSection:
        timers, counts, sessions = self._timers, self._shards.timer_counts, self._shards.sessions
        stores = sessions.live_stores()
        reports, dues_ms = counts.latest(stores), sessions.next_due_ms
        since_ms, held_by = timers.longest_held or (timers.civil.now_ms(), None)
        return TimersSection(
            **counts.totals,
            lateness=histogram(counts.lateness),
            pending=sum(report.pending for report in reports),
            unknown=sum(report.unknown for report in reports),
            held=timers.held,
            held_by=held_by,
            held_seconds=(timers.civil.now_ms() - since_ms) / 1000,
            clock_ahead_seconds=timers.civil.differs_ms / 1000,
            next_due_ms=min((ms for each in stores if (ms := dues_ms.get(each)) is not None), default=None),
        )

    def _budgets(self, status: CoordinatorStatus, source: SourceStatus) -> dict[str, Budget]:
        rules, (lines_bytes, most_lines) = self._shards.rules, source.lines
        budgets = {
            "buffer": Budget(used_bytes=status.buffered_bytes, limit_bytes=rules.buffer_bytes),
            "segments": Budget(used_bytes=status.segment_bytes, limit_bytes=rules.segment_disk_bytes),
        }
        if most_lines:
            budgets["lines"] = Budget(used_bytes=lines_bytes, limit_bytes=most_lines)
        return budgets


def _counts(counts: Any) -> dict[str, Any]:
    return {} if counts is None else {"records": counts.records, "rows": counts.rows, "bytes": counts.bytes}
