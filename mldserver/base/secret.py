"""The shared secret that bridges show a listener: its file, and the gate that reads it. The gate is synchronous.

A bridge sends ``mldserver-secret WORD`` as a line of its own before the daemon's first line. A listener without a secret
drops that line, so that bridges may have the secret first.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from pathlib import Path
from typing import Final

from mldserver.errors import ConfigError

PREFIX: Final = b"mldserver-secret "
LONGEST: Final = 1024
"""Bytes of a secret's line."""
_WORD: Final = re.compile(rb"[\x21-\x7e]{16,900}")
"""Long enough that no one guesses it, and one line for the bridges."""


def read_secret(path: Path) -> bytes:
    """Return the secret in a file. Blocking. Raises ConfigError where there is none, or every user may read it."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            word = file.read(LONGEST).strip()
    except OSError as error:
        raise ConfigError(
            f"The file of the secret, {path}, cannot be read: {error.strerror}.",
            advice="Check listen_secret.",
        ) from error
    if mode & 0o027:  # a mounted secret of Kubernetes is readable by its group (fsGroup)
        raise ConfigError(
            f"The file of the secret, {path}, may be read by every user, or written by its group (mode {mode:o}).",
            advice=f"Run `chmod 640 {path}`, and write another secret if another user may have read it.",
        )
    if not _WORD.fullmatch(word):
        raise ConfigError(
            f"The file {path} does not hold a secret.",
            advice="Write one word of 16 to 900 printable ASCII characters, for example with `openssl rand -hex 32`.",
        )
    return word


class SecretGate:
    """Checks the line with the secret at the start of a connection."""

    def __init__(self, secret: bytes | None) -> None:
        """``secret``: what the peer must show; None: nothing."""
        self._secret = secret
        self._received = b""
        self.refused = ""
        """Why the peer is refused; empty while it is not."""

    def feed(self, data: bytes) -> bytes | None:
        """Take a connection's first bytes; return those after the secret's line. None: more are needed, or see ``refused``."""
        self._received += data
        if not self._received.startswith(PREFIX[: len(self._received)]):
            if self._secret is None:
                return self._received
            self.refused = "The peer did not show the secret of listen_secret."
        elif len(self._received) > len(PREFIX):
            line, end, rest = self._received.partition(b"\n")
            if end and (self._secret is None or hmac.compare_digest(line.removeprefix(PREFIX), self._secret)):
                return rest
            if end or len(line) > LONGEST:
                self.refused = "The peer showed another secret than that of listen_secret."
        return None
