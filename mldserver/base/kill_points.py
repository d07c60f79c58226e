"""Kill points: the named steps of the life of a row and of a window, at which a crash test ends the process.

``MLDSERVER_KILL_AT=step`` (or ``step:n`` for the n-th time) makes the process send itself SIGKILL when it comes to the
step, as a power cut would: nothing is flushed, closed or told. Of several (``step,step:n``) it ends at the first that
comes. Without the variable a kill point is one look into an empty dictionary.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Final

KILL_VARIABLE: Final = "MLDSERVER_KILL_AT"

STEPS: Final[Mapping[str, str]] = {
    # A shard and its rows.
    "shard.opening": "a daemon has initialised a shard; its epoch is not raised yet",
    "shard.opened": "its epoch is raised; the daemon is not answered yet",
    "state.loading": "the ledger has named a store's files; none is read",
    "state.loaded": "its entries are read; no handler has them",
    "batch.received": "a batch is here; the handler has not seen it",
    "batch.handled": "the handler has made rows of it",
    "batch.buffered": "its rows are in memory; the daemon may be answered",
    "segment.written": "a file of a flush is on disk; the ledger does not name it",
    "letters.stored": "dead letters are where they go; the ledger has not moved the position",
    "state.written": "the changes of keyed state are on disk; the ledger does not name the file",
    "flush.registering": "all files of a flush are on disk",
    "flush.registered": "the ledger names them and has moved the positions; memory does not know it",
    "flush.done": "the rows have left memory",
    "late.staged": "late rows lie ready for their table; it does not name them",
    "late.moved": "late rows are visible, as files or in their table; the ledger does not know it",
    "late.published": "the ledger knows it",
    "checkpoint.asking": "a durable position is about to be sent to the daemon",
    "checkpoint.stored": "the daemon has stored it; the batch is not answered yet",
    "batch.answered": "the batch is answered",
    "shard.drained": "the rows of a shard that is handed over are durable; nothing is checkpointed",
    "shard.lost": "the rows of a shard whose lease is gone are durable; the daemon is not answered",
    "shard.released": "the ledger knows that the shard has no owner",
    "shard.end_durable": "the end of a shard is in the ledger; the daemon has not been asked to checkpoint it",
    "shard.end_stored": "the daemon has checkpointed the end; it is not answered yet",
    # A window.
    "window.cutting": "the watermark has passed; nothing is cut",
    "window.cut": "the ledger has fixed its segments; no server computes it yet",
    "attempt.begun": "an attempt is counted; its staging folder is not made",
    "job.running": "the engine is at work",
    "attempt.computed": "the engine has written the output; it is not synced to disk",
    "attempt.staged": "the output is safe on disk; it does not count yet",
    "window.committed": "the output counts; it is not visible",
    "sink.writing": "the output is on its way into the table; perhaps it is there",
    "table.filled": "the files of a window lie in the folder of a table of Delta Lake or Iceberg; the table does not name them",
    "table.committed": "the table names them; the server does not know it",
    "sink.written": "the table holds the first window of a group, perhaps not the others",
    "window.renamed": "the first revision of a window is visible, of others of its group perhaps not",
    "window.visible": "readers see it; the ledger does not know it",
    "window.published": "the ledger knows it; what it has replaced is still there",
    "window.cleaning": "the files of failed attempts and of older revisions are deleted",
    "window.cleaned": "all that is not needed any more is deleted",
    # A window that is still open.
    "early.computed": "the engine has written an early result; no reader sees it",
    "early.showing": "its window is not published, and the lock of publications is held",
    "early.shown": "readers see it; the one before lies in its staging folder",
    "early.hidden": "it is gone; its window is committed, and about to be visible",
    # A window again, with its late rows.
    "revision.cutting": "its late rows were gathered long enough; nothing is cut",
    "revision.cut": "the ledger has fixed the segments of the next revision",
    "revision.exchanged": "readers see the next revision; the one before lies in its staging folder",
    "window.expired": "late rows cannot come any more; the segments are still there",
    # Files of keyed state.
    "state.compacting": "files are chosen; none is read",
    "state.compacted": "the file that takes their place is on disk; the ledger does not name it",
    "state.dropped": "files that no store needs any more are deleted; the ledger still names them",
    # A dead letter that runs once more.
    "redrive.taken": "a letter is about to run through the handler",
    "redrive.handled": "the handler has seen it; what it gave is in memory",
    "redrive.done": "what it gave is registered, and the letter is gone; its key may still be parked",
    # What is wanted of the function.
    "function.wanted": "the ledger has what is wanted now; no server follows it yet",
    "function.swapping": "the ledger names another version; the workers run the old one",
    # Timers.
    "timers.firing": "timers are due; the handler has not seen them",
    "timers.fired": "what they gave is in memory",
    "store.adopted": "the store of a shard that ended without a child is this server's; no handler has it",
    # A transaction, whichever it is.
    "ledger.written": "everything is written; the transaction is not committed",
    "ledger.committed": "it is committed; the caller does not know it",
    # A start, and an end.
    "server.joined": "the ledger knows the server; dead servers are not expired yet",
    "server.expiring": "a dead server is found; it is still in the ledger",
    "server.expired": "it is out; what it left lies about",
    "recovery.opened": "nothing is taken over yet",
    "recovery.adopted": "windows that were under way are this server's",
    "recovery.sweeping": "files that no entry names are found",
    "recovery.swept": "they are deleted; nothing is served yet",
    "server.left": "all is done and the server has left the ledger",
    # Beside another server.
    "windows.adopted": "windows of a server that died are this server's, in the middle of its life",
}
"""Every step, in the order in which a row and its window come to it, and what holds at that instant."""


armed: dict[str, int] = {}
"""The steps at which the process may end, and how often it must still come there. Hot paths look at it before they call."""
_number = signal.SIGKILL
_tell: Callable[[str], None] | None = None


def arm(
    spec: str | None, number: signal.Signals = signal.SIGKILL, tell: Callable[[str], None] | None = None
) -> None:
    """Set where this process ends: ``step``, ``step:n`` (n from 1), several of them with commas, or None for nowhere.

    ``number`` is the signal that the process sends itself there: SIGSTOP stops it until SIGCONT. ``tell`` is called
    with the step just before. Raises ValueError for a step that is not in ``STEPS`` and for an impossible n.
    """
    global armed, _number, _tell
    remaining = {}
    for each in spec.split(",") if spec else ():
        step, _, times = each.partition(":")
        if step not in STEPS:
            raise ValueError(f"{KILL_VARIABLE}={spec}: there is no step {step!r}")
        if times and not (times.isascii() and times.isdigit() and int(times) > 0):
            raise ValueError(f"{KILL_VARIABLE}={spec}: {times!r} is no count")
        remaining[step] = int(times or "1")
    armed, _number, _tell = remaining, number, tell


def kill_point(step: str) -> None:
    """End the process here if a crash test has armed this step (see ``arm``) and it has been reached often enough."""
    global armed  # noqa: PLW0603  # see ``arm``
    remaining = armed  # another thread may be ending the process
    if step in remaining:
        remaining[step] -= 1
        if remaining[step] == 0:
            armed = {}
            if _tell is not None:
                _tell(step)
            os.kill(os.getpid(), _number)


arm(os.environ.get(KILL_VARIABLE))
