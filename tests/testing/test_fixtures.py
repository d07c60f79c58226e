"""The plugin is loaded in every user's test run: it must be light and quiet."""

import subprocess
import sys

import pytest

import mldserver.testing
from mldserver.testing import FakeStream, LocalEngine, VirtualClock


def test_the_fixtures_are_there(
    virtual_clock: VirtualClock, fake_stream: FakeStream, local_engine: LocalEngine
) -> None:
    assert virtual_clock.sleepers == 0
    assert len(fake_stream.open_shards) == 2
    assert local_engine.jobs == []


def test_the_plugin_loads_nothing_heavy() -> None:
    heavy = ("pyarrow", "pyspark", "pandas", "aioboto3", "asyncio", "structlog")
    # pytest itself is imported first: what it loads is not the plugin's.
    code = (
        "import sys, pytest; before = set(sys.modules); import mldserver.testing.fixtures; "
        f"print([name for name in {heavy} if name in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", mldserver.testing.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(mldserver.testing, name).__name__ == name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FakeMdl'"):
        getattr(mldserver.testing, "FakeMdl")  # noqa: B009  # a misspelling, as users make it
