from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from coordinator.pipeline import Faults, FaultyStore

from mldserver.ledger.contract import Segment
from mldserver.output.store import Garbage

pytestmark = pytest.mark.quick


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def doomed(tmp_path: Path, faults: Faults) -> Garbage:
    for name in ("w1/a", "w1/b", "w2/c", "w2/stays"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    doomed = Garbage(FaultyStore(str(tmp_path), faults))
    doomed.add(Segment(name, "w", 1, 5) for name in ("w1/a", "w1/b", "w2/c"))
    return doomed


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


async def test_files_are_deleted_and_folders_that_are_empty_then(doomed: Garbage, tmp_path: Path) -> None:
    assert doomed.bytes == 15
    assert await doomed.delete() == 15
    assert names(tmp_path) == ["stays", "w2"]
    assert (doomed.bytes, await doomed.delete()) == (0, 0)


async def test_what_two_threads_delete_at_once_is_counted_once(doomed: Garbage, tmp_path: Path) -> None:
    assert sum(await asyncio.gather(doomed.delete(), doomed.delete())) == 15
    assert (doomed.bytes, names(tmp_path)) == (0, ["stays", "w2"])


async def test_what_cannot_be_deleted_counts_until_it_can(
    doomed: Garbage, faults: Faults, tmp_path: Path
) -> None:
    def hook(name: str, after: bool) -> None:
        if faults.calls.count(name) > 1 and not after:
            raise OSError(5, "Input/output error")

    faults.hook = hook
    with pytest.raises(OSError, match="Input/output"):
        await doomed.delete()
    assert doomed.bytes == 10
    faults.hook = None
    assert await doomed.delete() == 10
    assert names(tmp_path) == ["stays", "w2"]


async def test_a_file_that_was_begun_is_deleted_too_if_it_is_there(doomed: Garbage, tmp_path: Path) -> None:
    doomed.add_unfinished("w2/stays")
    doomed.add_unfinished("w3/never-there")
    doomed.add_unfinished("w1/a")
    assert doomed.bytes == 15, "what is known better stays"
    await doomed.delete()
    assert names(tmp_path) == []
