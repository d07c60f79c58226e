"""The sharp oracle of worlds whose handler counts the records of each key: ``support/counted.py`` with the records of a world."""

from __future__ import annotations

from collections.abc import Iterable

from simulation.outputs import Expected, Key, Outputs, key_of
from support.counted import Named, Run, check_counts, check_stored

from mldserver.ledger.contract import LedgerState
from mldserver.records import DeadLetter


def check(outputs: Outputs, letters: Iterable[DeadLetter], state: LedgerState) -> list[str]:
    """Compare the numbers in all rows, and the state in the end, with the stream; return what is wrong."""
    rows = [
        ((row["_shard"], (int(row["_sequence"]), row["_sub_sequence"])), row)
        for _, _, row in outputs.visible()
    ]
    expected = outputs.expected()
    shown, stored = {record for record, _ in rows}, {key_of(letter) for letter in letters}
    counts = {
        record: told
        for record, told in sorted(expected.items(), key=lambda each: each[0][1])
        if record in shown or (told.none and record not in stored)
    }
    runs: dict[str, list[list[Key]]] = {}
    latest: dict[str, Expected] = {}
    for record, told in counts.items():
        key = told.record.partition_key or ""
        if key not in latest or _is_absent(latest[key], told.effective_ms, outputs.plan.ttl_ms):
            runs.setdefault(key, []).append([])
        runs[key][-1].append(record)
        latest[key] = told
    broken = [
        f"{record} has the key {row['key']}"
        for record, row in rows
        if record in expected and row["key"] != expected[record].record.partition_key
    ]
    silent = frozenset(record for record, told in counts.items() if told.none)
    again = outputs.letters_ever & shown
    named = [
        Run(f"{key} ({place})", run, silent & set(run), again & set(run))
        for key, found in runs.items()
        for place, run in enumerate(found)
    ]
    broken += check_counts(named, [(record, row["counted"]) for record, row in rows])
    present = {key: len(found[-1]) for key, found in runs.items() if not latest[key].reset}
    forgotten = runs if outputs.plan.ttl_ms is not None else ()
    return broken + check_stored(outputs.out, Named.of(state), present, forgotten=forgotten)


def _is_absent(latest: Expected, now_ms: int, ttl_ms: int | None) -> bool:
    """Whether a key has no state any more at a time, after the latest of its records that counted."""
    return latest.reset or (ttl_ms is not None and latest.effective_ms + ttl_ms <= now_ms)
