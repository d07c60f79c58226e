"""The clients' permissions at the admin endpoint, the limits for browsers, and the token with its file."""

from __future__ import annotations

import contextlib
import enum
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from mldserver.config.kinds import is_loopback
from mldserver.errors import OperatorError


class Listener(enum.Enum):
    """Where the endpoint listens."""

    UNIX = "a Unix socket"
    LOOPBACK = "a loopback address"
    REMOTE = "an address that others reach"


class Credential(enum.Enum):
    """What a client has shown. Of several the best counts, but a wrong one is never made good by another."""

    NONE = "nothing"
    OWNER = "the server's user, or root"
    STRANGER = "another user of this host"
    TOKEN = "the token"  # noqa: S105  # words for people
    WRONG_TOKEN = "a wrong token"  # noqa: S105  # as above
    CERTIFICATE = "a client certificate"
    WRONG_NAME = "a client certificate of another name"


class Act(enum.IntEnum):
    """A request; a client that may make one may make those before it."""

    LIVE = 1
    """Whether the server lives, or is ready: one bit, for probes."""
    READ = 2
    STEER = 3


_MOST: Final = {
    (Listener.UNIX, Credential.OWNER): Act.STEER,
    (Listener.LOOPBACK, Credential.NONE): Act.READ,
    (Listener.LOOPBACK, Credential.TOKEN): Act.STEER,
    (Listener.LOOPBACK, Credential.WRONG_TOKEN): Act.LIVE,
    (Listener.LOOPBACK, Credential.CERTIFICATE): Act.STEER,
    (Listener.LOOPBACK, Credential.WRONG_NAME): Act.LIVE,
    (Listener.REMOTE, Credential.CERTIFICATE): Act.STEER,
}
"""The most that a client may do; nothing where it is not in the table."""

_INSECURE: Final = {
    (Listener.REMOTE, Credential.NONE): Act.READ,
    (Listener.REMOTE, Credential.TOKEN): Act.READ,  # an eavesdropper could use it later
    (Listener.REMOTE, Credential.WRONG_TOKEN): Act.LIVE,
}
"""Under ``insecure = true`` also these."""

_LACKS: Final = {
    Listener.UNIX: "Only the server's own user and root may use its Unix socket.",
    Listener.LOOPBACK: "This needs the token of the server's token file, as `Authorization: Bearer TOKEN`, "
    "or a client certificate that the server accepts.",
    Listener.REMOTE: "This needs a client certificate that the server accepts.",
}


def refusal(
    listener: Listener, credential: Credential, act: Act, *, guarded: bool = False, insecure: bool = False
) -> str | None:
    """Return why a client may not do something, in a sentence; None when it may.

    ``guarded``: without the token a client may not even read. ``insecure``: the setting.
    """
    most = (_MOST | _INSECURE if insecure else _MOST).get((listener, credential), 0)
    if guarded and credential is Credential.NONE:
        most = min(most, Act.LIVE)
    return None if act <= most else _LACKS[listener]


def browser_refusal(
    listener: Listener, path: str, *, method: str, host: str, origin: str, site: str
) -> str | None:
    """Return why a request may be another site's, in a sentence; None when it is none.

    The rest are headers: ``Host``, ``Origin``, ``Sec-Fetch-Site``; empty where they did not come. Only browsers send
    the last two; a page of another site can neither leave them out nor forge them. A link to the page may come from anywhere.
    """
    name, colon, port = host.rpartition(":")
    bare = (name if colon and port.isdigit() else host).strip("[]")
    if listener is Listener.LOOPBACK and not is_loopback(bare):
        return "On loopback the Host header must name this host: localhost, 127.0.0.1 or [::1]."
    reads = method in {"GET", "HEAD"}
    elsewhere = site not in {"", "none", "same-origin"} or (origin and origin.partition("://")[2] != host)
    if elsewhere and not (reads and path == "/"):
        return "Pages of other sites may not use this endpoint."
    return None


# The token.


class AccessToken(NamedTuple):
    """What a token's file holds, and whose file it is."""

    word: str
    owner: int
    """The user's id."""


def make_token(path: Path) -> None:
    """Make the server's own token file, unless a valid one exists: random, and for this user alone. Blocking.

    Replace a token of this user's that others could read: they may know it. Raises OperatorError when the file cannot be
    made or be kept from others, and for another user's file.
    """
    try:
        read_token(path)
    except OperatorError:
        with contextlib.suppress(OSError):  # there is none, or making one will say why
            if path.lstat().st_uid != os.geteuid():
                raise
    else:
        return
    # Whole or not at all. Of two servers the later rename counts, for both: each reads the file when a token is shown.
    own = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, own = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123  # a descriptor has no path
            file.write(secrets.token_urlsafe(32) + "\n")
        Path(own).replace(path)
    except OSError as error:
        if own:
            Path(own).unlink(missing_ok=True)
        raise OperatorError(
            f"The token file {path} cannot be made: {error.strerror or error}.",
            advice="Name another with --admin-token-file.",
        ) from error
    read_token(path)


def read_token(path: Path) -> str:
    """Return the token for a server. Blocking. Raises OperatorError as ``find_token``, and for another user's file."""
    token = find_token(path)
    if token.owner not in {os.geteuid(), 0}:
        raise OperatorError(
            f"The token file {path} belongs to user {token.owner}, not to the server's user or root.",
            advice="Remove it, or name another with --admin-token-file.",
        )
    return token.word


def find_token(path: Path) -> AccessToken:
    """Return what a token file holds. Blocking. Raises OperatorError when it cannot be read, is empty, or no secret."""
    try:
        with path.open(encoding="ascii") as file:
            about = os.fstat(file.fileno())
            token = file.read(4096).strip()
    except (OSError, UnicodeError) as error:
        raise OperatorError(
            f"The token file {path} cannot be read: {getattr(error, 'strerror', None) or error}.",
            advice="Check its path and rights, or name another with --admin-token-file.",
        ) from error
    if stat.S_IMODE(about.st_mode) & 0o077:
        raise OperatorError(
            f"The token file {path} may be read by others (mode {stat.S_IMODE(about.st_mode):o}).",
            advice=f"Run `chmod 600 {path}`; if another user may have read it, write a new token.",
        )
    if not token:
        raise OperatorError(f"The token file {path} is empty.", advice="Write a random word into it.")
    return AccessToken(token, about.st_uid)


def same_token(shown: str, token: str) -> bool:
    """Whether a client has shown the token. The time does not reveal how much matches."""
    return hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), token.encode())
