"""What a changed handler means for the rows that a ledger holds: the core, and two lives and two servers on one ledger."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from coordinator.pipeline import Pipeline, two
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.core.shape import Column, Shape
from mldserver.errors import OperatorError
from mldserver.ledger.contract import LedgerState, Segment, SegmentKind, ServerState, WindowEntry, WindowState
from mldserver.output.layout import segment_path
from mldserver.windows import TimeWindows, WindowSpec, batches, time_window_id

pytestmark = [pytest.mark.quick, pytest.mark.core]

HOUR = 3_600_000
SPEC = TimeWindows(HOUR, on="at")
AT, CARRIER, DELAY = (
    Column("at", "TIMESTAMP", nullable=False),
    Column("carrier", "STRING"),
    Column("delay", "INT"),
)
OLD = Shape.of("p", (AT, CARRIER, DELAY), SPEC)
W = [time_window_id(start) for start in range(0, 100_000, 10_000)]


def shape(*columns: Column, spec: WindowSpec | None = SPEC, pipeline: str = "p") -> Shape:
    return Shape.of(pipeline, columns, spec)


def holding(*shapes: Shape, **fields: Any) -> LedgerState:
    """A ledger with a retained window, one segment of each shape; the first is the pipeline's."""
    segments = tuple(
        Segment(
            segment_path("w", n, "u", kind=SegmentKind.WINDOW, tag="0" * 16, shape=each.fingerprint),
            "w",
            1,
            1,
        )
        for n, each in enumerate(shapes)
    )
    entry = WindowEntry("w", WindowState.PUBLISHED, 0, HOUR, segments=segments)
    texts = {each.fingerprint: each.text for each in shapes}
    usual = {"windows": {"w": entry}, "shape": shapes[0].fingerprint, "shapes": texts}
    return LedgerState(**(usual | fields))


def refusal(new: Shape, state: LedgerState) -> str:
    with pytest.raises(OperatorError) as caught:
        new.change(state)
    return str(caught.value)


def test_a_shape_is_what_its_text_says_and_the_order_of_columns_is_no_other_shape() -> None:
    assert Shape.read(OLD.text) == OLD
    again = shape(DELAY, AT, CARRIER)
    assert (again.fingerprint, len(OLD.fingerprint)) == (OLD.fingerprint, 12)
    assert OLD.ddl == "`at` TIMESTAMP NOT NULL, `carrier` STRING, `delay` INT"
    assert shape(Column("a`b", "INT")).ddl == "`a``b` INT"
    others = [shape(AT), shape(AT, CARRIER, DELAY, pipeline="q"), shape(AT, CARRIER, DELAY, spec=batches())]
    assert len({each.fingerprint for each in (OLD, *others)}) == 4


@pytest.mark.parametrize(
    "new",
    [
        shape(DELAY, CARRIER, AT),
        shape(AT, CARRIER, DELAY, Column("more", "ARRAY<STRING>")),
        shape(replace(AT, nullable=True), CARRIER, DELAY),
        *(shape(AT, CARRIER, replace(DELAY, type=wider)) for wider in ("BIGINT", "DOUBLE", "DECIMAL(12,2)")),
        shape(AT, CARRIER, DELAY, spec=TimeWindows(HOUR, on="at", lateness_ms=5, disorder_ms=7)),
    ],
)
def test_changes_that_keep_the_meaning_of_older_rows_go_on(new: Shape) -> None:
    change = new.change(holding(OLD))
    assert (change.fingerprint, change.text) == (new.fingerprint, new.text)
    assert (change.over, change.window_ms, change.forget_event_times) == (frozenset(), None, False)


@pytest.mark.parametrize(
    ("new", "told"),
    [
        (shape(AT, DELAY, Column("airline", "STRING")), "column carrier STRING is gone; column airline STRING is new"),
        (shape(AT, DELAY), "column carrier STRING is gone"),
        (shape(AT, CARRIER, DELAY, Column("id", "INT", nullable=False)), "column id INT NOT NULL is new"),
        (shape(AT, replace(CARRIER, nullable=False), DELAY), "column carrier STRING has become STRING NOT NULL"),
        (shape(AT, CARRIER, replace(DELAY, type="SMALLINT")), "column delay INT has become SMALLINT"),
        (shape(AT, CARRIER, replace(DELAY, type="STRING")), "column delay INT has become STRING"),
        (shape(AT, CARRIER, DELAY, spec=TimeWindows(2 * HOUR, on="at")), "there were windows of 1 h of at, and are windows of 2 h of at"),
        (shape(AT, CARRIER, DELAY, spec=TimeWindows(HOUR)), "there were windows of 1 h of at, and are windows of 1 h of arrival time"),
        (shape(AT, CARRIER, DELAY, spec=batches()), "there were windows of 1 h of at, and are batches"),
        (shape(spec=None), "and are no windows"),
        (shape(AT, CARRIER, DELAY, pipeline="q"), "the pipeline was p, and is q"),
        (replace(OLD, table="delta:x"), "windows went into files, and go into delta:x"),
    ],
)  # fmt: skip
def test_any_other_is_refused_in_a_sentence_with_the_columns_and_the_way_out(new: Shape, told: str) -> None:
    text = refusal(new, holding(OLD))
    assert told in text
    assert "`mldserver drain`" in text


TYPES = ["TINYINT", "SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "DECIMAL(5,0)", "DECIMAL(12,2)", "STRING"]
LIMITS = {
    "TINYINT": 2**7 - 1,
    "SMALLINT": 2**15 - 1,
    "INT": 2**31 - 1,
    "BIGINT": 2**63 - 1,
    "DECIMAL(5,0)": 10**5 - 1,
}
ARROW = {
    "TINYINT": pa.int8(), "SMALLINT": pa.int16(), "INT": pa.int32(), "BIGINT": pa.int64(), "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(), "DECIMAL(5,0)": pa.decimal128(5, 0), "DECIMAL(12,2)": pa.decimal128(12, 2), "STRING": pa.string(),
}  # fmt: skip


@given(st.sampled_from(sorted(LIMITS)), st.sampled_from(TYPES))
def test_a_number_may_become_what_holds_its_largest_and_smallest_value(narrow: str, wide: str) -> None:
    """Arrow says what a cast loses; text and what only happens to be exact is refused beside that."""
    new = shape(AT, CARRIER, Column("delay", wide))
    fits = not new.faults(shape(AT, CARRIER, Column("delay", narrow)))
    if fits:
        extremes = pa.array([LIMITS[narrow], -LIMITS[narrow], 1], ARROW[narrow])
        assert extremes.cast(ARROW[wide]).cast(ARROW[narrow]).equals(extremes)
    assert not (fits and wide == "STRING")
    assert fits or wide != narrow


def test_rows_of_several_shapes_are_each_read_by_their_own() -> None:
    wider = shape(AT, CARRIER, replace(DELAY, type="BIGINT"))
    state = holding(wider, OLD, shape(replace(AT, nullable=True), CARRIER, replace(DELAY, type="BIGINT")))
    assert wider.older(state) == {OLD.fingerprint: OLD.ddl}


def test_without_rows_any_handler_may_follow() -> None:
    state = holding(OLD, windows={})
    new = shape(Column("x", "STRING"), spec=TimeWindows(2 * HOUR))
    change = new.change(state)
    # Windows of another size begin anew, and another column's times say nothing of this one's.
    assert (change.window_ms, change.forget_event_times, change.over) == (2 * HOUR, True, frozenset())
    first = LedgerState()
    assert (new.change(first).window_ms, new.change(first).forget_event_times) == (None, False)
    assert OLD.change(holding(shape(spec=None))).over == frozenset()


def test_after_a_drain_published_windows_are_over_whose_rows_do_not_go_with_the_handler() -> None:
    new = shape(AT, DELAY)
    state = holding(OLD, draining=True)
    assert new.change(state).over == {"w"}
    assert shape(DELAY, AT, CARRIER).change(state).over == frozenset()


@pytest.mark.parametrize("still", [WindowState.OPEN, WindowState.SET_ASIDE, "waiting"])
def test_what_a_drain_has_not_published_is_not_given_up(still: str) -> None:
    state = holding(OLD, draining=True)
    entry = state.windows["w"]
    changed = (
        replace(entry, pending=entry.segments)
        if still == "waiting"
        else replace(entry, state=WindowState(still))
    )
    text = refusal(shape(AT, DELAY), replace(state, windows={"w": changed}))
    assert "Window w is" in text
    assert "column carrier STRING is gone" in text
    assert "mldserver windows retry w" in text


def test_a_server_that_runs_with_another_shape_is_a_rival() -> None:
    new = shape(AT, CARRIER, DELAY, Column("more", "STRING"))

    def told(server_id: str, found: Shape | None) -> dict[str, ServerState]:
        return {server_id: ServerState(server_id, 1, shape=found.fingerprint if found else "")}

    def rival(servers: dict[str, ServerState]) -> str | None:
        found = new.rival(holding(OLD, new, servers=servers), "me")
        return None if found is None else str(found)

    assert rival(told("me", OLD)) is rival(told("joins", None)) is rival(told("alike", new)) is None
    text = rival(told("other", OLD)) or ""
    assert text.startswith("The server other runs with another handler: ")
    assert "`more` STRING" in text
    gone = shape(AT, DELAY).rival(holding(OLD, servers=told("other", OLD)), "me")
    assert gone is not None
    assert "column carrier STRING is gone" in str(gone)


# On a ledger.

VALUE = (Column("value", "BIGINT"),)
RENAMED = (Column("amount", "BIGINT"),)


def changed(pipeline: Pipeline, *columns: Column) -> Pipeline:
    pipeline.columns = columns
    return pipeline


async def first_life(pipeline: Pipeline) -> None:
    """Publish the first window, and leave the second open."""
    async with changed(pipeline, *VALUE).life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 11_000)])
        await pipeline.clock.advance(3)
    assert pipeline.published() == {W[0]: [1]}


async def test_a_renamed_column_does_not_replace_a_published_window_by_one_with_nulls(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, recompute=True, spec=TimeWindows(10_000, on="at"))
    at = Column("at", "TIMESTAMP", nullable=False)

    def rows(name: str, *values: int) -> dict[str, pa.Array]:
        return {
            name: pa.array(values),
            "at": pa.array([v * 1000 for v in values], pa.timestamp("ms", tz="UTC")),
        }

    async with changed(pipeline, *VALUE, at).life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 11_000)], columns=rows("value", 1, 11))
        await pipeline.clock.advance(3)
    assert pipeline.published() == {W[0]: [1]}
    with pytest.raises(OperatorError, match="column value BIGINT is gone; column amount BIGINT is new"):
        await start(changed(pipeline, *RENAMED, at))
    # The handler as it was goes on: a late row makes the window's next revision, over all its rows.
    async with changed(pipeline, *VALUE, at).life():
        session = await pipeline.open("a", None)
        await pipeline.give(session, [(3, 12_000)], columns=rows("value", 2))
        await pipeline.clock.advance(5)
    assert pipeline.published()[W[0]] == [1, 2]


async def test_a_column_is_added_and_a_number_widened_over_the_windows_that_are_there(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, recompute=True)
    async with changed(pipeline, Column("value", "INT")).life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)], columns={"value": pa.array([1], pa.int32())})
        await pipeline.cycle()
    async with changed(pipeline, *VALUE, Column("more", "STRING")).life():
        session = await pipeline.open("a", None)
        both = {"value": pa.array([2**40, 3]), "more": pa.array(["x", "y"])}
        await pipeline.give(session, [(2, 2000), (3, 11_000)], columns=both)
        await pipeline.clock.advance(3)
        (job,) = pipeline.engine.jobs
        (old,) = job.older["`value` INT"]
        assert old in job.segments
        assert len(job.segments) == 2
    rows = sorted((row["value"], row["more"]) for row in pipeline.rows(f"window={W[0]}/*"))
    assert rows == [(1, None), (2**40, "x")]


async def start(pipeline: Pipeline) -> None:
    async with pipeline.life():
        pass


async def test_a_second_server_with_another_handler_is_refused_and_disturbs_nobody(tmp_path: Path) -> None:
    one, other = two(tmp_path, recompute=True)
    changed(other, *VALUE, Column("more", "STRING"))
    async with changed(one, *VALUE).life():
        joining = asyncio.create_task(start(other))
        await one.clock.advance(3)
        session = await one.open("a")
        await one.give(session, [(1, 1000), (2, 11_000)])
        await one.clock.advance(3)
        assert one.published() == {W[0]: [1]}
        await one.clock.advance(3)
        with pytest.raises(OperatorError, match=r"The server one runs with another handler: .*`more` STRING"):
            await joining
        # With rows that it could not read it need not even wait.
        with pytest.raises(OperatorError, match="column value BIGINT is gone; column amount BIGINT is new"):
            await start(changed(other, *RENAMED))


async def test_a_dead_servers_shape_forbids_nothing_once_it_is_expired(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    await first_life(one)
    changed(other, *VALUE, Column("more", "STRING"))
    starting = asyncio.create_task(start(other))
    await one.clock.advance(4)
    assert not starting.done()
    await one.clock.advance(2)
    await starting
    assert other.state().servers["two"].shape == Shape.of("test", other.columns, other.spec).fingerprint


async def test_servers_that_come_at_once_agree_on_one_handler(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    changed(one, *VALUE)
    changed(other, *VALUE)
    async with one.life(), other.life():
        state = one.state()
    assert {each.shape for each in state.servers.values()} == {state.shape} == set(state.shapes)
