"""A process that plays a scenario on a store, tells each finished step, and kills itself in the middle of one.

``crash_child.py PATH STATEMENT``: SIGKILL as the scenario's STATEMENT-th SQL statement begins; 0: never, repeat the
scenario for other shards and windows for ever.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

from mldserver.ledger.contract import Flush
from tests.ledger.samples import play
from tests.support.store import SqliteStore


def main() -> None:
    path, kill_at = Path(sys.argv[1]), int(sys.argv[2])
    store = SqliteStore(path, pipeline="p", server_id="one")
    store.open(now_ms=0)
    statements = itertools.count(1)

    def traced(_statement: str) -> None:
        if next(statements) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    assert store._db is not None
    store._db.set_trace_callback(traced)
    for round_number in itertools.count():
        for _ in play(store, round_number):
            os.write(1, b".")
        if kill_at:
            break
    store.register(Flush(()), now_ms=0)


main()
