"""What commands that read a ledger share: finding it, and opening it while servers run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path  # cyclopts reads the annotations
from typing import Final

from cyclopts import Group, Parameter

from mldserver.base.clock import SystemClock
from mldserver.cli import ReaderGone, working_directory
from mldserver.config.locations import SqlitePlace
from mldserver.config.resolve import ledger_file, resolve, resolve_functions
from mldserver.config.settings import Settings
from mldserver.errors import ConfigError, LedgerError, OperatorError
from mldserver.ledger.contract import LedgerState
from mldserver.ledger.operations import Ledger
from mldserver.ledger.sqlite_file import pipeline_of


@Parameter(name="*", group=Group("Where the ledger is"))
@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """Names a ledger, in the words of the server's settings; these count too, from variables and settings file."""

    out: str | None = None
    """Folder of output, segments and ledger: a path or a URI. [default: as for `mldserver serve`]"""
    ledger: str | None = None
    """`sqlite`, `sqlite:PATH`, or `dynamodb://TABLE?region=REGION`. [default: as for `mldserver serve`]"""
    pipeline: str | None = None
    """The pipeline's name. [default: what the ledger in the folder says; else as for `mldserver serve`]"""
    function: str | None = None
    """The function, of a server with several. [default: the only one]"""
    config: Path | None = None
    """Settings file. [default: mldserver.toml in the working directory, if it is there]"""

    def resolved(self, **more: object) -> Settings:
        """Return the settings that these words, ``more`` (raw, by name) and the server's own settings give.

        Raises ConfigError if the server has several functions and these words name none.
        """
        return resolve(
            {"out": self.out, "ledger": self.ledger, "pipeline": self.pipeline, **more},
            environ=os.environ,
            folder=working_directory(),
            config=self.config,
            handler_required=False,
            function=self.function,
        )

    def all_resolved(self, **more: object) -> tuple[Settings, ...]:
        """Return ``resolved`` for the function that these words name; if they name none, for every function of the server."""
        if any((self.out, self.ledger, self.pipeline, self.function)):
            return (self.resolved(**more),)
        folder = working_directory()
        return resolve_functions(
            more, environ=os.environ, folder=folder, config=self.config, handler_required=False
        )


FROM_SETTINGS: Final = LedgerOptions()
"""As for ``mldserver serve``."""


def ledger_settings(where: LedgerOptions) -> Settings:
    """Return the server's settings with the command's options. The pipeline's name comes from the ledger if that is a file.

    Raises ConfigError if the ledger is a DynamoDB table and no pipeline is named.
    """
    settings = where.resolved()
    if isinstance(settings.ledger, SqlitePlace):
        pipeline = where.function or where.pipeline or pipeline_of(ledger_file(settings)) or settings.pipeline
        return dataclasses.replace(settings, pipeline=pipeline)
    if not {"pipeline", "handler"} & settings.origins.keys():
        raise ConfigError(
            "A table may hold the ledgers of several pipelines.", advice="Name the one with --pipeline."
        )
    return settings


@contextlib.contextmanager
def as_operator_errors() -> Iterator[None]:
    """Raise OperatorError for a ledger or disk that fails: the operator named something that cannot be read."""
    try:
        yield
    except LedgerError as error:
        raise OperatorError(error.what, did=error.did, advice=error.advice, **error.where) from error
    except ReaderGone:
        raise
    except OSError as error:
        raise OperatorError(f"{error.filename or 'A file'}: {error.strerror or error}.") from error


@contextlib.contextmanager
def open_ledger(settings: Settings) -> Iterator[tuple[Ledger, LedgerState, asyncio.Runner]]:
    """Yield the ledger, what it holds now, and an ``asyncio.Runner`` with which a command makes the ledger's async calls.

    Servers are not affected: nothing is registered or locked. Raises OperatorError if the ledger does not exist, is damaged,
    has a newer format, belongs to another pipeline, or cannot be reached.
    """
    from mldserver.assembly import ledger_of  # noqa: PLC0415  # the whole server: `--help` must not wait for it

    with as_operator_errors(), asyncio.Runner() as runner:
        ledger = ledger_of(settings, server_id=f"tool:{os.getpid()}", clock=SystemClock())
        try:
            yield ledger, runner.run(ledger.peek()), runner
        finally:
            runner.run(ledger.close())


def read_ledger(where: LedgerOptions) -> LedgerState:
    """Return what the ledger holds. Raises OperatorError as ``open_ledger``."""
    with open_ledger(ledger_settings(where)) as (_, state, _):
        return state
