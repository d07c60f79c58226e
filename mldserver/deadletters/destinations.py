"""Dead letters outside the ledger: as JSON documents, and in files.

A document is the same in files, queues and streams, and in the output of commands:

    {"id": "trips/shardId-000000000001/49590…/0", "pipeline": "trips", "shard": "shardId-000000000001",
     "sequence": "49590…", "sub_sequence": 0, "partition_key": "k", "arrival_ms": 1700000000000, "attempts": 3,
     "error": "ValueError: no", "traceback": "…", "handler": "handlers.trips", "handler_version": "7",
     "at_ms": 1700000000500, "parked_behind": null, "data": "<base64>", "timer": null, "due_ms": null}

``id`` names the record, or the timer: a letter that was written twice, since a server died in between, has it twice. Files hold
JSON lines, or Parquet.
"""

from __future__ import annotations

import asyncio
import base64
import fnmatch
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import orjson
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from mldserver.base.uris import opened
from mldserver.errors import OperatorError
from mldserver.ledger.contract import storable
from mldserver.output.store import OutputStore
from mldserver.records import DeadLetter, Sequence

T = TypeVar("T")

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
    "timer": (str, type(None)),
    "due_ms": (int, type(None)),
}
"""Fields, with types, that a document must have to become a letter again. Those of earlier versions lack the last two."""

FIELDS: Final = ("id", "pipeline", *_TYPES)


def identity(letter: DeadLetter, pipeline: str) -> str:
    """Return what names a letter's record or timer among all pipelines: ``pipeline/shard/sequence/sub-sequence``, see ``record``."""
    return storable(f"{pipeline}/{letter.record}")


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
        "timer": None if letter.timer is None else storable(letter.timer),
        "due_ms": letter.due_ms,
    }


def from_document(fields: Any) -> DeadLetter:
    """Return the letter that a document holds, as ``document`` makes it. Raises ValueError if a field is missing or invalid."""
    if not isinstance(fields, dict):
        raise ValueError(f"{type(fields).__name__} is no dead letter")  # noqa: TRY004  # damaged text
    fields = {"timer": None, "due_ms": None, **fields}
    for name, types in _TYPES.items():
        if name not in fields or type(fields[name]) not in types:
            raise ValueError(f"{name} is missing or of another type")
    parked_behind = fields["parked_behind"]
    number, _, sub = (parked_behind or "").partition("/")
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
        parked_behind=None if parked_behind is None else _sequence(number, int(sub or 0)),
        handler_version=fields["handler_version"],
        timer=fields["timer"],
        due_ms=fields["due_ms"],
    )


def _sequence(number: str, sub: int) -> Sequence:
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{number!r} is no sequence number")
    return Sequence(int(number), sub)


_NUMBERS: Final = ("sub_sequence", "arrival_ms", "attempts", "at_ms", "due_ms")
_SCHEMA: Final = pa.schema(
    [
        (name, pa.int64() if name in _NUMBERS else pa.binary() if name == "data" else pa.string())
        for name in FIELDS
    ]
)


def batches(items: Iterable[T], *, size: Callable[[T], int], count: int, most: int) -> Iterator[list[T]]:
    """Yield items in order, in lists of at most ``count`` items and ``most`` bytes. A larger item has a separate list."""
    batch: list[T] = []
    total = 0
    for item in items:
        total += size(item)
        if batch and (len(batch) == count or total > most):
            yield batch
            batch, total = [], size(item)
        batch.append(item)
    if batch:
        yield batch


def as_rows(letters: Iterable[DeadLetter], pipeline: str) -> pa.Table:
    """Return letters as rows with the fields of documents; ``data`` is binary."""
    rows = [{**document(letter, pipeline), "data": letter.data} for letter in letters]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def files(
    letters: Iterable[DeadLetter], pipeline: str, kind: Literal["jsonl", "parquet"]
) -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of a file for each shard's letters. The path names the shard and its first sequence.

    A repeated flush begins with the same letter, so it replaces its file. It may hold fewer letters: the others follow in
    a later flush, because the shard's position does not pass a letter that is not stored. Flushes of timers are told apart by the
    time of the failure: their sequence may be the same.
    """
    shards: dict[str, list[DeadLetter]] = {}
    for letter in letters:
        shards.setdefault(letter.shard_id, []).append(letter)
    for shard_id, group in shards.items():
        first = group[0]
        name = f"{first.sequence.number}-{first.sequence.sub}"
        if first.timer is not None:
            which = hashlib.md5(identity(first, pipeline).encode(), usedforsecurity=False).hexdigest()
            name += f"-{first.at_ms}-{which[:8]}"
        path = f"{shard_id.replace('/', '_')}/{name}.{kind}"
        if kind == "jsonl":
            yield path, b"".join(orjson.dumps(document(letter, pipeline)) + b"\n" for letter in group)
        else:
            sink = pa.BufferOutputStream()
            pq.write_table(as_rows(group, pipeline), sink, compression="zstd")
            yield path, bytes(sink.getvalue())


def read_letters(place: str, pipeline: str) -> list[DeadLetter]:
    """Return the letters of the files that a path or URI names: of one file, or of all below a folder.

    ``*`` in its last part stands for any name.
    Blocking. Raises OperatorError for files that are not there, cannot be read, or hold letters of another pipeline.
    """
    try:
        fs, path = opened(place) if "://" in place else (pafs.LocalFileSystem(), str(Path(place).absolute()))
        folder, _, pattern = path.rpartition("/")
        if "*" not in pattern:
            folder, pattern = path, "*"
        if folder == path and fs.get_file_info(path).type == pafs.FileType.File:
            names = [path]
        else:
            selector = pafs.FileSelector(folder, allow_not_found=True, recursive=True)
            names = sorted(
                info.path
                for info in fs.get_file_info(selector)
                if info.type == pafs.FileType.File
                and info.path.endswith((".jsonl", ".parquet"))
                and fnmatch.fnmatch(info.base_name, pattern)
            )
        letters = [letter for name in names for letter in _letters_of_file(fs, name, pipeline)]
    except (OSError, ValueError, NotImplementedError, pa.ArrowException) as error:
        raise OperatorError(
            f"{place} cannot be read as dead letters: {error}.",
            did="Nothing was put into the ledger.",
            advice="Name .jsonl or .parquet files as `dead_letters` writes them.",
            path=place,
        ) from error
    if not names:
        raise OperatorError(f"There are no files of dead letters at {place}.", path=place)
    return letters


def _letters_of_file(fs: pafs.FileSystem, name: str, pipeline: str) -> Iterator[DeadLetter]:
    """Yield the letters of a JSON lines or Parquet file. Raises ValueError for content that is not letters of ``pipeline``."""
    documents: list[Any]
    with fs.open_input_file(name) as file:
        if name.endswith(".parquet"):
            rows = pq.read_table(file).to_pylist()
            documents = [{**row, "data": base64.b64encode(row.get("data") or b"").decode()} for row in rows]
        else:
            documents = [orjson.loads(line) for line in bytes(file.read()).splitlines()]
    for fields in documents:
        if isinstance(fields, dict) and fields.get("pipeline") != pipeline:
            raise ValueError(f"{name} holds letters of the pipeline {fields.get('pipeline')!r}")
        yield from_document(fields)


@dataclass(frozen=True)
class FolderDestination:
    """A ``Destination`` below a folder of a store: one file for each shard of a flush."""

    output: OutputStore
    folder: str
    _: KW_ONLY
    pipeline: str
    kind: Literal["jsonl", "parquet"]

    async def store(self, letters: tuple[DeadLetter, ...]) -> tuple[DeadLetter, ...]:
        """Write files; none is too large."""
        await asyncio.to_thread(self._write, letters)
        return ()

    def _write(self, letters: tuple[DeadLetter, ...]) -> None:
        self.output.keep_private(self.folder)
        for path, data in files(letters, self.pipeline, self.kind):
            self.output.replace(f"{self.folder}/{path}", data)

    async def close(self) -> None:
        """Do nothing."""
