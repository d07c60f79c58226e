"""Whose an output folder is: one pipeline's on one ledger.

A start deletes files that its ledger does not name. With the ledger in the folder itself these are its own; with a
ledger elsewhere they might be another's, which somebody gave the same folder by mistake. So the folder says whose it
is: ``_mldserver/owner.json``, written by the first server and compared by every other. Blocking.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mldserver.coordinator.layout import OWNER
from mldserver.errors import OperatorError

if TYPE_CHECKING:
    from mldserver.coordinator.store import OutputStore

__all__ = ["claim"]


def claim(store: OutputStore, *, pipeline: str, ledger: str | None) -> None:
    """Make the folder this pipeline's, on this ledger (None: the one inside the folder, which tells for itself).

    Raises OperatorError when it is another's, and OSError.
    """
    wanted = {"format": 1, "pipeline": pipeline, "ledger": ledger}
    try:
        data = store.get(OWNER)
    except FileNotFoundError:
        data = b""
    # An empty file was cut off by a crash, or is being written by another server: of this pipeline, or it finds out.
    if data:
        _compare(store, data, wanted)
    elif ledger is not None:
        store.put(OWNER, json.dumps(wanted, ensure_ascii=False).encode())


def _compare(store: OutputStore, data: bytes, wanted: dict[str, object]) -> None:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if found == wanted:
        return
    whose = (
        f"pipeline {found.get('pipeline')} on the ledger {found.get('ledger')}"
        if isinstance(found, dict)
        else "something unknown"
    )
    own = "the one in the folder" if wanted["ledger"] is None else wanted["ledger"]
    raise OperatorError(
        f"The output folder {store.uri()} belongs to {whose}; this is pipeline {wanted['pipeline']} on the ledger {own}.",
        did="Nothing was touched.",
        advice=f"Name another folder. If the ledger was moved on purpose, delete {OWNER} in the folder first: "
        "segments that the new ledger does not name will then be deleted.",
    )
