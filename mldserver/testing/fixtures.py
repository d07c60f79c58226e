"""The pytest plugin: fixtures for tests of handlers and pipelines.

It is loaded in every test run where mldserver is installed, so it registers nothing but these fixtures, and what they
need is imported when a test asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from mldserver import testing


@pytest.fixture
def virtual_clock() -> testing.VirtualClock:
    """A clock that only moves when the test says ``await virtual_clock.advance(seconds)``."""
    return testing.VirtualClock()


@pytest.fixture
def fake_stream() -> testing.FakeStream:
    """A seeded in-memory Kinesis stream with two shards; put records, split, merge, end."""
    return testing.FakeStream(shards=2, seed=1)


@pytest.fixture
def local_engine() -> testing.LocalEngine:
    """An engine without Spark: windows come out as their rows went in."""
    return testing.LocalEngine()


@pytest.fixture
def run_handler(virtual_clock: testing.VirtualClock) -> Callable[..., testing.HandlerRun]:
    """Returns a ``HandlerRun`` of a handler under ``virtual_clock``, by its dotted path."""
    return partial(testing.HandlerRun, clock=virtual_clock)
