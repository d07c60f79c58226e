"""Dead letters in files, JSON lines or Parquet: written beside the output or under a URI, and read back."""

from __future__ import annotations

import base64
import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from mldserver.base.uris import opened
from mldserver.deadletters.document import FIELDS, document, from_document
from mldserver.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mldserver.records import DeadLetter

FOLDER: Final = "_dead_letters"
"""In the output folder; its readers do not see it."""

_NUMBERS: Final = ("sub_sequence", "arrival_ms", "attempts", "at_ms")
_SCHEMA: Final = pa.schema(
    [
        (name, pa.int64() if name in _NUMBERS else pa.binary() if name == "data" else pa.string())
        for name in FIELDS
    ]
)


def grouped(letters: tuple[DeadLetter, ...]) -> Iterator[tuple[DeadLetter, ...]]:
    """Yield the letters of each shard, which share a file."""
    shards: dict[str, list[DeadLetter]] = {}
    for letter in letters:
        shards.setdefault(letter.shard_id, []).append(letter)
    for group in shards.values():
        yield tuple(group)


def file_name(letters: tuple[DeadLetter, ...], suffix: str) -> str:
    """Return the path of a file of one shard's letters: ``<shard>/<sequence>-<sub>.<suffix>`` of the first.

    A flush that is repeated begins with the same letter, so that its file is written over. It may then hold fewer:
    those it lacks have not moved the position, and come again.
    """
    first = letters[0]
    shard = first.shard_id.replace("/", "_")
    return f"{shard}/{first.sequence.number}-{first.sequence.sub}.{suffix}"


def file_content(letters: tuple[DeadLetter, ...], pipeline: str, kind: Literal["jsonl", "parquet"]) -> bytes:
    """Return the bytes of a file of letters."""
    if kind == "jsonl":
        return b"".join(orjson.dumps(document(letter, pipeline)) + b"\n" for letter in letters)
    rows = [{**document(letter, pipeline), "data": letter.data} for letter in letters]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), sink, compression="zstd")
    return bytes(sink.getvalue())


def read_letters(place: str, pipeline: str) -> list[DeadLetter]:
    """Return the letters of the files that a path or URI names; ``*`` in its last part stands for any name.

    Blocking. Raises OperatorError for files that are not there, cannot be read, or hold letters of another pipeline.
    """
    try:
        fs, path = opened(place) if "://" in place else (pafs.LocalFileSystem(), str(Path(place).absolute()))
        names = _matching(fs, path)
        letters = [letter for name in names for letter in _read(fs, name, pipeline)]
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


def _matching(fs: pafs.FileSystem, path: str) -> list[str]:
    """Return the files that a path names: itself, all below it, or those that its last part matches."""
    folder, _, pattern = path.rpartition("/")
    if "*" not in pattern:
        info = fs.get_file_info(path)
        if info.type == pafs.FileType.File:
            return [path]
        folder, pattern = path, "*"
    selector = pafs.FileSelector(folder, allow_not_found=True, recursive=True)
    return sorted(
        info.path
        for info in fs.get_file_info(selector)
        if info.type == pafs.FileType.File
        and info.path.endswith((".jsonl", ".parquet"))
        and fnmatch.fnmatch(info.base_name, pattern)
    )


def _read(fs: pafs.FileSystem, name: str, pipeline: str) -> Iterator[DeadLetter]:
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
