"""A module is one handler for all shards; each row holds which shards it has seen so far."""

from __future__ import annotations

from mldserver import Record, Shard, batches

schema = "seen STRING"
windows = batches(max_rows=1000, max_age="1 hour")
seen: list[str] = []


def initialize(shard: Shard) -> None:
    seen.append(f"opened {shard.id}")


def process_record(record: Record) -> tuple[str]:
    seen.append(record.shard_id)
    return (" ".join(seen),)
