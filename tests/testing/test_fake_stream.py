import base64
import hashlib

import pytest
from aws_kinesis_agg.deaggregator import deaggregate_records

from mldserver.testing import FakeStream, Place

START = Place("TRIM_HORIZON")


def test_the_same_seed_gives_the_same_stream() -> None:
    def make(seed: int) -> list[tuple[str, str]]:
        stream = FakeStream(3, seed=seed)
        for n in range(50):
            stream.put(b"x", f"key-{n}")
        return [(s.id, r.sequence_number) for s in stream.shards.values() for r in s.records]

    assert make(7) == make(7)
    assert make(7) != make(8)


def test_sequence_numbers_grow_as_integers_but_not_as_texts() -> None:
    stream = FakeStream(1)
    numbers = [stream.put(b"x", "k").sequence_number for _ in range(100)]
    assert sorted(numbers, key=int) == numbers
    assert sorted(numbers) != numbers
    assert {len(number) for number in numbers} == {55, 56}


def test_a_key_stays_in_one_lineage() -> None:
    stream = FakeStream(2, seed=3)
    stream.put(b"before", "key")
    (parent,) = [shard.id for shard in stream.shards.values() if shard.records]
    left, right = stream.split(parent)
    stream.put(b"after", "key")
    (child,) = [name for name in (left, right) if stream.shards[name].records]
    assert stream.shards[child].parents == (parent,)
    stream.put(b"again", "key")
    assert len(stream.shards[child].records) == 2


def test_split_and_merge_follow_the_hash_ranges() -> None:
    stream = FakeStream(1)
    left, right = stream.split("shardId-000000000000")
    assert stream.open_shards == (left, right)
    assert stream.adjacent_pairs() == ((left, right),)
    child = stream.merge(right, left)
    assert stream.shards[child].parents == (right, left)
    assert stream.shards[child].key_range == (0, 2**128 - 1)
    with pytest.raises(ValueError, match="closed"):
        stream.split(left)


def test_a_split_at_a_hash_sends_each_key_to_the_child_with_its_md5() -> None:
    stream = FakeStream(1)
    at = int(hashlib.md5(b"key").hexdigest(), 16)  # how Kinesis places records
    below, from_it_on = stream.split("shardId-000000000000", at)
    assert [stream.shards[each].key_range for each in (below, from_it_on)] == [(0, at - 1), (at, 2**128 - 1)]
    stream.put(b"x", "key")
    assert not stream.shards[below].records
    with pytest.raises(ValueError, match=f"{below} cannot be split at 0"):
        stream.split(below, 0)
    with pytest.raises(ValueError, match="cannot be split"):
        stream.split(from_it_on, at)


def test_only_adjacent_shards_merge() -> None:
    stream = FakeStream(3)
    first, _, third = stream.open_shards
    with pytest.raises(ValueError, match="adjacent"):
        stream.merge(first, third)


def test_an_ended_stream_takes_no_records() -> None:
    stream = FakeStream(1)
    stream.end()
    assert stream.ended
    with pytest.raises(ValueError, match="closed"):
        stream.put(b"x", shard_id="shardId-000000000000")


def test_records_without_a_key_need_a_shard() -> None:
    stream = FakeStream(1)
    with pytest.raises(ValueError, match="needs a shard_id"):
        stream.put(b"x")
    assert stream.put(None, shard_id=stream.open_shards[0]).partition_key is None


def test_a_stream_has_at_least_one_shard() -> None:
    with pytest.raises(ValueError, match="at least one"):
        FakeStream(0)


def test_reading_goes_on_after_a_place_and_tells_the_lag() -> None:
    stream = FakeStream(1)
    (shard,) = stream.open_shards
    put = [stream.put(b"%d" % n, shard_id=shard, arrival_ms=1000 * n) for n in range(10)]
    head, behind = stream.read(shard, START, 4)
    assert list(head) == put[:4]
    assert behind == 6000
    rest, behind = stream.read(shard, Place(head[-1].sequence_number), 100)
    assert list(rest) == put[4:]
    assert behind == 0
    assert stream.read(shard, Place(put[-1].sequence_number), 5) == ([], 0)
    assert stream.read(shard, Place("SHARD_END"), 1)[0] == put[:1]  # nobody reads from there


def test_aggregates_are_never_cut_and_resume_in_their_middle() -> None:
    stream = FakeStream(1)
    (shard,) = stream.open_shards
    stream.put(b"first", shard_id=shard)
    users = stream.put_aggregate([("a", b"0"), ("b", b"1"), ("c", b"2")])
    stream.put(b"last", shard_id=shard)
    assert [record.sub_sequence_number for record in users] == [0, 1, 2]
    two, _ = stream.read(shard, START, 2)
    assert [record.data for record in two] == [b"first", b"0", b"1", b"2"]
    rest, _ = stream.read(shard, Place(users[0].sequence_number, 1), 1)
    assert [record.data for record in rest] == [b"2"]
    assert stream.records == 5


def test_v1_gets_aggregates_whole() -> None:
    stream = FakeStream(1)
    (shard,) = stream.open_shards
    stream.put_aggregate([("a", b"0"), ("b", b"1")])
    raw, _ = stream.read(shard, START, 10, raw=True)
    (record,) = raw
    assert record.data is not None
    assert record.data.startswith(b"\xf3\x89\x9a\xc2")
    kinesis = {
        "data": base64.b64encode(record.data),
        "sequenceNumber": record.sequence_number,
        "kinesisSchemaVersion": "1.0",
        "approximateArrivalTimestamp": 0,
        "partitionKey": record.partition_key,
    }
    users = deaggregate_records(
        [
            {
                "kinesis": kinesis,
                "eventSource": "",
                "eventVersion": "",
                "eventID": "",
                "eventName": "",
                "invokeIdentityArn": "",
                "awsRegion": "",
                "eventSourceARN": "",
            }
        ]
    )
    assert [base64.b64decode(user["kinesis"]["data"]) for user in users] == [b"0", b"1"]


def test_explicit_arrival_times_may_go_back_and_the_clock_goes_on_from_the_latest() -> None:
    stream = FakeStream(1, start_ms=100)
    (shard,) = stream.open_shards
    times = [stream.put(b"", shard_id=shard, arrival_ms=ms).arrival_ms for ms in (500, 300, None)]
    assert times == [500, 300, 501]


def test_what_arrives_later_is_not_there_yet() -> None:
    stream = FakeStream(1)
    (shard,) = stream.open_shards
    numbers = [stream.put(b"x", shard_id=shard, arrival_ms=at).sequence_number for at in (1000, 2000, 9000)]
    now = [999]
    stream.tip_ms = lambda: now[0]
    seen = []
    for now[0] in (999, 1000, 8999, 9000):
        records, behind = stream.read(shard, Place("TRIM_HORIZON", 0), 10)
        seen.append((len(records), behind, stream.waiting(shard)))
    assert seen == [(0, 0, True), (1, 0, True), (2, 0, True), (3, 0, False)]
    assert stream.read(shard, Place(numbers[1], 0), 10)[0][0].sequence_number == numbers[2]
