"""What a case is: the daemon's lines in order, and what a child may do with each. All of it is data.

The lines are written as the Java writes them: compact JSON in raw UTF-8, ``action`` first in messages and last in records,
``null`` for what is absent. ``SHARD`` stands for a shard's id; each run of a case puts one of its own there.
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
"""Of what takes its place: ``shardId-`` and twelve digits."""
FIRST: Final = 49680413909947883502063281066617764366550132805456625682
"""The first record's sequence number, as Kinesis counts."""
ARRIVAL_MS: Final = 1_795_221_970_967

KCL3, V2, V1 = Form.KCL3, Form.V2, Form.V1
FORM_NAMES: Final = {KCL3: "KCL 2 and 3", V2: "KCL 1.7.1 to 1.x", V1: "KCL before 1.7.1"}


class Want(enum.Enum):
    """What must become of a request."""

    STATUS = enum.auto()
    """One status."""
    REFUSAL = enum.auto()
    """No daemon sends this: the child should close and not answer. If it does answer, that is not a strict failure."""
    EITHER = enum.auto()
    """A status, or the child closes: both are right."""
    NO_STATUS = enum.auto()
    """Anything but a status, which would lose data: checkpoints asked for again, silence, or the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request of the daemon."""

    action: str
    """What its status must name."""
    line: bytes = b""
    """With its LF."""
    make: Callable[[], bytes] | None = None
    """Makes a line that is too long to keep."""
    start: Place | None = None
    """Of ``initialize``: where the daemon's checkpoint is."""
    places: tuple[Place, ...] = ()
    """The records that it delivers."""
    ends: bool = False
    """Whether the shard is at its end: a status without a stored checkpoint blocks the shard's children."""
    replies: tuple[str | bytes | None, ...] = ()
    """To its checkpoints in this order, then as the Java would: an error's name, None for a success, or bytes as they are."""
    reply_after: float = 0.0
    """Seconds that the daemon takes for each reply."""
    want: Want = Want.STATUS
    checkpointable: bool = True
    """Whether a checkpoint may be asked for meanwhile."""
    checkpoint: bool = False
    """Whether the case shows nothing unless a checkpoint is asked for."""
    piece: int = 0
    """Bytes that arrive at a time; 0: all at once."""
    pause: float = 0.0
    """Seconds between two pieces."""
    covers: bool = False
    """Whether all that was delivered should be checkpointed when it is answered."""


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

    ``cut``: by a reset in place of an orderly end, where there is such a thing.
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
    """Where it stands in the Java, or on which documented behaviour it rests."""
    steps: tuple[Step, ...]
    form: Form
    strict: bool = True
    """Whether what goes wrong hurts with a real daemon; else it is reported as not strict."""
    patience: float = 1.0
    """By how much longer than others it may take."""


@dataclass(slots=True)
class Section:
    """Numbers the cases of one section in the order in which they are written."""

    letter: str
    name: str
    cases: list[Case] = field(default_factory=list)

    def add(
        self,
        title: str,
        source: str,
        /,
        *steps: Step,
        form: Form = KCL3,
        strict: bool = True,
        patience: float = 1.0,
    ) -> None:
        """Add a case; its title names a form other than KCL 2 and 3. A case without an end ends with ``HangUp``."""
        told = title if form is KCL3 else f"{title} ({FORM_NAMES[form]})"
        number = f"{self.letter}{len(self.cases) + 1:02d}"
        ended = steps if isinstance(steps[-1], HangUp) else (*steps, HangUp())
        self.cases.append(Case(number, self.name, told, source, ended, form, strict, patience))


# Where it stands: classes of KCL 3.1.3 but where another is named, and what was captured from it (tests/transcripts/).

WRITER: Final = "MessageWriter"
READER: Final = "LineReaderTask, GetNextMessageTask"
PROTOCOL: Final = "MultiLangProtocol"
PROCESSOR: Final = "MultiLangShardRecordProcessor"
RECORD: Final = "JsonFriendlyRecord"
INITIALIZE: Final = "InitializeMessage"
BATCH: Final = "ProcessRecordsMessage"
CHECKPOINT: Final = "CheckpointMessage"
CHECKPOINTER: Final = "ShardRecordProcessorCheckpointer"
SENTINELS: Final = "SentinelCheckpoint"
ENDS: Final = "LeaseLostMessage, ShardEndedMessage, ShutdownRequestedMessage"
DRAIN: Final = "DrainChildSTDOUTTask"
KCL1: Final = "ShutdownMessage (KCL 1.x)"
OLD: Final = "CheckpointMessage, InitializeMessage (KCL before 1.7.1)"
KPL: Final = "UserRecord (KCL 1.x), KPL's aggregation format"
AGGREGATOR: Final = "AggregatorUtil"
DYNAMODB: Final = "DynamoDB Streams API: sequence numbers of 21 to 40 digits"
KINESIS: Final = "Kinesis API"
NEVER: Final = "MultiLangProtocol asks one at a time, in this order only: no daemon sends it"
MALFORMED: Final = "MessageWriter writes whole messages only: no daemon sends it"
FUTURE: Final = "no version writes it so; a later one, or another JSON library, may"

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


def plain(place: int, form: Form) -> dict[str, Any]:
    """Return a record that came in no aggregate: KCL 2 and 3 number it 0, KCL 1.x not at all."""
    return record(place, 0 if form is KCL3 else None)


_V1_KEYS: Final = ("data", "partitionKey", "sequenceNumber")


def batch(
    *records: dict[str, Any],
    form: Form = KCL3,
    behind: int | None = 0,
    line_of: Callable[[dict[str, Any]], bytes] = line,
    **ask: Any,
) -> Ask:
    """Return a batch; ``behind`` in milliseconds, not in V1. ``line_of`` writes it in another way than the daemon does."""
    shown = [{key: each[key] for key in _V1_KEYS} for each in records] if form is V1 else records
    message: dict[str, Any] = {"action": "processRecords", "records": shown}
    if form is not V1:
        message["millisBehindLatest"] = behind
    places = tuple(Place(each["sequenceNumber"], each.get("subSequenceNumber") or 0) for each in records)
    return Ask(line=line_of(message), action="processRecords", places=places, **ask)


def initialize(form: Form = KCL3, start: str | None = "TRIM_HORIZON", sub: int | None = 0, **ask: Any) -> Ask:
    """Return the first request, which says where the daemon starts."""
    message: dict[str, Any] = {"action": "initialize", "shardId": SHARD}
    if form is not V1:
        message |= {"sequenceNumber": start, "subSequenceNumber": sub}
    place = TRIM_HORIZON if start is None or form is V1 else Place(start, sub or 0)
    return Ask(line=line(message), action="initialize", start=place, checkpointable=False, **ask)


def shutdown_requested(**ask: Any) -> Ask:
    """Return the request before the lease goes elsewhere, or the daemon stops."""
    return Ask(line=line({"action": "shutdownRequested"}), action="shutdownRequested", **ask)


def lease_lost(form: Form = KCL3, **ask: Any) -> Ask:
    """Return the end that takes the lease away."""
    return _end(form, "leaseLost", "ZOMBIE", checkpointable=False, **ask)


def shard_ended(form: Form = KCL3, **ask: Any) -> Ask:
    """Return the end of a shard that was read to its end."""
    return _end(form, "shardEnded", "TERMINATE", ends=True, **ask)


def _end(form: Form, action: str, reason: str, **ask: Any) -> Ask:
    if form is KCL3:
        return Ask(line=line({"action": action}), action=action, **ask)
    return Ask(line=line({"action": "shutdown", "reason": reason}), action="shutdown", **ask)


def odd(
    message: Any, action: str = "", *, start: Place | None = None, places: Sequence[Place] = (), **ask: Any
) -> Ask:
    """Return a request that no daemon sends: JSON, or bytes as they are."""
    text = message if isinstance(message, bytes) else line(message)
    named = action or (message.get("action") if isinstance(message, dict) else None)
    return Ask(
        line=text, action=str(named), start=start, places=tuple(places), **{"want": Want.REFUSAL} | ask
    )
