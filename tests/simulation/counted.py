"""The sharp oracle of worlds whose handler counts the records of each key: ``support/counted.py`` with the records of a world."""

from __future__ import annotations

from collections.abc import Iterable

from simulation.outputs import Key, Outputs, key_of
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
    written_ms: dict[str, int] = {}
    for record, told in counts.items():
        key = told.record.partition_key or ""
        ttl_ms = outputs.plan.ttl_ms
        if key not in runs or (ttl_ms is not None and written_ms[key] + ttl_ms <= told.effective_ms):
            runs.setdefault(key, []).append([])
        runs[key][-1].append(record)
        written_ms[key] = told.effective_ms
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
    forgotten = runs.keys() if outputs.plan.ttl_ms is not None else ()
    return broken + check_stored(
        outputs.out,
        Named.of(state),
        {key: len(found[-1]) for key, found in runs.items()},
        forgotten=forgotten,
    )
