"""Zip archives whose bytes depend on their content alone: sorted names, one fixed time, no compression."""

from __future__ import annotations

import io
from collections.abc import Mapping
from zipfile import BadZipFile, ZipFile, ZipInfo

from mldserver.errors import OperatorError

LIMIT_BYTES = 64 << 20
"""The files of an archive may have so many bytes together. They are kept in memory, and each worker gets them."""


def archive(files: Mapping[str, bytes]) -> bytes:
    """Return the files, given by their paths, as a zip archive. Equal files give equal bytes."""
    with io.BytesIO() as buffer:
        with ZipFile(buffer, "w") as target:
            for path in sorted(files):
                entry = ZipInfo(path)  # its time is 1980-01-01
                entry.create_system = 3  # Unix, on every host
                entry.external_attr = 0o644 << 16
                target.writestr(entry, files[path])
        return buffer.getvalue()


def unarchived(data: bytes, what: str) -> dict[str, bytes]:
    """Return the files of a zip archive by their paths. ``what`` names the archive in errors.

    Raises OperatorError if the data is not a zip archive, is damaged, or holds more than ``LIMIT_BYTES``.
    """
    try:
        with ZipFile(io.BytesIO(data)) as source:
            entries = [entry for entry in source.infolist() if not entry.is_dir()]
            total = sum(entry.file_size for entry in entries)
            if total > LIMIT_BYTES:
                raise OperatorError(
                    f"{what} holds {total:,} bytes; {LIMIT_BYTES:,} are allowed.",
                    advice="Leave data files out: install them with the handler's package.",
                )
            return {entry.filename: source.read(entry) for entry in entries}
    except (BadZipFile, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
        raise OperatorError(
            f"{what} is not a zip archive that can be read: {error}.", advice="Copy or make it again."
        ) from error
