"""Listeners for the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.sources.house import serving

if TYPE_CHECKING:
    from tests.sources.house import Build, House


@pytest.fixture
async def build() -> AsyncIterator[Build]:
    """Return a function that starts a listener; it is stopped at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*address: Any, **limits: Any) -> House:
            return await stack.enter_async_context(serving(*address, **limits))

        yield start


@pytest.fixture
async def house(build: Build) -> House:
    return await build()
