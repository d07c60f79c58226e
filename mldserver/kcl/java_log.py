"""The Java daemon's output as log events: a synchronous parser, and the logback settings that it reads.

Logback writes one line an event, its fields between tabs, line ends in it replaced by U+2028. Everything else on the
pipe comes from the JVM itself (or from before logback was up); there, lines of a stack trace are joined.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

ENDS_ITSELF: Final = "Process terminated, will initiate shutdown."
"""What the daemon says when its JVM begins to exit: on SIGTERM, or because a connection to the server ended."""

MARK: Final = "MLD"
LINE_END: Final = "\u2028"
CHATTY: Final = "\n  ".join(
    f'<logger name="software.amazon.kinesis.multilang.{name}" level="WARN"/>'
    for name in (
        "GetNextMessageTask",
        "LineReaderTask",
        "MessageReader",
        "MessageWriter",
        "MultiLangProtocol",
    )
)
"""Classes that write several lines for each message, even an empty one; the server logs every batch already."""

TELLING: Final = '<logger name="software.amazon.kinesis.lifecycle.ShutdownTask" level="DEBUG"/>'
"""The only class that says why a shard is let go."""

LOGBACK_XML: Final = f"""\
<configuration>
  <statusListener class="ch.qos.logback.core.status.NopStatusListener"/>
  <appender name="stdout" class="ch.qos.logback.core.ConsoleAppender">
    <encoder>
      <charset>UTF-8</charset>
      <pattern>{MARK}\t%level\t%logger\t%replace(%msg%n%ex){{'[\\r\\n]+', '{LINE_END}'}}%nopex%n</pattern>
    </encoder>
  </appender>
  {CHATTY}
  {TELLING}
  <root level="INFO"><appender-ref ref="stdout"/></root>
</configuration>
"""

LEVELS: Final = {"TRACE": "debug", "DEBUG": "debug", "INFO": "info", "WARN": "warning", "ERROR": "error"}

_CONTINUES: Final = re.compile(r"\s|Caused by:|Suppressed:|\.\.\. \d+ more")
_FAILURE: Final = re.compile(r"#|Exception in thread|.*\b[A-Z]\w*(Exception|Error)\b")


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One event of the daemon's log."""

    level: str
    """``debug``, ``info``, ``warning`` or ``error``."""
    logger: str
    """The Java class that logged; ``jvm`` for the JVM's own output."""
    text: str
    """The message; a stack trace follows on further lines."""


class LogParser:
    """Lines in, events out. The JVM's own lines wait for those that belong to them; ``flush`` ends the wait."""

    def __init__(self) -> None:
        self._raw: list[str] = []

    @property
    def waiting(self) -> bool:
        """Whether ``flush`` would give an event."""
        return bool(self._raw)

    def feed(self, lines: Iterable[str]) -> list[LogEvent]:
        """Return the events that ``lines`` complete."""
        return [event for line in lines for event in self._line(line)]

    def flush(self) -> list[LogEvent]:
        """Return the JVM's own lines as an event: nothing more belongs to them."""
        lines, self._raw = self._raw, []
        if not lines:
            return []
        level = "error" if _FAILURE.match(lines[0]) else "warning"
        return [LogEvent(level, "jvm", "\n".join(lines))]

    def _line(self, line: str) -> list[LogEvent]:
        fields = line.split("\t", 3)
        if len(fields) == 4 and fields[0] == MARK:  # noqa: PLR2004  # the pattern's four fields
            text = fields[3].rstrip(LINE_END + " ").replace(LINE_END, "\n")
            return [*self.flush(), LogEvent(LEVELS.get(fields[1], "warning"), fields[2], text)]
        if not line.strip():
            return []
        if self._raw and (_CONTINUES.match(line) or self._raw[0].startswith("#")):
            self._raw.append(line)
            return []
        events = self.flush()
        self._raw.append(line)
        return events
