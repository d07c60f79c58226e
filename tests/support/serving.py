"""A whole server in this process, with a small engine in Spark's place."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from mldserver.admin.gather import EventTally
from mldserver.base.clock import Clock
from mldserver.config.kinds import TcpAddress
from mldserver.config.locations import OutPlace
from mldserver.config.settings import Settings, specs
from mldserver.jobs.engine import Engine
from mldserver.server import Server
from mldserver.sources.listing import MakeKinesis
from mldserver.sources.source import MakeSource
from mldserver.testing import FakeStream, LocalEngine
from mldserver.testing.fake_kinesis import FakeKinesis

KEEP_EVERYTHING = '''
"""Keeps every record as a row."""
from mldserver import batches

schema = "data BINARY, key STRING"
windows = batches(max_rows=1000, max_age="1 hour")


def process_record(record):
    return record.data, record.partition_key
'''


CONSTANTS: Final[dict[str, Any]] = {"settle_time_ms": 200, "retry_seconds": (0.001, 0.01)}
"""Constants of the parts that tests shorten (``Settings.constants``)."""
ALL_CONSTANTS: Final = CONSTANTS.keys() | {"list_seconds", "poll_seconds", "early_ms"}


def quick(out: OutPlace, handler: str, **changes: Any) -> Settings:
    """Return settings under which nothing waits longer than a test needs. ``changes``: settings, and names of ``CONSTANTS``.

    Silence closes no window, unless a test asks for it: what a slow machine keeps waiting is not silent.
    """
    values: dict[str, Any] = {
        "listen": TcpAddress("127.0.0.1", 0),
        "flush_interval": 0.05,
        "idle_time": 600.0,
        "quiet_time": 600.0,
        "recompute_delay": 0.05,
        "retry_base": 0.001,
        "grace": 30.0,
        "workers": None,
        "log_error_messages": True,
    }
    constants = {**CONSTANTS, **{name: changes.pop(name) for name in ALL_CONSTANTS & changes.keys()}}
    table, values = specs(), values | changes
    given = {
        table[name].field: table[name].kind.parse(value) if isinstance(value, float | str) else value
        for name, value in values.items()
    }
    return Settings(handler=handler, out=out, constants=constants, **given)


def no_aws(patch: pytest.MonkeyPatch, home: Path) -> None:
    """Take away whatever AWS's clients would find here."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("HOME", str(home))


@contextlib.asynccontextmanager
async def serving(
    settings: Settings,
    *,
    engine: Engine | None = None,
    kinesis: MakeKinesis | None = None,
    stream: FakeStream | None = None,
    source: MakeSource | None = None,
    exit_code: int = 0,
    tally: EventTally | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[Server]:
    """Run a server while the block runs; it must then stop as it should, cleanly unless told otherwise.

    It lists the shards of ``stream``: no window closes before one of them that is slow to connect.
    """
    if stream is not None:
        settings, kinesis = replace(settings, stream="flights"), FakeKinesis(stream).make
    engine = engine or LocalEngine()
    server = Server(settings, engine=engine, kinesis=kinesis, source=source, seed=1, tally=tally, clock=clock)
    async with asyncio.TaskGroup() as group:
        life = group.create_task(server.run())
        listening = group.create_task(server.listening())
        await asyncio.wait({life, listening}, return_when=asyncio.FIRST_COMPLETED)
        assert listening.done(), f"the server did not start: exit code {life.result()}"
        yield server
        server.stop("the test is over")
    assert life.result() == exit_code


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to what ``Server.listening`` returned."""
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"), limit=1 << 24)
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port), limit=1 << 24)


async def until(condition: Callable[[], bool]) -> None:
    """Return once a condition holds; the caller bounds the time."""
    while not condition():  # noqa: ASYNC110  # what a real server does has no event for a test to wait on
        await asyncio.sleep(0.01)
