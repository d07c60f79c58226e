"""The sharp oracle of worlds whose records set timers: ``support/timed.py`` with the calls of a world."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from simulation import timed_handlers
from simulation.outputs import EPOCH, Expected, Key, Outputs, is_timer, key_of, timer_key
from support.counted import Named, check_stored
from support.timed import Act, Call, Fired, Firing, Recorded, Rules, check_timers

from mldserver.ledger.contract import LedgerState
from mldserver.records import DeadLetter

EARLY_MS = 3000
"""How far a server's clock may be ahead of AWS's before an answer corrects it: two seconds, and those that a date has not."""
TRANSIT_MS = 1000
"""Records that came by then, but not before, may be on their way to an idle shard while its timers fire."""


def check(
    outputs: Outputs, letters: Iterable[DeadLetter], purged: Iterable[Key], state: LedgerState, start_ms: int
) -> list[str]:
    """Compare the rows of records and timers, and the state in the end, with the stream; return what is wrong."""
    plan, expected = outputs.plan, outputs.expected()
    stored = {key_of(letter) for letter in letters} | set(purged)
    early_ms = EARLY_MS if plan.clocks_differ else 2  # clocks count whole milliseconds
    rules = Rules(
        letters={_firing(key) for key in outputs.letters_ever if is_timer(key)},
        keeps_letters=plan.on_failure != "skip",
        early_ms=early_ms + TRANSIT_MS,
    )
    broken, calls = [], dict[str, list[tuple[int, Call]]]()
    rows = list(outputs.visible())
    if plan.ttl_ms is not None:  # the numbers begin again whenever state expires
        rows.sort(key=lambda each: (each[2]["_time"], each[2]["_clock"]))
    for name, _, row in rows:
        if row["timer"] is None:
            record = row["_shard"], (int(row["_sequence"]), row["_sub_sequence"])
            if record not in expected:
                continue  # what is wrong is told elsewhere
            call: Call = _recorded(expected[record], row, again=record in outputs.letters_ever)
        else:
            key = timer_key(row["key"], row["timer"], row["n"], row["link"])
            call = Fired(
                _firing(key),
                _ms(row["due"]),
                row["attempt"],
                row["seen"].split(),
                key in outputs.letters_ever,
            )
            broken += [f"{call.firing} has a row and a dead letter"] if key in stored else []
            broken += [f"{call.firing}: {wrong}" for wrong in _wrong(outputs, name, row)]
        numbered = calls.setdefault(row["key"], [])
        numbered.append((row["counted"] if plan.ttl_ms is None else len(numbered) + 1, call))
    broken += check_timers(calls, rules)
    broken += [
        f"{firing} was due at {due_ms} and was called {due_ms - called_ms} ms early"
        for firing, due_ms, seconds in timed_handlers.fired
        if (called_ms := start_ms + round(seconds * 1000)) < due_ms - early_ms
    ]
    broken += [
        f"the store {store.store_id} has a timer for {store.next_due_ms}"
        for store in state.stores.values()
        if not store.closed and store.next_due_ms is not None
    ]
    present = {} if plan.ttl_ms else {key: len(numbered) for key, numbered in calls.items()}
    return broken + check_stored(
        outputs.out, Named.of(state), present, forgotten=calls if plan.ttl_ms else ()
    )


def _recorded(told: Expected, row: dict[str, Any], *, again: bool) -> Recorded:
    acts = msgspec.convert(told.timers, tuple[Act, ...])
    return Recorded(told.n, acts, told.record.arrival_ms, told.put, row["seen"].split(), again)


def _wrong(outputs: Outputs, name: str, row: dict[str, Any]) -> list[str]:
    """Name the columns of a firing that are not what they must be."""
    wrong = outputs.wrong_window(name, row, _ms(row["due"]))
    wrong += ["it has an arrival time"] if row["_arrival"] is not None else []
    if row["_time"] < _ms(row["due"]):
        wrong.append(f"_time is {row['_time']}, before it was due")
    return wrong


def _firing(key: Key) -> Firing:
    _, name, timer = key[0].split(" ")
    return Firing(name, timer, *key[1])


def _ms(at: datetime) -> int:
    return (at.replace(tzinfo=at.tzinfo or UTC) - EPOCH) // timedelta(milliseconds=1)
