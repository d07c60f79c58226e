"""Sessions: the newest has its shard, and only what the ledger says of that very one concerns it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mldserver.coordinator.core.buffer import Buffer
from mldserver.coordinator.core.flush import moved
from mldserver.coordinator.core.lineage import Lineage, Presence
from mldserver.coordinator.core.sessions import Sessions, ShardPosition
from mldserver.coordinator.core.watermark import Watermark
from mldserver.coordinator.core.windows import CoordinatorRules
from mldserver.ledger.contract import PositionUpdate, ShardState
from mldserver.records import Sequence

S = Sequence


@dataclass(eq=False)
class Stub:
    """A session, and whether it was told to let go."""

    shard_id: str
    epoch: int
    position: ShardPosition
    alive: bool = True

    def disconnected(self) -> None:
        self.alive = False


@dataclass
class Around:
    """Sessions with all that they are told of and tell."""

    on_arrival: bool = True
    max_ahead_ms: int | None = None
    lineage: Lineage = field(default_factory=Lineage)
    buffer: Buffer = field(default_factory=Buffer)

    def __post_init__(self) -> None:
        rules = CoordinatorRules(
            on_arrival=self.on_arrival, settle_time_ms=1000, max_ahead_ms=self.max_ahead_ms
        )
        self.watermark = Watermark(rules, self.lineage, 0)
        self.sessions = Sessions(lineage=self.lineage, watermark=self.watermark, buffer=self.buffer)

    def open(self, state: ShardState, *, now_ms: int = 0) -> Stub:
        self.lineage.know(state.shard_id, now_ms, parents=state.parents)
        session = Stub(state.shard_id, state.epoch, ShardPosition(state.position))
        self.sessions.take_in(session, state, now_ms, tells_lag=True)
        return session

    def held_by(self, now_ms: int = 1000) -> tuple[str | None, str]:
        holder = self.watermark.view(now_ms).holder
        return holder.shard_id, holder.reason


@pytest.fixture
def around() -> Around:
    return Around()


def test_a_shard_goes_to_its_newest_session_and_on_where_the_ledger_has_it(around: Around) -> None:
    old = around.open(ShardState("a", 1))
    around.buffer.add(moved("a", 1, S(3)))
    assert around.sessions.live("a") is old
    new = around.open(ShardState("a", 2, S(2), effective_ms=500, event_ms=400))
    assert around.sessions.live("a") is new
    assert (old.alive, new.alive) == (False, True)
    assert not around.sessions.has(old)
    assert len(around.buffer) == 0, "it comes again"
    assert around.lineage["a"].presence is Presence.CONNECTED
    assert around.lineage["a"].effective_ms == 500
    assert around.watermark.shard_ms("a") == 400
    assert len(around.sessions) == 1


def test_a_session_that_was_overtaken_while_it_was_opened_is_dead_and_changes_nothing(around: Around) -> None:
    new = around.open(ShardState("a", 2, S(5), effective_ms=500, event_ms=500))
    around.buffer.add(moved("a", 2, S(6)))
    late = Stub("a", 1, ShardPosition(None))
    assert not around.sessions.take_in(late, ShardState("a", 1), 0, tells_lag=True)
    assert not late.alive
    assert around.sessions.live("a") is new
    assert len(around.buffer) == 1
    assert around.lineage["a"].effective_ms == 500


def test_a_shard_that_was_never_read_begins_at_its_parents_times_when_windows_are_cut_on_arrival(
    around: Around,
) -> None:
    around.lineage.know("p", 0, ended=True, effective_ms=700)
    around.open(ShardState("c", 1, parents=("p",)))
    assert around.watermark.shard_ms("c") == 700
    on_a_column = Around(on_arrival=False)
    on_a_column.lineage.know("p", 0, ended=True, effective_ms=700)
    on_a_column.open(ShardState("c", 1, parents=("p",)))
    assert on_a_column.watermark.shard_ms("c") is None


def test_a_shard_that_is_let_go_is_missing_unless_a_newer_session_has_it(around: Around) -> None:
    old, new = around.open(ShardState("a", 1)), around.open(ShardState("a", 2))
    assert not around.sessions.let_go(old, 0)
    assert around.held_by() == ("a", "nothing seen")
    new.alive = False
    assert around.sessions.let_go(new, 0)
    assert around.held_by() == ("a", "missing")
    assert around.sessions.live("a") is None


def test_a_shard_that_has_ended_holds_nothing_once_its_children_had_time_to_appear(around: Around) -> None:
    session = around.open(ShardState("a", 1))
    around.sessions.end(session, 5000)
    assert around.held_by(5999) == (None, "settling")
    assert around.held_by(6000) == (None, "ended")


def test_a_shard_that_is_forgotten_has_no_session(around: Around) -> None:
    around.open(ShardState("a", 1))
    around.open(ShardState("b", 1))
    around.sessions.forget(("a", "never seen"))
    assert around.sessions.live("a") is None
    assert set(around.sessions.durable()) == {"b"}


def test_a_session_learns_from_the_ledger_what_it_has_not_heard(around: Around) -> None:
    session = around.open(ShardState("a", 3, S(1)))
    for number in (2, 3):
        session.position.accept(S(number))
        around.buffer.add(moved("a", 3, S(number)))
    around.sessions.catch_up([ShardState("a", 3, S(2)), ShardState("elsewhere", 7, S(9))])
    assert session.alive
    assert around.sessions.durable() == {"a": S(2)}
    assert [batch.last for batch in around.buffer.snapshot().values()] == [S(3)]


def test_a_session_whose_shard_was_opened_elsewhere_lets_go_and_claims_nothing(around: Around) -> None:
    session = around.open(ShardState("a", 3, S(1)))
    around.sessions.catch_up([ShardState("a", 4, S(2))])
    assert not session.alive
    assert around.sessions.durable() == {"a": S(1)}


def test_what_the_ledger_held_before_a_session_was_opened_does_not_concern_it(around: Around) -> None:
    session = around.open(ShardState("a", 3, S(1)))
    around.sessions.catch_up([ShardState("a", 2, S(9))])
    assert session.alive
    assert around.sessions.durable() == {"a": S(1)}


def test_a_flush_moves_only_the_session_whose_rows_it_held(around: Around) -> None:
    session = around.open(ShardState("a", 3, S(1)))
    session.position.accept(S(2))
    stale = PositionUpdate("a", 2, S(9), None, None)
    own = PositionUpdate("a", 3, S(2), None, None)
    around.sessions.registered([stale, PositionUpdate("forgotten", 1, S(4), None, None)])
    assert around.sessions.durable() == {"a": S(1)}
    around.sessions.registered([own])
    assert around.sessions.durable() == {"a": S(2)}


def test_sessions_whose_rows_a_flush_left_out_let_go(around: Around) -> None:
    lost, kept, newer = (around.open(ShardState(shard, 3)) for shard in ("lost", "kept", "newer"))
    batches = [
        moved("lost", 3, S(1)),
        moved("kept", 3, S(1)),
        moved("newer", 2, S(1)),
        moved("gone", 1, S(1)),
    ]
    around.sessions.left_out(batches, {"lost", "newer", "gone"})
    assert (lost.alive, kept.alive, newer.alive) == (False, True, True)


@pytest.mark.parametrize(
    ("max_ahead_ms", "event_ms", "first"),
    [(100, 600, 600), (100, 601, None), (None, 10**12, 10**12), (100, None, None)],
)
def test_an_event_time_that_no_clock_can_have_shown_is_not_gone_on_from(
    max_ahead_ms: int | None, event_ms: int | None, first: int | None
) -> None:
    around = Around(on_arrival=False, max_ahead_ms=max_ahead_ms)
    around.open(ShardState("a", 1, S(2), effective_ms=500, event_ms=event_ms))
    assert around.watermark.shard_ms("a") == first
