"""Effects: what a handler produced, as one value from its call to the ledger's transaction. Synchronous, without I/O.

A runtime makes an ``Effects`` of each batch. The worker's socket, the coordinator's buffer and the flush carry it without
naming its kinds. The flusher writes the rows as segments; the ledger's transaction registers all other kinds.

A new kind of effect changes three files:

* this one: a tuple field of ``Effects``, and in ``KINDS`` its size and its form between processes;
* the file that produces it (as ``runtime/work.py`` produces dead letters);
* ``ledger/row_rules.py``: what the transaction does with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from mldserver.records import DeadLetter, pack_sequence, unpack_sequence

if TYPE_CHECKING:
    import pyarrow as pa


class Effects(msgspec.Struct, frozen=True):
    """What a batch, or several, produced."""

    rows: pa.Table | None = None
    """The handler's columns and META_COLUMNS except ``_clock``, in shard order; None without rows."""
    dead_letters: tuple[DeadLetter, ...] = ()
    state: tuple[bytes, ...] = ()
    """Changes of keyed state, a blob for each part of the work (``stores.pack_changes``). Later blobs replace earlier values."""

    def __bool__(self) -> bool:
        return self is not NOTHING and (self.rows is not None or any(map(self.of_kind, KINDS)))

    def of_kind(self, name: str) -> tuple[Any, ...]:
        """Return the effects of one of ``KINDS``."""
        items: tuple[Any, ...] = getattr(self, name)
        return items

    @property
    def nbytes(self) -> int:
        """About how much memory they take."""
        size: int = 0 if self.rows is None else self.rows.nbytes
        return size + sum(sum(map(kind.size, self.of_kind(name))) for name, kind in KINDS.items())

    def packed(self) -> dict[str, list[Any]]:
        """Return all kinds except rows as values that MessagePack can encode; ``unpacked`` reads them."""
        kinds = KINDS.items() if self else ()
        return {name: list(map(kind.pack, items)) for name, kind in kinds if (items := self.of_kind(name))}

    @classmethod
    def unpacked(cls, rows: pa.Table | None, packed: Mapping[str, list[Any]]) -> Effects:
        """Return these rows with the kinds that ``packed`` returned in another process."""
        return cls(rows, **{name: tuple(map(KINDS[name].unpack, items)) for name, items in packed.items()})

    @classmethod
    def without_rows(cls, parts: SequenceABC[Effects]) -> Effects:
        """Return the effects of parts in their order as one value, except their rows."""
        kinds = {name: tuple(chain.from_iterable(part.of_kind(name) for part in parts)) for name in KINDS}
        return cls(**kinds) if any(kinds.values()) else NOTHING


NOTHING: Final = Effects()


class EffectKind(NamedTuple):
    """How the effects of one kind are counted, and how they cross between processes."""

    size: Callable[[Any], int]
    """Returns about how many bytes one takes in memory."""
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def _pack_letter(letter: DeadLetter) -> dict[str, Any]:
    fields = {field.name: getattr(letter, field.name) for field in dataclasses.fields(letter)}
    behind = pack_sequence(letter.parked_behind)
    return fields | {"sequence": pack_sequence(letter.sequence), "parked_behind": behind}


def _unpack_letter(fields: dict[str, Any]) -> DeadLetter:
    sequences = {name: unpack_sequence(fields[name]) for name in ("sequence", "parked_behind")}
    return DeadLetter(**(fields | sequences))


KINDS: Final[dict[str, EffectKind]] = {
    "dead_letters": EffectKind(
        lambda letter: len(letter.data) + len(letter.traceback), _pack_letter, _unpack_letter
    ),
    "state": EffectKind(len, bytes, bytes),
}
"""The kinds of effects except rows, by their field's name."""
