"""Java's properties files, by what ``java.util.Properties`` says of its format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.base.java_properties import as_text, from_text

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "line",
    [
        "spark.ui.port=4041",
        "spark.ui.port = 4041",
        "spark.ui.port:4041",
        "spark.ui.port   4041",
        "\t spark.ui.port\t:\t4041",
        "spark.ui.port\f4041",
        "spark.ui.\\\n    port \\\r\n = \\\r   4041",
        "# a comment, and it ends here \\\nspark.ui.port=4041",
        "   ! a comment\n\n \t\nspark.ui.port=4041\n",
        "spark.ui.port=1\rspark.ui.port=4041\r",
        "spark.ui.port=4041\\",
        "spark.ui.port=4041\\\n\n",
        "spark.ui.p\\u006Frt=404\\1",
    ],
)
def test_key_and_value_are_separated_by_an_equals_sign_a_colon_or_space(line: str) -> None:
    assert from_text(line) == {"spark.ui.port": "4041"}


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("", {}),
        ("a", {"a": ""}),
        ("a=", {"a": ""}),
        ("a b=c:d # e", {"a": "b=c:d # e"}),
        ("a  =  = b ", {"a": "= b "}),
        ("a\\ b\\=c\\:d = 1", {"a b=c:d": "1"}),
        ("a=C:\\\\x\\\\", {"a": "C:\\x\\"}),
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        ("a=x\\ty\\nz\\r\\f\\q", {"a": "x\ty\nz\r\fq"}),
        ("a=\\ud83d\\ude00ü", {"a": "😀ü"}),
        ("a=1\\\n# no comment", {"a": "1# no comment"}),
        ("a=1\x0b\x85\u2028b", {"a": "1\x0b\x85\u2028b"}),
        ("= 1", {"": "1"}),
    ],
)
def test_values_are_read_to_the_end_of_the_line_without_their_escapes(
    text: str, pairs: dict[str, str]
) -> None:
    assert from_text(text) == pairs


@pytest.mark.parametrize("value", ["\\u12", "\\u12g4", "\\u", "\\ud83d", "\\ude00\\ud83d"])
def test_half_a_character_is_told_with_its_line_and_not_with_its_value(value: str) -> None:
    with pytest.raises(ValueError, match=r"^line 3 has a \\u that names no character$"):
        from_text(f"# nothing\na = 1\npassword = hush{value}\n")


def test_java_reads_special_characters_through_escapes() -> None:
    assert as_text({"a b": " C:\\x", "k": "ü😀\n", "e": ""}) == (
        "a\\ b = \\ C:\\\\x\nk = \\u00fc\\ud83d\\ude00\\u000a\ne = \n"
    )


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_what_is_written_is_read_again(properties: dict[str, str]) -> None:
    written = as_text(properties)
    assert written.isascii()
    assert from_text(written) == properties
