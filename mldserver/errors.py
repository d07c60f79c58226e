"""One small tree of errors, split by whose fault it is.

In addition to its sentence, each error carries what the server did (``did``), what a person can do next (``advice``)
and the place it happened at (``pipeline``, ``shard``, ``sequence`` …) as fields for the log.

    MldserverError
    ├── PeerError          the daemon, or another client of its port
    ├── HandlerError       the user's handler
    ├── LedgerError        durable state is damaged, newer than this program, or out of reach
    ├── SparkError         a window's job, the Spark driver, or Java
    ├── OperatorError      settings, files, ports: what the person who starts the server gave it
    └── InternalError      this server: always a bug worth reporting
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, ClassVar, Final, Literal, TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)

EXIT_CLEAN: Final = 0
EXIT_FAULT: Final = 1
EXIT_OPERATOR: Final = 2
"""Settings, handler, Java or ledger cannot work as given, however often they are tried."""
EXIT_FORCED: Final = 3
"""A second signal, or the grace was over before every row was durable; of `mldserver kcl`: the daemon was killed."""


class MldserverError(Exception):
    """The root: a sentence for people, and fields for the log."""

    lasting: ClassVar[bool] = False
    """Whether another start would meet it again, until a person does something. The exit code is then 2, else 1."""

    def __init__(self, what: str, *, did: str = "", advice: str = "", **where: Any) -> None:
        """Say ``what`` happened, what the server ``did`` about it, what to do next, and where it was."""
        super().__init__(what)
        self.what = what
        self.did = did
        self.advice = advice
        self.where = where

    def told(self, flat: Collection[str] = ("traceback",)) -> dict[str, Any]:
        """Return the error as fields of a log event; its place is one field, ``where``, except the keys in ``flat``.

        ``error`` is its class's name, which is stable.
        By default the traceback is a separate field: readers of the log show it as a block.
        """
        where = {key: value for key, value in self.where.items() if value is not None and value != ""}
        own = {key: where.pop(key) for key in tuple(where) if key in flat}
        name = type(self).__name__
        said = {"error": name, "what": self.what, "did": self.did, "advice": self.advice, "where": where}
        return {key: value for key, value in said.items() if value} | own

    def __str__(self) -> str:
        """Return one paragraph: what happened, what was done, what to do."""
        return " ".join(part for part in (self.what, self.did, self.advice) if part)


def told_of(error: MldserverError | OSError) -> dict[str, Any]:
    """Return an error of ours, or of the output folder's disk, as fields that any event may carry."""
    if isinstance(error, MldserverError):
        return error.told()
    return {
        "what": str(error) or type(error).__name__,
        "did": "Rows stay where they are and are tried again; no position moves.",
        "advice": "Make room on the output folder's disk, or mend what the error names.",
    }


def fields_to_log(error: Exception, *, quotes: bool) -> dict[str, Any]:
    """Return an error of a job as fields of the log. ``quotes``: whether they may quote what the user's code or Spark says."""
    fields = error.told() if isinstance(error, MldserverError) else {"what": str(error)}
    if not may_quote(error, quotes=quotes):
        fields |= {name: without_messages(fields[name]) for name in ("what", "traceback") if name in fields}
    return fields


def may_quote(error: Exception, *, quotes: bool) -> bool:
    """Return whether what an error says may be shown: it quotes nobody else, or that is allowed."""
    return quotes or not isinstance(error, WindowFailed) or not error.quotes


WITHHELD: Final = "(message withheld: see log_error_messages)"
_FRAME: Final = re.compile(r' *File "[^"]+", line \d+(, in |$)|\s+at [\w.$<>/]+\(|\s*\.\.\. \d+ more|\t… \d')
"""A line of a traceback that says where: Python's, or Java's."""
_BETWEEN: Final = re.compile(
    r"( *\+ Exception Group )?Traceback \(most|During handling of|The above exception|The error above"
    r"| *\+[-+]+( (\d+|\.\.\.) -+)?$"
)
_CAUSE: Final = re.compile(r"\s*(Caused by|Suppressed): ")
_CLASS: Final = re.compile(
    r"(\s*(?:Caused by|Suppressed): )?([A-Za-z_][\w.$<>]*(?:: [A-Za-z_][\w.]*(?:Error|Exception))?)(: |:?$)"
)
"""An error's class, or that of Spark's error and of the one that a function of the user's has raised."""
_PLACE: Final = re.compile(r" \([^()\s]+:\d+, in [\w<>.]+\)$")
"""Where a function of the user's has raised it, at the end of its line."""
_OF_GROUP: Final = re.compile(r" *\| ?")
"""What goes ahead of the lines of an exception group."""


def without_messages(text: str) -> str:
    """Return what may be logged of an error, or of its traceback: classes and places, not what the errors say.

    Messages of the user's code, of Spark and of databases may quote values of rows.
    """
    kept: list[str] = []
    # What a line is depends on the one before it: code and its marks follow a frame, a class follows a traceback.
    code, marks, class_ = False, False, True
    for whole in text.splitlines():
        line = _OF_GROUP.sub("", whole, count=1)
        is_place = _FRAME.match(line) or _BETWEEN.match(line)
        is_code = (code and line.startswith("    ")) or (marks and line and not line.strip(" ~^"))
        if is_place or is_code:
            code, marks, class_ = bool(is_place), bool(code), True
            kept.append(whole)
            continue
        found = _CLASS.match(line) if class_ or _CAUSE.match(line) else None
        if found is not None:
            place, head = _PLACE.search(line), whole[: len(whole) - len(line) + found.end()]
            message = f"{head}{WITHHELD}{place[0] if place else ''}"
            kept.append(message if found[3] == ": " else whole)
        code, marks, class_ = False, False, False
    return "\n".join(kept) or WITHHELD


def leaves(group: BaseExceptionGroup[ErrorT]) -> Iterator[ErrorT]:
    """Yield the errors of a group and of the groups in it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


def folder_error(error: OSError) -> type[OperatorError]:
    """Return the class for a folder that cannot be used: one that is a file stays one, all else may be a missing mount."""
    lasting = isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError)
    return OperatorError if lasting else NotThereYet


class PeerError(MldserverError):
    """The peer broke the protocol; its own connection is closed, no other notices."""


class FramingError(PeerError):
    """A line is longer than the limit."""


class DecodeError(PeerError):
    """A line is not a message: invalid UTF-8, not JSON, nested too deeply, a field of a wrong type."""


class ProtocolViolation(PeerError):
    """A well-formed message came where the protocol does not allow it."""


class PeerTimeout(PeerError):
    """The peer did not send what must come within a limit."""


class GapRefused(PeerError):
    """The daemon starts beyond the ledger's position: records would be skipped without a trace."""


class HandlerError(MldserverError):
    """The user's handler is at fault."""

    lasting = True


class HandlerNotFound(HandlerError):
    """A dotted path leads nowhere: the module, or the attribute in it, does not exist."""


class HandlerInvalid(HandlerError):
    """A handler was found but cannot be run: hooks, signatures, schema or windows are wrong."""


class HandlerUnready(HandlerInvalid):
    """Importing the handler met something that does not answer: its database, say. It may by the next start."""

    lasting = False


class HandlerHalted(HandlerError):
    """A handler failed under the policy ``halt``: the connection is closed on purpose."""


class HandlerLost(HandlerError):
    """A handler that keeps its position is gone with records that it had not checkpointed: they must be read again."""


class NoKey(HandlerError):
    """The handler asked for the key or the state of a record that has no partition key. The call fails."""


class NotATimer(HandlerError):
    """Something that is not marked with ``timer``, or cannot be, was used as a callback of timers. The call fails."""


class StateTooLarge(HandlerError):
    """The state of one key or the payload of a timer is longer than the limit, or a key has too many timers. The call fails."""


class StateFull(HandlerError):
    """Keyed state takes as much memory as ``state_bytes`` allows. A call that writes the state of a new key fails."""


class QueryFailed(HandlerError):
    """A query of a handler (``ctx.sql``), or of a lookup, has no result. The call fails unless it catches this."""


class QueryTooLarge(QueryFailed):
    """A query of a handler has a result beyond its limit of rows or bytes."""


class KeyElsewhere(HandlerError):
    """A record's key hashes outside its shard's range, so another shard has the key's state. The call fails."""


class LedgerError(MldserverError):
    """Durable state cannot be used."""


class LedgerMissing(LedgerError):
    """No ledger of this pipeline was ever made there."""


class LedgerUnusable(LedgerError):
    """The ledger is damaged, or these settings can never reach it."""

    lasting = True


class LedgerVersionError(LedgerUnusable):
    """The ledger was written by a newer program, or does not belong to this pipeline."""


class ServerExpired(LedgerError):
    """Another server expired this one: nothing it had not registered counts, and it must start again."""


class SparkError(MldserverError):
    """Spark is at fault."""


class WindowFailed(SparkError):
    """A window's job failed: the user's ``on_window``, or Spark under it."""

    quotes: bool = False
    """Whether it says what the user's code, Spark or a database has said, which may quote rows."""


class DriverLost(SparkError):
    """The Spark driver's process, or its JVM, is gone."""

    blame: Literal["window", "others", "outside", "server"] = "window"
    """The possible cause of the driver's death: the only ``window`` that ran there; one of several windows
    (``others``); the sender of a signal (``outside``), while one window ran; or the ``server``, which ended the
    driver for its own reason or the cluster's."""


class OperatorError(MldserverError):
    """What the operator gave cannot work; the process says so and exits."""

    lasting = True


class NotThereYet(OperatorError):
    """What a start needs is not there, or not free: a folder, a port, a service. That may change by itself."""

    lasting = False


class ConfigError(OperatorError):
    """A setting is unknown or has an impossible value."""


class JavaError(OperatorError):
    """Java is missing or too old for Spark."""


class InternalError(MldserverError):
    """A bug in this server: the state of a core and what was asked of it do not fit."""


class StateMoved(InternalError):
    """The runtime's copy of a store lacks a batch that the server accepted, or has one that it did not accept.

    It never reaches the handler: the server opens the shard again with a new snapshot.
    """
