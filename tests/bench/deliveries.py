"""Batches as a runtime gives them to the coordinator: departures of one hour, on shards side by side."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from mldserver.effects import Effects
from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome, BatchOutline

__all__ = ["HOUR_MS", "SHARDS", "START_MS", "Delivered", "deliveries"]

SHARDS = tuple(f"shardId-{number:012d}" for number in range(3))
START_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
_CARRIERS = np.array(["UA", "B6", "EV", "DL", "AA", "MQ", "US", "9E", "WN", "VX", "FL", "AS", "F9", "YV"])
_FIRST = 49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898
"""Sequence numbers of Kinesis have 56 digits."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """One batch on its way to the coordinator."""

    shard_id: str
    outcome: BatchOutcome


def deliveries(rows: int, *, batch: int = 10_000, closing: bool = True) -> list[Delivered]:
    """Return batches of at most ``batch`` rows, the shards in turn: ``rows`` rows of one hour, in order of time.

    ``batch``: the most that a daemon sends (KCL: ``maxRecords`` is 10,000). ``closing``: each shard has one more row
    in a batch of its own, which lies in the next hour, so that the last of them closes the window.
    """
    dice = np.random.default_rng(rows)
    places = np.arange(rows, dtype=np.int64)
    event_ms = START_MS + places * HOUR_MS // max(rows, 1)
    by_shard: list[list[Delivered]] = []
    for index, shard_id in enumerate(SHARDS):
        own = places[index :: len(SHARDS)]
        chunks = [own[at : at + batch] for at in range(0, len(own), batch)]
        made = [_delivered(shard_id, chunk, event_ms[chunk], dice) for chunk in chunks]
        if closing:
            made.append(_delivered(shard_id, np.array([rows + index]), np.array([START_MS + HOUR_MS]), dice))
        by_shard.append(made)
    in_turn = itertools.zip_longest(*by_shard)
    return [each for several in in_turn for each in several if each is not None]


def _delivered(
    shard_id: str, places: np.ndarray, event_ms: np.ndarray, dice: np.random.Generator
) -> Delivered:
    # Arrival times are approximate: neighbours are swapped now and then.
    arrival_ms = event_ms + dice.integers(0, 40, len(places))
    rows = pa.table(
        {
            "carrier": pa.array(dice.choice(_CARRIERS, len(places))),
            "delay": pa.array(dice.normal(12, 40, len(places)).round(0)),
            "scheduled": pa.array(event_ms * 1000, pa.timestamp("us", tz="UTC")),
            "_time": pa.array(np.maximum.accumulate(arrival_ms), pa.int64()),
            "_shard": pa.array([shard_id] * len(places), pa.string()),
            "_sequence": pa.array([str(_FIRST + place) for place in places.tolist()], pa.string()),
            "_sub_sequence": pa.array(np.zeros(len(places), np.int64)),
            "_arrival": pa.array(arrival_ms, pa.timestamp("ms", tz="UTC")),
        }
    )
    outline = BatchOutline(
        records=len(places),
        duplicates=0,
        first=Sequence(_FIRST + int(places[0])),
        last=Sequence(_FIRST + int(places[-1])),
        latest_arrival_ms=int(arrival_ms.max()),
        millis_behind_latest=1000,
    )
    return Delivered(shard_id, BatchOutcome(outline, Effects(rows)))
