"""The pytest plugin: fixtures for tests of handlers and pipelines.

It is loaded in every test run where mldserver is installed, so it imports next to nothing and registers nothing but
these fixtures; each imports what it needs when a test asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mldserver.testing.fake_stream import FakeStream
    from mldserver.testing.stand_ins import LocalEngine, VirtualClock


@pytest.fixture
def virtual_clock() -> VirtualClock:
    """A clock that only moves when the test says ``await virtual_clock.advance(seconds)``."""
    from mldserver.testing.stand_ins import VirtualClock  # noqa: PLC0415  # see the module's docstring

    return VirtualClock()


@pytest.fixture
def fake_stream() -> FakeStream:
    """A seeded in-memory Kinesis stream with two shards; put records, split, merge, end."""
    from mldserver.testing.fake_stream import FakeStream  # noqa: PLC0415  # see the module's docstring

    return FakeStream(shards=2, seed=1)


@pytest.fixture
def local_engine() -> LocalEngine:
    """An engine without Spark: windows come out as their rows went in."""
    from mldserver.testing.stand_ins import LocalEngine  # noqa: PLC0415  # see the module's docstring

    return LocalEngine()
