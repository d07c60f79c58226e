"""Which commit of the program this is. It imports nothing of the package: the build runs it too."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

COMMIT_FILE: Final = "commit.txt"
"""Written into wheels and source archives when they are built out of a clone (``build_hooks.py``)."""


def commit_of(package: Path) -> str | None:
    """Return the commit of a package's folder: of the clone that it lies in, or of the one it was built out of.

    It ends in ``-dirty`` where files were changed. None: nobody knows.
    """
    if not (package.parent / ".git").exists():
        file = package / COMMIT_FILE
        return file.read_text("ascii").strip() if file.exists() else None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=package.parent, capture_output=True, text=True, check=True)  # noqa: S603  # no word of it comes from outside
    except (OSError, subprocess.CalledProcessError):  # no git here, or not for this user
        return None
    return done.stdout.strip()
