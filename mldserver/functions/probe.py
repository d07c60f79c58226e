"""Loads a handler in a process of its own, which ends when it has reported what it found."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Final

from mldserver.base.clock import SystemClock
from mldserver.base.threads import run_in_daemon_thread
from mldserver.config.settings import Settings
from mldserver.errors import OperatorError
from mldserver.functions.package import is_package, read_package
from mldserver.handler.spec import HandlerSpec
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.versions.archive import archive
from mldserver.versions.code import Code, unpack
from mldserver.workers.standby import StandbyWorkers
from mldserver.workers.wire import StartWorker

_BYTES: Final = 1 << 20
_WHERE: Final = (
    "Name the folder from which the handler's module is imported, or a zip archive, a wheel or a package that has the module, on "
    "the server's host."
)


async def probe(settings: Settings, code: Code | None = None, directory: str | None = None) -> HandlerSpec:
    """Load the settings' handler in a fresh process and return its spec, as a server's first worker would.

    ``code``: the modules to load. Without, the process searches ``directory`` first, and then the Python path. Raises
    HandlerError if the handler cannot be loaded.
    """
    start = StartWorker(
        pipeline=settings.pipeline,
        handler=settings.handler,
        python_path=[path for path in sys.path if path],
        directory=str(Path.cwd()),
        policy=FailurePolicy(),
        concurrency=settings.concurrency,
        deadline_seconds=None,
        arena_bytes=_BYTES,
        state_bytes=_BYTES,
        settings=dict(settings.handler_settings),
        log_level=30,
    )
    async with StandbyWorkers(start, clock=SystemClock()).start_afresh(1, code, directory) as (spec, _):
        return spec


async def load_from(settings: Settings, path: Path) -> HandlerSpec:
    """Load the settings' handler in a fresh process from a folder, an archive, a wheel or a package, and return its spec.

    Raises HandlerError if the code cannot be loaded, OperatorError if the handler is not in it.
    """
    module = settings.handler.partition(":")[0]
    root, code = await run_in_daemon_thread(partial(_read, path), name="mldserver-code")
    spec = await probe(settings, code, root) if code is None or module in code else None
    file = "" if spec is None else spec.code.get(module, ("an installed package", b""))[0]
    if spec is None or not file.startswith(f"{root}/"):
        raise OperatorError(
            f"{path} does not have the module {module}{f': it comes from {file}' if file else ''}.",
            advice=_WHERE,
        )
    return spec


def _read(path: Path) -> tuple[str, Code | None]:
    """Return the absolute path, and the modules of the archive there; None for a folder. Blocking. Raises OperatorError."""
    root = str(path.resolve())
    if path.is_dir():
        return root, None
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OperatorError(f"The code {path} cannot be read: {error.strerror}.", advice=_WHERE) from error
    data = archive(read_package(data, f"{path}").code) if is_package(data) else data
    return root, unpack(data, root)
