"""Checking a handler in a process of its own: whatever it does at import, the report says what it was."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mldserver.handler.spec import Finding
from mldserver.runtime import trial as check_module
from mldserver.runtime.trial import TrialReport, _unfinished, check_handler, report

PATIENCE = 1.5
ADVICE = ": move what waits or takes long into `initialize`"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)

    def check(text: Any, name: Any = "", **options: Any) -> Any:
        (tmp_path / "mine.py").write_text(text)
        return check_handler("mine" + name, **options)

    return check


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Code that hangs; the check's time is over when it does, however long the interpreter took to come there."""
    told = tmp_path / "hanging"

    class Child(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout != PATIENCE:
                return super().wait(timeout)
            while not told.exists() and self.poll() is None:
                time.sleep(0.01)
            return super().wait(0)

    monkeypatch.setattr(check_module.subprocess, "Popen", Child)
    monkeypatch.setattr(check_module, "_DUMP_SECONDS", 600)
    return f"__import__('pathlib').Path({str(told)!r}).touch(), threading.Event().wait()"


def lines(found: Any) -> Any:
    return [str(finding) for finding in found.findings]


def test_a_good_handler_is_summed_up(check: Any) -> None:
    found = check("""
from mldserver import tumbling
print("hello")
class C:
    schema = "a INT NOT NULL, b STRING"
    windows = tumbling("1 hour")
    async def process_record(self, record): ...
    def on_window(self, rows, window): return rows
""", ":C")  # fmt: skip
    assert found.ok
    assert found.summary == (
        ("kind", "class, made once per shard"),
        ("hooks", "async process_record, on_window"),
        ("schema", "a INT NOT NULL"),
        ("", "b STRING"),
        ("windows", "tumbling, 1 h of arrival time"),
    )
    assert found.output == "hello\n"


def test_a_handler_of_changes_is_summed_up_and_tried(check: Any) -> None:
    insert = (
        b'{"eventName": "INSERT", "dynamodb": {"Keys": {"id": {"N": "7"}}, "NewImage": {"id": {"N": "7"}}}}'
    )
    text = "schema = 'id BIGINT'\ndef on_insert(change): return (change.new['id'],)\n"
    found = check(text, lines=[insert, insert.replace(b"INSERT", b"REMOVE"), b"{}"])
    assert found.summary[1:3] == (
        ("hooks", "on_insert"),
        (
            "changes",
            "records are changes of a DynamoDB table, their numbers Decimal; updates and deletes give no row",
        ),
    )
    assert (found.trial.rows, found.trial.first) == (1, (("id",), ("7",)))
    assert [(each.name, each.records, each.place) for each in found.trial.failures] == [("NotAChange", 1, "")]


def test_findings_and_retention_come_through(check: Any) -> None:
    text = (
        "from mldserver import tumbling\nschema='n INT'\nwindows=tumbling('2 h')\ndef process_record(r): ..."
    )
    found = check(text, retention_ms=3_600_000)
    assert not found.ok
    assert lines(found)[0].startswith("mine.py:3: windows of 2 h with a lateness of 0 ms are longer than")


def test_an_error_at_import_is_shown_with_its_traceback(check: Any) -> None:
    found = check("import json\njson.loads('{')\n")
    assert lines(found)[0].startswith("mine.py:2: JSONDecodeError: ")
    assert "json.loads('{')" in found.traceback


def test_a_module_that_ends_the_process_is_told(check: Any) -> None:
    assert lines(check("import sys\nsys.exit('bye')")) == [
        "mine.py:2: it ends the process while it is imported (sys.exit('bye'))"
    ]


def test_a_module_that_ends_the_process_without_an_exception_is_told(check: Any) -> None:
    found = check("import os\nprint('x', flush=True)\nos._exit(4)")
    assert lines(found) == ["importing it ends the process, without an exception (exit code 4)"]
    assert found.output == "x\n"


def test_a_module_that_crashes_the_interpreter_is_told_with_its_place(check: Any) -> None:
    assert lines(check("import ctypes\n\nctypes.string_at(0)")) == [
        "mine.py:3: importing it crashes the interpreter (SIGSEGV)"
    ]


def test_a_module_that_hangs_is_stopped_and_told_with_its_place(check: Any, hanging: str) -> None:
    found = check("import threading; print('hello')\n\n" + hanging, timeout=PATIENCE)
    assert "Fatal Python error" not in found.output
    assert lines(found) == [
        "mine.py:3: importing it takes longer than 1.5 s; the process was stopped" + ADVICE
    ]


def test_a_module_that_cannot_even_be_aborted_is_killed(
    check: Any, hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_module, "_DUMP_SECONDS", 0.2)
    text = (
        "import signal, threading, faulthandler\nfaulthandler.disable()\nsignal.signal(6, signal.SIG_IGN)\n"
    )
    found = check(text + hanging, timeout=PATIENCE)
    assert lines(found) == ["importing it takes longer than 1.5 s; the process was stopped" + ADVICE]


def test_threads_that_the_module_starts_do_not_keep_the_check_waiting(check: Any) -> None:
    text = "import threading\nthreading.Thread(target=threading.Event().wait).start()\ndef process_record(r): ..."
    assert check(text, timeout=600).ok


def test_signals_have_their_names() -> None:
    told = [_unfinished(code, "", 1, "importing it").text for code in (-11, -99)]
    assert told == [f"importing it crashes the interpreter ({name})" for name in ("SIGSEGV", "signal 99")]


def test_the_innermost_frame_of_the_users_is_found_also_in_installed_packages() -> None:
    dump = '  File "{}", line 1 in f\n  File "/x/site-packages/theirs.py", line 2 in g\n  File "/x/mine.py", line 3 in h'
    theirs, nothing = (
        _unfinished(1, output, 1, "it") for output in (dump.format(threading_file()), "nothing")
    )
    assert (theirs.file, theirs.line) == ("/x/site-packages/theirs.py", 2)
    assert (nothing.file, nothing.line) == ("", 0)


def threading_file() -> Any:
    import threading

    return threading.__file__


def test_the_child_reports_plain_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    told = report("handlers.audit", None)
    assert told.findings == ()
    assert told.summary[-1] == ("schema", "none: it has only side effects")
    missing = report("handlers.nothing", None)
    assert missing.findings[0].text.startswith("There is no module 'handlers.nothing'.")
    assert missing.summary == ()


def test_a_handler_that_cannot_be_opened_is_told_before_any_record(check: Any) -> None:
    text = "def initialize(shard): 1 / 0\ndef process_record(record): ..."
    found = check(text, lines=[b"1"])
    assert lines(found)[0].startswith("initialize failed for good: ZeroDivisionError")
    assert "mine.py" in found.traceback
    assert found.trial is None


def test_a_handler_that_cannot_be_run_is_given_no_record(check: Any) -> None:
    assert check("def process_record(): ...", lines=[b"1"]).trial is None


def test_records_that_end_the_process_are_told(check: Any) -> None:
    found = check("import os\ndef process_record(record): os._exit(3)", lines=[b"1"])
    assert lines(found) == [
        "importing it and running the records ends the process, without an exception (exit code 3)"
    ]


def test_each_record_runs_once_whatever_takes_it(check: Any) -> None:
    found = check("""
schema = "n INT"
async def process_records(batch):
    print(len(batch), flush=True)
    return [(int(record.data),) for record in batch]
""", lines=[b"%d" % n for n in range(600)])  # fmt: skip
    assert found.ok
    assert (found.trial.records, found.trial.rows) == (600, 600)
    assert found.trial.first == (("n",), ("0",), ("1",), ("2",), ("3",), ("4",))
    assert found.output == "500\n100\n"


def test_warnings_do_not_spoil_a_report() -> None:
    assert TrialReport((Finding("x", is_error=False),)).ok
    assert not TrialReport((Finding("x"),)).ok


def test_the_summary_tells_of_records_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in_lanes.py").write_text("concurrency = 4\ndef process_record(record): ...\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    told = ("concurrency", "4 records of a batch at a time, in order for each key")
    assert told in report("in_lanes", None).summary
