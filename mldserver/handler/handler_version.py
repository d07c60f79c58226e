"""Which version of a handler ran: what it says of itself, or what its module's source hashes to."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mldserver.handler.loader import Loaded

__all__ = ["version_of"]

_DIGITS: Final = 12
"""Of the hash: enough to tell a handler's versions apart, short enough for a table."""


def version_of(loaded: Loaded) -> str:
    """Return the handler's ``version`` when it has one (text or a number), else a hash of its module's source.

    Empty when there is neither, as for a module that only exists compiled. What the module imports does not count.
    """
    given = getattr(loaded.target, "version", None)
    if isinstance(given, str | int | float) and not isinstance(given, bool) and str(given).strip():
        return str(given).strip()
    file = getattr(loaded.module, "__file__", None)
    try:
        source = Path(file or "").read_bytes()
    except OSError:
        return ""
    return f"sha256:{hashlib.sha256(source).hexdigest()[:_DIGITS]}"
