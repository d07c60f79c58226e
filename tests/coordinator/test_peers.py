"""Other servers, as one of them sees them: who counts which shard, and who is overdue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mldserver.coordinator.core.lineage import DRAIN, Peers
from mldserver.ledger.contract import ServerState, ShardState

pytestmark = [pytest.mark.quick, pytest.mark.core]

OWN = "own"


def told(server_id: str, beat_ms: int) -> ServerState:
    return ServerState(server_id, beat_ms)


class Ledger:
    """What the ledger shows."""

    def __init__(self) -> None:
        self.peers = Peers(OWN, timeout_ms=1000)
        self.beats: dict[str, int] = {OWN: 1}
        self.states: dict[str, ServerState] = {}
        self.shards: dict[str, ShardState] = {}

    def own(self, shard_id: str, owner: str | None, epoch: int = 1, *, ended: bool = False) -> None:
        self.shards[shard_id] = ShardState(shard_id, epoch, owner=owner, ended_ms=5 if ended else None)

    def look(self, now_ms: int = 0) -> Peers:
        servers = {
            each: replace(self.states.get(each, told(each, beat)), beat_ms=beat)
            for each, beat in self.beats.items()
        }
        self.peers.update(servers, self.shards, now_ms)
        return self.peers


def test_a_server_alone_has_no_peers() -> None:
    peers = Ledger().look()
    assert (len(peers.states()), peers.states(), peers.overdue()) == (0, (), ())


def test_a_server_that_only_drains_is_a_peer_that_does_not_serve() -> None:
    ledger = Ledger()
    ledger.beats |= {"two": 1, f"{DRAIN}host:7:x": 1}
    peers = ledger.look()
    assert (len(peers.states()), peers.serving) == (2, 1)


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
    for shard_id, owner in (("mine", OWN), ("free", None), ("lost", "expired")):
        ledger.own(shard_id, owner)
    ledger.own("over", "two", ended=True)
    ledger.look()
    ledger.beats |= {OWN: 2, "two": 6}
    peers = ledger.look()
    assert [shard for shard in (*ledger.shards, "unknown") if peers.counts(shard)] == []


def test_a_shard_whose_owner_is_expired_counts_no_more() -> None:
    ledger = Ledger()
    ledger.beats["two"] = 5
    ledger.own("a", "two")
    ledger.look()
    ledger.beats["two"] = 6
    assert ledger.look().counts("a")
    del ledger.beats["two"]
    ledger.own("a", None)
    assert not ledger.look().counts("a")
    assert ledger.look().states() == ()


def test_a_server_is_overdue_when_its_beat_stands_still_on_the_clock_of_the_one_that_looks() -> None:
    ledger = Ledger()
    ledger.beats["two"] = 999_999_999  # its own clock is far ahead
    for now_ms in (0, 500, 999):
        assert ledger.look(now_ms).overdue() == ()
    assert ledger.look(1000).overdue() == (told("two", 999_999_999),)
    assert ledger.peers.silent_ms["two"] == 1000
    ledger.beats["two"] = 3  # or was set back, and it lives
    for now_ms in (1100, 1600, 2099):
        assert ledger.look(now_ms).overdue() == ()
    assert [each.server_id for each in ledger.look(2100).overdue()] == ["two"]


def test_time_in_which_this_server_did_not_look_says_little_of_the_others() -> None:
    """The ledger was out of everybody's reach for an hour: whoever is back first expires nobody."""
    ledger = Ledger()
    ledger.beats["two"] = 5
    ledger.look(0)
    assert ledger.look(3_600_000).overdue() == ()
    ledger.beats["two"] = 6
    assert ledger.look(3_600_400).overdue() == ()
    assert ledger.look(7_200_000).overdue() == ()
    assert ledger.look(7_200_500).overdue() == (told("two", 6),)


def test_a_server_that_misses_its_beats_is_not_idle_for_the_others_any_more() -> None:
    ledger = Ledger()
    ledger.beats |= {"idle": 5, "busy": 5}
    ledger.states["idle"] = ServerState("idle", 0, None, idle=True, reason="idle")
    ledger.states["busy"] = ServerState("busy", 0, 700, held_by="z", reason="behind")
    ledger.look(0)
    assert [each.idle for each in ledger.look(499).states()] == [True, False]
    idle, busy = ledger.look(500).states()
    assert idle == ServerState("idle", 5, None, idle=False, reason="silent")
    assert busy == ServerState("busy", 5, 700, held_by="z", reason="behind"), "holds where it last told"
    ledger.beats["idle"] = 6
    assert [each.idle for each in ledger.look(600).states()] == [True, False]


def test_a_shard_is_owned_from_its_opening_on_until_its_owner_is_gone() -> None:
    ledger = Ledger()
    ledger.beats["two"] = 5
    ledger.own("a", "two")
    ledger.own("mine", OWN)
    assert [ledger.look().owns(shard) for shard in ("a", "mine", "unknown")] == [True, False, False]
    ledger.own("a", None)
    assert not ledger.look().owns("a")
