"""What a handler must give that counts the records and firings of each key: a sequential model of timers replays its calls.

Each call counts one more in ``ctx.state`` and gives a row with that number, so the rows of a key tell in which order its records and
timers were called. The model goes through the calls in that order: it sets, replaces and cancels timers as the records say, and finds
whatever fires twice, too early, out of order, after it was cancelled, or not at all. Nothing of the server's code is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

import msgspec

ATTEMPTS: Final = 3
"""Calls of a callback that fails, before it is a dead letter."""
SKIPS: Final = "brief"
"""The callback whose timers are skipped when they are late."""


class Act(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a record does with one timer of its key. As JSON it is part of the record."""

    timer: str
    """The callback, or "callback/name"."""
    due: int | None = None
    """When it is due, ms; None: the record cancels it, unless it has ``after``."""
    after: int | None = None
    """How many ms after the record's arrival it is due."""
    fails: int = 0
    """How many calls of the callback fail first; -1: all."""
    again: tuple[int, ...] = ()
    """The callback sets its timer again: so many ms later, each time one of them."""
    drops: str = ""
    """The callback cancels this timer of its key."""

    @property
    def cancels(self) -> bool:
        """Whether it cancels a timer."""
        return self.due is None and self.after is None


class Firing(NamedTuple):
    """One timer as it was set once: what may fire once."""

    key: str
    timer: str
    n: int
    """The number of the record that began it."""
    link: int = 0
    """How often its callback has set it again since."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A call with a record."""

    n: int
    acts: Sequence[Act]
    arrival_ms: int
    put_ms: int
    """When it could be read."""
    seen: Sequence[str] | None = None
    """The timers of its key that the call found (``Firing`` as ``shown`` gives it), in their order."""
    again: bool = False
    """Whether it was a dead letter, and came at a time of its own."""


@dataclass(frozen=True, slots=True)
class Fired:
    """A call with a timer."""

    firing: Firing
    at_ms: int
    """When the timer was due, as the callback saw it."""
    attempt: int
    seen: Sequence[str] | None = None
    again: bool = False
    """Whether the timer was a dead letter."""


Call = Recorded | Fired


@dataclass(frozen=True, slots=True)
class Rules:
    """How the pipeline treats timers that fail or are late."""

    letters: Collection[Firing] = ()
    """Those that were a dead letter at any time."""
    keeps_letters: bool = True
    """Whether what fails for good is kept as a dead letter."""
    skips: bool = True
    """Whether firings may have been late, so that timers with ``max_lateness`` are skipped."""
    early_ms: int = 0
    """How far the server's clock may be ahead of the stream's."""


@dataclass(slots=True)
class _Pending:
    firing: Firing
    act: Act
    due_ms: int
    number: int

    @property
    def vanishes(self) -> bool:
        """Whether it may be gone without a firing: it fails too often."""
        return not 0 <= self.act.fails < ATTEMPTS

    def skipped(self, rules: Rules) -> bool:
        return rules.skips and self.firing.timer.partition("/")[0] == SKIPS


def shown(timer: str, n: int, link: int) -> str:
    """Return how a call names a timer that it finds."""
    return f"{timer}:{n}.{link}"


@dataclass(slots=True)
class Model:
    """The timers of one key, from its calls one by one."""

    key: str
    rules: Rules
    broken: list[str] = field(default_factory=list)
    ever: dict[Firing, _Pending] = field(default_factory=dict)
    """All that were set."""
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _number: int = 0

    def run(self, calls: Sequence[Call]) -> Self:
        """Go through all calls of the key, in their order."""
        first_put_ms: list[int | None] = [None] * (len(calls) + 1)
        for place in range(len(calls) - 1, -1, -1):  # the earliest record that is called behind a place
            call, later = calls[place], first_put_ms[place + 1]
            if isinstance(call, Recorded) and not call.again:
                later = call.put_ms if later is None else min(later, call.put_ms)
            first_put_ms[place] = later
        for call, put_ms in zip(calls, first_put_ms[1:], strict=True):
            if isinstance(call, Recorded):
                self._record(call)
            else:
                self._fire(call, put_ms)
        return self._end()

    def _tell(self, text: str) -> None:
        self.broken.append(f"{self.key}: {text}")

    def _record(self, call: Recorded) -> None:
        self._look(f"record {call.n}", call.seen)
        for act in call.acts:
            if act.cancels:
                self._pending.pop(act.timer, None)
            else:
                due_ms = call.arrival_ms + (act.after or 0) if act.due is None else act.due
                self._set(Firing(self.key, act.timer, call.n), act, due_ms)

    def _set(self, firing: Firing, act: Act, due_ms: int) -> None:
        self._number += 1
        self._pending[firing.timer] = self.ever[firing] = _Pending(firing, act, due_ms, self._number)

    def _fire(self, call: Fired, put_ms: int | None) -> None:
        firing, name = call.firing, shown(*call.firing[1:])
        held = self._pending.get(firing.timer)
        due = held is not None and held.firing == firing
        told = held if due else self.ever.get(firing)
        # A dead letter has left its timer's place to others.
        if told is None or not (due or call.again):
            self._tell(f"{name} fired, pending is {held and shown(*held.firing[1:])}")
            return
        if not call.again:
            self._check_time(name, told, call, put_ms)
        if due:
            del self._pending[firing.timer]
        self._look(name, call.seen)
        self._pending.pop(told.act.drops, None)
        if told.act.again:
            step, *rest = told.act.again
            act = msgspec.structs.replace(told.act, again=tuple(rest))
            self._set(firing._replace(link=firing.link + 1), act, told.due_ms + step)

    def _check_time(self, name: str, held: _Pending, call: Fired, put_ms: int | None) -> None:
        """Compare a firing with its due time, with the records behind it, and with the other timers that are due."""
        first = call.attempt == 0
        if (
            first is not (call.at_ms == held.due_ms)
            or call.at_ms < held.due_ms
            or call.attempt > held.act.fails
        ):
            self._tell(f"{name} was due at {held.due_ms} and fired at {call.at_ms}, attempt {call.attempt}")
        if put_ms is not None and put_ms <= call.at_ms - self.rules.early_ms:
            self._tell(f"{name} was due at {call.at_ms} and fired before a record of {put_ms}")
        before = [
            shown(*other.firing[1:])
            for other in self._pending.values()
            if (other.due_ms, other.number) < (held.due_ms, held.number)
            and not (other.act.fails or other.skipped(self.rules))
        ]
        if first and before:
            self._tell(f"{name} fired before {before}, which were due")

    def _look(self, name: str, seen: Sequence[str] | None) -> None:
        """Compare the timers that a call has found."""
        if seen is None:
            return
        held = sorted(self._pending.values(), key=lambda each: (each.due_ms, each.number))
        sure = [
            shown(*each.firing[1:]) for each in held if not each.act.fails and not each.skipped(self.rules)
        ]
        gone = {shown(*each.firing[1:]) for each in held if each.vanishes or each.skipped(self.rules)}
        known = {shown(*each.firing[1:]) for each in held}
        in_order = [each for each in seen if each in set(sure)]
        if (
            in_order != sure
            or not known - gone <= set(seen)
            or not set(seen) <= known
            or len(set(seen)) < len(seen)
        ):
            pending = [f"{shown(*each.firing[1:])} ({each.due_ms}, fails {each.act.fails})" for each in held]
            self._tell(f"{name} found {list(seen)}, pending are {pending}")

    def _end(self) -> Self:
        rules = self.rules
        for held in self._pending.values():
            letter = held.firing in rules.letters
            if held.skipped(rules) or letter or (held.vanishes and not rules.keeps_letters):
                continue
            self._tell(f"{shown(*held.firing[1:])} was due at {held.due_ms} and never fired")
        return self


def check_timers(calls: Mapping[str, Iterable[tuple[int, Call]]], rules: Rules) -> list[str]:
    """Replay the calls of each key, given with their numbers; return what is wrong."""
    broken: list[str] = []
    ever: dict[Firing, object] = {}
    for key, numbered in sorted(calls.items()):
        ordered = sorted(numbered, key=lambda each: each[0])
        numbers = [number for number, _ in ordered]
        if numbers != list(range(1, len(numbers) + 1)):
            broken.append(f"{key}: its calls have the numbers {numbers}")
            continue
        model = Model(key, rules).run([call for _, call in ordered])
        broken += model.broken
        ever |= model.ever
    return broken + [
        f"{firing} is a dead letter and was never set"
        for firing in sorted(rules.letters)
        if firing not in ever
    ]


def firing_of(key: str | None, timer: str, payload: Any) -> Firing:
    """Return which firing a payload belongs to."""
    return Firing(key or "", timer, payload["n"], payload["link"])
