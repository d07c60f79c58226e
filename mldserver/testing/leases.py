"""The lease table of a KCL application: who owns which shard, and how far it was checkpointed.

``ShardCheckpointer`` is one shard's checkpointer inside a running worker, with the rules of KCL's
``ShardRecordProcessorCheckpointer``; ``LeaseTable`` is what outlives workers.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_BELOW_ALL: Final = {"AT_TIMESTAMP": -3, "TRIM_HORIZON": -2, "LATEST": -1}


class JavaThrow(Exception):
    """An exception on the Java side, by its simple class name."""

    def __init__(self, simple_name: str, why: str) -> None:
        super().__init__(f"{simple_name}: {why}")
        self.simple_name = simple_name


class WorkerMistake(JavaThrow):
    """Thrown because of what the worker asked, not because of the state of the world."""


class Place(NamedTuple):
    """KCL's ExtendedSequenceNumber: digits or a sentinel, and a sub-sequence number. Equal when the texts are."""

    number: str
    sub: int = 0

    def order(self) -> tuple[int, int, int]:
        """Return a key that compares as the Java does: sentinels below digits, SHARD_END above.

        Raises WorkerMistake (IllegalArgumentException) for text that is neither.
        """
        if self.number == "SHARD_END":
            return (1, 0, 0)
        if self.number in _BELOW_ALL:
            return (0, _BELOW_ALL[self.number], self.sub)
        if not self.number.isdecimal():
            raise WorkerMistake("IllegalArgumentException", f"neither digits nor a sentinel: {self.number!r}")
        return (0, int(self.number), self.sub)

    def __str__(self) -> str:
        """Return the number, with ``/sub`` where there is one."""
        return f"{self.number}/{self.sub}" if self.sub else self.number


TRIM_HORIZON: Final = Place("TRIM_HORIZON")
SHARD_END: Final = Place("SHARD_END")


class ShardCheckpointer:
    """What may be checkpointed now: between the last checkpoint and the last record delivered (KCL 3.1.3)."""

    def __init__(self, initial: Place, store: Callable[[Place], None]) -> None:
        """Begin at ``initial``; ``store`` writes to the lease table and raises JavaThrow when it cannot."""
        self.last = initial
        self.largest = initial
        self._store = store
        self._last_record: Place | None = None

    def delivered(self, place: Place) -> None:
        """A record at ``place`` goes to the worker with the next message."""
        if place.order() > self.largest.order():
            self.largest = place

    def reach_end(self) -> None:
        """The shard is read to its end: SHARD_END may be stored, and the last record's place stands for it."""
        self._last_record = self.largest
        self.largest = SHARD_END

    def checkpoint(self, number: str | None, sub: int | None) -> None:
        """Checkpoint as the worker asked; a number of None means everything delivered.

        Raises WorkerMistake (IllegalArgumentException) outside the permitted range, JavaThrow when the lease table
        refuses.
        """
        if number is None:
            self._advance(self.largest)
            return
        wanted = Place(number, sub or 0)
        if wanted.sub < 0 or not self.last.order() <= wanted.order() <= self.largest.order():
            raise WorkerMistake(
                "IllegalArgumentException", f"{wanted} is not between {self.last} and {self.largest}"
            )
        self._advance(wanted)

    def _advance(self, wanted: Place) -> None:
        # The Java compares what was asked, not what would be stored: asking for the last record at the shard's end
        # stores nothing, and reports success, when exactly that record had been checkpointed before.
        if wanted == self.last:
            return
        stored = SHARD_END if wanted == self._last_record else wanted
        self._store(stored)
        self.last = stored


@dataclass(slots=True)
class _Lease:
    place: Place = TRIM_HORIZON
    token: int = 0
    """Changes hands with the lease: a checkpoint under an old token is refused."""
    elsewhere: bool = False
    """Another worker owns it."""
    leaving: bool = False
    """It is being handed over gracefully: ``shutdownRequested`` comes first."""


class LeaseTable:
    """Checkpoints and owners of one application's shards; survives every restart of a worker."""

    def __init__(self, *, seed: int = 0, throttle: float = 0.0) -> None:
        """``throttle`` is the probability (0 to 1) that a checkpoint is refused with ThrottlingException."""
        self.throttle = throttle
        self._random = random.Random(seed)  # noqa: S311  # faults that repeat, not secrets
        self._leases: dict[str, _Lease] = {}
        self._refusals: dict[str, list[str]] = {}
        self.refused: Counter[str] = Counter()
        """Checkpoints refused so far, by Java exception."""

    @property
    def checkpoints(self) -> dict[str, Place]:
        """Return the stored checkpoint of every shard that was ever leased."""
        return {shard_id: lease.place for shard_id, lease in self._leases.items()}

    def place(self, shard_id: str) -> Place:
        """Return the shard's checkpoint; TRIM_HORIZON before the first one."""
        return self._peek(shard_id).place

    def ended(self, shard_id: str) -> bool:
        """Return whether the shard's end was checkpointed."""
        return self._peek(shard_id).place == SHARD_END

    def take(self, shard_id: str) -> int:
        """Take (or renew after a restart) the lease; return the token that checkpoints must carry."""
        lease = self._lease(shard_id)
        lease.token += 1
        lease.elsewhere = lease.leaving = False
        return lease.token

    def lose(self, shard_id: str, *, graceful: bool = False) -> None:
        """Give the lease to a stranger: at once, or after a ``shutdownRequested``."""
        lease = self._lease(shard_id)
        if graceful:
            lease.leaving = True
            return
        lease.token += 1
        lease.elsewhere = True
        lease.leaving = False

    def grant(self, shard_id: str) -> None:
        """Let this application's worker have the lease again."""
        lease = self._lease(shard_id)
        lease.elsewhere = lease.leaving = False

    def elsewhere(self, shard_id: str) -> bool:
        """Return whether a stranger owns the lease."""
        return self._peek(shard_id).elsewhere

    def leaving(self, shard_id: str) -> bool:
        """Return whether the lease is about to be handed over."""
        return self._peek(shard_id).leaving

    def refuse(self, shard_id: str, *, times: int = 1, error: str = "ThrottlingException") -> None:
        """Refuse the shard's next ``times`` checkpoints with ``error``, a Java exception's simple name."""
        self._refusals.setdefault(shard_id, []).extend([error] * times)

    def store(self, shard_id: str, token: int, place: Place) -> None:
        """Store a checkpoint. Raises JavaThrow: ShutdownException without the lease, or an injected refusal."""
        lease = self._lease(shard_id)
        if lease.elsewhere or lease.token != token:
            self._refuse("ShutdownException", "another worker holds the lease")
        if refusals := self._refusals.get(shard_id):
            self._refuse(refusals.pop(0), "injected")
        if self._random.random() < self.throttle:
            self._refuse("ThrottlingException", "injected by probability")
        lease.place = place

    def _refuse(self, error: str, why: str) -> None:
        self.refused[error] += 1
        raise JavaThrow(error, why)

    def _peek(self, shard_id: str) -> _Lease:
        return self._leases.get(shard_id) or _Lease()

    def _lease(self, shard_id: str) -> _Lease:
        return self._leases.setdefault(shard_id, _Lease())
