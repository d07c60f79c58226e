"""A whole server, as ``mldserver serve`` runs it, with a small engine in Spark's place and its log in a file."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import uvloop

from mldserver.config.kinds import UnixAddress
from mldserver.config.settings import Settings
from mldserver.observe.logging import logging_to
from mldserver.server import Server
from mldserver.testing import LocalEngine

__all__: list[str] = []


def main(workers: str, handler: str, path: str) -> int:
    """Run it until it is told to stop."""
    folder = Path(path).parent
    settings = Settings(
        handler=f"bench.hot.handlers.{handler}",
        out=folder / "out",
        listen=UnixAddress(Path(path)),
        log_file=folder / "log",
        log_format="json",
        connection_limit=4096,
        workers=None if workers == "inline" else int(workers),
    )
    gc.freeze()  # as `mldserver serve` does
    with logging_to(settings):
        return uvloop.run(Server(settings, engine=LocalEngine()).run())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
