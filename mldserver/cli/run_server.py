"""The life of the process that ``mldserver serve`` is: its log, its event loop, and an end that nothing can hold up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import uvloop

from mldserver.cli.stdio import complain
from mldserver.errors import EXIT_FORCED
from mldserver.observe.logging import logging_to
from mldserver.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from mldserver.config.settings import Settings

log = structlog.get_logger("mldserver")

_LAST_SECONDS: Final = 5.0
"""How long a forced server may take to end its parts, until the process ends without it."""


def live(settings: Settings, *, drain: bool = False) -> int:
    """Run a server until it stops; return its exit code. Once it was forced, the process ends in here.

    ``drain``: it does nothing but drain the pipeline. Raises OperatorError when the log file cannot be opened.
    """
    with contextlib.ExitStack() as logs:
        logs.enter_context(logging_to(settings))
        gc.freeze()  # what was imported stays: the collector would stop the event loop to look through it
        code = uvloop.run(_life(Server(settings, drain=drain), partial(_leave, settings, logs)))
    _tell(settings, code)
    return code


async def _life(server: Server, leave: Callable[[], None]) -> int:
    """Run the server and return its exit code; when it was forced, end the process with ``leave`` instead.

    A call that hangs in a thread would hold up the end of the loop and of the interpreter, whether its caller was
    cancelled or not, and user code may refuse to be cancelled: only the end of the process is sure. What the server has
    started sees its sockets end then, and ends too.
    """
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_last_resort(server, leave), name="last resort")
        code = await server.run()
        watching.cancel()
    if code == EXIT_FORCED:
        leave()
    return code


async def _last_resort(server: Server, leave: Callable[[], None]) -> None:
    await server.forced()
    await asyncio.sleep(_LAST_SECONDS)
    log.critical(
        "server.failed",
        exit_code=EXIT_FORCED,
        what=f"The server did not end within {_LAST_SECONDS:g} seconds of being forced.",
        did="The process ended without waiting for it; what was not durable is delivered again.",
    )
    leave()


def _leave(settings: Settings, logs: contextlib.ExitStack) -> None:
    """End the process without waiting for anything but the log."""
    try:
        logs.close()
        _tell(settings, EXIT_FORCED)
    finally:
        os._exit(EXIT_FORCED)


def _tell(settings: Settings, code: int) -> None:
    if code and settings.log_file is not None:  # the terminal has seen nothing of it
        complain(f"stopped with exit code {code}; {settings.log_file} says why.")
