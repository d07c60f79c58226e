"""Which calls a batch takes when some fail: a synchronous core that only decides.

The shell asks the plan for the next call (``BatchPlan.step``), makes it, and reports the result. The rules, where
``FailurePolicy.ending`` says whether a failed record is called again:

* One record a call (``process_record``): the failing record alone is called again until it succeeds or ends; then the
  plan goes on behind it. The handler never sees a later record before that is decided.
* A whole batch a call (``process_records``, ``process_table``): the batch is called again, and when that is over the
  failing record is searched by halving. A part that succeeds is done: no record is processed successfully twice because
  of another one. A half is not called when it is known to hold the failure (the other one succeeded), and what lies
  behind the first record that was found is called in one piece. So one bad record among n costs ``attempts`` calls of
  the batch, ceil(log2 n) to find it, at most one for it alone, and at most one for the rest.
* Records that are named (rows that cannot be taken, ``BatchResult``, ``Fatal(records=…)``): the others are done or
  called again without them; only those are tried again, or end.
* A call that returns something of the wrong shape (``Failure.whole_call``) fails for all its records: the handler's code
  is at fault, and smaller calls would hide that.
* Where the end of a part would be ``halt``, nothing is searched: the shard stops.
* When keys are parked, the records behind a dead letter of their key that were not handed over yet are dead letters too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from mldserver import records
from mldserver.handler.failure import Failure
from mldserver.runtime.failure_policy import Ending, FailurePolicy


class Step(msgspec.Struct, frozen=True):
    """The next call: for these records of the batch, in this order."""

    indices: Sequence[int]
    failures: int = 0
    """How often the call has failed in a row. From 1 on it waits for a back-off."""
    after_seconds: float | None = None
    """Seconds that the call waits; None: as long as the back-off of ``failures``."""
    halved: bool = False


class Again(msgspec.Struct, frozen=True):
    """A failure that will be tried again, or that stops the shard."""

    index: int
    """The failing record, or the first of the failing part."""
    failure: Failure
    attempt: int
    """Which call failed, from 1."""


class End(msgspec.Struct, frozen=True):
    """How a record ended that has no rows."""

    ending: Ending
    failure: Failure
    attempts: int
    """Failed calls that included the record."""
    behind: records.Sequence | None = None
    """The dead letter of its key that it must not overtake, if it is parked."""


@dataclass(slots=True)
class BatchPlan:
    """Decides which call comes next, and how failed records end, for the records ``indices`` of one batch."""

    indices: Sequence[int]
    policy: FailurePolicy
    fresh: Sequence[records.Record]
    """The batch's records. Read only after a failure, as are ``arrivals_ms``."""
    arrivals_ms: Sequence[int]
    """The arrival time of each record, or its time of receipt if the daemon does not say."""
    ends: dict[int, End] = field(default_factory=dict)
    """The records that ended without rows."""
    halted: Again | None = None
    """The failure that stops the shard."""
    exhausted: bool = False
    """Whether ``step`` has reported that every record is decided. Before that, a call may be running."""
    parked: dict[str, records.Sequence] = field(default_factory=dict)
    """The keys with a dead letter of this batch, with its sequence; only when keys are parked."""
    todo: list[Step] = field(default_factory=list)
    """A stack: the next call is the last item. Empty: every record is decided, unless a call is running."""
    fires: bool = False
    """Whether the records are timers: one that must be called again is not called in this batch (``Ending.AGAIN``)."""
    calls: dict[int, int] = field(default_factory=dict)
    """The number of failed calls of each record that has any. Those of timers include earlier batches."""
    _suspect: Step | None = None
    """The right half of the part that failed last. If the left half succeeds, the right half holds the failure."""
    _merging: bool = True
    """Whether at most one bad record was found: the records after it are then called in one piece."""
    _merged: Step | None = None
    _by_key: dict[str | None, list[int]] | None = None

    def __post_init__(self) -> None:
        """Begin with one call for all records."""
        if self.indices:
            self.todo.append(Step(self.indices))

    @property
    def attempts(self) -> int:
        """The largest number of calls that any record took, failed and successful."""
        if not self.calls:
            return 1
        return max(calls + (index not in self.ends) for index, calls in self.calls.items())

    def step(self) -> Step | None:
        """Remove the next call from the plan and return it; None if every record is decided, or the shard stops."""
        if self.halted is not None:
            return None
        while self.todo:
            step = self.todo.pop()
            if step is not self._suspect or len(step.indices) == 1:
                return step
            self._halve(step)
        self.exhausted = True
        return None

    def condemn(self, faults: Mapping[int, Failure], now_ms: int) -> None:
        """End records that cannot be called, before the first call. They are not retried, whatever a rule says."""
        for index in self._drop(faults):
            ending = self._ending((index,), faults[index], now_ms)
            for_good = Ending(self.policy.on_failure) if ending in {None, Ending.AGAIN} else ending
            self._end(index, for_good, faults[index])

    def park(self, keys: Mapping[str, records.Sequence], *, behind: int = -1) -> None:
        """Make records of these keys dead letters: they wait behind a dead letter of their key.

        Ignores records that the handler has had, and records up to the index ``behind``.
        """
        if self._by_key is None:
            self._by_key = {}
            for index in self.indices:
                self._by_key.setdefault(self.fresh[index].partition_key, []).append(index)
        for key, sequence in keys.items():
            for index in self._drop([each for each in self._by_key.get(key, ()) if each > behind]):
                failure = Failure(f"Parked: it waits behind {sequence}, a dead letter of its partition key")
                self.ends[index] = End(Ending.DEAD_LETTER, failure, self.calls.get(index, 0), sequence)

    def failed_at(self, step: Step, place: int, failure: Failure, now_ms: int) -> Again | None:
        """Handle a failed call for one record of a step. Earlier records are done, later ones were not called.

        Returns the record's next attempt, or None if the record ended (or the shard stops).
        """
        rest = step.indices[place + 1 :]
        if rest:
            self.todo.append(Step(rest))
        return self.failed(Step(step.indices[place : place + 1]), failure, now_ms)

    def failed(self, step: Step, failure: Failure, now_ms: int) -> Again | None:
        """Handle a failed call for all records of a step.

        Returns the next attempt (of the step, or of its halves), or None if the records ended (or the shard stops).
        """
        self._suspect = None
        if step is self._merged:
            self._merging = False
        indices, first = step.indices, step.indices[0]
        ending = self._ending(indices, failure, now_ms)
        again = Again(first, failure, self.calls[first])
        if ending is None and (len(indices) == 1 or not step.halved or failure.whole_call):
            self.todo.append(Step(indices, again.attempt, failure.after_seconds, step.halved))
            return again
        if ending is Ending.HALT:
            self.halted = again
            return None
        if ending is not None and failure.whole_call:
            for index in indices:
                self._end(index, ending, failure)
            return None
        if len(indices) > 1:
            self._halve(step)
            return again
        assert ending is not None, "a single record without an end was called again above"
        self._end(first, ending, failure)
        if step.halved and self._merging:
            # A bad record was found: all remaining parts of the search may be good, so one call takes them.
            rest: list[int] = []
            while self.todo and self.todo[-1].halved and not self.todo[-1].failures:
                rest += self.todo.pop().indices
            if rest:
                self._merged = Step(rest, halved=True)
                self.todo.append(self._merged)
        return None

    def named(self, step: Step, indices: Iterable[int], failure: Failure, now_ms: int) -> list[Again]:
        """Handle a call that failed because of the named records; the others are called again without them."""
        named = sorted(set(indices))
        rest = [index for index in step.indices if index not in set(named)]
        if rest:
            self.todo.append(Step(rest, halved=step.halved))
        return self.faulty(step, dict.fromkeys(named, failure), now_ms)

    def faulty(self, step: Step, faults: Mapping[int, Failure], now_ms: int) -> list[Again]:
        """Handle a call that succeeded except for some of its records; the others are done.

        Returns the failed records' next attempts.
        """
        indices, self._suspect = sorted(faults), None
        endings = {index: self._ending((index,), faults[index], now_ms) for index in indices}
        again = [
            Again(index, faults[index], self.calls[index]) for index in indices if endings[index] is None
        ]
        if again:
            waits = [one.failure.after_seconds for one in again if one.failure.after_seconds is not None]
            failures = max(one.attempt for one in again)
            after = max(waits) if len(waits) == len(again) else None
            self.todo.append(Step([one.index for one in again], failures, after, step.halved))
        for index, ending in endings.items():
            if ending is not None:
                self._end(index, ending, faults[index])
        return [one for one in again if one.index not in self.ends]

    def _halve(self, step: Step) -> None:
        """Replace a call that failed, or would fail, by two calls for its halves."""
        middle = len(step.indices) // 2
        self._suspect = Step(step.indices[middle:], halved=True)
        self.todo += [self._suspect, Step(step.indices[:middle], halved=True)]

    def _ending(self, indices: Sequence[int], failure: Failure, now_ms: int) -> Ending | None:
        """Count a failed call for these records; return how they end, or None if they are called again."""
        for index in indices:
            self.calls[index] = self.calls.get(index, 0) + 1
        # The oldest record's age; computed only if the policy has a maximum. Timers have ``max_lateness``.
        aged = self.policy.max_age_ms is not None and not self.fires
        age_ms = now_ms - min(map(self.arrivals_ms.__getitem__, indices)) if aged else 0
        ending = self.policy.ending(failure, calls=self.calls[indices[0]], age_ms=age_ms)
        return Ending.AGAIN if ending is None and self.fires else ending

    def _end(self, index: int, ending: Ending, failure: Failure) -> None:
        if ending is Ending.HALT:
            self.halted = self.halted or Again(index, failure, self.calls[index])
            return
        self.ends[index] = End(ending, failure, self.calls[index])
        if ending is Ending.DEAD_LETTER and self.policy.parks:
            key, sequence = self.fresh[index].partition_key, self.fresh[index].sequence
            if key is not None:
                self.parked.setdefault(key, sequence)
                self.park({key: sequence}, behind=index)

    def _drop(self, indices: Iterable[int]) -> list[int]:
        """Remove records from the planned calls; return those that were planned."""
        unwanted, found = set(indices), list[int]()
        if not unwanted:
            return found
        kept = []
        for step in self.todo:
            found += [index for index in step.indices if index in unwanted]
            left = [index for index in step.indices if index not in unwanted]
            if left:
                # A copy is not the suspect any more: a removed record may have caused the failure.
                same = len(left) == len(step.indices)
                kept.append(step if same else msgspec.structs.replace(step, indices=left))
        self.todo = kept
        return found
