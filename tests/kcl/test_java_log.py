from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from mldserver.kcl.log_filter import JOINED_LINES, LINE_END, LOGBACK_XML, LogEvent, LogParser

pytestmark = pytest.mark.quick


def test_a_line_of_logback_is_one_event() -> None:
    assert LogParser().feed(["MLD\tINFO\ta.B\tgrüße\tdich ", ""]) == [LogEvent("info", "a.B", "grüße\tdich")]


def test_levels_are_mapped_and_an_unknown_one_is_a_warning() -> None:
    lines = "".join(f"MLD\t{level}\tx\tt\n" for level in ("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "ODD"))
    assert [event.level for event in LogParser().feed(lines.split("\n"))] == [
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
    assert LogParser().feed(line.split("\n")) == [
        LogEvent("error", "a.B", "failed\njava.io.IOException: x\n\tat a.B.c(B.java:1)")
    ]


def test_the_jvms_own_lines_are_joined_until_something_else_comes() -> None:
    parser = LogParser()
    raw = (
        'Exception in thread "main" java.lang.Error: x\n\tat a.B.c(B.java:1)\nCaused by: y\n\t... 3 more\n\n'
    )
    assert parser.feed(raw.split("\n")) == []
    assert parser.waiting
    assert parser.feed(["MLD\tINFO\tx\tnext", "plain"]) == [
        LogEvent("error", "jvm", raw.rstrip("\n")),
        LogEvent("info", "x", "next"),
    ]
    assert parser.feed(["another"]) == [LogEvent("warning", "jvm", "plain")]
    assert parser.flush() == [LogEvent("warning", "jvm", "another")]
    assert not parser.waiting
    assert parser.flush() == []


def test_the_report_of_a_crashed_jvm_stays_together() -> None:
    parser = LogParser()
    assert parser.feed(["#", "# A fatal error has been detected", "SIGSEGV"]) == []
    assert parser.flush() == [LogEvent("error", "jvm", "#\n# A fatal error has been detected\nSIGSEGV")]


def test_lines_without_end_that_go_on_are_not_kept_without_end() -> None:
    parser = LogParser()
    events = parser.feed(["# A fatal error", *(" at x" for _ in range(3 * JOINED_LINES))])
    assert [event.text.count("\n") + 1 for event in events] == [JOINED_LINES] * 3
    assert [event.text for event in parser.flush()] == [" at x"]


def test_logbacks_settings_are_xml_with_the_pattern_that_is_parsed() -> None:
    pattern = ET.fromstring(LOGBACK_XML).findtext(".//pattern")
    assert pattern is not None
    assert pattern.startswith("MLD\t%level\t%logger\t")
    assert LINE_END in pattern
