"""Whose an output folder is: one pipeline's, on one ledger.

Folder and ledger know each other. ``_mldserver/owner.json`` names the ledger by its random id and says how often it
was claimed; the ledger names the folder by an id that stands in that file. A start compares the two before
anything is deleted, written or published. So it notices a ledger that is missing, exchanged or rolled back beside what
an earlier one left, and a second folder on a ledger (two hosts, each with a local folder of its own).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog

from mldserver.errors import OperatorError
from mldserver.ledger.contract import LedgerState
from mldserver.ledger.operations import Ledger
from mldserver.output.layout import LATE, OUTPUTS, OWNER, PUBLISH_LOCK, SEGMENTS, STATE, window_path, written
from mldserver.output.manifest import MANIFESTS

if TYPE_CHECKING:
    from mldserver.output.store import OutputStore

log = structlog.get_logger("mldserver")

_FORMAT: Final = 2
_WAYS_OUT: Final = (
    "Restore the ledger (`mldserver ledger restore`), or name another `out`. To go on with this ledger in this "
    "folder start once with --new-ledger: what it does not name is moved to _mldserver/quarantine, published "
    "windows stay (move them away to publish them again), and daemons must read again what must count again."
)
_SHARE: Final = (
    "Servers on one ledger share one folder: name the folder that it has, on storage that every host reaches, or give "
    "this folder another ledger (or pipeline name)."
)


@dataclass(frozen=True, slots=True)
class FolderOwner:
    """What the folder says."""

    folder: str
    """Its own id."""
    pipeline: str
    ledger: str | None
    """Where its ledger is; None: in the folder."""
    ledger_id: str | None = None
    """None: no start has got so far."""
    claims: int = 0
    """The ledger's when a server started last. It has as many or more, unless it was rolled back."""


class FolderClaim:
    """One start's claim on one folder."""

    def __init__(
        self,
        store: OutputStore,
        *,
        pipeline: str,
        ledger: str | None,
        former: str | None = None,
        new_ledger: bool = False,
    ) -> None:
        """``ledger``: where it is, None for the one in the folder; ``former``: where, under the pipeline's former name.

        ``new_ledger``: take it whatever the folder says, unless its rows lie in another.
        """
        self._store = store
        self._new_ledger = new_ledger
        self._expected = FolderOwner("", pipeline, ledger)
        self._accepted_ledgers = {ledger, former or ledger}
        self._renamed: FolderOwner | None = None
        self._owner = self._expected
        self._segments: list[str] = []

    def inspect(self) -> None:
        """Read what the folder says before the ledger is touched; a new folder gets its id. Blocking.

        Raises OperatorError when its ledger is elsewhere, and OSError.
        """
        owner, expected = self.read(), self._expected
        # Of the pipeline's name a ledger itself is the judge; in a table it is a part of the place.
        if owner.ledger not in self._accepted_ledgers and not self._new_ledger:
            advice = "Name another folder, or the ledger it had. If the ledger was moved on purpose, start once with --new-ledger."
            if _table(owner.ledger) == _table(expected.ledger) != "":
                advice = (
                    f"A pipeline whose handler was renamed goes on under its new name with --rename-from {owner.pipeline}, once "
                    "it is drained (`mldserver help operations`), or under its old name with --pipeline. Another pipeline needs "
                    "another folder."
                )
            raise OperatorError(
                f"The output folder {self._store.uri()} belongs to pipeline {owner.pipeline} on the ledger "
                f"{_named(owner.ledger)}; this is pipeline {expected.pipeline} on the ledger {_named(expected.ledger)}.",
                did="Nothing was touched.",
                advice=advice,
            )

    def read(self) -> FolderOwner:
        """Return the recorded owner, this pipeline or another; a new folder gets an id. Blocking.

        Raises OperatorError, OSError.
        """
        with self._store.alone(PUBLISH_LOCK):
            owner = _read(self._store)
            if owner is None:
                # On object stores, where two servers may do this at once, both find the same.
                uri = self._store.uri().encode()
                folder = uuid.uuid4().hex if self._store.local else hashlib.sha256(uri).hexdigest()[:32]
                owner = replace(self._expected, folder=folder)
                self._write(owner)
        self._owner = owner
        self._segments = [path for path, _ in self._store.files(SEGMENTS)]
        return owner

    def give(self, state: LedgerState) -> None:
        """Record a restored ledger as the folder's owner. Blocking. Raises OSError."""
        assert state.folder is not None, "a restored ledger names its folder"
        self._store_owner(
            replace(self._expected, folder=state.folder, ledger_id=state.ledger_id, claims=state.claims)
        )

    async def acquire(self, state: LedgerState, ledger: Ledger) -> LedgerState:
        """Compare folder and ledger, store each one's id in the other, and return what the ledger holds then.

        ``state``: as this server's registration found it. Raises OperatorError when the two do not belong together,
        and then nothing in the folder was touched; OSError and LedgerError.
        """
        while mismatch := await asyncio.to_thread(self._mismatch, state):
            # Another server may be claiming the folder too: a mismatch counts if the folder has not changed meanwhile.
            before = self._owner
            await asyncio.to_thread(self.read)
            if self._owner == before:
                break
            state = await ledger.peek()
        if mismatch and (not self._new_ledger or self._count_foreign_segments(state)):
            raise mismatch
        folder = self._folder_id(state)
        claimed = await ledger.claim(folder, instead_of=state.ledger_id if mismatch else None)
        while True:
            if claimed.folder != folder:
                raise self._foreign_ledger_error(claimed)
            record = replace(
                self._expected, folder=folder, ledger_id=claimed.ledger_id, claims=claimed.claims
            )
            if record.ledger != self._owner.ledger and self._owner.ledger in self._accepted_ledgers:
                # Until the ledger has the new name, a start under the former one must find the folder as it was.
                self._renamed, record = record, replace(record, ledger=self._owner.ledger)
            await asyncio.to_thread(self._store_owner, record)
            # Another server may have claimed it since (and removed this one), and recorded that before this write.
            state, claimed = claimed, await ledger.peek()
            if claimed.ledger_id == state.ledger_id:
                break
        if mismatch:
            log.warning("ledger.accepted", what=mismatch.what, did="It is the folder's ledger from now on.")
        return claimed

    async def renamed(self) -> None:
        """Note the pipeline's new name in the folder, if it has one: the ledger has it. Raises OSError."""
        if self._renamed is not None:
            await asyncio.to_thread(self._store_owner, self._renamed)

    def _folder_id(self, state: LedgerState) -> str:
        """Return the id of the output folder."""
        if state.folder is not None and self._owner.ledger_id is None and self._expected.ledger is None:
            # A user has deleted owner.json: the ledger, which lies in the folder, still knows its owner.
            return state.folder
        return self._owner.folder

    def _count_foreign_segments(self, state: LedgerState) -> int:
        """Return how many segments a ledger names, if it is another folder's and none of them is in this one."""
        windows = state.windows.values()
        named = {segment.path for entry in windows for segment in (*entry.segments, *entry.pending)}
        known = state.folder in {None, self._folder_id(state)}
        return len(named) if not known and named.isdisjoint(self._segments) else 0

    def _foreign_ledger_error(self, state: LedgerState) -> OperatorError:
        what = f"The ledger {_named(self._expected.ledger)} belongs to another output folder than {self._store.uri()}"
        if count := self._count_foreign_segments(state):
            return _refusal(f"{what}, and names rows that are not here (segments: {count:,}).", _SHARE)
        way = f" If somebody has deleted {OWNER} here, start once with --new-ledger."
        return _refusal(f"{what}.", _SHARE + way)

    def _mismatch(self, state: LedgerState) -> OperatorError | None:
        """Return the error to raise if folder and ledger do not belong together; None if they do. Blocking."""
        owner, out, named = self._owner, self._store.uri(), _named(self._expected.ledger)
        if state.folder not in {None, self._folder_id(state)}:
            return self._foreign_ledger_error(state)
        if owner.ledger not in self._accepted_ledgers:
            return _refusal(f"The ledger of {out} is {named} now; it was {_named(owner.ledger)}.")
        if state.folder is None:
            # What a ledger would know of.
            counts = {
                "windows": sum(folder.startswith(window_path("")) for folder in self._store.folders("")),
                "manifests": sum(1 for _ in self._store.files(MANIFESTS)),
                "segments": len(self._segments),
                "outputs": sum(1 for _ in self._store.files(OUTPUTS)),
                "late files": sum(1 for _ in self._store.files(LATE)),
                "state files": sum(1 for _ in self._store.files(STATE)),
            }
            if left := ", ".join(f"{name}: {count:,}" for name, count in counts.items() if count):
                return _refusal(
                    f"The ledger {named} is new, and the one that knew what {out} holds is missing ({left})."
                )
        if owner.ledger_id not in {None, state.ledger_id} and state.folder is not None:
            return _refusal(f"The ledger {named} is not the one that {out} had last.")
        # What was listed before the ledger was read was written at a clock that a ledger has at least, ever after.
        clocks = [written(path).clock for path in self._segments if written(path).ledger == state.ledger_id]
        behind = state.claims < owner.claims or max(clocks, default=0) > state.clock
        if owner.ledger_id == state.ledger_id and behind:
            return _refusal(
                f"The ledger {named} is older than {out}: it was rolled back, to a copy of an earlier day perhaps."
            )
        return None

    def _store_owner(self, owner: FolderOwner) -> None:
        with self._store.alone(PUBLISH_LOCK):
            self._write(owner)

    def _write(self, owner: FolderOwner) -> None:
        fields = {"format": _FORMAT} | asdict(owner)
        self._store.replace(OWNER, json.dumps(fields, ensure_ascii=False).encode())


def _read(store: OutputStore) -> FolderOwner | None:
    """Return whose the folder is; None when it does not say so."""
    try:
        data = store.get(OWNER)
    except FileNotFoundError:
        return None
    # An empty file was cut off by a crash, on a file system that shows files before they are whole.
    if not data:
        return None
    format_number = _FORMAT
    try:
        fields = json.loads(data)
        format_number = int(fields.pop("format"))
        if format_number == _FORMAT:
            return FolderOwner(**fields)
    except (ValueError, TypeError, AttributeError, KeyError):
        pass
    if format_number > _FORMAT:
        raise OperatorError(
            f"The output folder {store.uri()} has format {format_number}; this program knows format {_FORMAT}.",
            did="Nothing was touched.",
            advice="Run the version of mldserver that wrote it, or a later one.",
        )
    raise OperatorError(
        f"The output folder {store.uri()} belongs to something unknown: {OWNER} in it cannot be read.",
        did="Nothing was touched.",
        advice="Name another folder; or, if it is this pipeline's, delete that file.",
    )


def _refusal(what: str, advice: str = _WAYS_OUT) -> OperatorError:
    did = "The server did not start; nothing in the folder was touched."
    return OperatorError(what, did=did, advice=advice)


def _table(ledger: str | None) -> str:
    """Return the table in which a ledger lies under its pipeline's name; empty for a file."""
    return (ledger or "").rpartition("/")[0] if (ledger or "").startswith("dynamodb://") else ""


def _named(ledger: str | None) -> str:
    return "in the folder" if ledger is None else ledger
