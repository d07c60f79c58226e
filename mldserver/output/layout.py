"""Where things lie in a pipeline's output folder.

    <out>/window=<id>/part-….parquet            published windows: what readers read
    <out>/_early/window=<id>/part-….parquet     early results of open windows
    <out>/_late/window=<id>/….parquet           the late dataset (hidden from readers of <out>, as all below)
    <out>/_dead_letters/                        dead letters as files (``deadletters/destinations.py``)
    <out>/_mldserver/ledger.sqlite              the ledger
    <out>/_mldserver/owner.json                 whose the folder is (``owner.py``)
    <out>/_mldserver/servers/<tag>.lock         held by each server that lives
    <out>/_mldserver/segments/<id>/             rows of windows that are not published yet, or retained (``joined.py`` too)
    <out>/_mldserver/state/                     changes of keyed state (``coordinator/core/state_files.py``)
    <out>/_mldserver/code/<sha>.zip             versions of the handler's code (``versions/code.py``)
    <out>/_mldserver/staging/<id>/<n>-<tag>/    the n-th attempt's output
    <out>/_mldserver/spark/<tag>/               scratch space of a server's Spark driver, or what it proves to share
    <out>/_mldserver/drivers/<host>-<pid>/      scratch space of the Spark driver that several functions share
    <out>/_mldserver/quarantine/<ledger>-<n>/   files of other ledgers, as the n-th start on this one found them

On object stores nothing is renamed (``publish.py``): an attempt's output stays where it was written, and manifests say
which one counts.

    <out>/_mldserver/outputs/<id>/<n>-<tag>/    the n-th attempt's output
    <out>/_mldserver/manifest/<id>/<r>.json     what readers read of the window's r-th revision
    <out>/_mldserver/early/<id>.json            what they read of its early result, while it has no revision

Where the output is not local, the ledger's file, locks and scratch space lie on the host's own disk (``config/locations.py``).

Names that begin with an underscore are invisible to Spark's and Arrow's dataset readers. Every segment, state file and
attempt carries the tag of its writer, which is the ledger's id and the server's tag. The tag distinguishes files that
a dead server left, files that a live one will register, and files of other ledgers. A segment also carries the
fingerprint of its rows' shape (``coordinator/core/shape.py``), by which it is read.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from mldserver.ledger.contract import SegmentKind

PRIVATE = "_mldserver"
LEDGER = f"{PRIVATE}/ledger.sqlite"
OWNER = f"{PRIVATE}/owner.json"
SEGMENTS = f"{PRIVATE}/segments"
STATE = f"{PRIVATE}/state"
CODE = f"{PRIVATE}/code"
STAGING = f"{PRIVATE}/staging"
OUTPUTS = f"{PRIVATE}/outputs"
PUBLISH_LOCK = f"{PRIVATE}/publish.lock"
SERVERS = f"{PRIVATE}/servers"
SPARK = f"{PRIVATE}/spark"
DRIVERS = f"{PRIVATE}/drivers"
QUARANTINE = f"{PRIVATE}/quarantine"
EARLY = "_early"
LATE = "_late"
DEAD_LETTERS = "_dead_letters"
LETTERS = "dead-letters"
"""In place of a window's id in the paths of segments: dead letters on their way into a table."""
JOINED = "joined-"
"""What the name of a joined file begins with; the rest is that of the first segment in it."""

_PREFIX = {SegmentKind.WINDOW: "", SegmentKind.RECOMPUTE: "again-", SegmentKind.LATE: "late-"}
_SEGMENT = re.compile(r"(?:again-|late-|joined-)?(\d{16,})-([0-9a-f]{16})-(?:([0-9a-f]{12})-)?[^/]*")
_ATTEMPT = re.compile(r"(?:early-\d+|(\d{4,}))-([0-9a-f]{16})")


def server_tag(server_id: str) -> str:
    """Return eight hexadecimal digits that stand for a server in file names."""
    return hashlib.sha256(server_id.encode()).hexdigest()[:8]


def writer_tag(ledger_id: str, server_id: str) -> str:
    """Return sixteen hexadecimal digits that stand for a server on a ledger in the names of files."""
    return ledger_id + server_tag(server_id)


def window_path(window_id: str) -> str:
    """Return the folder of a published window."""
    return f"window={window_id}"


def segment_path(window_id: str, clock: int, unique: str, *, kind: SegmentKind, tag: str, shape: str) -> str:
    """Return a new segment's path.

    ``clock`` makes names sort in merge order, ``unique`` distinguishes retries, ``shape`` is the fingerprint of the
    rows' shape.
    """
    return f"{SEGMENTS}/{window_id}/{_PREFIX[kind]}{clock:016d}-{tag}-{shape}-{unique}.parquet"


def state_path(clock: int, unique: str, *, tag: str) -> str:
    """Return a new state file's path. ``clock`` makes names sort by time, ``unique`` distinguishes retries."""
    return f"{STATE}/{clock:016d}-{tag}-{unique}.parquet"


def is_joined(path: str) -> bool:
    """Whether a file in a window's folder of segments is a joined one."""
    name = path.rpartition("/")[2]
    return name.startswith(JOINED) and name.endswith(".parquet")


def attempt_path(root: str, window_id: str, attempt: int, tag: str) -> str:
    """Return the folder of one attempt below ``root``, which is ``STAGING`` or ``OUTPUTS``."""
    return f"{root}/{window_id}/{attempt:04d}-{tag}"


def early_path(window_id: str) -> str:
    """Return the folder of a window's early result, which readers see."""
    return f"{EARLY}/window={window_id}"


def early_attempt_path(root: str, window_id: str, number: int, tag: str) -> str:
    """Return the folder of an early result that is being computed. Numbers are those of a server's process."""
    return f"{root}/{window_id}/early-{number}-{tag}"


class Written(NamedTuple):
    """What the name of a segment, or of an attempt's folder, says of who wrote it; nothing for other names."""

    clock: int = 0
    """The merge clock at which a segment was written: no ledger's clock is before it, unless that was rolled back."""
    attempt: int = 0
    """An attempt's number; 0 for early results."""
    tag: str | None = None
    """The writer's."""
    ledger: str | None = None
    """The id of the ledger that it was written for."""
    shape: str = ""
    """The fingerprint of the shape of a segment's rows."""


def written(path: str) -> Written:
    """Return what the last part of a path says."""
    name = path.rpartition("/")[2]
    if match := _SEGMENT.fullmatch(name):
        return Written(clock=int(match[1]), tag=match[2], ledger=match[2][:8], shape=match[3] or "")
    if match := _ATTEMPT.fullmatch(name):
        return Written(attempt=int(match[1] or 0), tag=match[2], ledger=match[2][:8])
    return Written()


def late_path(segment: str) -> str:
    """Return where a segment of late rows is published; or one of dead letters, if they have no table any more."""
    window_id, name = segment.rsplit("/", 2)[1:]
    if window_id == LETTERS:
        return f"{DEAD_LETTERS}/{name}"
    return f"{LATE}/window={window_id}/{name}"
