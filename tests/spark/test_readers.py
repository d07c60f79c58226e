"""Spark reads the output folder as its users do, while a server works in it: published windows, and nothing else."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from support.serving import quick, serving, until

from mldserver.config.kinds import UnixAddress
from mldserver.config.settings import Settings
from mldserver.spark.session import DriverSession
from mldserver.testing import FakeMLD, FakeStream, Habits

pytestmark = pytest.mark.slow

HANDLER: Final = '''
"""One row for each record; ten-second windows over the record's own time."""
from mldserver import tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP NOT NULL"
windows = tumbling("10 seconds", on="at")


def process_record(record):
    event = record.json()
    return event["id"], event["at"]
'''
FIRST: Final = range(5)
SECOND: Final = range(5, 10)
LATE: Final = range(20, 32)
"""Rows for the second window that come one at a time, each after the one before it was published."""

GONE: Final = ("FileNotFoundException", "NoSuchFileException", "FILE_NOT_EXIST")
"""How Spark says that a file is gone, by where it was with it: at its status, its opening, or its reading."""


class Shop:
    """An output folder, the stream behind it, and how a reader finds it."""

    def __init__(self, root: Path, address: Path, session: DriverSession) -> None:
        (root / "read_by_spark.py").write_text(HANDLER)
        self.out = root / "out"
        self.stream = FakeStream(1, seed=1, start_ms=1_800_000_000_000)
        self._session = session
        self._address = UnixAddress(address)
        self.daemon = FakeMLD(
            self.stream,
            f"unix:{address}",
            habits=Habits(seed=1, idle_seconds=0.01),
            supervised=True,
            backoff_seconds=0.01,
        )

    def settings(self, late: str) -> Settings:
        return quick(self.out, "read_by_spark", late=late, recompute_delay=0.02, listen=self._address)

    def put(self, second: int, *ids: int) -> None:
        for number in ids:
            event = {"id": number, "at": f"2027-01-15T08:00:{second:02d}Z"}
            self.stream.put(json.dumps(event).encode(), f"key-{number}")

    def files(self, window: str) -> set[str]:
        return {path.name for path in (self.out / f"window=2027-01-15T{window}").glob("*.parquet")}

    async def replaced(self, window: str, before: set[str]) -> None:
        await until(lambda: not self.files(window) <= before)

    def private(self, folder: str) -> list[Path]:
        return list((self.out / folder).rglob("*.parquet"))

    def read(self) -> Counter[int] | None:
        """Return the ids that a query finds. None: a file that it had listed was gone, so it is to list again."""
        try:
            rows = self._session.spark.read.parquet(str(self.out)).select("id", "window").collect()
        except (Py4JJavaError, PySparkException) as error:
            if not any(told in str(error) for told in GONE):
                raise
            return None
        return Counter(row["id"] for row in rows)


@pytest.fixture
def shop(tmp_path: Path, session: DriverSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.syspath_prepend(str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="readers-") as sockets:
        yield Shop(tmp_path, Path(sockets) / "server", session)


async def test_spark_finds_published_windows_alone_and_each_revision_whole(shop: Shop) -> None:
    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        playing = group.create_task(shop.daemon.run())
        async with serving(shop.settings("separate")):
            shop.put(1, *FIRST)
            shop.put(11, *SECOND)
            await shop.replaced("08-00-00Z", set())
            shop.put(2, 10)
            await until(lambda: bool(shop.private("_late")))
            assert shop.private("_mldserver/segments"), "rows of the second window, which is open"
            assert await asyncio.to_thread(shop.read) == Counter(FIRST)

        async with serving(shop.settings("recompute")):
            shop.put(21, 11)
            await shop.replaced("08-00-10Z", set())
            both = Counter([*FIRST, *SECOND])
            assert await asyncio.to_thread(shop.read) == both
            before = shop.files("08-00-10Z")
            shop.put(12, 12)
            await shop.replaced("08-00-10Z", before)
            both[12] += 1
            assert await asyncio.to_thread(shop.read) == both

            over = threading.Event()
            reading = group.create_task(asyncio.to_thread(read_until, shop, over))
            try:
                for number in LATE:
                    before |= shop.files("08-00-10Z")
                    shop.put(13, number)
                    await shop.replaced("08-00-10Z", before)
            finally:
                over.set()
            for rows in await reading:
                # Hadoop's local file system leaves out names that go between its listing of a folder and its look at
                # each: Spark then finds no file of the window that is exchanged at this moment. Never some of them.
                known = (
                    Counter(FIRST)
                    if rows == Counter(FIRST)
                    else both + Counter(LATE[: rows.total() - both.total()])
                )
                assert rows == known
            assert await asyncio.to_thread(shop.read) == both + Counter(LATE)
            assert shop.private("_mldserver/segments")
            assert shop.private("_late")
            shop.stream.end()
            await playing


def read_until(shop: Shop, over: threading.Event) -> list[Counter[int]]:
    """Read again and again, and at least once."""
    seen = [shop.read()]
    while not over.is_set():
        seen.append(shop.read())
    return [rows for rows in seen if rows is not None]
