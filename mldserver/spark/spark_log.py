"""From the driver's standard output and error to events of the log. Synchronous, no I/O.

Spark writes JSON, by the log4j settings that ``session.py`` gives it, unless the user gave it others; Java, Python and
the user's code write whatever they like.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import orjson

# Spark calls an error what it goes on to retry, and every error of the user's code. What those come to is told by the
# server's own events (window.failed, spark.lost), at the level that they deserve.
_LEVELS = {
    "TRACE": "debug",
    "DEBUG": "debug",
    "INFO": "info",
    "WARN": "warning",
    "ERROR": "warning",
    "FATAL": "error",
}

_PLAIN = re.compile(r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d (TRACE|DEBUG|INFO|WARN|ERROR|FATAL) ([\w.$]+): (.*)")
"""``26/11/21 02:53:02 WARN NativeCodeLoader: …``: Spark's own pattern, for users who bring it back."""

_ALWAYS_SAID = re.compile(
    r"WARNING: Using incubator modules|Using Spark's default log4j profile|Setting default log level to"
    r"|To adjust logging level use|NOTE: SPARK_\w+ is|Unable to load native-hadoop library"
)
"""Said at every start, about nothing that a person could or should change."""

_SAID_TWICE = frozenset(
    {
        "DataFrameQueryContextLogger",
        "org.apache.spark.sql.execution.datasources.FileFormatWriter",
        "org.apache.spark.util.Utils",
    }
)
"""Loggers that repeat a job's error, which comes back with the job's answer anyway."""

_FRAMES = 40
"""Lines of a Java stack that are kept."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event: ``spark.log``, or ``handler.output`` when the user's code printed it."""

    level: str
    text: str
    logger: str = ""
    exception: str = ""


def parse(line: str) -> Entry:
    """Return what a line of the driver's standard error says."""
    if line.startswith("{") and (entry := _structured(line)) is not None:
        return entry
    if plain := _PLAIN.match(line):
        return Entry(_level(plain[1], plain[3]), plain[3], plain[2])
    return Entry("debug" if _ALWAYS_SAID.search(line) else "info", line)


def _level(name: str, text: str) -> str:
    return "debug" if _ALWAYS_SAID.search(text) else _LEVELS.get(name, "info")


def _structured(line: str) -> Entry | None:
    try:
        fields = orjson.loads(line)
    except ValueError:
        return None
    if "level" not in fields or "msg" not in fields:
        return None
    logger, text = str(fields.get("logger", "")), str(fields["msg"])
    level = "debug" if logger in _SAID_TWICE else _level(str(fields["level"]), text)
    exception = fields.get("exception")
    if isinstance(exception, dict):  # pyspark's own logger, in Python
        return Entry(level, text, logger, f"{exception.get('class')}: {exception.get('msg')}")
    stack = str(exception or "").splitlines()
    if len(stack) > _FRAMES:
        stack[_FRAMES:] = [f"\t… {len(stack) - _FRAMES} more"]
    return Entry(level, text, logger, "\n".join(stack))
