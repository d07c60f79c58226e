"""Cases of the wire: framing, ``initialize``, what records hold, batches, and how long lines may be."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from typing import Final

from mldserver.conformance.cases import (
    AGGREGATOR,
    BATCH,
    DYNAMODB,
    FUTURE,
    INITIALIZE,
    KCL3,
    KINESIS,
    KPL,
    OLD,
    PROCESSOR,
    RECORD,
    SENTINELS,
    SHARD,
    SHARD_ID_LENGTH,
    V1,
    V2,
    WRITER,
    Ask,
    Quiet,
    Reopen,
    Section,
    Step,
    Want,
    batch,
    initialize,
    lease_lost,
    line,
    odd,
    plain,
    record,
    sequence,
    shutdown_requested,
)
from mldserver.testing.daemon import Form

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


def _life(*batches: Ask, form: Form = KCL3) -> tuple[Step, ...]:
    """Deliver batches between a beginning and an end that shows what was read: by a checkpoint, if the child asks."""
    last = () if form is V1 else (shutdown_requested(),)
    return (initialize(form), *batches, *last, lease_lost(form))


def _shown(*batches: Ask, begin: Ask | None = None) -> tuple[Step, ...]:
    """Do the same where a checkpoint must show it: in the batch, or when the lease is about to go."""
    return (begin or initialize(), *batches, shutdown_requested(checkpoint=True), lease_lost())


def _framing() -> Section:
    section = Section("A", "framing")
    plain = batch(record(1), record(2))
    section.add("initialize arrives byte by byte", WRITER, initialize(piece=1), lease_lost())
    for piece in (1, 3, 64):
        one = batch(record(1, partitionKey="é中😀"), record(2), piece=piece)
        section.add(f"a batch arrives in pieces of {piece} bytes, cut inside characters", WRITER, *_life(one))
    length = len(line({"action": "leaseLost"}))
    section.add(
        "the line feed arrives after its line",
        WRITER,
        *(initialize(), plain, lease_lost(piece=length - 1, pause=0.3)),
    )
    section.add("a line arrives slowly", WRITER, *_life(batch(record(1), record(2), piece=40, pause=0.2)))
    for name, key in _ODD_KEYS.items():
        section.add(
            f"a partition key is {name}", WRITER, *_life(batch(record(1, partitionKey=key), record(2)))
        )
    begin = {"action": "initialize", "shardId": SHARD, "sequenceNumber": "LATEST", "subSequenceNumber": 0}
    tolerated: dict[str, tuple[Step, ...]] = {
        "a line ends with CR LF": _life(batch(record(1), line_of=lambda m: line(m)[:-1] + b"\r\n")),
        "blank lines come between two messages": _life(batch(record(1), line_of=lambda m: b"\n\n" + line(m))),
        "white space stands before a message": _life(batch(record(1), line_of=lambda m: b" \t" + line(m))),
        "white space stands inside a message": _life(
            batch(record(1), line_of=lambda m: json.dumps(m).encode() + b"\n")
        ),
        "characters that are not ASCII are escaped": _life(
            batch(record(1, partitionKey="é中😀"), line_of=lambda m: json.dumps(m).encode() + b"\n")
        ),
        "slashes are escaped": _life(
            batch(record(1, data=b"\xff" * 6), line_of=lambda m: line(m).replace(b"/", b"\\/"))
        ),
        "the action comes last in a message": _life(
            batch(record(1), line_of=lambda m: line(dict(reversed(m.items()))))
        ),
        "the action comes first in a record": _life(batch(dict(reversed(record(1).items())))),
        "initialize has a field more": (odd({**begin, "epoch": 1}, want=Want.STATUS), lease_lost()),
        "a record has a field more": _life(batch(record(1, explicitHashKey="7", schema=None))),
        "a batch has a field more": _life(batch(record(1), line_of=lambda m: line({**m, "childShards": []}))),
        "an end has a field more": (
            initialize(),
            odd({"action": "leaseLost", "reason": "x"}, want=Want.STATUS),
        ),
    }
    for title, steps in tolerated.items():
        section.add(title, FUTURE, *steps, strict=False)
    return section


def _initialize() -> Section:
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
    for name, (start, sub) in starts.items():
        source = SENTINELS if start and not start.isdigit() else INITIALIZE
        section.add(
            f"the daemon starts at {name}",
            source,
            *(initialize(start=start, sub=sub), batch(), shutdown_requested(), lease_lost()),
        )
    for name in ("TRIM_HORIZON", "a record", "null, sub-sequence null"):
        start, sub = starts[name]
        section.add(
            f"the daemon starts at {name}",
            INITIALIZE,
            *(initialize(V2, start=start, sub=sub), batch(form=V2), shutdown_requested(), lease_lost(V2)),
            form=V2,
        )
    section.add(
        "the daemon does not say where it starts",
        OLD,
        *(initialize(V1), batch(form=V1), batch(form=V1), lease_lost(V1)),
        form=V1,
    )
    ids = {
        "of 128 characters": SHARD + "a" * (128 - SHARD_ID_LENGTH),
        "of DynamoDB": f"{SHARD}-abcdef01",
        "with every kind of character that is allowed": f"{SHARD}_.-zZ9",
    }
    for name, shard_id in ids.items():
        begin = {
            "action": "initialize",
            "shardId": shard_id,
            "sequenceNumber": "LATEST",
            "subSequenceNumber": 0,
        }
        section.add(
            f"the shard's id is one {name}",
            KINESIS,
            odd(begin, want=Want.STATUS),
            batch(record(1)),
            lease_lost(),
        )
    section.add(
        "a shard begins, loses its lease and begins again",
        PROCESSOR,
        *(initialize(), batch(record(1)), lease_lost(), Reopen()),
        *(initialize(), batch(record(1)), lease_lost()),
    )
    return section


def _records() -> Section:
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
        section.add(f"the data is {name}", RECORD, *_life(batch(record(1, data=data), record(2))))
    section.add(
        "the data is null in every record", RECORD, *_life(batch(*(record(n, data=None) for n in range(3))))
    )
    section.add(
        "the partition key is null, as in DynamoDB Streams",
        RECORD,
        *_life(batch(record(1, partitionKey=None))),
    )
    for name, arrival in {
        "null": None,
        "0": 0,
        "1 ms": 1,
        "in the year 2100": 4_102_444_800_000,
        "before the one of the record before it": 1_795_000_000_000,
    }.items():
        records = record(1), record(2, approximateArrivalTimestamp=arrival)
        section.add(f"the arrival time is {name}", RECORD, *_life(batch(*records)))
    section.add(
        "every field is null that may be",
        RECORD,
        *_life(
            batch(
                record(1, None, data=None, partitionKey=None, approximateArrivalTimestamp=None), behind=None
            )
        ),
    )
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
        source = DYNAMODB if "2" in name[:5] or "40" in name or "Dynamo" in name else KINESIS
        section.add(
            f"a sequence number {name} comes back in the checkpoint",
            source,
            *_shown(batch(record(number))),
        )
    section.add(
        "neighbours that differ in their last digit alone are told apart",
        KINESIS,
        *_shown(batch(*(record(n) for n in range(1, 10)))),
    )
    for sub in (1, 2**31, 2**63 - 1):
        section.add(f"a sub-sequence number is {sub}", RECORD, *_shown(batch(record(1, sub))))
    section.add(
        "the sub-sequence is null",
        RECORD,
        *_life(batch(record(1, None), record(2, None)), form=V2),
        form=V2,
    )
    section.add(
        "records have no sub-sequence and no arrival time",
        OLD,
        *_life(batch(record(1), record(2), form=V1), form=V1),
        form=V1,
    )
    section.add(
        "data and partition key are null",
        OLD,
        *_life(batch(record(1, data=None, partitionKey=None), form=V1), form=V1),
        form=V1,
    )
    for name, behind in {
        "null": None,
        "1 ms": 1,
        "seven days": 604_800_000,
        "a year": 31_536_000_000,
        "2**63-1 ms": 2**63 - 1,
    }.items():
        section.add(f"the lag is {name}", BATCH, *_life(batch(record(1), behind=behind)))
    section.add("the lag is null in an empty batch", BATCH, *_life(batch(behind=None)))
    return section


def _batches() -> Section:
    section = Section("D", "batches")
    section.add("an empty batch comes first", BATCH, *_life(batch(), batch(record(1))))
    section.add(
        "an empty batch comes behind one with records",
        BATCH,
        *_life(batch(record(1)), batch(), batch(record(2))),
    )
    section.add("100 empty batches come in a row", BATCH, *_life(*[batch()] * 100))
    section.add(
        "50 batches of one record come in a row", BATCH, *_life(*(batch(record(n)) for n in range(50)))
    )
    for form in (KCL3, V2, V1):
        three = [batch(*(plain(10 * n + m, form) for m in range(10)), form=form) for n in range(3)]
        section.add("three batches of ten records", BATCH, *_life(*three, form=form), form=form)
        around = (batch(form=form), batch(plain(1, form), form=form), batch(form=form))
        section.add("empty batches come around one of a record", BATCH, *_life(*around, form=form), form=form)
    section.add("a batch of 1,000 records", BATCH, *_life(batch(*(record(n) for n in range(1000)))))
    section.add(
        "sequence numbers have wide gaps",
        KINESIS,
        *_shown(batch(record(1), record(10**30)), batch(record(10**40))),
    )
    whole = [record(1, sub) for sub in range(5)]
    section.add("the records of an aggregate share a sequence number", AGGREGATOR, *_shown(batch(*whole)))
    section.add(
        "two aggregates with plain records between them",
        AGGREGATOR,
        *_shown(batch(*whole, record(2), *(record(3, sub) for sub in range(3)), record(4))),
    )
    section.add(
        "an aggregate is cut by a batch's border", AGGREGATOR, *_shown(batch(*whole[:2]), batch(*whole[2:]))
    )
    section.add(
        "a batch begins inside an aggregate, where the last worker had checkpointed",
        AGGREGATOR,
        *_shown(batch(*whole[3:]), begin=initialize(start=sequence(1), sub=2)),
    )
    section.add(
        "an aggregate of 2,000 records", AGGREGATOR, *_shown(batch(*(record(1, sub) for sub in range(2000))))
    )
    section.add(
        "aggregated and plain records, these without a sub-sequence",
        AGGREGATOR,
        *_life(batch(record(1, 0), record(1, 1), record(2, None)), form=V2),
        form=V2,
    )
    packed = aggregate(3)
    for name, data in {
        "an aggregate comes whole": packed,
        "an aggregate's checksum is wrong, which makes it a plain record": packed[:-1]
        + bytes([packed[-1] ^ 1]),
        "data begins like an aggregate and is none": packed[:4],
        "an aggregate of no records": aggregate(0),
    }.items():
        one = batch(record(1), record(2, data=data), record(3), form=V1)
        section.add(name, KPL, *_life(one, form=V1), form=V1)
    for name, again in {
        "the same records": [batch(record(1), record(2))],
        "the same records in other batches, and more": [batch(record(1)), batch(record(2), record(3))],
        "fewer records": [batch(record(1))],
    }.items():
        section.add(
            f"the connection was lost, and there come {name}",
            PROCESSOR,
            *(initialize(), batch(record(1), record(2)), Reopen()),
            *(initialize(), *again, shutdown_requested(), lease_lost()),
        )
    section.add(
        "a batch comes again on a third connection, each cut by a reset",
        PROCESSOR,
        *(initialize(), batch(record(1), record(2)), Reopen(cut=True)) * 2,
        *(initialize(), batch(record(1), record(2)), shutdown_requested(), lease_lost()),
    )
    section.add(
        "a batch waits for a while behind its neighbour",
        BATCH,
        *(initialize(), batch(record(1)), Quiet(0.5), batch(record(2)), lease_lost()),
    )
    return section


def aggregate(count: int) -> bytes:
    """Return a KPL aggregate of so many records: magic, a protobuf message, its MD5."""

    def piece(tag: int, data: bytes) -> bytes:
        return bytes([tag, len(data)]) + data

    # AggregatedRecord: 1 partition_key_table, 3 records; Record: 1 partition_key_index, 3 data.
    body = piece(0x0A, b"key") + b"".join(
        piece(0x1A, b"\x08\x00" + piece(0x1A, b"%d" % number)) for number in range(count)
    )
    return b"\xf3\x89\x9a\xc2" + body + hashlib.md5(body, usedforsecurity=False).digest()


def _limits() -> Section:
    section = Section("E", "limits")
    overhead = len(batch(record(1, data=None, partitionKey="")).line)
    for length in (2**16 - 1, 2**16, 2**16 + 1, 2**17):
        key = "k" * (length + 1 - overhead)
        section.add(
            f"a line of {length:,} bytes",
            "MessageWriter sets no limit; readers of lines do (64 KiB in asyncio)",
            *_life(batch(record(1, data=None, partitionKey=key))),
        )
    sizes = {
        "one record of 1 MiB, the most that Kinesis took until 2025": (1, 2**20),
        "one record of 10 MiB, the most that Kinesis takes": (1, 10 * 2**20),
        "10,000 records of 100 bytes": (10_000, 100),
        "10,000 records of 1 KiB: 15.7 MB": (10_000, 1024),
        "64 records of 700 KiB: 60 MB": (64, 700 * 1024),
    }
    for name, (count, size) in sizes.items():
        places = batch(*map(record, range(count))).places
        lazy = functools.partial(_long_line, count, size)
        section.add(
            f"a batch of {name}" if count > 1 else name,
            "GetRecords gives 10,000 records or 10 MiB, and aggregates grow when they are undone",
            initialize(),
            Ask(make=lazy, action="processRecords", places=places),
            lease_lost(),
            patience=6,
        )
    return section


def _long_line(count: int, size: int) -> bytes:
    data = b"x" * size
    return batch(*(record(n, data=data) for n in range(count))).line


SECTIONS: Final = (_framing, _initialize, _records, _batches, _limits)
