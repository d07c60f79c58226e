from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from mldserver.kcl.java_log import LINE_END, LOGBACK_XML, LONGEST, LogEvent, LogParser


def test_a_line_of_logback_is_one_event() -> None:
    assert LogParser().feed("MLD\tINFO\ta.B\tgrüße\tdich \n".encode()) == [
        LogEvent("info", "a.B", "grüße\tdich")
    ]


def test_levels_are_mapped_and_an_unknown_one_is_a_warning() -> None:
    lines = "".join(f"MLD\t{level}\tx\tt\n" for level in ("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "ODD"))
    assert [event.level for event in LogParser().feed(lines.encode())] == [
        "debug",
        "debug",
        "info",
        "warning",
        "error",
        "warning",
    ]


def test_a_stack_trace_comes_back_on_its_lines() -> None:
    line = (
        f"MLD\tERROR\ta.B\tfailed{LINE_END}java.io.IOException: x{LINE_END}\tat a.B.c(B.java:1){LINE_END} \n"
    )
    assert LogParser().feed(line.encode()) == [
        LogEvent("error", "a.B", "failed\njava.io.IOException: x\n\tat a.B.c(B.java:1)")
    ]


def test_the_jvms_own_lines_are_joined_until_something_else_comes() -> None:
    parser = LogParser()
    raw = (
        'Exception in thread "main" java.lang.Error: x\n\tat a.B.c(B.java:1)\nCaused by: y\n\t... 3 more\n\n'
    )
    assert parser.feed(raw.encode()) == []
    assert parser.waiting
    assert parser.feed(b"MLD\tINFO\tx\tnext\nplain\n") == [
        LogEvent("error", "jvm", raw.rstrip("\n")),
        LogEvent("info", "x", "next"),
    ]
    assert parser.feed(b"another\r\n") == [LogEvent("warning", "jvm", "plain")]
    assert parser.flush() == [LogEvent("warning", "jvm", "another")]
    assert not parser.waiting
    assert parser.flush() == []


def test_the_report_of_a_crashed_jvm_stays_together() -> None:
    parser = LogParser()
    parser.feed(b"#\n# A fatal error has been detected\nSIGSEGV\n")
    assert parser.end() == [LogEvent("error", "jvm", "#\n# A fatal error has been detected\nSIGSEGV")]


def test_the_end_completes_a_line_without_its_end() -> None:
    parser = LogParser()
    assert parser.feed(b"MLD\tINFO\tx\tlast words") == []
    assert parser.end() == [LogEvent("info", "x", "last words")]
    assert parser.end() == []


def test_a_line_beyond_the_limit_is_cut_and_says_so() -> None:
    parser = LogParser()
    parser.feed(b"MLD\tINFO\tx\t")
    for _ in range(3):
        assert parser.feed(b"a" * LONGEST) == []
    (event,) = parser.feed(b"\n")
    assert event.text.endswith("a … cut")
    assert len(event.text) <= LONGEST + 10
    assert parser.feed(b"MLD\tINFO\tx\tshort\n") == [LogEvent("info", "x", "short")]


@given(st.lists(st.sampled_from(["MLD\tWARN\ta\tm", "raw", "\tat x", "", "#x", "Caused by: z"])), st.data())
def test_chunking_changes_nothing(lines: list[str], data: st.DataObject) -> None:
    stream = "\n".join(lines).encode()
    whole, pieces = LogParser(), LogParser()
    wanted = whole.feed(stream) + whole.end()
    got: list[LogEvent] = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        got += pieces.feed(stream[:cut])
        stream = stream[cut:]
    assert got + pieces.end() == wanted


def test_logbacks_settings_are_xml_with_the_pattern_that_is_parsed() -> None:
    pattern = ET.fromstring(LOGBACK_XML).findtext(".//pattern")
    assert pattern is not None
    assert pattern.startswith("MLD\t%level\t%logger\t")
    assert LINE_END in pattern
