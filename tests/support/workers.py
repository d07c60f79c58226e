"""Two workers of one KCL application, each with a daemon of its own, whose leases move between them."""

from __future__ import annotations

import random
from typing import Final

from mldserver.testing import FakeMLD, FakeStream, Habits, LeaseTable

__all__ = ["Application", "WorkerLeases"]

NAMES: Final = ("one", "two")


class WorkerLeases(LeaseTable):
    """The application's lease table as one worker sees it: what another owns is elsewhere."""

    def __init__(self, name: str, application: Application) -> None:
        super().__init__()
        self._leases = application.table._leases
        self._name = name
        self._application = application

    def elsewhere(self, shard_id: str) -> bool:
        return self._application.owner(shard_id) != self._name

    def lose(self, shard_id: str, *, graceful: bool = False) -> None:
        if graceful:
            super().lose(shard_id, graceful=True)
        else:
            self._application.pass_on(shard_id)


class Application:
    """The workers, their daemons, and who owns what."""

    def __init__(self, stream: FakeStream, *, seed: int, habits: Habits) -> None:
        self.table = LeaseTable()
        self.stream = stream
        self.random = random.Random(seed)
        self.moves = 0
        self._owners: dict[str, str] = {}
        self.daemons = {
            name: FakeMLD(
                stream,
                "",
                habits=habits,
                leases=WorkerLeases(name, self),
                supervised=True,
                backoff_seconds=0.02,
            )
            for name in NAMES
        }

    @property
    def finished(self) -> bool:
        return all(daemon.finished for daemon in self.daemons.values())

    @property
    def records_sent(self) -> int:
        return sum(daemon.records_sent for daemon in self.daemons.values())

    def owner(self, shard_id: str) -> str:
        if shard_id not in self._owners:
            self._owners[shard_id] = self.random.choice(NAMES)
        return self._owners[shard_id]

    def pass_on(self, shard_id: str) -> None:
        """Give a lease to the other worker, unless that one has not let go of it yet."""
        other = NAMES[1 - NAMES.index(self.owner(shard_id))]
        if shard_id not in self.daemons[other].active_shards:
            LeaseTable.lose(self.table, shard_id)
            LeaseTable.grant(self.table, shard_id)
            self._owners[shard_id] = other
            self.moves += 1

    def move_any(self) -> None:
        """Move some lease: with a last word to the server, or without."""
        shard_id = self.random.choice(list(self.stream.shards))
        daemon = self.daemons[self.owner(shard_id)]
        if shard_id in daemon.active_shards and self.random.random() < 0.5:
            daemon.leases.lose(shard_id, graceful=True)
        else:
            self.pass_on(shard_id)

    def violations(self) -> list[str]:
        """Return the servers' mistakes, but their ends, each of which ends a daemon too."""
        told = [each for daemon in self.daemons.values() for each in daemon.violations]
        return [each for each in told if "EOF" not in each and "reset" not in each]
