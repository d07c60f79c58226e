"""Other servers, as one of them sees them: who counts which shard, and who is overdue."""

from __future__ import annotations

from mldserver.coordinator.peers import Peers
from mldserver.state.ledger import ServerState, ShardState

OWN = "own"


def told(server_id: str, beat_ms: int) -> ServerState:
    return ServerState(server_id, beat_ms)


class Ledger:
    """What the ledger shows."""

    def __init__(self) -> None:
        self.peers = Peers(OWN, timeout_ms=1000)
        self.beats: dict[str, int] = {OWN: 1}
        self.shards: dict[str, ShardState] = {}

    def own(self, shard_id: str, owner: str | None, epoch: int = 1, *, ended: bool = False) -> None:
        self.shards[shard_id] = ShardState(shard_id, epoch, owner=owner, ended=ended)

    def look(self, now_ms: int = 0) -> Peers:
        servers = {server_id: told(server_id, beat) for server_id, beat in self.beats.items()}
        self.peers.learn(servers, self.shards, now_ms)
        return self.peers


def test_a_server_alone_has_no_peers() -> None:
    peers = Ledger().look()
    assert (len(peers), peers.told(), peers.overdue(10_000)) == (0, (), ())


def test_a_shard_counts_elsewhere_once_its_owner_has_beaten_since_it_was_seen_to_own_it() -> None:
    ledger = Ledger()
    ledger.beats["two"] = 5
    ledger.own("a", "two")
    assert not ledger.look().counts("a")
    assert not ledger.look().counts("a")
    ledger.beats["two"] = 6
    assert ledger.look().counts("a")
    assert ledger.look().counts("a")


def test_a_shard_that_changes_hands_counts_again_only_after_the_new_owners_beat() -> None:
    ledger = Ledger()
    ledger.beats |= {"two": 5, "three": 5}
    ledger.own("a", "two")
    ledger.look()
    ledger.beats |= {"two": 6, "three": 6}
    assert ledger.look().counts("a")
    ledger.own("a", "three", 2)
    assert not ledger.look().counts("a")
    ledger.beats["two"] = 7
    assert not ledger.look().counts("a")
    ledger.beats["three"] = 7
    assert ledger.look().counts("a")
    ledger.own("a", "three", 3)
    assert not ledger.look().counts("a"), "opened again: it may have been elsewhere in between"


def test_a_shard_of_this_server_of_nobody_or_of_a_server_that_is_gone_counts_nowhere_else() -> None:
    ledger = Ledger()
    ledger.beats["two"] = 5
    for shard_id, owner in (("mine", OWN), ("free", None), ("lost", "buried")):
        ledger.own(shard_id, owner)
    ledger.own("over", "two", ended=True)
    ledger.look()
    ledger.beats |= {OWN: 2, "two": 6}
    peers = ledger.look()
    assert [shard for shard in (*ledger.shards, "unknown") if peers.counts(shard)] == []


def test_a_shard_whose_owner_is_buried_counts_no_more() -> None:
    ledger = Ledger()
    ledger.beats["two"] = 5
    ledger.own("a", "two")
    ledger.look()
    ledger.beats["two"] = 6
    assert ledger.look().counts("a")
    del ledger.beats["two"]
    ledger.own("a", None)
    assert not ledger.look().counts("a")
    assert ledger.look().told() == ()


def test_a_server_is_overdue_when_its_beat_stands_still_on_the_clock_of_the_one_that_looks() -> None:
    ledger = Ledger()
    ledger.beats["two"] = 999_999_999  # its own clock is far ahead
    assert ledger.look(0).overdue(999) == ()
    assert ledger.look(900).overdue(1000) == (told("two", 999_999_999),)
    ledger.beats["two"] = 3  # or far behind, and it lives
    assert ledger.look(1000).overdue(1500) == ()
    assert [each.server_id for each in ledger.look(1500).overdue(2000)] == ["two"]
