from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mldserver.cli import run
from mldserver.testing import simulation
from mldserver.testing.playground import read_lines


def test_help_names_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    run(["sim", "--help"])
    told = capsys.readouterr().out
    for option in (
        "--splits",
        "--merges",
        "--lost-leases",
        "--throttle",
        "--crashes",
        "--format",
        "--engine",
    ):
        assert option in told


def test_a_run_ends_with_a_summary_and_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLDSERVER_WORKERS")  # as users run it, in workers
    out = tmp_path / "out"
    arguments = ["sim", "handlers.departures_daily", "--engine", "local", "--limit", "500", "--out", str(out)]
    assert run([*arguments, "--splits", "1", "--throttle", "0.3", "--seed", "5"]) == 0
    told = capsys.readouterr().out
    assert "500 in 5 shards" in told
    assert "500 durable, 0 late, 0 dead letters" in told
    assert str(out) in told
    assert told.rstrip().endswith("ok")
    assert len(re.findall("2013-01-0", told)) >= 5, "the first rows of its windows"
    assert list(out.glob("window=*/*.parquet"))


def test_what_the_handler_discards_is_counted_and_the_log_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "discards.py").write_text(
        "from mldserver import Discard\nschema = 'id INT'\n"
        "def process_record(record):\n    if record.json() % 2:\n        raise Discard\n    return (record.json(),)\n"
    )
    (tmp_path / "in.jsonl").write_text("".join(f"{n}\n" for n in range(2_500)))
    arguments = ["discards", "--input", "in.jsonl", "--engine", "local", "--out", "out", "--shards", "1"]
    assert run(["sim", *arguments]) == 0
    told = capsys.readouterr().out
    assert "2,500 in 1 shard\n" in told
    assert "1,250 durable, 0 late, 0 dead letters, 1,250 discarded\n" in told
    assert f"mldserver logs {(tmp_path / 'out' / '_server.log').resolve()}" in told


def test_a_cluster_needs_a_folder_that_it_sees(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sim", "handlers.departures_daily", "--spark-master", "spark://h:7077"]) == 2
    assert "Name a folder that Spark's executors see too: --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("declared", "columns"), [("None", ["id"]), ('("since", "until")', ["id", "since", "until"])]
)
def test_the_output_has_the_window_columns_that_the_handler_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: str, columns: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"named_{len(columns)}"
    (tmp_path / f"{name}.py").write_text(
        f"from mldserver import tumbling\nschema = 'id INT'\nwindows = tumbling('1 day')\nwindow_columns = {declared}\n"
        "def process_record(record):\n    return (record.json(),)\n"
    )
    (tmp_path / "in.jsonl").write_text("1\n")
    assert run(["sim", name, "--input", "in.jsonl", "--engine", "local", "--out", "out"]) == 0
    (file,) = (tmp_path / "out").glob("window=*/*.parquet")
    assert [each for each in pq.read_schema(file).names if not each.startswith("_")] == columns


def test_progress_says_how_far_it_is_and_waits_for_nothing_in_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mldserver.testing.simulation._PROGRESS_SECONDS", 0)
    arguments = [
        "handlers.departures_daily",
        "--engine",
        "local",
        "--limit",
        "50",
        "--out",
        str(tmp_path / "out"),
    ]
    assert run(["sim", *arguments]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if re.match(r" *[\d.]+ s ", line)]
    assert told[-1].endswith("every window is published  50 rows durable, 1 windows")


def test_a_run_leaves_the_configured_ledger_table_and_dead_letters_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    places = [tmp_path / name for name in ("production.sqlite", "letters", "table")]
    (tmp_path / "mldserver.toml").write_text(
        f'ledger = "sqlite:{places[0]}"\ndead_letters = "jsonl:{places[1]}"\nsink = "delta:{places[2]}"\n'
        'attempts = 1\nserver_id = "production-1"\n'
    )
    (tmp_path / "in.jsonl").write_text('{"carrier": "UA"}\n')
    out = tmp_path / "out"
    arguments = ["handlers.departures", "--input", "in.jsonl", "--engine", "local", "--out", str(out)]
    assert run(["sim", *arguments, "--allow-dead-letters"]) == 0
    assert "0 durable, 0 late, 1 dead letter\n" in capsys.readouterr().out
    assert [place for place in places if place.exists()] == []
    assert run(["dead-letters", "list", "--out", str(out), "--ledger", "sqlite"]) == 0
    assert "1 dead letters" in capsys.readouterr().out


def test_a_run_plays_by_arrival_times_when_it_is_told_a_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = []

    class Watched(simulation.Simulation):
        def __init__(self, *given: Any, speed: float | None, **options: Any) -> None:
            speeds.append(speed)
            super().__init__(*given, speed=speed, **options)

    monkeypatch.setattr(simulation, "Simulation", Watched)
    arguments = ["handlers.departures_daily", "--engine", "local", "--limit", "50", "--shards", "1"]
    pace = ["--rate", "1", "--speed", "20"]
    assert run(["sim", *arguments, *pace, "--out", str(tmp_path / "out")]) == 0
    assert speeds == [20]
    assert "50 durable, 0 late" in capsys.readouterr().out


@pytest.mark.long  # by day test_a_run_plays_by_arrival_times… plays at a speed, and late rows are the coordinator's tests'
def test_a_row_is_late_when_its_record_comes_late_by_the_datas_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hours = [*range(5, 15), 5]
    rows = [
        {
            "carrier": "UA",
            "dep_delay": 1,
            "scheduled": f"2013-01-01T{hour:02}:00:00Z",
            "at": 1_400_000_000_000 + 1000 * number,
        }
        for number, hour in enumerate(hours)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["handlers.departures", "--input", "in.jsonl", "--engine", "local", "--shards", "1"]
    assert run(["sim", *arguments, "--time-field", "at", "--speed", "1"]) == 0
    assert "11 durable, 1 late, 0 dead letters" in capsys.readouterr().out


def test_a_handler_that_keeps_state_counts_each_key_through_splits_merges_and_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counts.py").write_text(
        "schema = 'carrier STRING, n INT'\ndef process_record(record, ctx):\n"
        "    ctx.state['n'] = ctx.state.get('n', 0) + 1\n    return ctx.key, ctx.state['n']\n"
    )
    faults = ["--splits", "2", "--merges", "1", "--crashes", "1", "--lost-leases", "1", "--batch", "50"]
    arguments = ["counts", "--key-field", "carrier", "--engine", "local", "--limit", "2000", "--out", "out"]
    assert run(["sim", *arguments, *faults]) == 0
    counts: dict[str, list[int]] = {}
    for file in Path("out").glob("window=*/*.parquet"):
        for row in pq.ParquetFile(file).read(["carrier", "n"]).to_pylist():
            counts.setdefault(row["carrier"], []).append(row["n"])
    assert len(counts) > 5
    assert all(sorted(numbers) == [*range(1, len(numbers) + 1)] for numbers in counts.values())
    assert re.search(r"^state +mldserver state show --out /\S+/out$", capsys.readouterr().out, re.MULTILINE)
    assert run(["state", "show", "--out", "out", "--json", "--limit", "1000"]) == 0
    stored = {entry["key"]: entry["value"]["n"] for entry in json.loads(capsys.readouterr().out)["entries"]}
    assert stored == {key: len(numbers) for key, numbers in counts.items()}


def test_the_example_with_timers_on_the_bundled_departures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    last: dict[str, dict[str, Any]] = {}
    times: Counter[str] = Counter()
    for line in read_lines(None, limit=4_000):
        flight = json.loads(line)
        key = f"{flight['carrier']} {flight['flight']}"
        last[key] = flight
        times[key] += (flight["dep_delay"] or 0) > 60
    wanted = {
        key: (flight["dep_delay"], times[key])
        for key, flight in last.items()
        if (flight["dep_delay"] or 0) > 60
    }
    assert len(wanted) > 20
    assert sum(times.values()) > len(wanted), "some alarms are cancelled"
    arguments = [
        "handlers.late_departures",
        "--key-field",
        "carrier,flight",
        "--limit",
        "4000",
        "--engine",
        "local",
    ]
    assert run(["sim", *arguments, "--out", "counted"]) == 0
    told = capsys.readouterr().out
    assert re.search(
        rf"^timers .* 0 fired, .* {len(wanted)} pending \(--fire-timers fires them\)$", told, re.MULTILINE
    )
    assert run(["timers", "list", "--out", "counted", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pending"] == len(wanted)
    faults = ["--splits", "1", "--merges", "1", "--crashes", "1"]
    assert run(["sim", *arguments, *faults, "--fire-timers", "--out", "out"]) == 0
    told = capsys.readouterr().out
    assert re.search(rf"^timers .* {len(wanted)} fired, 0 skipped, 0 failed, 0 pending$", told, re.MULTILINE)
    rows = [
        row
        for file in Path("out").glob("window=*/*.parquet")
        for row in pq.ParquetFile(file).read().to_pylist()
    ]
    assert len(rows) == len(wanted)
    assert {f"{row['carrier']} {row['flight']}": (row["delay"], row["times"]) for row in rows} == wanted


def test_visits_are_the_clicks_of_a_user_without_a_longer_silence_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dice = random.Random(7)
    start = datetime(2013, 1, 1, 6, tzinfo=UTC)
    of_user: dict[int, list[datetime]] = {}
    clicks = []
    for _ in range(3_000):
        user, at = dice.randrange(60), start + timedelta(seconds=dice.randrange(30 * 3600))
        of_user.setdefault(user, []).append(at)
        arrived = at + timedelta(seconds=dice.choice([0, 0, 1, 299]))
        clicks.append({"user": user, "at": at.isoformat(), "arrived": arrived.isoformat()})
    clicks.sort(key=lambda click: str(click["arrived"]))
    Path("clicks.jsonl").write_text("".join(f"{json.dumps(click)}\n" for click in clicks))
    wanted = Counter[tuple[str, datetime, datetime, int]]()
    for user, times in of_user.items():
        times.sort()
        borders = [
            0,
            *(n for n in range(1, len(times)) if times[n] - times[n - 1] > timedelta(minutes=30)),
            len(times),
        ]
        for one, other in itertools.pairwise(borders):
            wanted[str(user), times[one], times[other - 1], other - one] += 1
    assert len(wanted) > 600
    arguments = [
        "handlers.visits",
        "--input",
        "clicks.jsonl",
        "--key-field",
        "user",
        "--time-field",
        "arrived",
    ]
    faults = ["--splits", "1", "--merges", "1", "--crashes", "2"]
    assert run(["sim", *arguments, *faults, "--engine", "local", "--fire-timers", "--out", "out"]) == 0
    assert "0 late, 0 dead letters" in capsys.readouterr().out
    rows = [
        row
        for file in Path("out").glob("window=*/*.parquet")
        for row in pq.ParquetFile(file).read().to_pylist()
    ]
    found = Counter((row["user"], row["began"], row["ended"], row["clicks"]) for row in rows)
    assert found == wanted


def test_timers_that_set_themselves_again_fire_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forever.py").write_text(
        "from mldserver import timer\nschema = 'at TIMESTAMP'\n"
        "def process_record(record, ctx):\n    ctx.timers.set(hourly, after='1 hour')\n"
        "@timer\ndef hourly(due, ctx):\n    ctx.timers.set(hourly, after='1 hour')\n    return (due.at,)\n"
    )
    (tmp_path / "in.jsonl").write_text("{}\n{}\n")
    arguments = ["forever", "--input", "in.jsonl", "--engine", "local", "--shards", "1", "--fire-timers"]
    assert run(["sim", *arguments, "--out", "out"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^timers +22 set, 0 cancelled, 20 fired, .* 2 pending$", told, re.MULTILINE)


def test_dead_letters_are_told_by_class_with_an_example_and_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    good = '{"carrier": "UA", "dep_delay": 2.0, "scheduled": "2013-01-01T05:15:00Z"}\n'
    (tmp_path / "in.jsonl").write_text(good + '{"carrier": "AA"}\n{"carrier": "B6"}\nno json\n')
    (tmp_path / "mldserver.toml").write_text("attempts = 1\n")
    arguments = ["handlers.departures", "--input", "in.jsonl", "--engine", "local", "--shards", "1"]
    assert run(["sim", *arguments, "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().out
    assert re.search(r"^failed +2 with KeyError, such as$", told, re.MULTILINE)
    assert re.search(r'departures\.py:\d+: KeyError: .dep_delay.\n +in {"carrier": "AA"}\n', told)
    assert "1 with JSONDecodeError, such as\n" in told
    assert "mldserver check handlers.departures --input in.jsonl" in told
    assert told.rstrip().endswith("3 records became dead letters")
    assert re.search(r"first rows +carrier +delay +scheduled", told)
    assert re.search(r"UA +2\.0 +2013-01-01 05:15:00", told)


def test_a_run_that_fails_says_what_the_server_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"carrier": "UA"}) + "\n")
    (tmp_path / "mldserver.toml").write_text('on_failure = "halt"\nattempts = 1\n')
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mldserver",
            "sim",
            "handlers.departures",
            "--input",
            "in.jsonl",
            "--engine",
            "local",
        ],
        cwd=tmp_path,
        env={"PATH": "", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "EOF while waiting for the answer to processRecords" in done.stdout
    assert "the server logged" in done.stdout
    assert "Mend the handler" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["no.such.handler", "--engine", "local", "--limit", "1"], 2),
        (["handlers.departures", "--input", "/no/such/file"], 2),
        (["handlers.departures", "--throttle", "2"], 2),
        (["handlers.departures", "--engine", "magic"], 2),
        (["no.such.handler", "--limit", "1"], 2),
    ],
)
def test_wrong_arguments_are_the_operators_error(
    arguments: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sim", *arguments, "--out", str(tmp_path / "out")]) == code
    told = capsys.readouterr()
    assert told.out + told.err


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
def test_with_spark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out put"
    assert (
        run(
            [
                "sim",
                "handlers.departures_daily",
                "--limit",
                "2000",
                "--lost-leases",
                "1",
                "--out",
                out.as_uri(),
            ]
        )
        == 0
    )
    assert "2,000 rows durable" in capsys.readouterr().out
    assert len(list(out.glob("window=*"))) == 3
