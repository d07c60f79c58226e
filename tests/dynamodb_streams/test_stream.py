"""The ordered stream for programs, against the fake of DynamoDB Streams in virtual time."""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from mldserver.dynamodb_streams import Change, Stream
from mldserver.dynamodb_streams.reader import ShardReader
from mldserver.errors import ConfigError, NotThereYet, OperatorError
from mldserver.testing import FakeStreams, VirtualClock

HOUR_MS = 3_600_000


class Scene:
    """A table with a stream, in virtual time."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.fake = FakeStreams(clock=self.clock)
        (self.root,) = self.fake.open_shards

    def put(self, *names: str, shard: str | None = None, at_ms: int | None = None) -> None:
        for name in names:
            self.fake.put({"id": name}, shard_id=shard or self.root, at_ms=at_ms)

    def stream(self, position: object = "trim_horizon", table: str = "orders", **options: Any) -> Stream:
        options = {"make_client": self.fake.client, "clock": self.clock, "random": lambda: 0.5} | options
        return Stream(table, position, **options)

    async def within(self, stream: Stream, seconds: float) -> list[str]:
        """What is handed over within so many seconds."""
        found: list[str] = []

        async def follow() -> None:
            async for change in stream:
                found.append(name(change))  # noqa: PERF401  # what came before the end counts

        following = asyncio.create_task(follow())
        await self.clock.sleep(seconds)
        following.cancel()
        await asyncio.wait({following})
        if not following.cancelled():
            following.result()
        return found

    def requests(self, action: str, shard: str | None = None) -> list[int]:
        """When an action was asked for."""
        return [
            call.steady_ms
            for call in self.fake.calls
            if call.action == action and shard in {None, call.shard_id}
        ]


def virtual(test: Callable[[Scene], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Let a test's clock run whenever everybody waits for it."""

    @functools.wraps(test)
    async def run() -> None:
        scene = Scene()
        await scene.clock.drive(test(scene))

    del run.__wrapped__
    return run


def name(change: Change) -> str:
    return str(change.keys["id"])


async def some(stream: Stream, count: int) -> list[str]:
    """The next changes."""
    return [name(await anext(stream)) for _ in range(count)]


def shards_of(token: str) -> dict[str, str]:
    return {shard["id"]: shard["iterator"] for shard in json.loads(token)["shards"]}


def times_of(token: str) -> dict[str, str | None]:
    return {shard["id"]: shard["time"] for shard in json.loads(token)["shards"]}


# The order.


@virtual
async def test_the_worked_example_comes_out(scene: Scene) -> None:
    def ago(hours: int) -> int:
        return scene.clock.now_ms() - hours * HOUR_MS

    scene.put("R00", at_ms=ago(7))
    s1, s2 = scene.fake.split(scene.root)
    for record, shard, hours in [
        ("R11", s1, 6),
        ("R12", s1, 4),
        ("R13", s1, 2),
        ("R24", s2, 4),
        ("R25", s2, 3),
        ("R26", s2, 3),
    ]:
        scene.put(record, shard=shard, at_ms=ago(hours))
    async with scene.stream() as stream:
        assert await some(stream, 7) == ["R00", "R11", "R12", "R24", "R25", "R26", "R13"]


@virtual
async def test_trap_01_an_earlier_time_inside_a_shard_does_not_reorder_it(scene: Scene) -> None:
    other = scene.fake.add_root()
    for record, second in [("1", 10), ("2", 5), ("3", 11)]:
        scene.put(record, at_ms=second * 1000)
    scene.put("x", shard=other, at_ms=7000)
    async with scene.stream() as stream:
        assert await some(stream, 4) == ["x", "1", "2", "3"]


@virtual
async def test_trap_01_nor_when_it_is_read_on_from_a_token_between(scene: Scene) -> None:
    other = scene.fake.add_root()
    for record, second in [("1", 10), ("2", 5), ("3", 11)]:
        scene.put(record, at_ms=second * 1000)
    scene.put("x", "y", shard=other, at_ms=7000)
    scene.put("z", shard=other, at_ms=9000)
    async with scene.stream() as stream:
        assert await some(stream, 4) == ["x", "y", "z", "1"]
        scene.put("late", shard=other, at_ms=9000)
        token = stream.token
    async with scene.stream(token) as stream:
        assert await some(stream, 3) == ["late", "2", "3"]


@virtual
async def test_trap_01_a_token_keeps_the_latest_time_of_a_shard_and_of_its_parents(scene: Scene) -> None:
    for record, second in [("1", 10), ("2", 5), ("3", 6)]:
        scene.put(record, at_ms=second * 1000)
    left, right = scene.fake.split(scene.root)
    scene.put("4", shard=left, at_ms=7000)
    ten = "1970-01-01T00:00:10.000+00:00"
    async with scene.stream() as stream:
        for changes in (["1", "2"], ["3"]):  # a token moves behind several at once, and behind one
            assert await some(stream, len(changes)) == changes
            assert times_of(stream.token) == {scene.root: ten}
        await scene.clock.sleep(20)
        assert shards_of(stream.token) == {left: "TRIM_HORIZON", right: "TRIM_HORIZON"}
        assert times_of(stream.token) == {left: ten, right: ten}
        assert await some(stream, 1) == ["4"]
        assert times_of(stream.token) == {left: ten, right: ten}


@virtual
async def test_trap_02_a_shard_of_long_ago_comes_before_one_of_now(scene: Scene) -> None:
    scene.fake.page_records = 1
    other = scene.fake.add_root()
    for second in range(3):
        scene.put(f"new{second}", shard=scene.root, at_ms=100_000 + second * 1000)
        scene.put(f"old{second}", shard=other, at_ms=second * 1000)
    async with scene.stream() as stream:
        assert await some(stream, 6) == ["old0", "old1", "old2", "new0", "new1", "new2"]


@virtual
async def test_a_change_that_is_written_now_comes_within_two_polls(scene: Scene) -> None:
    scene.fake.add_root()
    async with scene.stream(poll_seconds=1.0) as stream:
        assert await scene.within(stream, 10) == []
        scene.put("1")
        assert await scene.within(stream, 2.5) == ["1"]


# Tokens.


@virtual
async def test_a_token_moves_when_a_change_is_handed_over_and_not_when_it_is_read(scene: Scene) -> None:
    scene.put("1", "2", "3")
    async with scene.stream() as stream:
        await scene.clock.sleep(5)
        assert shards_of(stream.token) == {scene.root: "TRIM_HORIZON"}
        assert await some(stream, 1) == ["1"]
        assert shards_of(stream.token) == {scene.root: "AFTER_SEQUENCE_NUMBER"}
        token = stream.token
        assert await some(stream, 2) == ["2", "3"]
    async with scene.stream(token) as stream:
        assert await scene.within(stream, 5) == ["2", "3"]


@virtual
async def test_trap_03_a_token_names_a_parent_whose_records_wait_and_not_its_children(scene: Scene) -> None:
    scene.put("1", "2", "3")
    left, right = scene.fake.split(scene.root)
    scene.put("4", shard=left)
    scene.put("5", shard=right)
    tokens = []
    async with scene.stream() as stream:
        await scene.clock.sleep(10)
        for _ in range(3):
            await some(stream, 1)
            tokens.append(stream.token)
            await scene.clock.sleep(0.01)
            tokens.append(stream.token)
    assert [list(shards_of(token)) for token in tokens] == [[scene.root]] * 5 + [[left, right]]
    for token, rest in zip(tokens, ["2345", "2345", "345", "345", "45", "45"], strict=False):
        if rest == "345":
            assert shards_of(token) == {scene.root: "AFTER_SEQUENCE_NUMBER"}
        async with scene.stream(token) as stream:
            assert await scene.within(stream, 5) == list(rest)


@virtual
async def test_trap_04_children_that_turn_up_late_are_read_and_the_stream_does_not_end(scene: Scene) -> None:
    other = scene.fake.add_root()
    scene.put("1")
    scene.fake.split(scene.root, visible_after=50)
    child = scene.fake.open_shards[-1]
    scene.put("3", shard=child)
    async with scene.stream() as stream:
        assert await some(stream, 1) == ["1"]
        scene.put("2", shard=other)
        assert await scene.within(stream, 20) == ["2"]
        assert scene.root in shards_of(stream.token)
        token = stream.token
        assert await scene.within(stream, 60) == ["3"]
        assert scene.root not in shards_of(stream.token)
    async with scene.stream(token) as stream:
        assert await scene.within(stream, 60) == ["3"]


@virtual
async def test_a_closed_shard_waits_for_children_that_turn_up_a_moment_later(scene: Scene) -> None:
    other = scene.fake.add_root()
    scene.put("1")
    child, _ = scene.fake.split(scene.root, visible_after=3)
    scene.put("2", shard=child)
    await scene.clock.sleep(1)
    scene.put("3", shard=other)
    async with scene.stream() as stream:
        assert await scene.within(stream, 20) == ["1", "2", "3"]


@virtual
async def test_trap_05_a_shard_that_fails_costs_no_page_of_the_others(scene: Scene) -> None:
    other = scene.fake.add_root()
    scene.put("1", "3", at_ms=1000)
    scene.put("2", "4", shard=other, at_ms=2000)
    scene.fake.fail("GetRecords", "AccessDeniedException", shard_id=other, times=2)
    async with scene.stream() as stream:
        for _ in range(2):
            with pytest.raises(OperatorError, match="AccessDenied"):
                await anext(stream)
        assert await scene.within(stream, 20) == ["1", "3", "2", "4"]


@virtual
async def test_trap_05_what_was_read_comes_before_the_error(scene: Scene) -> None:
    scene.put("1")
    async with scene.stream() as stream:
        await scene.clock.sleep(2)
        scene.put("2")
        scene.fake.fail("GetRecords", "AccessDeniedException", times=1)
        await scene.clock.sleep(2)
        assert await some(stream, 1) == ["1"]
        with pytest.raises(OperatorError):
            await anext(stream)
        assert await some(stream, 1) == ["2"]


# Positions.


@virtual
async def test_trap_06_names_of_positions_are_taken_in_any_case(scene: Scene) -> None:
    scene.put("1")
    async with scene.stream("Trim_Horizon") as stream:
        assert await some(stream, 1) == ["1"]
        await stream.move_to("LATEST")
        await scene.clock.sleep(5)
        scene.put("2")
        assert await some(stream, 1) == ["2"]


@virtual
async def test_trap_06_a_naive_time_is_refused_before_anything_changes(scene: Scene) -> None:
    scene.put("1", "2")
    naive = datetime(2026, 11, 22)  # noqa: DTZ001  # that is the point
    with pytest.raises(ConfigError, match="has no offset"):
        scene.stream(naive)
    async with scene.stream() as stream:
        await some(stream, 1)
        before = stream.token
        with pytest.raises(ConfigError, match="has no offset"):
            await stream.move_to(naive)
        assert stream.token == before
        assert await some(stream, 1) == ["2"]


@virtual
async def test_trap_07_a_token_saved_right_after_moving_to_a_time_does_not_go_back_before_it(
    scene: Scene,
) -> None:
    noon_ms = scene.clock.now_ms()
    scene.put("1", at_ms=noon_ms - 5000)
    scene.put("2", at_ms=noon_ms)
    async with scene.stream() as stream:
        await some(stream, 2)
        scene.fake.slow[scene.root] = 1.0
        await stream.move_to(datetime.fromtimestamp(noon_ms / 1000, UTC))
        at_once = stream.token
        await scene.clock.sleep(5)
        read = stream.token
    assert shards_of(at_once) == {scene.root: "AT_TIMESTAMP"}
    assert shards_of(read) == {scene.root: "AT_SEQUENCE_NUMBER"}
    for token in (at_once, read):
        async with scene.stream(token) as stream:
            assert await scene.within(stream, 5) == ["2"]


@virtual
async def test_trap_08_a_time_is_found_behind_many_pages_and_inside_one(scene: Scene) -> None:
    noon_ms = scene.clock.now_ms()
    scene.fake.page_records = 3
    scene.put(*(f"old{number}" for number in range(31)), at_ms=noon_ms - 5000)
    scene.put("1", "2", at_ms=noon_ms)
    scene.put("3", at_ms=noon_ms - 1000)
    scene.fake.fail("GetRecords", "empty", times=4)
    async with scene.stream(datetime.fromtimestamp(noon_ms / 1000, UTC)) as stream:
        assert await scene.within(stream, 60) == ["1", "2", "3"]


@virtual
async def test_trap_08_a_time_after_which_nothing_came_yet_leaves_older_records_out(scene: Scene) -> None:
    noon_ms = scene.clock.now_ms()
    scene.put("old", at_ms=noon_ms - 5000)
    left, right = scene.fake.split(scene.root)
    scene.put("old too", shard=left, at_ms=noon_ms - 4000)
    async with scene.stream(datetime.fromtimestamp(noon_ms / 1000, UTC)) as stream:
        assert await scene.within(stream, 20) == []
        assert shards_of(stream.token) == {left: "AT_TIMESTAMP", right: "AT_TIMESTAMP"}
        scene.put("new", shard=left)
        assert await scene.within(stream, 20) == ["new"]


@virtual
async def test_trap_09_a_heartbeat_does_not_let_children_pass_their_parent(scene: Scene) -> None:
    scene.put("1", "2")
    idle = scene.fake.add_root()
    child, _ = scene.fake.split(scene.root)
    scene.put("3", shard=child)
    async with scene.stream() as stream:
        for _ in range(3):
            asked = len(scene.requests("GetRecords", idle))
            await stream.heartbeat()
            assert len(scene.requests("GetRecords", idle)) > asked
        assert await some(stream, 1) == ["1"]
        await stream.heartbeat()
        assert await some(stream, 2) == ["2", "3"]


@virtual
async def test_trap_10_new_roots_are_read_that_appear_after_a_token_was_saved(scene: Scene) -> None:
    scene.put("1")
    async with scene.stream() as stream:
        await some(stream, 1)
        token = stream.token
    scene.put("2", shard=scene.fake.add_root())
    async with scene.stream(token) as stream:
        assert await scene.within(stream, 5) == ["2"]


@virtual
async def test_trap_10_new_roots_are_read_that_appear_meanwhile(scene: Scene) -> None:
    async with scene.stream("latest") as stream:
        await scene.clock.sleep(10)
        scene.put("1", shard=scene.fake.add_root())
        assert await scene.within(stream, 40) == ["1"]


@virtual
async def test_trap_12_records_that_are_trimmed_before_they_were_read_are_a_gap(scene: Scene) -> None:
    scene.put("1", "2", "3")
    numbers = [int(record["dynamodb"]["SequenceNumber"]) for record in scene.fake.shards[scene.root].records]
    async with scene.stream() as stream:
        await some(stream, 1)
        token = stream.token
    scene.fake.trim(scene.root, through=numbers[1])
    async with scene.stream(token) as stream:
        assert await some(stream, 1) == ["3"]
        assert stream.gaps == 1


@virtual
async def test_trap_12_so_are_those_that_are_trimmed_in_mid_stream(scene: Scene) -> None:
    scene.fake.page_records = 1
    scene.put("1", "2", "3")
    numbers = [int(record["dynamodb"]["SequenceNumber"]) for record in scene.fake.shards[scene.root].records]
    async with scene.stream() as stream:
        assert await some(stream, 1) == ["1"]
        scene.fake.trim(scene.root, through=numbers[1])
        rest = await scene.within(stream, 5)
        assert rest in (["3"], ["2", "3"])
        assert stream.gaps == (rest == ["3"])


@virtual
async def test_trap_13_a_slow_shard_does_not_keep_the_others_from_being_read(scene: Scene) -> None:
    slow = scene.fake.add_root()
    scene.fake.slow[slow] = 30.0
    scene.put("1", "2")
    async with scene.stream() as stream:
        await scene.clock.sleep(20)
        assert len(scene.requests("GetRecords", slow)) == 1
        assert len(scene.requests("GetRecords", scene.root)) > 10
        assert await some(stream, 2) == ["1", "2"]


@virtual
async def test_trap_14_shards_of_every_page_of_a_listing_are_read(scene: Scene) -> None:
    scene.fake.page_shards = 2
    scene.fake.shuffled = True
    names = [str(number) for number in range(7)]
    for each in names:
        scene.put(each, shard=scene.fake.add_root())
    async with scene.stream() as stream:
        assert sorted(await some(stream, 7)) == names


@virtual
async def test_trap_14_a_tokens_shard_that_is_gone_is_a_gap_and_the_rest_goes_on(scene: Scene) -> None:
    other = scene.fake.add_root()
    scene.put("1")
    scene.put("2", shard=other)
    child, _ = scene.fake.split(scene.root)
    scene.put("3", shard=child)
    async with scene.stream() as stream:
        token = stream.token
    scene.fake.trim(scene.root)
    scene.fake.trim(other)
    async with scene.stream(token) as stream:
        assert await scene.within(stream, 30) == ["3"]
        assert stream.gaps == 2
        assert other not in shards_of(stream.token)
        assert scene.root not in shards_of(stream.token)


@virtual
async def test_a_shard_that_aws_does_not_know_for_a_while_is_read_on_while_it_is_listed(scene: Scene) -> None:
    await outlasts_not_found(scene, "GetRecords")


@virtual
async def test_a_shard_for_which_aws_has_no_iterator_for_a_while_is_read_while_it_is_listed(
    scene: Scene,
) -> None:
    await outlasts_not_found(scene, "GetShardIterator")


async def outlasts_not_found(scene: Scene, action: Any) -> None:
    scene.fake.page_records = 1
    scene.put("1")
    async with scene.stream() as stream:
        if action == "GetRecords":
            assert await some(stream, 1) == ["1"]
        scene.fake.fail(action, "ResourceNotFoundException", times=1000)
        assert await scene.within(stream, 90) == []
        assert list(shards_of(stream.token)) == [scene.root]
        token = stream.token
        scene.fake.fail_no_more()
        scene.put("2")
        rest = ["2"] if action == "GetRecords" else ["1", "2"]
        assert await scene.within(stream, 10) == rest
        assert stream.gaps == 0
    async with scene.stream(token) as stream:
        assert await scene.within(stream, 10) == rest


@virtual
async def test_a_token_names_a_shard_also_when_all_are_gone(scene: Scene) -> None:
    scene.put("1")
    async with scene.stream() as stream:
        await some(stream, 1)
        scene.fake.trim(scene.root)
        new = scene.fake.add_root()
        await scene.clock.sleep(25)
        assert stream.gaps == 1
        assert list(shards_of(stream.token)) == [new]


@virtual
async def test_a_short_answer_at_the_start_is_not_believed(scene: Scene) -> None:
    scene.put("1")
    child, _ = scene.fake.split(scene.root)
    scene.put("2", shard=child)
    scene.fake.fail("DescribeStream", "short", times=1)  # whoever resolves the name
    scene.fake.fail("DescribeStream", "empty", times=1)
    scene.fake.shards[scene.root], scene.fake.shards[child] = (
        scene.fake.shards.pop(scene.root),
        scene.fake.shards.pop(child),
    )
    scene.fake.fail("DescribeStream", "short", times=1)  # without the root, which is last now
    async with scene.stream() as stream:
        assert await scene.within(stream, 10) == ["1", "2"]


@virtual
async def test_a_parent_that_is_listed_long_after_its_child_is_read_all_the_same(scene: Scene) -> None:
    scene.put("1")
    (child,) = scene.fake.split(scene.root, children=1, visible_after=50)
    scene.put("2", shard=child)
    (grandchild,) = scene.fake.split(child, children=1)
    scene.fake.shards[grandchild].visible_ms = 0
    scene.put("3", shard=grandchild)
    async with scene.stream() as stream:
        assert await scene.within(stream, 10) == ["1", "2", "3"]
        assert scene.clock.steady_ms() >= 50_000
        token = stream.token
    scene.put("4", shard=grandchild)
    async with scene.stream(token) as stream:
        assert await scene.within(stream, 20) == ["4"]


async def after_a_chain(scene: Scene, *names: str) -> tuple[str, list[str]]:
    """Put one change into each of a chain of shards; return a token in the last, and their ids."""
    shards = [scene.root]
    for place, each in enumerate(names):
        if place:
            shards += scene.fake.split(shards[-1], children=1)
        scene.put(each, shard=shards[-1])
    async with scene.stream() as stream:
        assert await some(stream, len(names)) == list(names)
        token = stream.token
    assert list(shards_of(token)) == [shards[-1]]
    return token, shards


@virtual
async def test_a_token_does_not_bring_old_shards_again_while_a_listing_is_incomplete(scene: Scene) -> None:
    token, shards = await after_a_chain(scene, "1", "2", "3", "4")
    scene.fake.shards[shards[1]].visible_ms = scene.clock.steady_ms() + 60_000
    scene.fake.shards[shards[2]].visible_ms = scene.clock.steady_ms() + 90_000
    scene.put("5", shard=shards[-1])
    async with scene.stream(token) as stream:
        assert await scene.within(stream, 50) == ["5"]
        token = stream.token
        assert await scene.within(stream, 100) == []
        scene.put("6", shard=scene.fake.add_root())
        assert await scene.within(stream, 40) == ["6"]
    async with scene.stream(token) as stream:
        assert await scene.within(stream, 100) == ["6"]


@virtual
async def test_a_closed_root_that_a_token_does_not_know_is_read_once_the_lineage_is_known(
    scene: Scene,
) -> None:
    token, shards = await after_a_chain(scene, "1", "2", "3")
    scene.fake.trim(shards[0])
    scene.fake.trim(shards[1])
    new = scene.fake.add_root()
    scene.put("4", shard=new)
    (child,) = scene.fake.split(new, children=1)
    scene.put("5", shard=child)
    async with scene.stream(token) as stream:
        assert await scene.within(stream, 4) == []
        assert await scene.within(stream, 10) == ["4", "5"]


@virtual
async def test_a_shard_whose_parent_aws_knows_and_never_lists_is_read_behind_it(scene: Scene) -> None:
    scene.put("1")
    (child,) = scene.fake.split(scene.root, children=1)
    scene.put("2", shard=child)
    scene.fake.shards[scene.root].visible_ms = 10**12
    async with scene.stream() as stream:
        assert await scene.within(stream, 10) == ["1", "2"]


@virtual
async def test_a_parent_is_not_gone_because_aws_refuses_the_credentials(scene: Scene) -> None:
    scene.put("1")
    (child,) = scene.fake.split(scene.root, children=1)
    scene.put("2", shard=child)
    scene.fake.shards[scene.root].visible_ms = scene.clock.steady_ms() + 12_000
    scene.fake.fail("GetShardIterator", "AccessDeniedException", shard_id=scene.root)
    async with scene.stream() as stream:
        assert await scene.within(stream, 30) == ["1", "2"]


@virtual
async def test_a_stream_that_lists_no_shard_is_not_opened(scene: Scene) -> None:
    scene.fake.shards[scene.root].visible_ms = 10**12
    with pytest.raises(NotThereYet, match="lists no shard"):
        async with scene.stream():
            pass


@virtual
async def test_a_token_of_another_stream_is_refused_before_anything_changes(scene: Scene) -> None:
    scene.put("1", "2")
    async with scene.stream() as stream:
        await some(stream, 1)
        foreign = stream.token.replace("table/orders", "table/others")
        before = stream.token
        with pytest.raises(ConfigError, match="table/others"):
            await stream.move_to(foreign)
        with pytest.raises(ConfigError, match="is not a position"):
            await stream.move_to("newest")
        assert stream.token == before
        assert await some(stream, 1) == ["2"]
    with pytest.raises(ConfigError, match="not of"):
        async with scene.stream(foreign):
            pass


@virtual
async def test_a_stream_that_cannot_be_listed_is_not_moved(scene: Scene) -> None:
    scene.put("1", "2")
    async with scene.stream() as stream:
        await some(stream, 1)
        scene.fake.fail("DescribeStream", "AccessDeniedException")
        with pytest.raises(OperatorError, match="AccessDenied"):
            await stream.move_to("trim_horizon")
        assert await some(stream, 1) == ["2"]


@virtual
async def test_moving_goes_back_as_well_as_on(scene: Scene) -> None:
    scene.put("1", "2")
    async with scene.stream() as stream:
        await some(stream, 1)
        token = stream.token
        await some(stream, 1)
        await stream.move_to("trim_horizon")
        assert await some(stream, 2) == ["1", "2"]
        await stream.move_to(token)
        assert await some(stream, 1) == ["2"]


@virtual
async def test_who_waits_for_a_change_gets_one_of_where_the_stream_was_moved_to(scene: Scene) -> None:
    scene.put("1")
    async with scene.stream("latest") as stream, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(some(stream, 1))
        await scene.clock.sleep(3)
        await stream.move_to("trim_horizon")
        assert await waiting == ["1"]


@virtual
async def test_latest_is_behind_everything_that_is_there(scene: Scene) -> None:
    scene.put("1")
    child, _ = scene.fake.split(scene.root)
    scene.put("2", shard=child)
    await scene.clock.sleep(10)
    async with scene.stream("latest") as stream:
        await scene.clock.sleep(10)
        token = stream.token
        scene.put("3", shard=child)
        assert await some(stream, 1) == ["3"]
    async with scene.stream(token) as stream:
        assert await scene.within(stream, 5) == ["3"]


@virtual
async def test_a_shard_that_is_behind_latest_and_ends_is_followed_by_its_children(scene: Scene) -> None:
    scene.put("1")
    await scene.clock.sleep(10)
    async with scene.stream("latest") as stream:
        await scene.clock.sleep(1)
        child, _ = scene.fake.split(scene.root)
        scene.put("2", shard=child)
        assert await scene.within(stream, 20) == ["2"]


@virtual
async def test_latest_counts_by_aws_time_where_this_hosts_clock_is_ahead(scene: Scene) -> None:
    await latest_by_aws_time(scene, -1)


@virtual
async def test_latest_counts_by_aws_time_where_this_hosts_clock_is_behind(scene: Scene) -> None:
    await latest_by_aws_time(scene, 1)


async def latest_by_aws_time(scene: Scene, ahead_hours: int) -> None:
    scene.fake.ahead_ms = ahead_hours * HOUR_MS
    idle = scene.fake.add_root()
    scene.put("old")
    scene.put("old too", shard=idle)
    await scene.clock.sleep(10)
    async with scene.stream("latest") as stream:
        await scene.clock.sleep(1)
        token = stream.token
        child, _ = scene.fake.split(scene.root)
        scene.put("1", shard=child)
        assert await scene.within(stream, 20) == ["1"]
        scene.fake.fail("GetRecords", "ExpiredIteratorException", shard_id=idle)
        await scene.clock.sleep(20)
        scene.put("2", shard=idle)
        scene.put("3", shard=scene.fake.add_root())
        assert await scene.within(stream, 60) == ["2", "3"]
    async with scene.stream(token) as stream:
        assert await scene.within(stream, 60) == ["1", "2", "3"]


# The life of a stream.


@virtual
async def test_who_is_cancelled_while_they_wait_loses_nothing(scene: Scene) -> None:
    scene.fake.page_records = 1
    found = []
    async with scene.stream() as stream:
        for number in range(20):
            scene.put(str(number))
            found += await scene.within(stream, 0.3)
        found += await scene.within(stream, 10)
    assert found == [str(number) for number in range(20)]


@virtual
async def test_a_shard_is_read_two_pages_ahead_at_most(scene: Scene) -> None:
    scene.put(*(str(number) for number in range(5000)))
    async with scene.stream() as stream:
        await scene.clock.sleep(30)
        assert len(scene.requests("GetRecords")) == 1
        await some(stream, 1500)
        await scene.clock.sleep(30)
        assert len(scene.requests("GetRecords")) == 3
        assert await some(stream, 3500) == [str(number) for number in range(1500, 5000)]


@virtual
async def test_large_items_are_read_ahead_by_bytes(scene: Scene) -> None:
    other, text = scene.fake.add_root(), "x" * 395_000
    scene.fake.page_records = 2
    for number in range(400):
        scene.fake.put({"id": str(number), "text": text}, shard_id=scene.root)
    async with scene.stream() as stream:
        await scene.clock.sleep(600)
        pages = len(scene.requests("GetRecords", scene.root))
        assert 80 <= pages <= 87, "64 MiB and one page"
        assert len(scene.requests("GetRecords", other)) > 100, "a shard that has nothing waiting is read on"
        scene.put("last", shard=other)
        assert await some(stream, 401) == [*(str(number) for number in range(400)), "last"]


# A shard, or all of them, without an answer.


async def test_a_shard_without_an_answer_holds_the_others_back_for_a_minute_only(
    logged: list[dict[str, Any]],
) -> None:
    scene = Scene()
    await scene.clock.drive(_silent_shard(scene, logged))


async def _silent_shard(scene: Scene, logged: list[dict[str, Any]]) -> None:
    other = scene.fake.add_root()
    async with scene.stream() as stream:
        await scene.clock.sleep(10)
        scene.fake.fail("GetRecords", "ThrottlingException", shard_id=other, times=10**9)
        scene.put("late", shard=other)
        await scene.clock.sleep(2)
        scene.put("1")
        assert await scene.within(stream, 40) == []
        assert await scene.within(stream, 40) == ["1"]
        (passed,) = [event for event in logged if event["event"] == "stream.shard_passed_over"]
        assert (passed["shard"], passed["level"]) == (other, "warning")
        scene.put("2")
        assert await scene.within(stream, 10) == ["2"]
        token = stream.token
        scene.fake.fail_no_more()
        scene.put("3")
        assert sorted(await scene.within(stream, 30)) == ["3", "late"]
        scene.put("4", shard=other)
        await scene.clock.sleep(2)
        scene.put("5")
        assert await scene.within(stream, 30) == ["4", "5"], "it counts again"
        assert len([event for event in logged if event["event"] == "stream.shard_passed_over"]) == 1
    async with scene.stream(token) as stream:
        assert sorted(await scene.within(stream, 30)) == ["3", "4", "5", "late"]


@virtual
async def test_a_shard_whose_children_cannot_be_asked_for_holds_the_others_back_for_a_minute_only(
    scene: Scene,
) -> None:
    other = scene.fake.add_root()
    async with scene.stream() as stream:
        await scene.clock.sleep(10)
        scene.fake.fail("DescribeStream", "ThrottlingException", times=10**9)
        (child,) = scene.fake.split(other, children=1)
        scene.put("late", shard=child)
        await scene.clock.sleep(10)
        scene.put("1")
        assert await scene.within(stream, 40) == []
        assert await scene.within(stream, 40) == ["1"]
        scene.fake.fail_no_more()
        assert await scene.within(stream, 40) == ["late"]


@virtual
async def test_a_shard_that_is_not_asked_because_it_brought_enough_is_waited_for(scene: Scene) -> None:
    other = scene.fake.add_root()
    scene.put(*(str(number) for number in range(1500)), at_ms=1000)
    async with scene.stream() as stream:
        await scene.clock.sleep(600)
        scene.put("x", shard=other, at_ms=2000)
        assert await some(stream, 1501) == [*(str(number) for number in range(1500)), "x"]


@pytest.mark.parametrize("action", ["ListStreams", "DescribeStream"])
async def test_a_dead_endpoint_ends_the_opening_with_an_error(action: Any) -> None:
    scene = Scene()
    scene.fake.fail(action, "disconnect", times=10**9)

    async def opening() -> None:
        with pytest.raises(NotThereYet, match="out of reach"):
            async with scene.stream():
                pass

    await asyncio.wait_for(scene.clock.drive(opening()), 20)
    assert 20_000 < scene.clock.steady_ms() < 60_000


@virtual
async def test_a_dead_endpoint_ends_a_move_and_the_stream_goes_on_from_where_it_was(scene: Scene) -> None:
    scene.put("1", "2")
    async with scene.stream() as stream:
        assert await some(stream, 1) == ["1"]
        scene.fake.fail("DescribeStream", "disconnect", times=10**9)
        with pytest.raises(NotThereYet, match="out of reach"):
            await stream.move_to("trim_horizon")
        assert await some(stream, 1) == ["2"]
        scene.put("3")
        assert await scene.within(stream, 100) == ["3"], "once it is open, outages are waited for"


@virtual
async def test_a_stream_that_was_disabled_is_read_to_its_end(scene: Scene) -> None:
    scene.put("1", "2")
    scene.fake.split(scene.root)
    async with scene.stream() as stream:
        await some(stream, 1)
        scene.fake.disable()
        assert [name(change) async for change in stream] == ["2"]
        assert [change async for change in stream] == []
        token = stream.token
    async with scene.stream(token, table=scene.fake.arn) as stream:
        assert [change async for change in stream] == []


async def test_the_end_of_a_stream_names_the_one_that_the_table_has_instead(
    logged: list[dict[str, Any]],
) -> None:
    scene = Scene()

    async def story() -> None:
        async with scene.stream() as stream:
            scene.put("1")
            scene.fake.enable()
            assert [name(change) async for change in stream] == ["1"]

    await scene.clock.drive(story())
    assert [entry["newest"] for entry in logged if entry["event"] == "stream.replaced"] == [scene.fake.arn]


@virtual
async def test_a_table_without_a_stream_is_explained(scene: Scene) -> None:
    with pytest.raises(NotThereYet, match="The table others has no enabled stream"):
        async with scene.stream(table="others"):
            pass


@virtual
async def test_nothing_is_asked_after_the_end_of_the_block(scene: Scene) -> None:
    async with scene.stream() as stream:
        await scene.clock.sleep(3)
    asked = len(scene.fake.calls)
    await scene.clock.sleep(60)
    assert len(scene.fake.calls) == asked
    for use in (lambda: stream.token, lambda: stream.gaps):
        with pytest.raises(RuntimeError, match="the stream is not open"):
            use()


@virtual
async def test_an_error_of_the_block_comes_out_as_it_is(scene: Scene) -> None:
    with pytest.raises(ValueError, match="mine"):
        async with scene.stream():
            raise ValueError("mine")


@virtual
async def test_a_start_that_is_cancelled_leaves_nothing_behind(scene: Scene) -> None:
    scene.fake.fail("DescribeStream", "InternalServerError", times=50)
    stream = scene.stream()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), stream:
            pass
    asked = len(scene.fake.calls)
    await scene.clock.sleep(60)
    assert len(scene.fake.calls) == asked


@virtual
async def test_a_listing_that_is_refused_meanwhile_is_told_and_asked_for_again(scene: Scene) -> None:
    async with scene.stream() as stream:
        await scene.clock.sleep(5)
        scene.fake.fail("DescribeStream", "AccessDeniedException")
        with pytest.raises(OperatorError, match="AccessDenied"):
            await anext(stream)
        scene.put("1", shard=scene.fake.add_root())
        assert await scene.within(stream, 40) == ["1"]


@virtual
async def test_children_that_may_not_be_asked_for_are_told_and_asked_for_again(scene: Scene) -> None:
    scene.put("1")
    async with scene.stream() as stream:
        await some(stream, 1)
        child, _ = scene.fake.split(scene.root)
        scene.put("2", shard=child)
        scene.fake.fail("DescribeStream", "AccessDeniedException")
        with pytest.raises(OperatorError, match="AccessDenied"):
            await anext(stream)
        assert await scene.within(stream, 5) == ["2"]


@virtual
async def test_a_heartbeat_tells_what_is_refused(scene: Scene) -> None:
    scene.fake.fail("GetRecords", "AccessDeniedException")
    async with scene.stream() as stream:
        with pytest.raises(OperatorError, match="AccessDenied"):
            await stream.heartbeat()
        await stream.heartbeat()


async def test_a_bug_in_a_reader_comes_out_where_changes_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(reader: ShardReader) -> None:
        raise ZeroDivisionError(reader.shard_id)

    monkeypatch.setattr(ShardReader, "next", broken)
    scene = Scene()

    async def story() -> None:
        async with scene.stream() as stream:
            await anext(stream)

    with pytest.raises(ExceptionGroup) as raised:
        await scene.clock.drive(story())
    assert raised.value.subgroup(ZeroDivisionError) is not None


def test_whoever_takes_changes_does_not_load_aws_library() -> None:
    program = """
import sys, mldserver.dynamodb_streams as room
assert not {"botocore", "aiobotocore", "aioboto3"} & sys.modules.keys()
room.Stream
try:
    room.Brook
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "has no attribute 'Brook'" in done.stdout
