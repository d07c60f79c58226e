"""User records out of an aggregate of the Kinesis Producer Library, for daemons that do not take them apart (V1).

Format: magic ``F3 89 9A C2``, a protobuf ``AggregatedRecord``, its MD5 (16 bytes). Source: KPL aggregation format.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from typing import Any, Final, NamedTuple

MAGIC: Final = b"\xf3\x89\x9a\xc2"
MAGIC_BASE64: Final = "84maw"
"""How the base64 text of every aggregate starts: the 30 bits that the magic fixes."""
_DIGEST_SIZE: Final = 16


class UserRecord(NamedTuple):
    """One record of an aggregate; its place in the result is its sub-sequence number."""

    partition_key: str
    data: bytes


def deaggregate(data: bytes) -> tuple[UserRecord, ...] | None:
    """Return the user records of an aggregate, None when ``data`` is no (undamaged) aggregate.

    A damaged one is a plain record, as the KCL has it (KCL 1.x UserRecord, KCL 3.1.3 AggregatorUtil).
    """
    body, digest = data[len(MAGIC) : -_DIGEST_SIZE], data[-_DIGEST_SIZE:]
    if not data.startswith(MAGIC) or len(data) <= len(MAGIC) + _DIGEST_SIZE:
        return None
    # MD5 is the format's checksum, not a safeguard.
    if hashlib.md5(body, usedforsecurity=False).digest() != digest:
        return None
    messages, damaged = _schema()
    aggregate = messages.AggregatedRecord()
    try:
        aggregate.ParseFromString(body)
        keys = aggregate.partition_key_table
        return tuple(UserRecord(keys[r.partition_key_index], r.data) for r in aggregate.records)
    except (damaged, IndexError):
        return None


@functools.cache
def _schema() -> tuple[Any, type[Exception]]:
    """Load the protobuf schema, at the first aggregate: most daemons never send one.

    ``aws_kinesis_agg.deaggregator`` puts two folders in front of ``sys.path`` to find its own generated modules;
    they are taken out again, so that a handler's modules are found as if it had never been loaded. Its own function is
    not used: it prints, and gives the head of a damaged aggregate before it notices the damage.
    """
    path = sys.path.copy()
    try:
        from aws_kinesis_agg.deaggregator import messages_pb2  # noqa: PLC0415  # see the docstring
        from google.protobuf.message import DecodeError  # noqa: PLC0415  # loaded with its user
    finally:
        sys.path[:] = path
    return messages_pb2, DecodeError
