"""Through how many files a batch goes: whoever reads its way reads these. The architecture page lists them."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from bench.hot.lines import SHAPES, initialize
from support.pages import DOCS
from support.serving import connect, quick, serving, until

import mldserver
from mldserver.sources.link import Link

HANDLER = """
from mldserver import batches

schema = "data BINARY"
windows = batches(max_rows=1, max_age="1 hour")


def process_record(record):
    return record.data,
"""
PACKAGE = f"{Path(mldserver.__file__).parent}/"

_ANSWER = "From the socket to the answer:"
_WINDOW = "From there to a published window:"
_OF_OTHERS = (
    *("base/kill_points.py", "testing/"),
    *(
        "admin/",
        "deadletters/",
        "status_document.py",
        "coordinator/sections.py",
        "sources/mld.py",
        "base/aws.py",
        "versions/swap.py",  # it looks each flush interval for another version of the code
        "jobs/engine.py",  # readiness asks whether a window takes too long
        "jobs/query_service.py",  # readiness asks whether a lookup is too old
        "stores.py",  # readiness asks whether the memory for keyed state is nearly full
    ),
)
"""Where tests end the process; this test's engine; and what the clock starts at the same time."""


class Trace:
    """Notes the files of the calls in all threads, and apart from them those of the calls that received bytes lead to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: set[str] = set()
        self.to_answer: set[str] = set()
        self.on = self.receiving = False
        updated = Link.buffer_updated

        def noted(link: Link, count: int) -> None:
            self.receiving = True
            updated(link, count)
            self.receiving = False

        monkeypatch.setattr(Link, "buffer_updated", noted)
        threading.setprofile(self.note)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if self.on and event == "call" and file.startswith(PACKAGE):
            name = file.removeprefix(PACKAGE)
            if not name.startswith(_OF_OTHERS):
                self.files.add(name)
                if self.receiving and threading.current_thread() is threading.main_thread():
                    self.to_answer.add(name)


def listed(heading: str) -> set[str]:
    """Return the files that the architecture page lists behind these words."""
    page = (DOCS / "architecture.md").read_text("utf-8")
    files = re.findall(r"`([\w/]+\.py)`", page.partition(heading)[2].partition("\n\n")[0])
    return {file.removeprefix("mldserver/") for file in files}


async def test_the_way_of_a_batch_leads_through_few_files_which_the_page_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    (tmp_path / "handles.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    trace, line = Trace(monkeypatch), SHAPES[0].line()
    try:
        async with serving(quick(tmp_path / "out", "handles")) as server:
            reader, writer = await connect(await server.listening())
            writer.write(initialize("shard"))
            await reader.readline()
            for number in range(2):  # by the second, what happens once has happened
                trace.on = number == 1
                sys.setprofile(trace.note if trace.on else None)
                writer.write(SHAPES[0].numbered(line, number))
                while b"checkpoint" in (asked := await reader.readline()):
                    writer.write(asked.replace(b"}", b',"error":null}'))
                await until(lambda number=number: _windows(logged) > number)
            sys.setprofile(None)
            writer.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    answer, window = listed(_ANSWER), listed(_WINDOW)
    assert trace.to_answer == answer
    assert trace.files <= answer | window
    assert len(answer) <= 24
    assert len(answer | window) <= 52


def _windows(logged: list[dict[str, Any]]) -> int:
    return sum(entry["event"] == "window.done" for entry in logged)
