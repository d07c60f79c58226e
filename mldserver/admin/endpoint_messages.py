"""What the server and the endpoint's process say to each other (``children/channel.py`` carries it).

server → endpoint    Start with the listening sockets: the endpoint's and, if configured, the one for metrics alone;
                     then Document once a second, Answered once for each Steer, and Renew when certificates must be
                     read again; the end of the socket ends the process
endpoint → server    Taken once for each Document, and Steer at any time
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from mldserver.base.tls import ServerTLS
from mldserver.children.channel import Message


class Start(Message, frozen=True):
    """How to serve the socket that comes along."""

    pipeline: str
    token_file: str
    """Read again for each token that is shown; it may not exist yet."""
    guarded: bool
    """Whether reading needs the token too."""
    insecure: bool
    """Whether remote clients may read without a client certificate."""
    certificate: str | None
    """None: it speaks plain HTTP."""
    key: str | None
    client_ca: str | None
    names: tuple[str, ...]
    """Globs of names that client certificates may have; none: any."""

    def tls(self) -> ServerTLS | None:
        """Return how it speaks TLS, if it does. Blocking. Raises OperatorError for files that cannot be used."""
        if self.certificate is None:
            return None
        key, client_ca = (None if file is None else Path(file) for file in (self.key, self.client_ca))
        required = client_ca is not None and not self.insecure
        return ServerTLS(Path(self.certificate), key, client_ca, names=self.names, required=required)


class Document(Message, frozen=True):
    """The server's status. Nothing else says that its event loop turns."""

    status: bytes
    """As JSON; empty: there is none newer."""


class Taken(Message, frozen=True):
    """A document has been taken: the next may come."""


class Renew(Message, frozen=True):
    """Read the certificates again."""


class Steer(Message, frozen=True):
    """A permitted caller's order to the server."""

    number: int
    act: str
    argument: str
    who: str
    """The caller, in words: a peer's credential, a token, a client certificate's name."""


class Answered(Message, frozen=True):
    """What became of a Steer."""

    number: int
    done: bool
    text: str
    """A sentence for the caller."""


class LogLine(Message, frozen=True):
    """An event for the server's log."""

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, Any]


ToEndpoint = Start | Document | Answered | Renew
FromEndpoint = Taken | Steer | LogLine
