"""Java's properties files, by what ``java.util.Properties`` says of its format."""

from __future__ import annotations

import pytest

from mldserver.base.java_properties import as_text

pytestmark = pytest.mark.quick


def test_java_reads_special_characters_through_escapes() -> None:
    assert as_text({"a b": " C:\\x", "k": "ü😀\n", "e": ""}) == (
        "a\\ b = \\ C:\\\\x\nk = \\u00fc\\ud83d\\ude00\\u000a\ne = \n"
    )
