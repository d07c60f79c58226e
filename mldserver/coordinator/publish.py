"""Makes committed outputs visible, and replaces what is visible by the next revision. Blocking; call it in a thread.

On a local file system readers read ``window=<id>`` folders:

* The first revision appears by one rename.
* A later one changes places with the old one in one step (``exchange.py``); the old one lies in staging then, and is
  deleted a little later. No two attempts give their files the same name, so a reader that listed the old files before the exchange
  gets FileNotFoundError for them at worst, and lists again: never half a window, none of it, or a mixture.
* A revision without output (``on_window`` returned None) takes the old one away by a rename, into its own folder.

Each is decided by where the output's first file lies, under a lock: it may be repeated, by a process that takes over
too. On object stores, which cannot rename, outputs stay where they are and a manifest names them (``manifest.py``).
Where a table is published into, that is the engine's work; here its staged files are looked after.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mldserver.coordinator.layout import (
    OUTPUTS,
    PUBLISH_LOCK,
    STAGING,
    attempt_number,
    attempt_path,
    window_path,
)
from mldserver.errors import OperatorError
from mldserver.faults import kill_point
from mldserver.manifest import MANIFESTS, Manifest, latest, manifest_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mldserver.coordinator.store import OutputStore

__all__ = ["Output", "Publisher"]

_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class Output:
    """A committed output."""

    window_id: str
    revision: int
    staging: str
    """The attempt's folder, relative to the output folder."""
    files: tuple[str, ...]
    """Relative to ``staging``; empty when there is nothing to show."""
    rows: int


class Publisher:
    """Publishes into one output folder."""

    def __init__(self, store: OutputStore, table: str | None = None) -> None:
        """``store``: the output folder. ``table``: what outputs are written into instead, as a log may show it."""
        self._store = store
        self.table = table
        self._root = STAGING if store.local else OUTPUTS

    def attempt(self, window_id: str, attempt: int, tag: str) -> str:
        """Return where an attempt writes its output, relative to the output folder."""
        return attempt_path(self._root, window_id, attempt, tag)

    def shown(self, window_id: str) -> str:
        """Return the path (or URI) under which readers find a window, or the table that holds it."""
        if self.table is not None:
            return self.table
        return self._store.uri(window_path(window_id) if self._store.local else f"{MANIFESTS}/{window_id}")

    def check(self) -> None:
        """Raise OperatorError where a revision could not replace another in one step."""
        if not self._store.local or self.table is not None:
            return
        probes = [f"{STAGING}/.exchange-{name}" for name in ("one", "other")]
        # Not two servers at once: one would take away what the other tries it with.
        with self._store.alone(PUBLISH_LOCK):
            self._try_exchange(probes)

    def _try_exchange(self, probes: list[str]) -> None:
        self._store.prepare(*probes)
        try:
            self._store.exchange(*probes)
        except OSError as error:
            if error.errno not in _NO_EXCHANGE:
                raise
            raise OperatorError(
                f"Two folders in {self._store.uri()} cannot change places in one step ({error.strerror}), so that"
                " windows could not be computed again for late rows without readers noticing.",
                advice="Put the output on a local Linux file system such as ext4 or xfs, or set late = separate.",
            ) from error
        finally:
            for probe in probes:
                self._store.delete(probe)

    def require(self, output: Output) -> None:
        """Raise FileNotFoundError when a table's output is gone: it was published, by whoever, and deleted."""
        if output.files and not self._store.exists(f"{output.staging}/{output.files[0]}"):
            raise FileNotFoundError(errno.ENOENT, f"{output.staging} does not hold the window's output")

    def publish(self, outputs: Iterable[Output]) -> None:
        """Make outputs visible, together; repeatable.

        Raises OSError: FileNotFoundError when an output is gone, and when a first revision finds its place taken.
        """
        if self._store.local:
            with self._store.alone(PUBLISH_LOCK):
                for each in outputs:
                    self._show(each)
            # The outputs themselves were synced before they were committed.
            self._store.sync_entries()
        else:
            for each in outputs:
                self._name(each)

    def _show(self, output: Output) -> None:
        store, target = self._store, window_path(output.window_id)
        if not output.files:
            # The attempt's empty folder tells that this was not done yet, by whoever else.
            done = f"{output.staging}/replaced"
            if output.revision > 1 and store.exists(target) and not store.exists(done):
                store.rename(target, done)
        elif store.exists(f"{output.staging}/{output.files[0]}"):
            if output.revision > 1 and store.exists(target):
                store.exchange(output.staging, target)
                kill_point("revision.exchanged")
            else:
                store.rename(output.staging, target)
                kill_point("window.renamed")
        elif not store.exists(f"{target}/{output.files[0]}"):
            raise FileNotFoundError(
                errno.ENOENT, f"neither {output.staging} nor {target} holds the window's output"
            )

    def _name(self, output: Output) -> None:
        files = tuple(f"{output.staging}/{file}" for file in output.files)
        manifest = Manifest(output.window_id, output.revision, files, output.rows)
        self._store.put(manifest_path(output.window_id, output.revision), manifest.encode())

    def clean(self, outputs: Iterable[Output]) -> None:
        """Delete what published outputs have replaced: older revisions, and attempts that came to nothing."""
        for each in outputs:
            last = attempt_number(each.staging)
            for folder in list(self._store.folders(f"{self._root}/{each.window_id}")):
                # Attempts behind the published one may be under way already.
                old = attempt_number(folder) <= last
                shown = not self._store.local and self.table is None and folder == each.staging
                if old and not shown:
                    self._store.delete(folder)
            self._store.drop_empty(f"{self._root}/{each.window_id}")
            if not self._store.local and self.table is None:
                self._forget(each)

    def _forget(self, output: Output) -> None:
        """Delete the manifests of older revisions, after that of the present one was written."""
        for path, _ in list(self._store.files(f"{MANIFESTS}/{output.window_id}")):
            if path < manifest_path(output.window_id, output.revision):
                self._store.delete(path)

    def attempts(self) -> Iterator[str]:
        """Yield the folders of attempts that readers do not read."""
        if not self._store.local:
            yield from self._nameless()
            return
        for window in self._store.folders(self._root):
            yield from self._store.folders(window)

    def _nameless(self) -> Iterator[str]:
        """Yield the folders that no manifest names.

        Every window that was ever published is listed, a thousand files in a request; what its manifest names is read
        only where that is not plain: one folder and a manifest that names something fit together.
        """
        folders: dict[str, set[str]] = {}
        for path, _ in self._store.files(self._root):
            window, attempt = path.removeprefix(f"{self._root}/").split("/")[:2]
            folders.setdefault(window, set()).add(f"{self._root}/{window}/{attempt}")
        sizes = dict(self._store.files(MANIFESTS))
        manifests = latest(sizes)
        for window, found in folders.items():
            manifest = manifests.get(window)
            if manifest is None:
                yield from sorted(found)
            elif len(found) > 1 or sizes[manifest] <= _largest_empty(window):
                files = Manifest.decode(self._store.get(manifest)).files
                yield from sorted(each for each in found if not any(f.startswith(f"{each}/") for f in files))


def _largest_empty(window: str) -> int:
    """Return the size, in bytes, up to which a window's manifest may name no file at all."""
    return len(Manifest(window, 10**9, (), 10**18).encode())
