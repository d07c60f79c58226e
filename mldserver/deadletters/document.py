"""A dead letter as a JSON document: the same in files, queues and streams, and in what the command line tells.

    {"id": "trips/shardId-000000000001/49590…/0", "pipeline": "trips", "shard": "shardId-000000000001",
     "sequence": "49590…", "sub_sequence": 0, "partition_key": "k", "arrival_ms": 1700000000000, "attempts": 3,
     "error": "ValueError: no", "traceback": "…", "handler": "handlers.trips", "handler_version": "7",
     "at_ms": 1700000000500, "parked_behind": null, "data": "<base64>"}

``id`` names the record: a letter that was written twice, since a server died in between, has it twice.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

from mldserver.ledger.contract import storable
from mldserver.records import DeadLetter, Sequence

if TYPE_CHECKING:
    from collections.abc import Mapping

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "shard": (str,),
    "sequence": (str,),
    "sub_sequence": (int,),
    "partition_key": (str, type(None)),
    "arrival_ms": (int, type(None)),
    "attempts": (int,),
    "error": (str,),
    "traceback": (str,),
    "handler": (str,),
    "handler_version": (str,),
    "at_ms": (int,),
    "parked_behind": (str, type(None)),
    "data": (str,),
}
"""What must be in a document that is to become a letter again."""

FIELDS: Final = ("id", "pipeline", *_TYPES)


def identity(letter: DeadLetter, pipeline: str) -> str:
    """Return what names a letter's record among all pipelines: ``pipeline/shard/sequence/sub-sequence``."""
    return f"{pipeline}/{letter.record}"


def document(letter: DeadLetter, pipeline: str) -> dict[str, Any]:
    """Return a letter as plain values; lone surrogates, which user code can make, are escaped."""
    key = letter.partition_key
    return {
        "id": identity(letter, pipeline),
        "pipeline": pipeline,
        "shard": letter.shard_id,
        "sequence": str(letter.sequence.number),
        "sub_sequence": letter.sequence.sub,
        "partition_key": None if key is None else storable(key),
        "arrival_ms": letter.arrival_ms,
        "attempts": letter.attempts,
        "error": storable(letter.error),
        "traceback": storable(letter.traceback),
        "handler": storable(letter.handler),
        "handler_version": storable(letter.handler_version),
        "at_ms": letter.at_ms,
        "parked_behind": None if letter.parked_behind is None else str(letter.parked_behind),
        "data": base64.b64encode(letter.data).decode(),
    }


def from_document(fields: Any) -> DeadLetter:
    """Return the letter of a document. Raises ValueError for what is none."""
    if not isinstance(fields, dict):
        raise ValueError(f"{type(fields).__name__} is no dead letter")  # noqa: TRY004  # damaged text
    for name, types in _TYPES.items():
        if name not in fields or type(fields[name]) not in types:
            raise ValueError(f"{name} is missing or of another type")
    behind = fields["parked_behind"]
    return DeadLetter(
        shard_id=fields["shard"],
        sequence=_sequence(fields["sequence"], fields["sub_sequence"]),
        partition_key=fields["partition_key"],
        data=base64.b64decode(fields["data"], validate=True),
        arrival_ms=fields["arrival_ms"],
        attempts=fields["attempts"],
        error=fields["error"],
        traceback=fields["traceback"],
        handler=fields["handler"],
        at_ms=fields["at_ms"],
        parked_behind=None if behind is None else _position(behind),
        handler_version=fields["handler_version"],
    )


def _position(text: str) -> Sequence:
    number, _, sub = text.partition("/")
    return _sequence(number, int(sub or 0))


def _sequence(number: str, sub: int) -> Sequence:
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{number!r} is no sequence number")
    return Sequence(int(number), sub)
