"""A disk that remembers what was synced: what is left of an output folder after a power cut, at each moment of a run.

It sees every ``fsync`` of the process, and takes a copy of the ledger at each commit (which SQLite syncs by itself). What
a file held when it was synced last is durable; and what a folder named when that was synced last. All else is lost: a
file whose entry alone is durable comes back empty. A rename is one transaction of the file system's journal, behind those
that made the folders above: with one of its two folders the other is durable too, and the way to both, as on ext4 and xfs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.store import SqliteStore

from mldserver.ledger.contract import LedgerState, WindowEntry, WindowState
from mldserver.output.layout import LEDGER, PRIVATE, late_path, window_path

__all__ = ["Disk", "Image", "unsafe"]

_LEDGER_CALLS = frozenset(
    {
        "open",
        "claim",
        "sync",
        "open_shard",
        "release_shard",
        "end_shards",
        "register",
        "cut",
        "adopt",
    }
    | {
        "begin_attempts",
        "commit",
        "published",
        "expire",
        "late_published",
        "prune",
        "expire_servers",
        "leave",
        "compact_state",
        "forget_state_files",
    }
)


@dataclass(frozen=True)
class Image:
    """What a power cut at one moment leaves."""

    event: str
    """The last thing that became durable: ``sync PATH``, or the ledger's call."""
    files: Mapping[str, bytes | None]
    """By path in the output folder; None: a folder."""
    ledger: bytes | None
    checkpoints: Mapping[str, int]
    """What the daemon had stored by then: it is another machine."""
    ended: frozenset[str]

    def restore(self, out: Path) -> None:
        """Write it to a new folder."""
        out.mkdir(parents=True)
        for path, data in self.files.items():
            if data is None:
                (out / path).mkdir(parents=True)
            else:
                (out / path).write_bytes(data)
        if self.ledger is not None:
            (out / LEDGER).write_bytes(self.ledger)

    def has(self, path: str) -> bool:
        """Whether a file is there and holds something."""
        return bool(self.files.get(path))


class Disk:
    """The disk under one output folder."""

    def __init__(self, out: Path) -> None:
        """``out`` need not be there yet; the folder above is, and durable."""
        self._out = out
        self._rooted = False
        self._contents: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._folders: set[int] = set()
        self._held: list[int] = []
        self._seen: set[int] = set()
        self._ledger: bytes | None = None
        self.events: list[str] = []
        """All that happened, also what is not durable: renames."""
        self.images: list[Image] = []
        self.checkpoints: dict[str, int] = {}
        self.ended: set[str] = set()

    def fsync(self, descriptor: int) -> None:
        """Take the place of ``os.fsync``."""
        told = os.fstat(descriptor)
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        actual = self._look()
        if stat.S_ISREG(told.st_mode):
            self._contents[told.st_ino] = os.pread(descriptor, told.st_size, 0)
        elif path == str(self._out.parent):
            self._rooted = self._out.is_dir()
        elif told.st_ino in actual:
            self._settle(told.st_ino, actual)
        self._note(f"sync {path.removeprefix(str(self._out)).lstrip('/') or '.'}")

    def called(self, name: str, store: SqliteStore) -> None:
        """Note a call that has taken effect: a ledger's transaction is durable with it."""
        if name not in _LEDGER_CALLS:
            self.events.append(name)
            return
        assert store._db is not None
        self._ledger = store._db.serialize()
        self._note(name)

    def close(self) -> None:
        """Let go what keeps numbers of files from being given twice."""
        for descriptor in self._held:
            os.close(descriptor)

    def _note(self, event: str) -> None:
        self.events.append(event)
        root = self._out.stat().st_ino if self._rooted else None
        files = dict(self._tree(root, "")) if root is not None else {}
        # SQLite syncs the folder of a log that it makes: with the first commit the ledger's own entry is durable.
        ledger = self._ledger if PRIVATE in files else None
        self.images.append(Image(event, files, ledger, dict(self.checkpoints), frozenset(self.ended)))

    def _tree(self, folder: int, above: str) -> Iterator[tuple[str, bytes | None]]:
        for name, number in self._entries.get(folder, {}).items():
            path = f"{above}{name}"
            if number in self._folders:
                yield path, None
                yield from self._tree(number, f"{path}/")
            else:
                yield path, self._contents.get(number, b"")

    def _look(self) -> dict[int, dict[str, int]]:
        """Return what each folder names now, but for the ledger's files and locks."""
        found: dict[int, dict[str, int]] = {}
        if self._out.is_dir():
            self._look_into(str(self._out), found)
        return found

    def _look_into(self, folder: str, found: dict[int, dict[str, int]]) -> None:
        names: dict[str, int] = {}
        number = Path(folder).stat().st_ino
        found[number] = names
        self._hold(number, folder)
        self._folders.add(number)
        for each in os.scandir(folder):
            if each.name.startswith("ledger.sqlite") or each.name.endswith(".lock"):
                continue
            names[each.name] = each.inode()
            self._hold(each.inode(), each.path)
            if each.is_dir():
                self._look_into(each.path, found)

    def _hold(self, number: int, path: str) -> None:
        """Keep a file that is deleted from giving its number to another."""
        if number not in self._seen:
            self._seen.add(number)
            self._held.append(os.open(path, os.O_PATH))

    def _settle(self, folder: int, actual: dict[int, dict[str, int]]) -> None:
        before, now = self._entries.get(folder, {}), actual[folder]
        known = {number for names in self._entries.values() for number in names.values()}
        self._entries[folder] = dict(now)
        moved = known & (set(before.values()) ^ set(now.values()))
        for other, names in list(self._entries.items()):
            there = actual.get(other, {})
            for name, number in {**names, **there}.items():
                if other != folder and number in moved and names.get(name) != there.get(name):
                    names.pop(name, None)
                    if name in there:
                        names[name] = there[name]
        if moved:
            self._root_to(folder, actual)

    def _root_to(self, folder: int, actual: dict[int, dict[str, int]]) -> None:
        """Make the entries durable that lead to a folder: its renames stand behind them in the journal."""
        for above, names in actual.items():
            for name, number in names.items():
                if number == folder:
                    self._entries.setdefault(above, {})[name] = number
                    self._root_to(above, actual)


def unsafe(images: Iterable[Image], scratch: Path) -> dict[int, list[str]]:
    """Return what each image's ledger counts on that the same power cut took away, by the image's number.

    ``scratch``: a folder that need not be there.
    """
    scratch.mkdir(exist_ok=True)
    lost: dict[int, list[str]] = {}
    late: dict[str, None] = {}
    read: bytes | None = None
    state, entries = LedgerState(), ()
    for number, image in enumerate(images):
        if image.ledger is None:
            continue
        if image.ledger != read:
            state, entries = _read(image.ledger, scratch / "ledger.sqlite")
            read = image.ledger
        waiting = {each.path for each in state.late_segments}
        late |= dict.fromkeys(waiting)
        gone = [
            path
            for path in late
            if not image.has(late_path(path)) and not (path in waiting and image.has(path))
        ]
        gone += [file.path for file in state.state_files.values() if file.needed and not image.has(file.path)]
        for entry in entries:
            gone += [each.path for each in (*entry.segments, *entry.pending) if not image.has(each.path)]
            gone += [f"{entry.window_id}/{file}" for file in entry.files if not _shown(image, entry, file)]
        if gone:
            lost[number] = gone
    return lost


def _read(ledger: bytes, file: Path) -> tuple[LedgerState, tuple[WindowEntry, ...]]:
    """Return what a ledger holds, and all its windows."""
    file.write_bytes(ledger)
    store = SqliteStore(file, pipeline="test", server_id="reader")
    try:
        state = store.peek()
        assert store._db is not None
        ids = tuple(row[0] for row in store._db.execute("SELECT window_id FROM windows"))
        return state, store.find(ids)
    finally:
        store.close()


def _shown(image: Image, entry: WindowEntry, file: str) -> bool:
    """Whether a file of an output is where it can still be published from, or published."""
    if image.has(f"{window_path(entry.window_id)}/{file}"):
        return True
    # Until the next revision counts, ``files`` are those of the one that is visible.
    return entry.state is WindowState.COMMITTED and image.has(f"{entry.staging}/{file}")
