import pytest

from mldserver.testing import JavaThrow, LeaseTable, Place
from mldserver.testing.fake_stream import SHARD_END, TRIM_HORIZON, CheckpointRange


def checkpointer(*delivered: Place, initial: Place = TRIM_HORIZON) -> tuple[CheckpointRange, list[Place]]:
    stored: list[Place] = []
    core = CheckpointRange(initial, stored.append)
    for place in delivered:
        core.delivered(place)
    return core, stored


def refused(core: CheckpointRange, number: str | None, sub: int | None = None) -> str:
    with pytest.raises(JavaThrow) as caught:
        core.checkpoint(number, sub)
    return caught.value.simple_name


def test_places_compare_as_integers_between_sentinels() -> None:
    rising = [
        Place("AT_TIMESTAMP"),
        TRIM_HORIZON,
        Place("LATEST"),
        Place("9"),
        Place("10"),
        Place("10", 1),
        SHARD_END,
    ]
    falling = rising[::-1]
    assert sorted(falling, key=Place.order) == rising
    assert [str(place) for place in rising[-3:]] == ["10", "10/1", "SHARD_END"]


def test_null_means_everything_delivered() -> None:
    core, stored = checkpointer(Place("5"), Place("7", 2))
    core.checkpoint(None, None)
    assert stored == [Place("7", 2)]


def test_null_before_any_record_stores_nothing() -> None:
    core, stored = checkpointer()
    core.checkpoint(None, None)
    assert stored == []


def test_a_missing_sub_sequence_number_counts_as_zero() -> None:
    core, stored = checkpointer(Place("7", 2))
    core.checkpoint("7", None)
    assert stored == [Place("7", 0)]


@pytest.mark.parametrize(
    ("number", "sub"),
    [("8", 0), ("4", 9), ("7", 3), ("nonsense", None), ("", None), ("7", -1), ("SHARD_END", 0)],
)
def test_outside_last_checkpoint_and_last_delivered_is_an_illegal_argument(
    number: str, sub: int | None
) -> None:
    core, stored = checkpointer(Place("5"), Place("7", 2))
    core.checkpoint("5", 0)
    assert refused(core, number, sub) == "IllegalArgumentException"
    assert stored == [Place("5")]


def test_the_shard_end_takes_null_or_the_last_record() -> None:
    for number in (None, "7", "SHARD_END"):
        core, stored = checkpointer(Place("7"))
        core.reach_end()
        core.checkpoint(number, None)
        assert stored == [SHARD_END]


def test_the_shard_end_by_its_last_record_stores_nothing_when_that_was_the_last_checkpoint() -> None:
    """ShardRecordProcessorCheckpointer.advancePosition compares what was asked; null is the safe form."""
    core, stored = checkpointer(Place("7"))
    core.checkpoint("7", None)
    core.reach_end()
    core.checkpoint("7", None)
    assert core.last == Place("7")
    core.checkpoint(None, None)
    assert stored == [Place("7"), SHARD_END]


def test_a_failed_store_leaves_the_last_checkpoint() -> None:
    def store(_place: Place) -> None:
        raise JavaThrow("ThrottlingException", "too often")

    core = CheckpointRange(TRIM_HORIZON, store)
    core.delivered(Place("3"))
    assert refused(core, "3") == "ThrottlingException"
    assert core.last == TRIM_HORIZON


def test_a_checkpoint_under_an_old_token_is_a_shutdown_exception() -> None:
    table = LeaseTable()
    old = table.acquire("s")
    new = table.acquire("s")
    with pytest.raises(JavaThrow, match="ShutdownException"):
        table.store("s", old, Place("1"))
    table.store("s", new, Place("1"))
    assert table.checkpoints == {"s": Place("1")}


def test_a_stolen_lease_refuses_until_it_is_granted_and_taken_again() -> None:
    table = LeaseTable()
    token = table.acquire("s")
    table.lose("s")
    assert table.elsewhere("s")
    with pytest.raises(JavaThrow, match="ShutdownException"):
        table.store("s", token, Place("1"))
    table.grant("s")
    assert not table.elsewhere("s")
    with pytest.raises(JavaThrow, match="ShutdownException"):
        table.store("s", token, Place("1"))
    table.store("s", table.acquire("s"), SHARD_END)
    assert table.ended("s")


def test_a_graceful_loss_lets_the_last_checkpoint_through() -> None:
    table = LeaseTable()
    token = table.acquire("s")
    table.lose("s", graceful=True)
    assert table.leaving("s")
    table.store("s", token, Place("1"))
    table.lose("s")
    assert not table.leaving("s")
    assert table.elsewhere("s")


def test_checkpoints_are_refused_on_request_and_by_probability() -> None:
    table = LeaseTable()
    token = table.acquire("s")
    table.refuse("s", times=2)
    table.refuse("s", error="KinesisClientLibDependencyException")
    for error in ("ThrottlingException", "ThrottlingException", "KinesisClientLibDependencyException"):
        with pytest.raises(JavaThrow, match=error):
            table.store("s", token, Place("1"))
    table.store("s", token, Place("1"))
    table.throttle = 1.0
    with pytest.raises(JavaThrow, match="probability"):
        table.store("s", token, Place("1"))
    assert table.refused == {"ThrottlingException": 3, "KinesisClientLibDependencyException": 1}
    assert table.place("s") == Place("1")
