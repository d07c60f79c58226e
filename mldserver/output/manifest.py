"""Which files of an output folder count now: for readers of outputs on object stores, and anywhere.

A folder cannot be renamed on an object store. There a window's output stays where its attempt wrote it, and one small
JSON object says that it counts: ``_mldserver/manifest/<window>/<revision>.json``, written in one put and never changed.
The highest revision of a window is the one that counts.

    {"format": 1, "window": "2013-01-01T10-00-00Z", "revision": 2, "rows": 17, "files": ["_mldserver/outputs/…"]}

>>> import pyarrow.dataset as ds
>>> from mldserver.output.manifest import current_files
>>> found = current_files("s3://bucket/departures")              # doctest: +SKIP
>>> ds.dataset(list(found.paths), filesystem=found.filesystem)   # doctest: +SKIP
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

MANIFESTS: Final = "_mldserver/manifest"
EARLY_MANIFESTS: Final = "_mldserver/early"
"""Of early results, one for each window: it counts while the window has no other."""
FORMAT: Final = 1
_TRIES: Final = 10


@dataclass(frozen=True, slots=True)
class Manifest:
    """One revision of one window's output."""

    window: str
    revision: int
    files: tuple[str, ...]
    """Relative to the output folder; empty when the revision has no output."""
    rows: int

    def encode(self) -> bytes:
        """Return it as JSON."""
        fields = {"format": FORMAT, "window": self.window, "revision": self.revision, "rows": self.rows}
        return json.dumps(fields | {"files": list(self.files)}, ensure_ascii=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode a manifest. Raises ValueError for other data, or a newer format."""
        try:
            fields = json.loads(data)
            if fields["format"] != FORMAT:
                raise ValueError(
                    f"a manifest of format {fields['format']}; this program knows format {FORMAT}"
                )
            return cls(fields["window"], int(fields["revision"]), tuple(fields["files"]), int(fields["rows"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a manifest: {data[:80]!r}") from error


@dataclass(frozen=True, slots=True)
class CurrentFiles:
    """The data files that count, as ``pyarrow.dataset`` takes them."""

    filesystem: FileSystem
    paths: tuple[str, ...]


def manifest_path(window: str, revision: int) -> str:
    """Return where a revision's manifest lies, relative to the output folder."""
    return f"{MANIFESTS}/{window}/{revision:06d}.json"


def early_manifest_path(window: str) -> str:
    """Return where the manifest of a window's early result lies, relative to the output folder."""
    return f"{EARLY_MANIFESTS}/{window}.json"


def latest(paths: Iterable[str]) -> dict[str, str]:
    """Return of each window the path of the highest revision's manifest, by the window's id."""
    highest: dict[str, tuple[int, str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        stem, dot, suffix = name.rpartition(".")
        if dot and suffix == "json" and stem.isdecimal():
            window = folder.rpartition("/")[2]
            highest[window] = max(highest.get(window, (0, "")), (int(stem), path))
    return {window: path for window, (_, path) in sorted(highest.items())}


def current_files(out: str, filesystem: FileSystem | None = None, *, early: bool = False) -> CurrentFiles:
    """List the published files of a pipeline's output folder, each window in one revision.

    ``out``: a local path or a URI that pyarrow.fs understands; a path in ``filesystem`` when that is given. ``early``: also
    list the early results of windows that are not published. The server deletes the files of a revision or an early result
    that is replaced after the call: a reader that gets FileNotFoundError must list again. Raises OSError, and ValueError for
    a manifest of a newer format.
    """
    from pyarrow import fs  # noqa: PLC0415  # readers pay for it, importers of the format do not

    base = out
    if filesystem is None and "://" in out:
        filesystem, base = fs.FileSystem.from_uri(out)
    elif filesystem is None:
        filesystem, base = fs.LocalFileSystem(), str(Path(out).absolute())
    base = base.rstrip("/")
    # Before the others: a window that is published meanwhile is found there.
    before = _shown(filesystem, f"{base}/_early", f"{base}/{EARLY_MANIFESTS}", base) if early else {}
    published = _shown(filesystem, base, f"{base}/{MANIFESTS}", base)
    files = [file for window in sorted(published) for file in published[window]]
    files += [file for window in sorted(before.keys() - published.keys()) for file in before[window]]
    return CurrentFiles(filesystem, tuple(files))


def _shown(filesystem: FileSystem, folders: str, manifests: str, base: str) -> dict[str, list[str]]:
    """Return the files of each window: of ``window=`` folders, and of those that manifests name, by the window's id."""
    found: dict[str, list[str]] = {}
    for path in _list(filesystem, folders, folders=True):
        name = path.rpartition("/")[2]
        if name.startswith("window="):
            files = sorted(_list(filesystem, path, deep=True))
            shown = [file for file in files if not file.rpartition("/")[2].startswith(("_", "."))]
            found[name.removeprefix("window=")] = shown
    return found | _named(filesystem, manifests, base)


def _named(filesystem: FileSystem, manifests: str, base: str) -> dict[str, list[str]]:
    tries = 0
    while True:
        tries += 1
        files: dict[str, list[str]] = {}
        try:
            paths = _list(filesystem, manifests, deep=True)
            # An early result has one manifest, without a folder.
            for path in latest(paths).values() if manifests.endswith(MANIFESTS) else paths:
                with filesystem.open_input_stream(path) as stream:
                    manifest = Manifest.decode(bytes(stream.read()))
                files[manifest.window] = [f"{base}/{name}" for name in manifest.files]
        except FileNotFoundError:
            # Replaced since it was listed.
            if tries == _TRIES:
                raise
        else:
            return files


def _list(filesystem: FileSystem, folder: str, *, deep: bool = False, folders: bool = False) -> list[str]:
    from pyarrow import fs  # noqa: PLC0415  # see above

    wanted = fs.FileType.Directory if folders else fs.FileType.File
    entries = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True, recursive=deep))
    return [info.path for info in entries if info.type == wanted]
