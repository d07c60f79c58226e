"""Who may do what at the admin endpoint: one table, and what browsers are kept from. Last, the token and its file."""

from __future__ import annotations

import enum
import hmac
import ipaddress
import os
import secrets
import stat
from typing import TYPE_CHECKING, Final

from mldserver.errors import NotThereYet, OperatorError

if TYPE_CHECKING:
    from pathlib import Path


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
    """What is asked for; who may do one may do those before it."""

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
    (Listener.REMOTE, Credential.TOKEN): Act.READ,  # whoever listens on the way could use it after
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
    if listener is Listener.LOOPBACK and not is_loopback(_bare(host)):
        return "On loopback the Host header must name this host: localhost, 127.0.0.1 or [::1]."
    reads = method in {"GET", "HEAD"}
    elsewhere = site not in {"", "none", "same-origin"} or (origin and origin.partition("://")[2] != host)
    if elsewhere and not (reads and path == "/"):
        return "Pages of other sites may not use this endpoint."
    return None


def _bare(host: str) -> str:
    """Return the host of ``host:port``."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).strip("[]")


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this host's own, and nobody else's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


# The token.


def make_token(path: Path) -> None:
    """Make the token's file, unless there is one: random, and for this user alone. Blocking.

    Raises OperatorError when it cannot be made, or others may read the one that is there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, and whichever of two servers is first: the other takes what it finds.
        own = path.with_name(f".{path.name}.{os.getpid()}")
        with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:  # noqa: PTH123  # the mode from the first moment on
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(own, path)
        except FileExistsError:
            pass
        finally:
            own.unlink()
    except OSError as error:
        raise NotThereYet(
            f"The token file {path} cannot be made: {error.strerror or error}.",
            advice="Name another with --admin-token-file, or set admin = none.",
        ) from error
    read_token(path)


def read_token(path: Path) -> str:
    """Return the token. Blocking. Raises OperatorError when it cannot be read, is empty, or is not this user's secret."""
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
            advice=f"Run `chmod 600 {path}`; if somebody may have read it, write a new token.",
        )
    if not token:
        raise OperatorError(f"The token file {path} is empty.", advice="Write a random word into it.")
    return token


def same_token(shown: str, token: str) -> bool:
    """Whether a client has shown the token; how long that takes tells nothing of it."""
    return hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), token.encode())
