"""Local files and folders that outlive a power cut. Blocking.

What is written is safe only once it was synced itself, and every entry that leads to it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["make_folder", "sync"]


def sync(path: Path) -> None:
    """Force a file, or what a folder names, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder, and sync it with every entry that leads to it. Raises OSError.

    Also when it is there already: who made it may have died before it was synced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for each in (folder, *folder.absolute().parents):
        try:
            sync(each)
        except PermissionError:
            return  # where this user may not even look, nothing of it was made
        if each.is_mount():
            return
