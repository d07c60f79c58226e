"""``mldserver check`` on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mldserver import cli
from mldserver.cli.check import app, check, render
from mldserver.errors import ConfigError
from mldserver.handler.spec import Finding
from mldserver.runtime.trial import TrialReport


def run(folder: Any, *arguments: Any) -> Any:
    command = [sys.executable, "-m", "mldserver", "check", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_good_handler_is_summed_up_and_the_exit_code_is_0(tmp_path: Path) -> None:
    done = run(tmp_path, "handlers.departures", "--retention", "24 hours")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "kind     module, shared by all shards\n"
        "hooks    process_record, on_window\n"
        "schema   carrier STRING\n"
        "         delay DOUBLE\n"
        "         scheduled TIMESTAMP\n"
        "windows  tumbling, 1 h of scheduled, open for 10 min after their end\n"
        "\n"
        "handlers.departures: it can be run\n"
    )


def test_a_bad_handler_of_the_working_directory_is_told_and_the_exit_code_is_1(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('hi')\nschema = 5\ndef process_record(): ...\n")
    done = run(tmp_path, "mine")
    assert done.returncode == 1
    assert done.stdout == (
        "mine.py:3: process_record is called as process_record(record) or process_record(record, ctx), but is process_record()\n"
        "mine.py:2: schema is an int, not Spark DDL as text\n"
        "\n"
        "It printed while it was imported:\n"
        "  hi\n"
        "\n"
        "mine: 2 problems\n"
    )


@pytest.mark.parametrize(
    "arguments", [(), ("mine", "--retention", "foo"), ("mine", "--timeout", "0"), ("a", "--b")]
)
def test_a_wrong_call_has_the_exit_code_2(arguments: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", *arguments]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_wrong_options_are_told_by_name() -> None:
    with pytest.raises(ConfigError, match="--retention: not a duration: 'foo'"):
        check("handlers.raw", retention="foo")
    with pytest.raises(ConfigError, match="--timeout 0 is not above zero"):
        check("handlers.raw", timeout=0)


GOOD = '{"carrier": "UA", "dep_delay": 2.0, "scheduled": "2013-01-01T05:15:00Z"}'


def test_records_of_a_file_run_through_the_handler_and_its_rows_are_shown(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(f"{GOOD}\n\n{GOOD}\n")
    done = run(tmp_path, "handlers.departures", "--input", "in.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(
        "records  2 gave 2 rows; 0 failed\n"
        "carrier  delay  scheduled\n"
        "UA       2.0    2013-01-01 05:15:00+00:00\n"
        "UA       2.0    2013-01-01 05:15:00+00:00\n"
        "\n"
        "handlers.departures: it can be run\n"
    )


def test_records_that_fail_are_told_by_class_with_the_handlers_line_and_the_exit_code_is_1(
    tmp_path: Path,
) -> None:
    (tmp_path / "in.jsonl").write_text(f'{GOOD}\nno json\n{{"carrier": 1}}\n{{"carrier": 2}}\n[]\n')
    (tmp_path / "mine.py").write_text(
        "schema = 'c STRING'\ndef process_record(record):\n    return {'c': record.json()['carrier']}\n"
    )
    done = run(tmp_path, "mine", "--input", "in.jsonl", "--limit", "4")
    assert (done.returncode, done.stderr) == (1, "")
    assert "records  4 gave 1 rows; 3 failed\nc\nUA\nfailed   2 with BadRow, such as\n" in done.stdout
    assert '           in {"carrier": 1}\n' in done.stdout
    assert "failed   1 with JSONDecodeError, such as\n           mine.py:3: JSONDecodeError: " in done.stdout
    assert done.stdout.endswith("mine: 3 of 4 records failed\n")
    assert run(tmp_path, "mine", "--input", "in.jsonl", "--allow-dead-letters").returncode == 0


def test_a_report_is_findings_traceback_output_and_summary() -> None:
    report = TrialReport(
        (Finding("x", "f.py", 1), Finding("y", is_error=False)), (("kind", "module"),), "T\n  b\n", "out\n"
    )
    assert render("mine", report) == (
        "f.py:1: x\nwarning: y\n\nT\n  b\n\nIt printed while it was imported:\n  out\n\nkind     module\n\nmine: 1 problem\n"
    )


def test_the_command_calls_itself_check() -> None:
    assert app.name == ("check",)


def test_records_get_the_partition_keys_that_a_field_names(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"carrier": "{name}"}}\n' for name in ("UA", "B6", "UA")))
    (tmp_path / "mine.py").write_text(
        "schema = 'c STRING, n INT'\nstate_ttl = '1 day'\ndef process_record(record, ctx):\n"
        "    ctx.state['n'] = ctx.state.get('n', 0) + 1\n    return ctx.key, ctx.state['n']\n"
    )
    done = run(tmp_path, "mine", "--input", "in.jsonl", "--key-field", "carrier")
    assert (done.returncode, done.stderr) == (0, "")
    assert "state    kept for each partition key, for 1 d after its last change\n" in done.stdout
    assert "         start the server with --stream NAME" in done.stdout
    assert "\nkeys" not in done.stdout
    assert "c   n\nUA  1\nB6  1\nUA  2\n" in done.stdout
    done = run(tmp_path, "mine", "--input", "in.jsonl")
    assert "c      n\nkey-1  1\nkey-2  1\nkey-3  1\n" in done.stdout
    assert "\nkeys     a different one for each record: --key-field NAME takes" in done.stdout


def test_the_handler_reads_the_settings_that_are_given(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("1\n")
    (tmp_path / "mine.py").write_text(
        "schema = 'n STRING'\ndef process_record(record, ctx):\n    return (ctx.settings['limit'],)\n"
    )
    done = run(tmp_path, "mine", "--input", "in.jsonl", "--handler-settings", "limit=20")
    assert "\nn\n20\n" in done.stdout.replace("         ", "")
    done = run(tmp_path, "mine", "--input", "in.jsonl", "--handler-settings", "limit")
    assert (done.returncode, "--handler-settings: the pair 1 is not key=value." in done.stderr) == (2, True)


def test_the_callbacks_of_timers_are_listed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from mldserver import timer\n"
        "def process_record(record, ctx): ...\n"
        "@timer\ndef alarm(due, ctx): ...\n"
        "@timer(max_lateness='6 hours')\ndef bell(due, ctx): ...\n"
    )
    done = run(tmp_path, "mine")
    assert "\ntimers   alarm\n         bell, skipped when it is more than 6 h late\n" in done.stdout


def test_timers_that_records_set_are_counted(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(5)))
    (tmp_path / "mine.py").write_text(
        "from mldserver import timer\n"
        "def process_record(record, ctx):\n"
        "    n = record.json()['n']\n"
        "    if n < 3:\n"
        "        ctx.timers.set(alarm, after='1 hour')\n"
        "    elif n == 4:\n"
        "        ctx.timers.set(print, after='1 hour')\n"
        "@timer\ndef alarm(due, ctx): ...\n"
    )
    done = run(tmp_path, "mine", "--input", "in.jsonl", "--allow-dead-letters")
    assert (
        "records  5 gave 0 rows; 1 failed\ntimers   3 are set at the end: `mldserver sim --fire-timers` calls them\n"
        "failed   1 with NotATimer, such as\n"
    ) in done.stdout
    assert "           mine.py:7: NotATimer: print is not a callback of timers. " in done.stdout
