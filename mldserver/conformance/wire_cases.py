"""Cases of the wire: framing, ``initialize``, what records hold, batches, and how long lines may be."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any, Final

from mldserver.conformance import origin
from mldserver.conformance.cases import (
    DAEMONS,
    NEW,
    SHARD,
    SHARD_ID_LENGTH,
    V1,
    Ask,
    Daemon,
    Quiet,
    Reopen,
    Section,
    Step,
    Want,
    line,
    odd,
    record,
    sequence,
)

_ODD_KEYS: Final = {
    "two-byte, three-byte and four-byte characters": "é中😀",
    "a quote and a backslash": 'a"b\\c',
    "an escaped line feed": "a\nb",
    "an escaped carriage return": "a\rb",
    "an escaped NUL": "a\0b",
    "an escaped vertical tab and form feed, which some readers take for line ends": "a\x0bb\x0cc",
    "escaped separators of files, groups and records, which some readers take for line ends": "a\x1cb\x1dc\x1ed",
    "NEXT LINE (U+0085), which some readers take for a line end": "a\x85b",
    "LINE SEPARATOR (U+2028), which some readers take for a line end": "a\u2028b",
    "PARAGRAPH SEPARATOR (U+2029), which some readers take for a line end": "a\u2029b",
    "a byte order mark": "\ufeffa",
    "DELETE (U+007F)": "a\x7fb",
    "nothing but a no-break space": "\xa0",
    "combining and right-to-left characters": "e\u0301 \u05d0\u202e",
    "what looks like a message": '{"action":"shardEnded"}',
    "256 characters, the most that Kinesis takes": "k" * 256,
    "one character": "k",
}


_SECOND, _OLD = DAEMONS[1:]
_LATEST: Final[dict[str, Any]] = {
    "action": "initialize",
    "shardId": SHARD,
    "sequenceNumber": "LATEST",
    "subSequenceNumber": 0,
}


def _add_case(
    section: Section, title: str, source: str, *batches: Step, daemon: Daemon = NEW, **more: Any
) -> None:
    """Add a case whose end shows what was read: by a checkpoint, if the child asks for one."""
    last = () if daemon.form is V1 else (daemon.shutdown_requested(),)
    section.life(daemon, title, source, *batches, *last, **more)


def _add_checkpointed(section: Section, title: str, source: str, *batches: Step, **more: Any) -> None:
    """Add a case that nothing but a checkpoint shows: in a batch, or when the lease is about to go."""
    section.life(NEW, title, source, *batches, NEW.shutdown_requested(checkpoint=True), **more)


def _framing() -> Section:
    """Return the cases of lines that arrive in pieces, odd characters, and JSON written in other ways than today's daemons do."""
    section = Section("A", "framing")
    two = NEW.batch(1, 2)
    section.life(NEW, "initialize arrives byte by byte", origin.WRITER, begin=NEW.initialize(piece=1))
    for piece in (1, 3, 64):
        title = f"a batch arrives in pieces of {piece} bytes, cut inside characters"
        cut = NEW.batch(record(1, partitionKey="é中😀"), 2, piece=piece)
        _add_case(section, title, origin.WRITER, cut)
    end = NEW.lease_lost(piece=len(NEW.lease_lost().line) - 1, pause=0.3)
    section.life(NEW, "the line feed arrives after its line", origin.WRITER, two, end=end)
    _add_case(section, "a line arrives slowly", origin.WRITER, NEW.batch(1, 2, piece=40, pause=0.2))
    for name, key in _ODD_KEYS.items():
        _add_case(
            section, f"a partition key is {name}", origin.WRITER, NEW.batch(record(1, partitionKey=key), 2)
        )
    styles: dict[str, Callable[[dict[str, Any]], bytes]] = {
        "a line ends with CR LF": lambda m: line(m)[:-1] + b"\r\n",
        "blank lines come between two messages": lambda m: b"\n\n" + line(m),
        "white space stands before a message": lambda m: b" \t" + line(m),
        "white space stands inside a message": lambda m: json.dumps(m).encode() + b"\n",
        "characters that are not ASCII are escaped": lambda m: json.dumps(m).encode() + b"\n",
        "slashes are escaped": lambda m: line(m).replace(b"/", b"\\/"),
        "the action comes last in a message": lambda m: line(dict(reversed(m.items()))),
        "the action comes first in a record": line,
        "a record has a field more": line,
        "a batch has a field more": lambda m: line({**m, "childShards": []}),
    }
    records = {
        "characters that are not ASCII are escaped": record(1, partitionKey="é中😀"),
        "slashes are escaped": record(1, data=b"\xff" * 6),
        "the action comes first in a record": dict(reversed(record(1).items())),
        "a record has a field more": record(1, explicitHashKey="7", schema=None),
    }
    for title, line_of in styles.items():
        if title == "a record has a field more":
            first = odd({**_LATEST, "epoch": 1}, want=Want.STATUS)
            section.life(NEW, "initialize has a field more", origin.FUTURE, begin=first, strict=False)
        one = NEW.batch(records.get(title, 1), line_of=line_of)
        _add_case(section, title, origin.FUTURE, one, strict=False)
    end = odd({"action": "leaseLost", "reason": "x"}, want=Want.STATUS)
    section.life(NEW, "an end has a field more", origin.FUTURE, end=end, strict=False)
    return section


def _initialize() -> Section:
    """Return the cases of ``initialize``: each place at which the daemon may start, and shard ids."""
    section = Section("B", "initialize")
    starts: dict[str, tuple[str | None, int | None]] = {
        "TRIM_HORIZON": ("TRIM_HORIZON", 0),
        "LATEST": ("LATEST", 0),
        "AT_TIMESTAMP": ("AT_TIMESTAMP", 0),
        "SHARD_END": ("SHARD_END", 0),
        "null, sub-sequence null": (None, None),
        "a record": (sequence(0), 0),
        "a record, sub-sequence null": (sequence(0), None),
        "a place inside an aggregate": (sequence(0), 7),
        "the number 0": ("0", 0),
        "a number of 129 digits": ("9" * 129, 0),
    }
    for daemon, names in ((NEW, starts), (_SECOND, ("TRIM_HORIZON", "a record", "null, sub-sequence null"))):
        for name in names:
            start, sub = starts[name]
            sentinel = daemon is NEW and start and not start.isdigit()
            source = origin.SENTINELS if sentinel else origin.INITIALIZE
            begin = daemon.initialize(start, sub)
            _add_case(
                section, f"the daemon starts at {name}", source, daemon.batch(), daemon=daemon, begin=begin
            )
    title = "the daemon does not say where it starts"
    section.life(_OLD, title, origin.OLD, _OLD.batch(), _OLD.batch())
    for name, shard_id in {
        "of 128 characters": SHARD + "a" * (128 - SHARD_ID_LENGTH),
        "of DynamoDB": f"{SHARD}-abcdef01",
        "with every kind of character that is allowed": f"{SHARD}_.-zZ9",
    }.items():
        begin = odd({**_LATEST, "shardId": shard_id}, want=Want.STATUS)
        section.life(NEW, f"the shard's id is one {name}", origin.KINESIS, NEW.batch(1), begin=begin)
    title = "a shard begins, loses its lease and begins again"
    again = NEW.batch(1), NEW.lease_lost(), Reopen(), NEW.initialize(), NEW.batch(1)
    section.life(NEW, title, origin.PROCESSOR, *again)
    return section


def _records() -> Section:
    """Return the cases of what a record's fields may hold: payloads, nulls, times, sequence numbers."""
    section = Section("C", "records and nulls")
    payloads = {
        "null": None,
        "empty": b"",
        "one byte (base64 with two pads)": b"\0",
        "two bytes (base64 with one pad)": b"\0\1",
        "three bytes (base64 without pads)": b"\0\1\2",
        "every byte there is": bytes(range(256)),
        "base64 of nothing but slashes": b"\xff" * 6,
        "base64 of nothing but pluses": base64.b64decode("++++++++"),
        "no UTF-8": b"\xc3(",
        "JSON with a line feed": b'{"a":\n1}',
        "of 70 KB, longer than a pipe's buffer": b"x" * 70_000,
    }
    for name, data in payloads.items():
        _add_case(section, f"the data is {name}", origin.RECORD, NEW.batch(record(1, data=data), 2))
    nulls = NEW.batch(*(record(n, data=None) for n in range(3)))
    _add_case(section, "the data is null in every record", origin.RECORD, nulls)
    title = "the partition key is null, as in DynamoDB Streams"
    _add_case(section, title, origin.RECORD, NEW.batch(record(1, partitionKey=None)))
    for name, arrival in {
        "null": None,
        "0": 0,
        "1 ms": 1,
        "in the year 2100": 4_102_444_800_000,
        "before the one of the record before it": 1_795_000_000_000,
    }.items():
        two = NEW.batch(1, record(2, approximateArrivalTimestamp=arrival))
        _add_case(section, f"the arrival time is {name}", origin.RECORD, two)
    empty = record(1, None, data=None, partitionKey=None, approximateArrivalTimestamp=None)
    _add_case(section, "every field is null that may be", origin.RECORD, NEW.batch(empty, behind=None))
    numbers = {
        "1": "1",
        "beyond a double's 53 bits": str(2**53 + 1),
        "beyond 63 bits": str(2**63 + 1),
        "beyond 64 bits": str(2**64 + 1),
        "of 21 digits": "100000000000000000001",
        "of 40 digits": "1" * 39 + "7",
        "of 56 digits, as of Kinesis": sequence(1),
        "of 129 digits, the most there may be": "9" * 128 + "7",
        "padded with zeros, as of DynamoDB Local": "000000000000000000001",
    }
    for name, number in numbers.items():
        source = origin.DYNAMODB if "2" in name[:5] or "40" in name or "Dynamo" in name else origin.KINESIS
        title = f"a sequence number {name} comes back in the checkpoint"
        _add_checkpointed(section, title, source, NEW.batch(record(number)))
    title = "neighbours that differ in their last digit alone are told apart"
    _add_checkpointed(section, title, origin.KINESIS, NEW.batch(*range(1, 10)))
    for sub in (1, 2**31, 2**63 - 1):
        _add_checkpointed(
            section, f"a sub-sequence number is {sub}", origin.RECORD, NEW.batch(record(1, sub))
        )
    _add_case(section, "the sub-sequence is null", origin.RECORD, _SECOND.batch(1, 2), daemon=_SECOND)
    title = "records have no sub-sequence and no arrival time"
    _add_case(section, title, origin.OLD, _OLD.batch(1, 2), daemon=_OLD)
    nulls = _OLD.batch(record(1, data=None, partitionKey=None))
    _add_case(section, "data and partition key are null", origin.OLD, nulls, daemon=_OLD)
    for name, behind in {
        "null": None,
        "1 ms": 1,
        "seven days": 604_800_000,
        "a year": 31_536_000_000,
        "2**63-1 ms": 2**63 - 1,
    }.items():
        _add_case(section, f"the lag is {name}", origin.BATCH, NEW.batch(1, behind=behind))
    _add_case(section, "the lag is null in an empty batch", origin.BATCH, NEW.batch(behind=None))
    return section


def _batches() -> Section:
    """Return the cases of batches: empty, large, with aggregates, and delivered again after a lost connection."""
    section = Section("D", "batches")
    empty, one, two = NEW.batch(), NEW.batch(1), NEW.batch(1, 2)
    _add_case(section, "an empty batch comes first", origin.BATCH, empty, one)
    title = "an empty batch comes behind one with records"
    _add_case(section, title, origin.BATCH, one, empty, NEW.batch(2))
    _add_case(section, "100 empty batches come in a row", origin.BATCH, *[empty] * 100)
    _add_case(section, "50 batches of one record come in a row", origin.BATCH, *map(NEW.batch, range(50)))
    for daemon in DAEMONS:
        tens = [daemon.batch(*range(10 * n, 10 * n + 10)) for n in range(3)]
        _add_case(section, "three batches of ten records", origin.BATCH, *tens, daemon=daemon)
        around = daemon.batch(), daemon.batch(1), daemon.batch()
        _add_case(section, "empty batches come around one of a record", origin.BATCH, *around, daemon=daemon)
    _add_case(section, "a batch of 1,000 records", origin.BATCH, NEW.batch(*range(1000)))
    wide = NEW.batch(1, 10**30), NEW.batch(10**40)
    _add_checkpointed(section, "sequence numbers have wide gaps", origin.KINESIS, *wide)
    five, three = ([record(n, sub) for sub in range(subs)] for n, subs in ((1, 5), (3, 3)))
    aggregated: dict[str, tuple[Ask, ...]] = {
        "the records of an aggregate share a sequence number": (NEW.batch(*five),),
        "two aggregates with plain records between them": (NEW.batch(*five, 2, *three, 4),),
        "an aggregate is cut by a batch's border": (NEW.batch(*five[:2]), NEW.batch(*five[2:])),
        "a batch begins inside an aggregate, where the last worker had checkpointed": (NEW.batch(*five[3:]),),
        "an aggregate of 2,000 records": (NEW.batch(*(record(1, sub) for sub in range(2000))),),
    }
    for title, batches in aggregated.items():
        begin = NEW.initialize(sequence(1), 2) if "inside" in title else None
        _add_checkpointed(section, title, origin.AGGREGATOR, *batches, begin=begin)
    title = "aggregated and plain records, these without a sub-sequence"
    mixed = _SECOND.batch(record(1, 0), record(1, 1), 2)
    _add_case(section, title, origin.AGGREGATOR, mixed, daemon=_SECOND)
    packed = aggregate(3)
    broken = packed[:-1] + bytes([packed[-1] ^ 1])
    for name, data in {
        "an aggregate comes whole": packed,
        "an aggregate's checksum is wrong, which makes it a plain record": broken,
        "data begins like an aggregate and is none": packed[:4],
        "an aggregate of no records": aggregate(0),
    }.items():
        _add_case(section, name, origin.KPL, _OLD.batch(1, record(2, data=data), 3), daemon=_OLD)
    for name, again in {
        "the same records": [two],
        "the same records in other batches, and more": [one, NEW.batch(2, 3)],
        "fewer records": [one],
    }.items():
        title = f"the connection was lost, and there come {name}"
        _add_case(section, title, origin.PROCESSOR, two, Reopen(), NEW.initialize(), *again)
    title = "a batch comes again on a third connection, each cut by a reset"
    cut = two, Reopen(cut=True), NEW.initialize()
    _add_case(section, title, origin.PROCESSOR, *cut, *cut, two)
    title = "a batch waits for a while behind its neighbour"
    section.life(NEW, title, origin.BATCH, one, Quiet(0.5), NEW.batch(2))
    return section


def aggregate(count: int) -> bytes:
    """Return a KPL aggregate of so many records: magic, a protobuf message, its MD5."""

    def field(tag: int, data: bytes) -> bytes:
        return bytes([tag, len(data)]) + data

    # AggregatedRecord: 1 partition_key_table, 3 records; Record: 1 partition_key_index, 3 data.
    body = field(0x0A, b"key") + b"".join(
        field(0x1A, b"\x08\x00" + field(0x1A, b"%d" % number)) for number in range(count)
    )
    return b"\xf3\x89\x9a\xc2" + body + hashlib.md5(body, usedforsecurity=False).digest()


def _limits() -> Section:
    """Return the cases of long lines and large batches."""
    section = Section("E", "limits")
    overhead = len(NEW.batch(record(1, data=None, partitionKey="")).line)
    for length in (2**16 - 1, 2**16, 2**16 + 1, 2**17):
        long = NEW.batch(record(1, data=None, partitionKey="k" * (length + 1 - overhead)))
        source = "MessageWriter sets no limit; readers of lines do (64 KiB in asyncio)"
        _add_case(section, f"a line of {length:,} bytes", source, long)
    for title, (count, size) in {
        "one record of 1 MiB, the most that Kinesis took until 2025": (1, 2**20),
        "one record of 10 MiB, the most that Kinesis takes": (1, 10 * 2**20),
        "a batch of 10,000 records of 100 bytes": (10_000, 100),
        "a batch of 10,000 records of 1 KiB: 15.7 MB": (10_000, 1024),
        "a batch of 64 records of 700 KiB: 60 MB": (64, 700 * 1024),
    }.items():
        lazy = functools.partial(_long_line, count, size)
        long = Ask(make=lazy, action="processRecords", places=NEW.batch(*range(count)).places)
        source = "GetRecords gives 10,000 records or 10 MiB, and aggregates grow when they are undone"
        section.life(NEW, title, source, long, patience=6)
    return section


def _long_line(count: int, size: int) -> bytes:
    data = b"x" * size
    return NEW.batch(*(record(n, data=data) for n in range(count))).line


SECTIONS: Final = (_framing, _initialize, _records, _batches, _limits)
