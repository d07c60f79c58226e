"""Which records a handler names as failed: in a ``BatchResult``, or in an exception. Synchronous, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mldserver.handler.failure import Failure, describe, printed
from mldserver.records import Record
from mldserver.runtime.values import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mldserver.records import BatchResult


def failed_records(result: BatchResult, records: Sequence[Record]) -> dict[int, Failure]:
    """Return the records of a call that a result names, by their place in it, with why.

    Raises ValueError when a name is none of the call's records.
    """
    failed = result.failed
    told = failed if isinstance(failed, Mapping) else dict.fromkeys(failed)
    places = named_places(told, records)
    return {place: _failure(reason) for place, reason in zip(places, told.values(), strict=True)}


def named_places(named: Iterable[Any], records: Sequence[Record]) -> list[int]:
    """Return the place in the call of each record that is named, as a record or as its place.

    Raises ValueError when a name is none of the call's records.
    """
    places = []
    by_sequence = None
    for name in named:
        place: int | None = None
        if isinstance(name, Record):
            by_sequence = by_sequence or {record.sequence: place for place, record in enumerate(records)}
            place = by_sequence.get(name.sequence)
        elif isinstance(name, int | np.integer) and not isinstance(name, bool) and 0 <= name < len(records):
            place = int(name)
        if place is None:
            raise ValueError(f"{shown(name)} was named as failed, but is none of the {len(records)} records")
        places.append(place)
    return places


def _failure(reason: object) -> Failure:
    if isinstance(reason, BaseException):
        return describe(reason)
    text = "the handler named it" if reason is None else printed(reason)
    return Failure(f"Failed: {text}", names=("Failed",))
