"""Joined files: each stands for many small segments of a window. Blocking; call these in a thread.

Each file of a window costs its reader time, Spark one to four milliseconds, and an hour with the default flush
interval has 720 files from each server. So while a window is open each server writes its own small segments a second
time, many in one file in the same folder. The ledger does not list these files. A joined file names its segments in
Parquet's metadata, and an attempt that must read all of these reads it instead. If a joined file is missing or
incomplete, the attempt reads the segments. Joined files are deleted when their window is published; those of sliding
windows, which share segments, when the segments are deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from mldserver.ledger.contract import Segment
from mldserver.output.layout import JOINED, is_joined
from mldserver.output.store import OutputStore

SEGMENTS_PER_FILE: Final = 64
"""How many segments the server joins in one file. A window with fewer segments has no joined file."""

SMALL_BYTES: Final = 128 * 1024
"""Larger segments are not joined: their rows cost more than their file does. So a joined file has 8 MiB at most."""

_MEMBERS: Final = b"mldserver.segments"


def join(store: OutputStore, segments: Sequence[str]) -> None:
    """Write the rows of one window's segments, of one shape, as one file. Raises OSError, and ArrowException for a damaged one."""

    def read(path: str) -> pa.Table:
        return pq.read_table(pa.BufferReader(store.get(path)), use_threads=False)

    folder, _, first = segments[0].rpartition("/")
    joined = f"{folder}/{JOINED}{first}"  # told from others as the first segment is
    tables = store.for_each(read, segments)
    rows = pa.concat_tables(tables).replace_schema_metadata({_MEMBERS: "\n".join(segments)})
    # Under its name it is whole, also after a power cut; on object stores a file is there once it is whole.
    unfinished = f"{joined}.part" if store.local else joined
    try:
        store.write(unfinished, rows)
        if store.local:
            store.rename(unfinished, joined)
    except OSError:
        # On a full disk a part of it would only be in the way.
        store.delete(unfinished)
        raise


def to_read(store: OutputStore, segments: Sequence[Segment]) -> dict[str, int]:
    """Return the files that hold the rows of these segments, and each one's bytes. Raises OSError."""
    left = {segment.path: segment.bytes for segment in segments}
    if len(left) < SEGMENTS_PER_FILE:
        return left
    joined = files(store, segments)
    found: dict[str, int] = {}
    several = store.for_each(lambda path: _members(store, path), joined)
    for (path, size), members in zip(joined.items(), several, strict=True):
        if members and left.keys() >= members:
            found[path] = size
            for member in members:
                del left[member]
    return found | left


def files(store: OutputStore, segments: Iterable[Segment]) -> dict[str, int]:
    """Return the joined files beside these segments in order, and each one's bytes. Raises OSError."""
    folders = dict.fromkeys(segment.path.rpartition("/")[0] for segment in segments)
    found = (file for folder in folders for file in sorted(store.files(folder)))
    return {path: size for path, size in found if is_joined(path)}


def _members(store: OutputStore, path: str) -> frozenset[str]:
    try:
        with store.parquet(path) as file:
            named = (file.metadata.metadata or {}).get(_MEMBERS, b"").decode()
    except (OSError, pa.ArrowInvalid):
        return frozenset()  # its server died while it wrote
    return frozenset(named.split("\n")) - {""}
