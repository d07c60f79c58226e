"""Where things lie in a pipeline's output folder.

    <out>/window=<id>/part-….parquet     published windows: what readers read
    <out>/_late/window=<id>/….parquet    the late dataset (hidden from readers of <out>, as all below)
    <out>/_mldserver/ledger.sqlite       the ledger
    <out>/_mldserver/segments/<id>/      rows of windows that are not published yet
    <out>/_mldserver/staging/<id>/<n>/   the n-th attempt's output
    <out>/_mldserver/spark/              scratch space of the Spark driver

Names that begin with an underscore are invisible to Spark's and Arrow's dataset readers.
"""

from __future__ import annotations

__all__ = [
    "LATE",
    "LEDGER",
    "SEGMENTS",
    "SPARK",
    "STAGING",
    "late_path",
    "segment_path",
    "staging_path",
    "window_path",
]

PRIVATE = "_mldserver"
LEDGER = f"{PRIVATE}/ledger.sqlite"
SEGMENTS = f"{PRIVATE}/segments"
STAGING = f"{PRIVATE}/staging"
SPARK = f"{PRIVATE}/spark"
LATE = "_late"


def window_path(window_id: str) -> str:
    """Return the folder of a published window."""
    return f"window={window_id}"


def segment_path(window_id: str, clock: int, unique: str, *, late: bool) -> str:
    """Return a new segment's path; ``clock`` makes names sort in merge order, ``unique`` tells retries apart."""
    return f"{SEGMENTS}/{window_id}/{'late-' if late else ''}{clock:016d}-{unique}.parquet"


def staging_path(window_id: str, attempt: int) -> str:
    """Return the folder of one attempt."""
    return f"{STAGING}/{window_id}/{attempt:04d}"


def late_path(segment: str) -> str:
    """Return where a late segment is published."""
    window_id, name = segment.rsplit("/", 2)[1:]
    return f"{LATE}/window={window_id}/{name}"
