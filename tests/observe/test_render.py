from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.observe.log_lines import as_json, as_text, harmless
from mldserver.records import Sequence

pytestmark = pytest.mark.quick

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no")


def read_back(**fields: Any) -> Any:
    return orjson.loads(as_json(fields))


def test_timestamp_level_and_event_come_first() -> None:
    line = as_json({"shard": "s", "event": "batch.done", "level": "info", "timestamp": "t", "records": 3})
    assert line == b'{"timestamp":"t","level":"info","event":"batch.done","shard":"s","records":3}'


def test_a_sequence_number_beyond_64_bits_is_told_in_its_digits() -> None:
    number = 49590338271490256608559692538361571095921575989136588898
    assert read_back(sequence=number, small=5, edge=2**64 - 1) == {
        "sequence": str(number),
        "small": 5,
        "edge": 2**64 - 1,
    }


class Reading(float):
    """As numpy's float64 is: a float, and none that JSON takes."""


@pytest.mark.parametrize("beside", [1, 2**70])
def test_a_float_of_another_class_is_told_as_text_whatever_stands_beside_it(beside: int) -> None:
    assert read_back(seconds=Reading(1.5), beside=beside)["seconds"] == "1.5"


def test_what_json_does_not_know_is_told_as_text() -> None:
    assert read_back(
        path=Path("/a"),
        sequence=Sequence(5, 1),
        data=b"a\xff",
        view=memoryview(b"b"),
        names={"b", "a"},
        error=ValueError("x"),
        odd=Unspeakable(),
        number=math.nan,
    ) == {
        "path": "/a",
        "sequence": "5/1",
        "data": "a\\xff",
        "view": "b",
        "names": ["a", "b"],
        "error": "x",
        "odd": "<Unspeakable: RuntimeError in its __str__>",
        "number": None,
    }


def test_lone_surrogates_are_escaped_wherever_they_are() -> None:
    assert read_back(text="a\ud800", nested=[{"k\udfff": ("x", 2**70, True, None, 1.5)}]) == {
        "text": "a\\ud800",
        "nested": [{"k\\udfff": ["x", str(2**70), True, None, 1.5]}],
    }


def test_endless_nesting_is_cut_off() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert isinstance(read_back(endless=endless)["endless"], list)
    circle: dict[str, Any] = {}
    circle["again"] = circle
    assert isinstance(read_back(circle=circle)["circle"], dict)


@given(st.dictionaries(st.text(), ANYTHING, max_size=5))
def test_anything_becomes_one_line_of_json(event: dict[str, Any]) -> None:
    line = as_json(event)
    assert b"\n" not in line
    assert isinstance(orjson.loads(line), dict)


@given(st.dictionaries(st.text(), ANYTHING, max_size=5), st.booleans())
def test_anything_becomes_text_without_control_characters(event: dict[str, Any], colours: bool) -> None:
    text = as_text(event, colours=colours)
    plain = text.replace("\x1b[", "") if colours else text
    assert not any(ord(char) < 32 and char not in "\n\t" for char in plain)


def test_people_see_where_it_was_before_what_it_was() -> None:
    event = {
        "timestamp": "2026-11-21T10:00:00.000000Z",
        "level": "info",
        "event": "batch.done",
        "records": 3,
        "shard": "shardId-000",
        "note": "two words",
        "quoted": 'a"b',
        "list": [1, 2],
        "none": None,
    }
    assert as_text(event, colours=False) == (
        "2026-11-21T10:00:00.000000Z info     batch.done             shard=shardId-000 records=3 "
        'note="two words" quoted="a\\"b" list=[1,2] none=null'
    )


def test_tracebacks_stand_below_and_are_indented() -> None:
    event = {"level": "error", "event": "e", "traceback": "Traceback:\n  File\x1b[2J", "exception": ""}
    assert as_text(event, colours=False).splitlines()[1:] == ["    Traceback:", "      File\\x1b[2J"]


def test_colours_follow_the_level() -> None:
    assert "\x1b[31merror" in as_text({"level": "error", "event": "e"}, colours=True)
    assert "\x1b[" not in as_text({"level": "error", "event": "e"}, colours=False)
    assert "strange" in as_text({"level": "strange", "event": "e"}, colours=True)


@pytest.mark.parametrize("char", ["\x1b", "\r", "\x07", "\x9b", "\u2028"])
def test_control_characters_cannot_move_the_cursor(char: str) -> None:
    assert char not in harmless(f"a{char}b")
    assert harmless("a\tb ü") == "a\tb ü"
