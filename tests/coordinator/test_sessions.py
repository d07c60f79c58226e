"""Sessions: the newest has its shard; checkpointed <= durable <= accepted, and exactly once whatever the borders of batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.core.flush import Buffer, BufferedBatch
from mldserver.coordinator.core.lineage import Lineage, Presence
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.core.sessions import SessionPosition, Sessions, make_reload, skips_records
from mldserver.coordinator.core.watermark import Watermark
from mldserver.errors import InternalError
from mldserver.ledger.contract import LedgerState, PositionUpdate, ShardState, StoreState, StoreUpdate
from mldserver.records import Sequence

pytestmark = [pytest.mark.quick, pytest.mark.core]

S = Sequence


@dataclass(eq=False)
class Stub:
    """A session, and whether it was told to let go."""

    shard_id: str
    epoch: int
    position: SessionPosition
    store: StoreState | None = None
    alive: bool = True
    outcomes: int = 0
    adopted: bool = False

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

    def open(self, state: ShardState, *, now_ms: int = 0, serial: int | None = None) -> Stub:
        """Open a shard. ``serial``: where the ledger has its store."""
        self.lineage.add(state.shard_id, now_ms, parents=state.parents)
        session = Stub(state.shard_id, state.epoch, SessionPosition(state.position))
        session.store = None if serial is None else StoreState(state.store, serial)
        self.sessions.open(session, state, now_ms, tells_lag=True)
        return session

    def held_by(self, now_ms: int = 1000) -> tuple[str | None, str]:
        holder = self.watermark.view(now_ms).holder
        return holder.shard_id, holder.reason


def held(*shards: ShardState, **stores: StoreState) -> LedgerState:
    return LedgerState(shards={shard.shard_id: shard for shard in shards}, stores=stores)


@pytest.fixture
def around() -> Around:
    return Around()


def test_a_shard_goes_to_its_newest_session_and_on_where_the_ledger_has_it(around: Around) -> None:
    old = around.open(ShardState("a", 1))
    around.buffer.add(BufferedBatch("a", 1, last=S(3)))
    assert around.sessions.live("a") is old
    new = around.open(ShardState("a", 2, S(2), effective_ms=500, event_ms=400))
    assert around.sessions.live("a") is new
    assert (old.alive, new.alive) == (False, True)
    assert len(around.buffer) == 0, "it comes again"
    assert around.lineage.nodes["a"].presence is Presence.CONNECTED
    assert around.lineage.nodes["a"].effective_ms == 500
    assert around.watermark.reached_ms()["a"] == 400
    assert len(around.sessions._sessions) == 1


def test_a_session_that_was_overtaken_while_it_was_opened_is_dead_and_changes_nothing(around: Around) -> None:
    new = around.open(ShardState("a", 2, S(5), effective_ms=500, event_ms=500))
    around.buffer.add(BufferedBatch("a", 2, last=S(6)))
    late = Stub("a", 1, SessionPosition(None))
    assert not around.sessions.open(late, ShardState("a", 1), 0, tells_lag=True)
    assert not late.alive
    assert around.sessions.live("a") is new
    assert len(around.buffer) == 1
    assert around.lineage.nodes["a"].effective_ms == 500


def test_a_shard_that_was_never_read_begins_at_its_parents_times_when_windows_are_cut_on_arrival(
    around: Around,
) -> None:
    around.lineage.add("p", 0, ended=True, effective_ms=700)
    around.open(ShardState("c", 1, parents=("p",)))
    assert around.watermark.reached_ms()["c"] == 700
    on_a_column = Around(on_arrival=False)
    on_a_column.lineage.add("p", 0, ended=True, effective_ms=700)
    on_a_column.open(ShardState("c", 1, parents=("p",)))
    assert on_a_column.watermark.reached_ms()["c"] is None


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
        around.buffer.add(BufferedBatch("a", 3, last=S(number)))
    around.sessions.catch_up(held(ShardState("a", 3, S(2)), ShardState("elsewhere", 7, S(9))))
    assert session.alive
    assert around.sessions.durable() == {"a": S(2)}
    assert [batch.last for batch in around.buffer.snapshot().values()] == [S(3)]


def test_a_session_whose_shard_was_opened_elsewhere_lets_go_and_claims_nothing(around: Around) -> None:
    session = around.open(ShardState("a", 3, S(1)))
    around.sessions.catch_up(held(ShardState("a", 4, S(2))))
    assert not session.alive
    assert around.sessions.durable() == {"a": S(1)}


def test_what_the_ledger_held_before_a_session_was_opened_does_not_concern_it(around: Around) -> None:
    session = around.open(ShardState("a", 3, S(1)))
    around.sessions.catch_up(held(ShardState("a", 2, S(9))))
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
        BufferedBatch("lost", 3, last=S(1)),
        BufferedBatch("kept", 3, last=S(1)),
        BufferedBatch("newer", 2, last=S(1)),
        BufferedBatch("gone", 1, last=S(1)),
    ]
    around.sessions.left_out(batches, {"lost", "newer", "gone"})
    assert (lost.alive, kept.alive, newer.alive) == (False, True, True)


S = Sequence


@pytest.mark.parametrize(
    ("start", "position", "ended", "skips"),
    [
        (S(5), S(5), False, False),
        (S(4), S(5), False, False),
        (S(5, 1), S(5, 2), False, False),
        (S(5, 3), S(5, 2), False, True),
        (S(6), S(5), False, True),
        (S(10**50), S(9 * 10**49), False, True),
        (S(6), None, False, True),
        ("TRIM_HORIZON", S(5), False, False),
        ("TRIM_HORIZON", None, False, False),
        ("LATEST", None, False, False),
        ("LATEST", S(5), False, True),
        ("AT_TIMESTAMP", S(5), False, False),
        (None, S(5), False, False),
        ("SHARD_END", S(5), False, True),
        ("SHARD_END", S(5), True, False),
        (S(6), S(5), True, False),
        ("LATEST", S(5), True, False),
    ],
)
def test_a_start_beyond_the_position_skips_records(
    start: Sequence | str | None, position: Sequence | None, ended: bool, skips: bool
) -> None:
    assert skips_records(start, position, ended=ended) is skips


def test_what_the_ledger_holds_was_accepted_before() -> None:
    place = SessionPosition(S(7))
    assert (place.accepted, place.durable, place.due()) == (S(7), S(7), None)


def test_a_checkpoint_never_passes_what_this_connection_delivered_however_far_the_ledger_is() -> None:
    place = SessionPosition(S(7))
    place.deliver(None)
    assert place.due() is None
    place.deliver(S(5))
    assert place.due() == S(5)
    place.deliver(S(4))
    assert place.due() == S(5)
    place.deliver(S(9))
    assert place.due() == S(7)


def whole_aggregates_only(*ends: Sequence) -> SessionPosition:
    """Return a position to which batches with these ends were delivered, and accepted."""
    place = SessionPosition(None, within_aggregates=False)
    for end in ends:
        place.deliver(end)
        place.accept(end)
    return place


def test_where_a_checkpoint_covers_whole_aggregates_only_it_lies_at_the_end_of_a_batch() -> None:
    place = whole_aggregates_only(S(5, 2), S(7), S(9, 1))
    seen = []
    for durable in (S(5), S(5, 2), S(6), S(7), S(9), S(9, 1)):
        place.register(durable)
        seen.append(place.due())
    assert seen == [None, S(5, 2), S(5, 2), S(7), S(7), S(9, 1)]
    place.store(S(9, 1))
    assert place.due() is None


def test_a_place_within_an_aggregate_is_kept_back_until_that_is_delivered_again() -> None:
    place = SessionPosition(S(5), within_aggregates=False)
    place.deliver(S(4))
    assert place.due() == S(4)
    place.deliver(S(5, 2))
    assert place.due() == S(4)


def test_of_very_many_batches_some_ends_are_forgotten_but_never_the_last() -> None:
    place = whole_aggregates_only(*map(S, range(1, 4001)))
    place.register(S(3000))
    due = place.due()
    assert due is not None
    assert S(2900) < due <= S(3000)
    place.register(S(4000))
    assert place.due() == S(4000)


def test_nothing_is_due_before_anything_is_durable() -> None:
    place = SessionPosition(None)
    place.accept(S(3))
    assert place.due() is None


def test_an_empty_batch_and_one_delivered_again_change_nothing() -> None:
    place = SessionPosition(S(7))
    place.accept(None)
    place.accept(S(6))
    assert place.accepted == S(7)


def test_a_position_is_due_until_the_daemon_has_stored_it() -> None:
    place = SessionPosition(None)
    place.deliver(S(9))
    place.accept(S(3))
    place.register(S(3))
    assert place.due() == S(3)
    place.store(S(3))
    assert place.due() is None
    place.accept(S(9))
    place.register(S(9))
    assert place.due() == S(9)


def test_a_registered_position_that_is_not_ahead_changes_nothing() -> None:
    place = SessionPosition(S(7))
    place.register(None)
    place.register(S(2))
    assert place.durable == S(7)


def test_an_older_checkpoint_does_not_take_a_newer_one_back() -> None:
    place = SessionPosition(S(7))
    place.store(S(7))
    place.store(S(3))
    assert place.checkpointed == S(7)


def test_a_position_never_passes_what_was_accepted() -> None:
    with pytest.raises(InternalError, match="would pass what was accepted"):
        SessionPosition(None).register(S(1))
    place = SessionPosition(S(1))
    with pytest.raises(InternalError, match="would pass what was accepted, 1"):
        place.register(S(2))


def test_a_checkpoint_never_passes_the_durable_position() -> None:
    with pytest.raises(InternalError, match="ahead of the durable position"):
        SessionPosition(None).store(S(1))
    place = SessionPosition(S(1))
    place.accept(S(2))
    with pytest.raises(InternalError, match="ahead of the durable position 1"):
        place.store(S(2))


def test_a_handler_that_keeps_its_position_claims_what_was_accepted_and_each_step_once() -> None:
    place = SessionPosition(None)
    assert place.claim(S(1)) is None
    place.accept(S(5))
    assert [place.claim(at) for at in (None, S(2), S(2), S(1), S(9), S(5))] == [
        None,
        S(2),
        None,
        None,
        S(5),
        None,
    ]
    assert SessionPosition(S(3)).claim(S(3)) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["batch", "flush", "checkpoint", "reopen"]), st.integers(1, 6)), max_size=40
    )
)
def test_every_record_is_durable_exactly_once_however_it_is_delivered_again(
    steps: list[tuple[str, int]],
) -> None:
    ledger: list[int] = []
    stored, durable = 0, None
    place, following, buffer = SessionPosition(None), 1, []
    for step, size in steps:
        if step == "batch":
            batch = list(range(following, following + size))
            following += size
            after = place.accepted.number if place.accepted else 0
            buffer += [record for record in batch if record > after]
            place.deliver(S(batch[-1]))
            place.accept(S(batch[-1]))
        elif step == "flush":
            ledger += buffer
            buffer = []
            durable = place.accepted
            place.register(durable)
        elif step == "checkpoint" and (due := place.due()) is not None:
            assert due.number < following, "beyond what was delivered"
            place.store(due)
            stored = due.number
        elif step == "reopen":  # the daemon goes on after its checkpoint, with borders of its own
            place, following, buffer = SessionPosition(durable), stored + 1, []
        order = [each or S(0) for each in (place.checkpointed, place.durable, place.accepted)]
        assert order == sorted(order)
        assert ledger == list(range(1, len(ledger) + 1))
        assert stored <= len(ledger)


# Stores.


def shard(shard_id: str, epoch: int = 1, **named: Any) -> ShardState:
    return ShardState(shard_id, epoch, store="s", **named)


def keyed(shard_id: str, position: int, epoch: int = 1) -> BufferedBatch:
    return BufferedBatch(shard_id, epoch, last=S(position), store="s")


def serial_of(around: Around) -> int:
    return around.sessions.stores()["s"][1].previous


def test_a_store_goes_on_from_where_the_ledger_had_it_when_its_first_shard_was_opened(around: Around) -> None:
    around.open(ShardState("unkeyed", 1))
    around.open(shard("a"), serial=4)
    around.open(shard("b"), serial=5)
    assert around.sessions.stores() == {"s": (StoreState("s", 4), StoreUpdate("s", 4, ("a", "b")))}
    assert around.sessions.live_stores() == {"s": StoreState("s", 4)}


def test_a_store_that_no_session_has_any_more_begins_again_without_what_its_sessions_left(
    around: Around,
) -> None:
    """What is buffered rests on a copy of the store that may lack what another server has registered since."""
    old = around.open(shard("a"), serial=4)
    around.buffer.add(keyed("a", 3))
    old.disconnected()
    assert around.sessions.live_stores() == {}
    around.open(shard("b"), serial=6)
    assert (serial_of(around), len(around.buffer)) == (6, 0)


def test_a_flush_whose_answer_was_lost_raises_a_serial_once(around: Around) -> None:
    around.open(shard("a"), serial=4).disconnected()
    lost = StoreUpdate("s", 4, ("a",))
    around.sessions.catch_up(held(), [lost])
    assert serial_of(around) == 5
    around.open(shard("a", 3), serial=7)
    around.sessions.catch_up(held(), [lost])
    assert serial_of(around) == 7, "another server has changed it meanwhile"


def test_a_flush_that_ends_while_a_shard_is_opened_counts(around: Around) -> None:
    around.open(shard("a"), serial=4).disconnected()
    around.sessions.registered([], [StoreUpdate("s", 4, ("a",))])
    around.open(shard("a", 2), serial=4)
    assert serial_of(around) == 5


def test_a_flush_raises_the_serials_of_its_stores(around: Around) -> None:
    around.open(shard("a"), serial=4)
    around.sessions.registered([], [StoreUpdate("s", 4, ("a",))])
    assert serial_of(around) == 5


def test_a_flush_whose_answer_was_lost_raises_serials_too(around: Around) -> None:
    around.open(shard("a"), serial=4)
    around.sessions.catch_up(held(), [StoreUpdate("s", 4, ("a",))])
    assert serial_of(around) == 5


def test_what_a_flush_whose_answer_was_lost_has_registered_leaves_the_buffer(around: Around) -> None:
    """Timers that fired move no position, so that only the store shows it."""
    around.open(shard("a"), serial=4)
    numbers = [around.buffer.add(BufferedBatch("a", 1, store="s")) for _ in range(3)]
    around.sessions.catch_up(held(), [StoreUpdate("s", 4, ("a",), 70)], numbers[:2])
    assert list(around.buffer.snapshot()) == numbers[2:]
    assert around.sessions.stores()["s"] == (
        StoreState("s", 5, next_due_ms=70),
        StoreUpdate("s", 5, ("a",), 70),
    )


# Timers.


def test_a_copy_that_was_read_never_hides_an_earlier_timer_that_was_set_meanwhile(around: Around) -> None:
    sessions = around.sessions
    sessions.loaded("s", None)
    assert sessions.next_due_ms == {"s": None}
    sessions.loaded("s", 70)
    sessions.next_due_ms["s"] = 60
    sessions.loaded("s", 80)
    assert sessions.next_due_ms == {"s": 60}
    sessions.loaded("s", None, 50)
    assert sessions.next_due_ms == {"s": 50}, "what the ledger says"
    sessions.forget([])
    assert sessions.next_due_ms == {}


def test_a_store_whose_first_timer_the_ledger_has_wrong_is_known(around: Around) -> None:
    around.sessions._stores["s"] = StoreState("s", next_due_ms=70)
    assert around.sessions.differs("s", None)
    assert not around.sessions.differs("s", 70)
    assert not around.sessions.differs("forgotten", 70)


def adopt(around: Around, store: str = "s", epoch: int = 2) -> Stub:
    state = ShardState("a", epoch, ended_ms=1, store=store, effective_ms=7)
    session = Stub("a", epoch, SessionPosition(None), StoreState(store, 4), adopted=True)
    around.sessions.adopt(session, state, 0)
    return session


def test_windows_do_not_wait_for_a_session_that_has_adopted_a_store(around: Around) -> None:
    session = adopt(around)
    assert around.sessions.live("a") is session
    assert around.lineage.all_ended()
    assert around.lineage.nodes["a"].effective_ms == 7
    assert around.watermark.reached_ms() == {}
    assert around.sessions.let_go(session, 0)
    assert around.lineage.all_ended()


def test_a_shard_is_not_forgotten_while_its_store_is_adopted(around: Around) -> None:
    """Timers may be due long after the stream has forgotten the shard."""
    session = adopt(around)
    assert around.lineage.forget_ended(10**9) == ()
    around.sessions.let_go(session, 0)
    assert around.lineage.forget_ended(10**9) == ("a",)


def test_a_shard_that_was_adopted_and_is_read_again_is_forgotten_as_any_other(around: Around) -> None:
    adopt(around)
    around.sessions.end(around.open(shard("a", 3), serial=4), 0)
    assert around.lineage.forget_ended(10**9) == ("a",)


@pytest.mark.parametrize(
    ("state", "left"),
    [
        (held(shard("a", ended_ms=1), s=StoreState("s")), True),
        (held(shard("a", ended_ms=1)), False),
        (held(shard("a", ended_ms=1), s=StoreState("s", closed=True)), False),
        (held(shard("a", ended_ms=1), shard("child"), s=StoreState("s")), False),
    ],
    ids=["ended", "forgotten", "closed", "family"],
)
def test_an_adopted_store_is_given_up_when_a_child_has_come(
    around: Around, state: LedgerState, left: bool
) -> None:
    session = adopt(around, epoch=1)
    around.sessions.catch_up(state)
    assert session.alive is left


def test_a_child_that_is_opened_here_ends_the_adoption_of_its_family(around: Around) -> None:
    session = adopt(around)
    around.buffer.add(BufferedBatch("a", 2, store="s"))
    around.open(shard("child"), serial=5)
    assert not session.alive
    assert (len(around.buffer), serial_of(around)) == (0, 5)


def test_a_connection_that_was_opened_after_the_adoption_keeps_the_shard(around: Around) -> None:
    session = around.open(shard("a", 3), serial=4)
    assert not adopt(around, epoch=2).alive
    assert session.alive


def test_when_one_shard_of_a_store_is_lost_all_let_go_with_what_they_gave(around: Around) -> None:
    """Also what was accepted during the flush: it must move no position past what was left out."""
    sessions = [around.open(shard(name), serial=0) for name in ("a", "b", "c")]
    other = around.open(ShardState("other", 1))
    for batch in (keyed("b", 3), keyed("c", 3), BufferedBatch("other", 1, last=S(3))):
        around.buffer.add(batch)
    around.sessions.left_out([keyed("a", 2), keyed("b", 2)], {"a"})
    assert not any(session.alive for session in sessions)
    assert other.alive
    assert [batch.shard_id for batch in around.buffer.snapshot().values()] == ["other"]
    assert around.sessions.stores() == {}
    around.open(shard("a", 2), serial=0)
    assert serial_of(around) == 0


def test_the_store_of_shards_that_are_forgotten_is_forgotten(around: Around) -> None:
    around.open(shard("a"), serial=0)
    around.open(shard("b"), serial=0)
    around.sessions.forget(["a"])
    assert serial_of(around) == 0
    around.sessions.forget(["b"])
    assert around.sessions.stores() == {}


def test_a_runtime_that_must_load_a_store_again_finds_that_no_number_follows() -> None:
    stub = Stub("a", 1, SessionPosition(None), outcomes=7)
    make_reload([stub])
    assert stub.outcomes + 1 not in {
        7,
        8,
        9,
    }  # whether or not the runtime has applied the outcome after the seventh


def test_all_live_sessions_are_those_that_have_a_shard(around: Around) -> None:
    old, other = around.open(ShardState("a", 1)), around.open(ShardState("b", 1))
    new = around.open(ShardState("a", 2))
    assert not old.alive
    assert around.sessions.all_live() == [new, other]
    other.disconnected()
    assert around.sessions.all_live() == [new]
