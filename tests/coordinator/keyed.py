"""A handler that counts the records of each key, as the coordinator sees it: a session's outcomes with state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from coordinator.outcomes import outcome
from coordinator.pipeline import Pipeline
from support.shards import accept

from mldserver.coordinator.shards import IntakeSession
from mldserver.effects import Effects
from mldserver.runtime.interface import BatchOutcome
from mldserver.stores import ALL_KEYS, StateChange, StateSnapshot, StoreClaim, pack_changes

CLAIM: Final = StoreClaim(ALL_KEYS)


def counts(snapshot: StateSnapshot) -> dict[str, int]:
    keys, values = (snapshot.entries.column(name).to_pylist() for name in ("key", "value"))
    assert len(set(keys)) == len(keys)
    return {key.decode(): int(value) for key, value in zip(keys, values, strict=True)}


@dataclass
class Counter:
    """A handler's process: counts the records of each key, from the snapshot that it opened with."""

    session: IntakeSession
    entries: dict[str, int] = field(default_factory=dict)
    ttl_ms: int | None = None

    async def load(self) -> None:
        assert self.session.snapshot is not None
        snapshot = await self.session.snapshot()
        assert snapshot.accepted + 1 == self.session.next_number
        self.entries = counts(snapshot)

    def run(self, records: list[tuple[int, str]], **named: Any) -> BatchOutcome:
        changed = {}
        for number, key in records:
            self.entries[key] = count = self.entries.get(key, 0) + 1
            expires_ms = None if self.ttl_ms is None else number + self.ttl_ms
            changed[key] = StateChange(key.encode(), str(count).encode(), expires_ms)
        made = outcome(self.session.shard_id, [(number, number) for number, _ in records], rows=[], **named)
        blob = pack_changes(changed.values())
        effects = Effects(dead_letters=made.effects.dead_letters, state=(blob,) if changed else ())
        return msgspec.structs.replace(made, effects=effects)

    async def give(self, *records: tuple[int, str], delivered: list[tuple[int, str]] | None = None) -> None:
        """Deliver a batch as a source does. ``delivered``: with records that were accepted earlier."""
        self.session.batch_began()
        made = self.run(list(records))
        if delivered is not None:
            whole = outcome(self.session.shard_id, [(number, number) for number, _ in delivered], rows=[])
            outline = msgspec.structs.replace(whole.outline, duplicates=len(delivered) - len(records))
            made = msgspec.structs.replace(made, outline=outline)
        await accept(self.session, made)


async def opened(
    pipeline: Pipeline, shard: str = "a", start: Any = "TRIM_HORIZON", claim: StoreClaim = CLAIM, **named: Any
) -> Counter:
    counter = Counter(await pipeline.open(shard, start, store=claim, **named))
    await counter.load()
    return counter
