from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.base.lines import LONGEST_LINE, LineSplitter, TextLines

pytestmark = pytest.mark.quick


@given(st.lists(st.binary(max_size=30)))
def test_lines_come_whatever_the_chunks_are(chunks: list[bytes]) -> None:
    lines, text = LineSplitter(), TextLines()
    found = [line for chunk in chunks for line in lines.feed(chunk)] + lines.finish()
    *ended, rest = b"".join(chunks).split(b"\n")
    expected = [line.removesuffix(b"\r") for line in ([*ended, rest] if rest else ended)]
    assert (found, lines.finish()) == (expected, [])
    shown = [line for chunk in chunks for line in text.feed_text(chunk)] + text.finish_text()
    assert shown == [line.decode("utf-8", "replace") for line in expected]


def test_what_a_line_has_beyond_the_limit_is_left_out_and_the_line_says_so() -> None:
    lines = TextLines()
    assert lines.feed_text(b"x" * LONGEST_LINE + b"\n") == ["x" * LONGEST_LINE]
    assert (
        lines.feed_text(b"x" * (LONGEST_LINE - 1))
        == lines.feed_text(b"yz")
        == lines.feed_text(b"z" * 10**6)
        == []
    )
    assert lines.feed_text(b"\nnext\n") == ["x" * (LONGEST_LINE - 1) + "y … cut", "next"]
