"""The data of a case: the daemon's lines in order, and what a child may answer to each.

The lines are written as the Java writes them: compact JSON in raw UTF-8, ``action`` first in messages and last in records,
``null`` for absent values. ``SHARD`` stands for a shard's id; each run of a case inserts its own.
"""

from __future__ import annotations

import base64
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from mldserver.testing.daemon import Form
from mldserver.testing.fake_stream import TRIM_HORIZON, Place

SHARD: Final = "@SHARD@"
SHARD_ID_LENGTH: Final = 20
"""Length of the id that replaces it: ``shardId-`` and twelve digits."""
FIRST: Final = 49680413909947883502063281066617764366550132805456625682
"""The first record's sequence number, as Kinesis counts."""
ARRIVAL_MS: Final = 1_795_221_970_967

KCL3, V2, V1 = Form.KCL3, Form.V2, Form.V1
FORM_NAMES: Final = {KCL3: "KCL 2 and 3", V2: "KCL 1.7.1 to 1.x", V1: "KCL before 1.7.1"}


class Want(enum.Enum):
    """The right answer to a request."""

    STATUS = enum.auto()
    """One status."""
    REFUSAL = enum.auto()
    """No daemon sends this: the child should close and not answer. If it does answer, that is not a strict failure."""
    EITHER = enum.auto()
    """A status, or the child closes: both are right."""
    NO_STATUS = enum.auto()
    """Anything except a status, which would lose data: repeated checkpoints, silence, or the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request of the daemon."""

    action: str
    """The action that the status must name."""
    line: bytes = b""
    """With its LF."""
    make: Callable[[], bytes] | None = None
    """Makes a line that is too long to store."""
    start: Place | None = None
    """The daemon's checkpoint, in ``initialize``."""
    places: tuple[Place, ...] = ()
    """The records that it delivers."""
    ends: bool = False
    """Whether the shard is at its end: a status without a stored checkpoint blocks the shard's children."""
    replies: tuple[str | bytes | None, ...] = ()
    """Replies to the child's checkpoints in order: an error's name, None for a success, or raw bytes. Later ones as the Java replies."""
    reply_after: float = 0.0
    """Seconds that the daemon takes for each reply."""
    want: Want = Want.STATUS
    checkpointable: bool = True
    """Whether the child may ask for a checkpoint before it answers."""
    checkpoint: bool = False
    """Whether the case proves nothing unless the child asks for a checkpoint."""
    piece: int = 0
    """Bytes that arrive at a time; 0: all at once."""
    pause: float = 0.0
    """Seconds between two pieces."""
    covers: bool = False
    """Whether every delivered record should be checkpointed when the child answers."""


@dataclass(frozen=True, slots=True)
class Provoke:
    """Batches of one record, until the child has asked for as many checkpoints as there are replies."""

    form: Form
    replies: tuple[str | bytes | None, ...] = (None,)
    reply_after: float = 0.0
    want: Want = Want.STATUS


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing is sent for some seconds, and nothing may come."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes that are not a whole request; or a request whose answer the player does not wait for."""

    what: bytes | Ask


@dataclass(frozen=True, slots=True)
class EndsItself:
    """After the last status the child should end its output before the daemon ends its own."""


@dataclass(frozen=True, slots=True)
class HangUp:
    """The daemon ends its output and drains the child's, without a time limit: the child must end it too."""


@dataclass(frozen=True, slots=True)
class Reopen:
    """The connection is over; another child (or connection) begins, for the same shard.

    ``cut``: a reset ends the connection, not an orderly close.
    """

    cut: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """As ``Reopen``, and the next child is initialized at the last checkpoint that was stored."""

    form: Form = KCL3


Step = Ask | Provoke | Quiet | Write | EndsItself | HangUp | Reopen | Resume


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation with a child."""

    number: str
    """A section's letter and the place in it."""
    section: str
    title: str
    source: str
    """The Java class, or the documented behaviour, that the case rests on."""
    steps: tuple[Step, ...]
    form: Form
    strict: bool = True
    """Whether a mistake does harm with a real daemon; else it is reported as not strict."""
    patience: float = 1.0
    """Factor by which the case may take longer than others."""


@dataclass(slots=True)
class Section:
    """Numbers the cases of one section in the order in which they are written."""

    letter: str
    name: str
    cases: list[Case] = field(default_factory=list)

    def add(
        self,
        daemon: Daemon,
        title: str,
        source: str,
        /,
        *steps: Step,
        strict: bool = True,
        patience: float = 1.0,
    ) -> None:
        """Add a case: a conversation of ``daemon`` with a child, step by step. ``source``: the Java class that it rests on.

        The title gets the daemon's generation unless it is KCL 2 and 3. ``HangUp`` is added if it is not the last step.
        """
        full = title if daemon.form is KCL3 else f"{title} ({FORM_NAMES[daemon.form]})"
        number = f"{self.letter}{len(self.cases) + 1:02d}"
        ended = steps if isinstance(steps[-1], HangUp) else (*steps, HangUp())
        self.cases.append(Case(number, self.name, full, source, ended, daemon.form, strict, patience))

    def life(
        self,
        daemon: Daemon,
        title: str,
        source: str,
        /,
        *steps: Step,
        begin: Ask | None = None,
        end: Ask | None = None,
        strict: bool = True,
        patience: float = 1.0,
    ) -> None:
        """Add a case with ``steps`` between ``begin`` and ``end``: by default ``initialize`` and the loss of the lease."""
        whole = begin or daemon.initialize(), *steps, end or daemon.lease_lost()
        self.add(daemon, title, source, *whole, strict=strict, patience=patience)


# The daemon's lines.


def line(message: Any) -> bytes:
    """Return a message as the daemon writes it."""
    return orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE)


def sequence(place: int) -> str:
    """Return the sequence number of a shard's n-th record."""
    return str(FIRST + place)


def record(
    place: int | str, sub: int | None = 0, *, data: bytes | None = b"{}", **changes: Any
) -> dict[str, Any]:
    """Return a record in the form of KCL 2 and 3; ``place``: which of the shard, or its sequence number as it is."""
    return {
        "data": None if data is None else base64.b64encode(data).decode(),
        "partitionKey": "key",
        "sequenceNumber": place if isinstance(place, str) else sequence(place),
        "approximateArrivalTimestamp": ARRIVAL_MS,
        "subSequenceNumber": sub,
        **changes,
        "action": "record",
    }


_V1_KEYS: Final = ("data", "partitionKey", "sequenceNumber")


@dataclass(frozen=True, slots=True)
class Daemon:
    """Writes the requests of one generation of the daemon."""

    form: Form = KCL3

    def batch(
        self,
        *records: dict[str, Any] | int,
        behind: int | None = 0,
        line_of: Callable[[dict[str, Any]], bytes] = line,
        **ask: Any,
    ) -> Ask:
        """Return a ``processRecords`` request. ``records``: whole records, or n for the shard's n-th record, a plain one.

        ``behind``: ``millisBehindLatest``, not in V1. ``line_of`` writes the message differently than the daemon does.
        """
        # The sub-sequence of a plain record, which came in no aggregate: 0 in KCL 2 and 3, null in KCL 1.x.
        sub = 0 if self.form is KCL3 else None
        whole = [record(each, sub) if isinstance(each, int) else each for each in records]
        sent = [{key: each[key] for key in _V1_KEYS} for each in whole] if self.form is V1 else whole
        message: dict[str, Any] = {"action": "processRecords", "records": sent}
        if self.form is not V1:
            message["millisBehindLatest"] = behind
        places = tuple(Place(each["sequenceNumber"], each.get("subSequenceNumber") or 0) for each in sent)
        return Ask(line=line_of(message), action="processRecords", places=places, **ask)

    def initialize(self, start: str | None = "TRIM_HORIZON", sub: int | None = 0, **ask: Any) -> Ask:
        """Return the first request, which says where the daemon starts."""
        message: dict[str, Any] = {"action": "initialize", "shardId": SHARD}
        if self.form is not V1:
            message |= {"sequenceNumber": start, "subSequenceNumber": sub}
        place = TRIM_HORIZON if start is None or self.form is V1 else Place(start, sub or 0)
        return Ask(line=line(message), action="initialize", start=place, checkpointable=False, **ask)

    def shutdown_requested(self, **ask: Any) -> Ask:
        """Return the request before the lease goes elsewhere, or the daemon stops."""
        return Ask(line=line({"action": "shutdownRequested"}), action="shutdownRequested", **ask)

    def lease_lost(self, **ask: Any) -> Ask:
        """Return the end that takes the lease away."""
        return self._end("leaseLost", "ZOMBIE", checkpointable=False, **ask)

    def shard_ended(self, **ask: Any) -> Ask:
        """Return the end of a shard that was read to its end."""
        return self._end("shardEnded", "TERMINATE", ends=True, **ask)

    def _end(self, action: str, reason: str, **ask: Any) -> Ask:
        if self.form is KCL3:
            return Ask(line=line({"action": action}), action=action, **ask)
        return Ask(line=line({"action": "shutdown", "reason": reason}), action="shutdown", **ask)

    def provoke(self, *replies: str | bytes | None, **more: Any) -> Provoke:
        """Return the step that sends batches until the child has received these replies to its checkpoints; by default one success."""
        return Provoke(self.form, replies or (None,), **more)


NEW: Final = Daemon(KCL3)
DAEMONS: Final = (NEW, Daemon(V2), Daemon(V1))
"""The newest generation first."""


def odd(
    message: Any, action: str = "", *, start: Place | None = None, places: Sequence[Place] = (), **ask: Any
) -> Ask:
    """Return a request that no daemon sends: JSON, or bytes as they are."""
    text = message if isinstance(message, bytes) else line(message)
    named = action or (message.get("action") if isinstance(message, dict) else None)
    return Ask(
        line=text, action=str(named), start=start, places=tuple(places), **{"want": Want.REFUSAL} | ask
    )
