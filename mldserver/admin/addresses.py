"""Where commands find a running server: its Unix socket for steering, and the file that names this socket."""

from __future__ import annotations

from pathlib import Path

from mldserver.config.kinds import Address
from mldserver.config.kinds import address as parse_address
from mldserver.config.resolve import home
from mldserver.config.settings import Settings


def steering_socket(settings: Settings, port: int) -> Path:
    """Return the path of the steering socket that a server creates if its endpoint listens on a TCP port of this host."""
    return home(settings) / "_mldserver" / f"admin-{port}.sock"


def address_file(settings: Settings) -> Path:
    """Return the file in which a server stores its socket's address, for commands that get only ``--out``."""
    return home(settings) / "_mldserver" / "admin.address"


def stored_address(settings: Settings) -> Address | None:
    """Return the address that a server of this output folder has stored; None without a file. Blocking."""
    try:
        return parse_address.parse(address_file(settings).read_text("utf-8").strip())
    except (OSError, ValueError):
        return None
