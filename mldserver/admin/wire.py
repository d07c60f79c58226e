"""What the server and the endpoint's process say to each other (``children/channel.py`` carries it).

server → endpoint    Start with the listening socket beside it; then Document once a second, Answered once for each
                     Ask, and Renew when certificates are to be read again; the end of the socket ends the process
endpoint → server    Taken once for each Document, and Ask at any time
"""

from __future__ import annotations

from mldserver.children.channel import Message


class Start(Message, frozen=True):
    """How to serve the socket that comes along."""

    pipeline: str
    token_file: str
    """Read anew for each token that is shown; there may be none yet."""
    guarded: bool
    """Whether reading needs the token too."""
    insecure: bool
    """Whether somebody outside may read without a client certificate."""
    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None
    names: tuple[str, ...] = ()
    """Globs of names that client certificates may have; none: any."""


class Document(Message, frozen=True):
    """The server's status. Nothing else says that its event loop turns."""

    status: bytes
    """As JSON; empty: there is none newer."""


class Taken(Message, frozen=True):
    """A document has been taken: the next may come."""


class Renew(Message, frozen=True):
    """Certificates are to be read again."""


class Ask(Message, frozen=True):
    """Somebody who may steers the server."""

    number: int
    act: str
    argument: str
    who: str
    """Who asks, in words: a peer's credential, a token, a client certificate's name."""


class Answered(Message, frozen=True):
    """What became of an Ask."""

    number: int
    done: bool
    text: str
    """A sentence for whoever asked."""


ToEndpoint = Start | Document | Answered | Renew
FromEndpoint = Taken | Ask
