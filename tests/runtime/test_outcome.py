"""From a line to fresh records, and from rows back to a batch's outcome."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.effects import NOTHING
from mldserver.errors import PeerError
from mldserver.handler.failure import Failure
from mldserver.protocol.batch_decoder import BatchDecoder
from mldserver.protocol.messages import Version
from mldserver.records import Record, Sequence
from mldserver.runtime import outcome
from mldserver.runtime.failure_policy import Ending
from mldserver.runtime.interface import META_COLUMNS, BatchOutline, MLDLine
from mldserver.runtime.outcome import FreshBatch, dead_letter, decode_failures, join_rows
from mldserver.runtime.plan import End
from mldserver.runtime.rows import Built

pytestmark = pytest.mark.quick


def built(records: Any, **columns: Any) -> Any:
    return Built(pa.table(columns), records)


def take(delivery: Any) -> FreshBatch:
    return outcome.decode_batch(delivery, BatchDecoder(delivery.shard_id))


def test_a_batch_is_outlined_with_its_duplicates(kit: Any) -> None:
    taken = take(kit.delivery("a", "b", "c", after=2))
    assert [record.sequence for record in taken.fresh] == [Sequence(3)]
    assert taken.outline == BatchOutline(
        records=3,
        duplicates=2,
        first=Sequence(1),
        last=Sequence(3),
        latest_arrival_ms=1_003,
        millis_behind_latest=7,
    )


def test_an_empty_batch_has_no_first_and_no_last(kit: Any) -> None:
    taken = take(kit.line([], after=5, behind=0))
    assert list(taken.fresh) == []
    assert taken.outline == BatchOutline(0, 0, None, None, None, 0)


def test_duplicates_end_at_the_sub_sequence(kit: Any) -> None:
    records = [kit.record(5, "x", subSequenceNumber=sub) for sub in range(3)]
    delivery = kit.line(records)
    taken = take(type(delivery)(delivery.shard_id, delivery.payload, 0, Sequence(5, 1)))
    assert [record.sequence for record in taken.fresh] == [Sequence(5, 2)]


def test_times_are_the_running_maximum_of_arrivals_over_every_record_of_the_message(kit: Any) -> None:
    arrivals = [50, 40, 60, 55, 70]
    records = [kit.record(n, "x", approximateArrivalTimestamp=ms) for n, ms in enumerate(arrivals)]
    taken = take(kit.line(records, after=0))
    assert taken.times_ms().tolist() == [50, 60, 60, 70]
    assert taken.outline.latest_arrival_ms == 70


def test_the_time_of_receipt_stands_in_for_arrivals_that_v1_does_not_send(kit: Any) -> None:
    records = [{"data": "YQ==", "partitionKey": "k", "sequenceNumber": "1"}]
    taken = take(kit.line(records, version=Version.V1))
    assert (taken.times_ms().tolist(), taken.outline.latest_arrival_ms) == ([9_000], 9_000)
    assert join_rows([built([0], n=[1])], taken, shard_id="s").rows.column("_arrival").to_pylist() == [None]


def test_it_stands_in_where_only_some_records_have_no_arrival(kit: Any) -> None:
    arrivals = [8_000, None, 9_500]
    records = [kit.record(n, "x", approximateArrivalTimestamp=ms) for n, ms in enumerate(arrivals)]
    taken = take(kit.line(records))
    assert taken.times_ms().tolist() == [8_000, 9_000, 9_500]
    assert taken.outline.latest_arrival_ms == 9_500


def test_a_line_that_is_no_batch_is_the_peers_fault(kit: Any) -> None:
    delivery = kit.delivery()
    with pytest.raises(PeerError):
        take(type(delivery)(delivery.shard_id, MLDLine(b"{}", Version.V2), 0, None))


def test_rows_carry_where_they_come_from(kit: Any) -> None:
    taken = take(kit.delivery("a", "b", "c"))
    rows = join_rows([built([0, 2, 2], n=[10, 20, 21])], taken, shard_id="s").rows
    assert rows.column_names == ["n", *(name for name in META_COLUMNS if name != "_clock")]
    assert rows.select(["n", "_time", "_shard", "_sequence", "_sub_sequence"]).to_pylist()[-1] == {
        "n": 21,
        "_time": 1_003,
        "_shard": "s",
        "_sequence": "3",
        "_sub_sequence": 0,
    }
    assert rows.schema.field("_arrival").type == pa.timestamp("ms", tz="UTC")
    assert rows.column("_arrival").cast(pa.int64()).to_pylist() == [1_001, 1_003, 1_003]


def test_no_rows_are_none(kit: Any) -> None:
    assert join_rows([], take(kit.delivery("a")), shard_id="s") is NOTHING
    assert join_rows([Built()], take(kit.delivery("a")), shard_id="s") is NOTHING


@given(st.lists(st.lists(st.integers(0, 5), max_size=4).map(sorted), max_size=5))
def test_rows_of_several_calls_come_in_the_order_of_their_records(parts: Any) -> None:
    records = [Record(shard_id="s", sequence_number=str(number), arrival_ms=number) for number in range(1, 7)]
    taken = FreshBatch(records, BatchOutline(6, 0, None, None, None, None), range(6))
    label = iter(range(1_000))
    tables = [built(part, n=pa.array([next(label) for _ in part], pa.int64())) for part in parts]
    rows = join_rows(tables, taken, shard_id="s").rows
    expected = sorted(
        (record, n) for t in tables for record, n in zip(t.records, t.table["n"].to_pylist(), strict=True)
    )
    if rows is None:
        assert not parts
    else:
        assert rows.column("n").to_pylist() == [n for _, n in expected]
        assert rows.column("_sequence").to_pylist() == [str(record + 1) for record, _ in expected]


BROKEN = Record(
    shard_id="s", sequence_number="9", sub_sequence_number=2, data="%%%", partition_key="k", arrival_ms=4
)


def test_records_with_damaged_base64_are_told() -> None:
    good = Record(shard_id="s", sequence_number="8", data="YQ==")
    assert decode_failures([good, BROKEN]).keys() == {1}
    assert decode_failures([BROKEN])[0].error.startswith("ValueError: record 9/2: data is not base64")


@pytest.mark.parametrize(("data", "kept"), [("YQ==", b"a"), (None, b""), ("%%%", b"%%%")])
def test_a_dead_letter_holds_all_that_is_known(data: Any, kept: Any) -> None:
    record = Record(
        shard_id="s", sequence_number="9", sub_sequence_number=2, data=data, partition_key="k", arrival_ms=4
    )
    end = End(Ending.DEAD_LETTER, Failure("E: x", "tb"), 3, Sequence(7))
    letter = dead_letter(record, end, handler="h", version="7", at_ms=99)
    assert letter.parked_behind == Sequence(7)
    assert (letter.data, letter.sequence, letter.partition_key, letter.arrival_ms) == (
        kept,
        Sequence(9, 2),
        "k",
        4,
    )
    assert (letter.error, letter.traceback, letter.attempts, letter.handler, letter.at_ms) == (
        "E: x",
        "tb",
        3,
        "h",
        99,
    )
