"""Makes committed outputs visible, and replaces what is visible by the next revision. Blocking; call it in a thread.

On a local file system readers read ``window=<id>`` folders:

* The first revision appears by one rename.
* A later one changes places with the old one in one step; the old one lies in staging then, and is
  deleted a little later. No two attempts give their files the same name, so a reader that listed the old files before
  the exchange gets FileNotFoundError at worst, and lists again: it never reads half a window, no window, or a
  mixture.
* A revision without output (``on_window`` returned None) takes the old one away by a rename, into its own folder.
* An early result lies in ``_early/window=<id>``. The first revision takes it away, by a rename too, before it appears itself.

Each is decided by where the output's first file lies, under a lock: it may be repeated, by a process that takes over
too. On object stores, which cannot rename, outputs stay where they are and a manifest names them (``manifest.py``).
Where a table is published into, that is the engine's work; here its staged files are looked after.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from mldserver.base.kill_points import kill_point
from mldserver.errors import OperatorError
from mldserver.ledger.contract import Commit
from mldserver.output.layout import (
    EARLY,
    OUTPUTS,
    PUBLISH_LOCK,
    STAGING,
    early_attempt_path,
    early_path,
    window_path,
    written,
)
from mldserver.output.manifest import (
    EARLY_MANIFESTS,
    MANIFESTS,
    Manifest,
    early_manifest_path,
    latest,
    manifest_path,
)

if TYPE_CHECKING:
    from mldserver.output.store import OutputStore

_LISTINGS = 5
"""How often manifests are listed while they are replaced under the reader."""

_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST})


def _manifest_of(output: Commit) -> Manifest:
    files = tuple(f"{output.staging}/{file}" for file in output.files)
    return Manifest(output.window_id, output.revision, files, output.rows_out)


def shown_files(store: OutputStore, window_id: str) -> tuple[str, ...]:
    """Return the files of a published window, relative to the output folder; none if it has no output.

    Raises OSError, and ValueError as ``Manifest.decode``.
    """
    if store.local:
        found = (path for path, _ in store.files(window_path(window_id)))
        return tuple(sorted(path for path in found if path.endswith(".parquet")))
    manifest = latest(path for path, _ in store.files(f"{MANIFESTS}/{window_id}")).get(window_id)
    return () if manifest is None else Manifest.decode(store.get(manifest)).files


class Publisher:
    """Publishes into one output folder."""

    def __init__(self, store: OutputStore, table: str | None = None, *, early: bool = False) -> None:
        """``store``: the output folder. ``table``: what outputs are written into instead, as a log may show it.

        ``early``: whether windows have early results, which their output replaces.
        """
        self._store = store
        self._early = early
        self.table = table
        self.root = STAGING if store.local else OUTPUTS
        """Where attempts write their output (``attempt_path``)."""

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
            self._store.prepare(*probes)
            try:
                self._store.exchange(*probes)
            except OSError as error:
                if error.errno not in _NO_EXCHANGE:
                    raise
                raise OperatorError(
                    f"Two folders in {self._store.uri()} cannot change places in one step ({error.strerror}), so that"
                    " late rows, and early results, could not replace what readers see without their noticing.",
                    advice="Put the output on a local Linux file system such as ext4 or xfs; or set late = separate, and"
                    " leave early out of windows.",
                ) from error
            finally:
                for probe in probes:
                    self._store.delete(probe)

    def publish(self, outputs: Iterable[Commit]) -> None:
        """Make outputs visible, together; repeatable.

        Raises OSError (FileNotFoundError when an output is gone), and OperatorError when a first revision finds its
        place taken: by what another ledger published, or this one before it was restored.
        """
        if self._store.local:
            with self._store.alone(PUBLISH_LOCK):
                for output in outputs:
                    self._show(output)
            # The outputs themselves were synced before they were committed.
            self._store.sync_entries()
            return
        self._store.for_each(self._name, outputs)

    def _name(self, output: Commit) -> None:
        manifest = _manifest_of(output)
        self._store.put(manifest_path(output.window_id, output.revision), manifest.encode())
        if self._early:
            self._store.delete(early_manifest_path(output.window_id))

    def show_early(self, output: Commit) -> bool:
        """Show an early result in place of the one before; return False if its window is published. Raises OSError.

        The one before then lies in ``output.staging``; on object stores, where readers ignore early results of windows that
        are published, it stays where it is.
        """
        store, target = self._store, early_path(output.window_id)
        if not store.local:
            store.put(early_manifest_path(output.window_id), _manifest_of(output).encode())
            return True
        with store.alone(PUBLISH_LOCK):
            if store.exists(window_path(output.window_id)):
                return False
            kill_point("early.showing")
            if store.exists(target):
                store.exchange(output.staging, target)
            else:
                store.prepare(EARLY)
                store.rename(output.staging, target)
            kill_point("early.shown")
        return True

    def _hide_early(self, output: Commit) -> None:
        """Take the early result of a window away."""
        tag = output.staging.rpartition("-")[2]
        target, place = early_path(output.window_id), early_attempt_path(self.root, output.window_id, 0, tag)
        if self._early and self._store.exists(target):
            self._store.prepare(place.rpartition("/")[0])
            self._store.rename(target, place)
            # Before the window's output is there: a power cut must not bring this back beside it.
            self._store.sync_entries(EARLY)
            kill_point("early.hidden")

    def _show(self, output: Commit) -> None:
        self._hide_early(output)
        store, target = self._store, window_path(output.window_id)
        if not output.files:
            # A folder without ``replaced`` shows that no server has done this yet.
            done = f"{output.staging}/replaced"
            if output.revision > 1 and store.exists(target) and not store.exists(done):
                store.rename(target, done)
        elif store.exists(f"{output.staging}/{output.files[0]}"):
            if output.revision > 1 and store.exists(target):
                store.exchange(output.staging, target)
                kill_point("revision.exchanged")
            else:
                try:
                    store.rename(output.staging, target)
                except OSError as error:
                    if error.errno not in _TAKEN:
                        raise
                    raise OperatorError(
                        f"Window {output.window_id} cannot be published: {store.uri(target)} is there already,"
                        " and this ledger did not publish it.",
                        did="The folder was left as it is; the window's output counts and is kept in staging.",
                        advice="Compare the two, then move the folder out of the output folder (or delete it): "
                        "the window is tried again by itself.",
                        path=store.uri(target),
                    ) from error
                kill_point("window.renamed")
        elif not store.exists(f"{target}/{output.files[0]}"):
            raise FileNotFoundError(
                errno.ENOENT, f"neither {output.staging} nor {target} holds the window's output"
            )

    def clean(self, output: Commit) -> None:
        """Delete what a published output has replaced: older revisions, and failed attempts."""
        by_manifest = not self._store.local and self.table is None
        for folder in list(self._store.folders(f"{self.root}/{output.window_id}")):
            # Attempts behind the published one may be under way already.
            if written(folder).attempt <= output.attempt and not (by_manifest and folder == output.staging):
                self._store.delete(folder)
        self._store.drop_empty(f"{self.root}/{output.window_id}")
        # Those of older revisions, after that of the present one was written: the first has replaced none.
        manifests = (
            self._store.files(f"{MANIFESTS}/{output.window_id}")
            if by_manifest and output.revision > 1
            else ()
        )
        for path, _ in list(manifests):
            if path < manifest_path(output.window_id, output.revision):
                self._store.delete(path)

    def drop_early(self) -> None:
        """Delete all early results, in a pipeline that has none any more."""
        for folder in () if self._early else (EARLY, EARLY_MANIFESTS):
            if self._store.exists(folder):
                self._store.delete(folder)

    def attempts(self) -> list[str]:
        """Return the folders of attempts; on object stores also of those that readers read (``unread``)."""
        if self._store.local:
            windows = list(self._store.folders(self.root))
            return [attempt for window in windows for attempt in self._store.folders(window)]
        # Every window that was ever published is listed, a thousand files in a request.
        depth = self.root.count("/") + 3
        return list(dict.fromkeys("/".join(p.split("/")[:depth]) for p, _ in self._store.files(self.root)))

    def unread(self, attempts: Iterable[str], suspects: Collection[str]) -> list[str]:
        """Return which of the suspects readers do not read. ``attempts``: all folders that were listed.

        To be asked after the ledger was, and only of attempts that cannot be published any more: which ones are shown
        is looked up now, so that an output that was published since the listing is found among them.
        """
        if self._store.local:
            return list(suspects)
        folders: dict[str, list[str]] = {attempt.split("/")[-2]: [] for attempt in suspects}
        for attempt in attempts:
            if (window := attempt.split("/")[-2]) in folders:
                folders[window].append(attempt)
        shown = self._early_shown(folders)
        for _ in range(_LISTINGS):
            if not folders:
                break
            sizes = dict(self._store.files(MANIFESTS))
            manifests = latest(sizes)
            replaced = {}
            for window in sorted(folders.keys() & manifests.keys()):
                path = manifests[window]
                try:
                    shown |= self._named(path, sizes[path], window, folders[window])
                except FileNotFoundError:
                    # By a later revision, since it was listed.
                    replaced[window] = folders[window]
            folders = replaced
        # What is replaced again and again can be looked at by the next start.
        shown.update(*folders.values())
        return [attempt for attempt in suspects if attempt not in shown]

    def _early_shown(self, folders: Mapping[str, Collection[str]]) -> set[str]:
        """Return which of the folders, by window, early manifests name."""
        shown: set[str] = set()
        for path, _ in list(self._store.files(EARLY_MANIFESTS)):
            with contextlib.suppress(FileNotFoundError):  # its window has a revision now
                manifest = Manifest.decode(self._store.get(path))
                named = {file.rpartition("/")[0] for file in manifest.files}
                shown |= named.intersection(folders.get(manifest.window, ()))
        return shown

    def _named(self, manifest: str, size: int, window: str, attempts: list[str]) -> set[str]:
        """Return which folders a manifest names; it is read only where that is not plain."""
        largest_empty = len(Manifest(window, 10**9, (), 10**18).encode())
        if len(attempts) == 1 and size > largest_empty:
            # It names something, and there is nothing else.
            return set(attempts)
        files = Manifest.decode(self._store.get(manifest)).files
        return {folder for folder in attempts if any(file.startswith(f"{folder}/") for file in files)}
