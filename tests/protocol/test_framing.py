"""Lines out of bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.protocol.codec import LineFramer

pytestmark = [pytest.mark.quick, pytest.mark.core]


def test_lines_end_with_lf_or_crlf_and_come_without_their_ends() -> None:
    assert LineFramer(limit=1000).feed(b"one\ntwo\r\nthree\n") == [b"one", b"two", b"three"]


def test_blank_lines_are_skipped() -> None:
    assert LineFramer(limit=1000).feed(b"\n\r\n  \t\none\n\n") == [b"one"]


def test_only_one_cr_belongs_to_the_line_end() -> None:
    assert LineFramer(limit=1000).feed(b"a\rb\r\r\n") == [b"a\rb\r"]


def test_a_line_may_come_byte_by_byte() -> None:
    framer = LineFramer(limit=1000)
    lines = [line for byte in b"one\r\ntwo\n" for line in framer.feed(bytes([byte]))]
    assert lines == [b"one", b"two"]


def test_a_buffer_is_taken_as_far_as_it_is_filled_and_may_be_filled_again() -> None:
    framer = LineFramer(limit=1000)
    data = bytearray(b"zero\nonxx\n")
    (zero,) = framer.feed(data, 7)
    data[:] = b"e\n" + b"\n" * 8
    (one,) = framer.feed(data, 2)
    data[:] = b"?" * 10
    assert (zero, one) == (b"zero", b"one")
    data.append(0)  # nothing holds on to it


def test_a_line_that_came_in_pieces_is_handed_over_in_what_it_was_collected_in() -> None:
    framer = LineFramer(limit=1000)
    framer.feed(b"on")
    (line,) = framer.feed(b"e\r\n")
    assert (type(line), line, len(framer.partial)) == (bytearray, b"one", 0)


def test_what_is_held_of_an_incomplete_line_is_known() -> None:
    framer = LineFramer(limit=1000)
    framer.feed(b"one\ntw")
    assert (len(framer.partial), bytes(framer.partial), framer.pending_blank) == (2, b"tw", False)
    framer.feed(b"o\n\r")
    assert (len(framer.partial), framer.pending_blank) == (1, True)
    framer.feed(b" " * 100)
    assert not framer.pending_blank


def test_an_incomplete_line_above_the_limit_is_an_error_before_its_end() -> None:
    framer = LineFramer(limit=4)
    assert framer.feed(b"ab") == []
    assert framer.error is None
    assert framer.feed(b"cde") == []
    assert framer.error is not None
    assert framer.error.where["excerpt"] == "abcde"
    assert len(framer.partial) == 0


def test_the_lines_before_one_that_is_too_long_are_given_and_none_after_it() -> None:
    framer = LineFramer(limit=4)
    assert framer.feed(b"one\ntoo long\ntwo\n") == [b"one"]
    assert framer.error is not None
    assert framer.feed(b"three\n") == []


def test_a_line_of_exactly_the_limit_is_no_error() -> None:
    framer = LineFramer(limit=4)
    assert framer.feed(b"four\nfo") == [b"four"]
    assert framer.feed(b"ur\n") == [b"four"]
    assert framer.error is None


def test_a_line_without_its_end_is_reported_at_eof_and_dropped() -> None:
    framer = LineFramer(limit=1000)
    framer.feed(b"one\nhalf")
    assert framer.feed_eof() == 4
    assert (len(framer.partial), framer.feed_eof()) == (0, 0)


def test_white_space_at_eof_is_no_line() -> None:
    framer = LineFramer(limit=1000)
    framer.feed(b"one\n\r")
    assert framer.feed_eof() == 0


def test_a_long_line_in_small_pieces_is_not_quadratic() -> None:
    framer = LineFramer(limit=2**28)
    piece = b"x" * 1024
    for _ in range(20_000):  # 20 MiB; joining anew at each piece would copy 200 GiB
        framer.feed(piece)
    (line,) = framer.feed(b"\n")
    assert len(line) == 20_000 * 1024


texts = st.lists(
    st.one_of(st.binary(max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r", b" ", b"long" * 5])),
    max_size=12,
).map(b"".join)


@given(texts, st.lists(st.integers(0, 200)), st.integers(1, 16))
def test_any_chunking_gives_what_the_whole_gives(data: bytes, cuts: list[int], limit: int) -> None:
    whole, pieces = LineFramer(limit), LineFramer(limit)
    expected = whole.feed(data)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    got = [line for start, end in itertools.pairwise(edges) for line in pieces.feed(data[start:end])]
    assert got == expected
    assert (whole.error is None) == (pieces.error is None)
    assert whole.feed_eof() == pieces.feed_eof()


@given(texts)
def test_lines_are_what_splitting_the_whole_gives(data: bytes) -> None:
    expected = [line.removesuffix(b"\r") for line in data.split(b"\n")[:-1] if line.strip()]
    assert LineFramer(limit=1000).feed(data) == [line for line in expected if line]
