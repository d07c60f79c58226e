"""The Java daemon's log: the logback settings that it reads, a parser of its output, and what of it is worth reading.

Synchronous cores, time passed in. Logback writes one line an event, its fields between tabs, line ends in it replaced by
U+2028. Everything else on the pipe comes from the JVM itself (or from before logback was up); there, lines of a stack
trace are joined.

At info the KCL writes several lines a second about its own bookkeeping, and a fault comes back with every attempt, each
time with its stack. Here leases and shards become events, known faults a sentence, and a line whose template was shown
within the last minute is only counted. Everything else, and everything as Java wrote it, is at debug.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from mldserver.base.folding import Folding

ENDS_ITSELF: Final = "Process terminated, will initiate shutdown."
"""What the daemon says when its JVM begins to exit: on SIGTERM, or because a connection to the server ended."""
BRIDGE_ENDED: Final = (
    "Child process exited with value: ",
    "Record processor was not initialized and will not have a child process",
)
"""How the daemon's messages begin after which it sends nothing more for a shard: the bridge has exited, or never started."""

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


JOINED_LINES: Final = 500
"""Of the JVM's own that are held back at most."""


@dataclass(slots=True)
class LogParser:
    """Lines in, events out. The JVM's own lines wait for those that belong to them; ``flush`` ends the wait."""

    _raw: list[str] = field(default_factory=list)

    @property
    def waiting(self) -> bool:
        """Whether ``flush`` would give an event."""
        return bool(self._raw)

    def feed(self, lines: Iterable[str]) -> list[LogEvent]:
        """Return the events that ``lines`` complete."""
        events = []
        for line in lines:
            fields = line.split("\t", 3)
            if len(fields) == 4 and fields[0] == MARK:  # noqa: PLR2004  # the pattern's four fields
                text = fields[3].rstrip(LINE_END + " ").replace(LINE_END, "\n")
                events += [*self.flush(), LogEvent(LEVELS.get(fields[1], "warning"), fields[2], text)]
            elif line.strip():
                belongs = self._raw and (_CONTINUES.match(line) or self._raw[0].startswith("#"))
                if not belongs or len(self._raw) >= JOINED_LINES:
                    events += self.flush()
                self._raw.append(line)
        return events

    def flush(self) -> list[LogEvent]:
        """Return the JVM's own lines as an event: nothing more belongs to them."""
        lines, self._raw = self._raw, []
        if not lines:
            return []
        level = "error" if _FAILURE.match(lines[0]) else "warning"
        return [LogEvent(level, "jvm", "\n".join(lines))]


LONGEST_LINE: Final = 1000
"""Characters; the SDK's list of everything that has no credentials is 9,000."""
MOST_LET_GO: Final = 10_000
"""Shards that were let go and are remembered. Each one beyond that can cost a repeated line."""


@dataclass(frozen=True, slots=True)
class FilteredEvent:
    """One event for our own log."""

    level: str
    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KnownFault:
    """A fault that the daemon's log is known to show: how, and what to say instead."""

    pattern: str
    """A regular expression."""
    what: str
    """The sentence; its fields are the pattern's groups."""
    advice: str


# The first that is found in a warning or an error counts.
_FAULTS: Final = (
    KnownFault(
        r"subprocess \[mldserver bridge: (?P<said>.*)\] for shard (?P<shard>\S+)",
        "The bridge of shard {shard} could not reach the server or broke: {said}.",
        "Look whether the server runs, and listens where --connect says.",
    ),
    KnownFault(
        (
            r"Failed to get status message for (?P<action>\w+) action for shard (?P<shard>\S+)"
            r"(?=(.|\n)*Reached end of STDIN)"
        ),
        "The connection of shard {shard} to the server ended while the daemon waited for its answer to {action}.",
        "The server's log says why; the daemon starts again with all its shards.",
    ),
    KnownFault(
        r"Cannot run program \"(?P<program>[^\"]*)\"(?P<said>[^\n]*)",
        "The daemon cannot start the bridge {program}{said}.",
        "Look whether the memory or the number of processes is used up, and whether the bridge may be executed.",
    ),
    KnownFault(
        "java.lang.OutOfMemoryError",
        "The daemon's JVM is out of memory.",
        "Give it more, e.g. --java-option=-Xmx1g.",
    ),
    KnownFault(
        "Unable to load credentials from any of the providers",
        "The daemon finds no AWS credentials any more.",
        "Look at the environment, the profile, or the role of the host.",
    ),
    KnownFault(
        (
            r"(?P<code>ExpiredToken\w*|UnrecognizedClientException|InvalidSignatureException|InvalidClientTokenId)"
            r"|security token included in the request is (expired|invalid)"
        ),
        "AWS refuses the daemon's credentials: they are expired or wrong.",
        "Renew them, and check the region and the host's clock.",
    ),
    KnownFault(
        r"not authorized to perform: (?P<action>[\w:]+)",
        "AWS does not allow the daemon {action}.",
        "Give its role that permission, on the stream or on the application's DynamoDB tables.",
    ),
    KnownFault(
        r"Stream (?P<stream>\S+) under account \S+ not found",
        "There is no stream {stream} in this account and region.",
        "Check --stream and --region; the daemon goes on looking for it.",
    ),
    KnownFault(
        r"ProvisionedThroughputExceededException|ThrottlingException|Rate exceeded",
        "AWS throttles the daemon.",
        "It tries again by itself. When it lasts, the stream has too many readers, or the lease table too little capacity.",
    ),
    KnownFault(
        (r"(?P<shard>\S+): \[SubscriptionLifetime\].*#errorOccurred\) @ \S+ id: \S+ -- (?P<said>.*?)\. Last"),
        "The fan-out subscription of shard {shard} failed: {said}.",
        "It is tried again. Where SubscribeToShard is not available (some emulators), use --retrieval polling.",
    ),
    KnownFault(
        (
            r"UnknownHostException: (?P<said>[^\n]+)|Unable to execute HTTP request: (?P<said2>[^\n]+)"
            r"|ConnectException: (?P<said3>[^\n]+)"
        ),
        "AWS, or the endpoint that stands in for it, is out of reach: {said}.",
        "The daemon tries again. Check the network, the region and the endpoints.",
    ),
    KnownFault(
        r"^Encountered an error while trying to (?P<doing>[^\n]+)\n(?P<said>[^\n]+)",
        "The daemon failed to {doing}: {said}.",
        "The server's log may say why; the daemon starts again with all its shards.",
    ),
)

_REPEATED_LINES: Final = {
    # The bridge's own words, which another class repeats with the shard.
    "jvm": "mldserver bridge: ",
    # Normal at every start and end.
    "CloudWatchPublisherRunnable": "Dropping metrics [] ",
    "WorkerMetricsSelector": "Did not find an operating range metadata provider",
    "LeaseAssignmentManager": "Not able to assign all expiredOrUnAssignedLeases",
}
"""By the last part of the logger's name: how warnings and errors begin that carry no information."""

_REPEATED_FAULT: Final = re.compile(r"Child process failed to |Failed to initialize child process")
"""In what a shard's processor says of a fault whose cause its protocol has told."""

_GAINED: Final = re.compile(
    r"Created new shardConsumer for : ShardInfo\(.*?shardId=(?P<shard>[^,]+),.*SequenceNumber: (?P<position>[^,]+),"
)
_LEFT: Final = re.compile(
    r"Invoking shutdown\(\) for shard (?P<shard>\S+) .*Shutdown reason: (?P<reason>\w+)"
)
_LEFT_EVENTS: Final = {"LEASE_LOST": "kcl.lease_lost", "SHARD_END": "kcl.shard_ended"}
_STARTED: Final = "Initialization complete. Starting worker loop."

_VARIABLE: Final = re.compile(r"shardId-\w+|\b[0-9a-fA-F]{8}(-[0-9a-fA-F]{4,12})+\b|@[0-9a-f]+\b|\d+")


@dataclass(slots=True)
class LogFilter:
    """Events of the daemon's log in, lines for ours out; ``now`` is in seconds, of any clock that does not go back."""

    _now_ms: int = 0
    _folding: Folding = field(init=False)
    _released: dict[tuple[str, str], None] = field(default_factory=dict)
    """Shards and how they were let go, the latest last: the KCL repeats a shutdown that fails every second."""
    _expected_repeats: int = 0
    """Faults of this daemon's protocol that their processors have still to repeat."""

    def __post_init__(self) -> None:
        self._folding = Folding(lambda: self._now_ms)

    def filter(self, event: LogEvent, now: float) -> list[FilteredEvent]:
        """Return the log lines for one event of the daemon: the raw text at debug, and a readable line if it is worth one."""
        raw = verbatim(event)
        class_name = event.logger.rpartition(".")[2]
        if event.level in {"debug", "info"}:
            if event.text.startswith(_STARTED):
                self._expected_repeats = 0
            return [raw, *self._lease_events(class_name, event)]
        if event.text.startswith(_REPEATED_LINES.get(class_name, "\0")):
            return [raw]
        if class_name == "MultiLangProtocol":
            self._expected_repeats += 1
        elif (
            class_name == "MultiLangShardRecordProcessor"
            and self._expected_repeats
            and _REPEATED_FAULT.search(event.text)
        ):
            self._expected_repeats -= 1
            return [raw]
        first_line = event.text.partition("\n")[0]
        for fault in _FAULTS:
            if match := re.search(fault.pattern, event.text):
                groups = {
                    name.rstrip("23"): text for name, text in match.groupdict().items() if text is not None
                }
                words = {name: _shorten(text).rstrip(". ") for name, text in groups.items()}
                fields = {"what": fault.what.format_map(words), "advice": fault.advice, "text": first_line}
                fields |= {"shard": groups["shard"]} if "shard" in groups else {}
                return [raw, *self._fold(fault.what, FilteredEvent(event.level, "kcl.fault", fields), now)]
        key = f"{class_name} {_VARIABLE.sub('#', first_line)}"
        lines = self._fold(key, FilteredEvent(event.level, "kcl.log", raw.fields), now)
        return lines if lines and lines[0].fields == raw.fields else [raw, *lines]

    def _lease_events(self, class_name: str, event: LogEvent) -> list[FilteredEvent]:
        """Return an event if the daemon has started, or gained or lost a shard's lease; a repeated loss gives none."""
        if event.text.startswith(_STARTED):
            return [FilteredEvent("info", "kcl.log", {"logger": event.logger, "text": _STARTED})]
        if class_name == "Scheduler" and (gained := _GAINED.search(event.text)):
            for reason in _LEFT_EVENTS:
                self._released.pop((gained["shard"], reason), None)
            return [FilteredEvent("info", "kcl.lease_gained", gained.groupdict())]
        if (
            class_name == "ShutdownTask"
            and (left := _LEFT.search(event.text))
            and left["reason"] in _LEFT_EVENTS
        ):
            key = left["shard"], left["reason"]
            known = key in self._released
            self._released.pop(key, None)
            self._released[key] = None
            if len(self._released) > MOST_LET_GO:
                del self._released[next(iter(self._released))]
            if known:
                return []
            return [FilteredEvent("info", _LEFT_EVENTS[left["reason"]], {"shard": left["shard"]})]
        return []

    def _fold(self, key: str, line: FilteredEvent, now: float) -> list[FilteredEvent]:
        """Return the line at most once a minute for each ``key``, with the number of lines that were held back."""
        self._now_ms = round(now * 1000)
        times = self._folding.count(key)
        return [self._line(line, times - 1)] if times else []

    def _line(self, line: FilteredEvent, count: int) -> FilteredEvent:
        """Return a line as it is shown: cut, and with its count."""
        lines = map(_shorten, line.fields["text"].split("\n"))
        fields = line.fields | {"text": "\n".join(lines)} | ({"repeated": count} if count else {})
        return FilteredEvent(line.level, line.event, fields)


def verbatim(event: LogEvent) -> FilteredEvent:
    """Return an event as Java wrote it, for debug."""
    return FilteredEvent("debug", "kcl.log", {"logger": event.logger, "text": event.text})


def _shorten(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} … cut"
