"""``mldserver kcl`` as a process of its own, with a script in Java's place."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mldserver.cli import run
from mldserver.kcl.launch import Files, prepare, private_files
from tests.ledger.dynamodb_emulator import Emulator

LIMIT = 120
APP = ["--app", f"a{os.getpid()}"]
"""Of this process alone: a name on this host is held by one `mldserver kcl` at a time."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "emulated", "AWS_SECRET_ACCESS_KEY": "emulated"}

FAKE_JAVA = f"""#!{sys.executable} -ISE
import os, shutil, signal, sys
if sys.argv[1] == "-version":
    print('openjdk version "17.0.9" 2023-10-17', file=sys.stderr)
    sys.exit()
given = open(sys.argv[sys.argv.index("--properties-file") + 1]).read()
app = given.partition("applicationName = ")[2].partition("\\n")[0]
seen = os.environ["SEEN"]
if os.path.isdir(seen + "/" + app):
    seen += "/" + app
if os.path.exists(seen + "/broken"):
    sys.exit(7)
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
with open(seen + "/properties", "w") as copy:
    copy.write(given)
shutil.copy(sys.argv[sys.argv.index("--log-configuration") + 1], seen + "/logback.xml")
print("MLD", "WARN", "fake.Daemon", "up with " + sys.argv[sys.argv.index("-cp") - 1], sep="\\t", flush=True)
with open(seen + "/pid", "w") as pid:
    pid.write(str(os.getpid()))
signal.pause()
"""


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    folder = tmp_path / "seen"
    folder.mkdir()
    os.mkfifo(folder / "pid")
    return folder


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def dynamodb() -> Iterator[str]:
    """Where the leader's lock would be, if there was a table."""
    emulator = Emulator()
    with emulator.running():
        yield emulator.url


@pytest.fixture
def environment(tmp_path: Path, seen: Path, temporary: Path, dynamodb: str) -> dict[str, str]:
    java = tmp_path / "java"
    java.write_text(FAKE_JAVA)
    java.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLDSERVER_", "JAVA_"))}
    own = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SEEN": str(seen), "TMPDIR": str(temporary)}
    own |= {"AWS_ENDPOINT_URL_DYNAMODB": dynamodb}
    return {**kept, **CREDENTIALS, **own}


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """What the daemon is to connect to; the kernel answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def started(
    environment: dict[str, str], tmp_path: Path, server: socket.socket
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "mldserver", "kcl", *APP, "--stream", "s", "--region", "eu-central-1"]
    command += ["--connect", f"127.0.0.1:{server.getsockname()[1]}", "--property", "maxRecords=7"]
    command += ["--kinesis-endpoint", "http://me:hush@h"]
    command += ["--java-option", "-Daws.secretAccessKey=hush", "--java-option", "-Xmx64m"]
    secret = tmp_path / "secret"
    secret.write_text("correct-horse-battery")
    secret.chmod(0o600)
    command += ["--listen-secret", str(secret)]
    process = subprocess.Popen(
        [*command, "--log-format", "json"], env=environment, cwd=tmp_path, stdout=subprocess.PIPE
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def logged(process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    assert process.stdout is not None
    return [json.loads(line) for line in process.stdout.read().splitlines()]


def test_it_runs_the_daemon_with_its_files_and_stops_it_in_order(
    started: subprocess.Popen[bytes], seen: Path, server: socket.socket, temporary: Path
) -> None:
    (seen / "pid").read_text()
    properties = (seen / "properties").read_text()
    title = Path(f"/proc/{started.pid}/cmdline")
    if title.exists():  # Linux
        assert title.read_text().strip("\0") == f"mldserver: {APP[1]} kcl"
    started.send_signal(signal.SIGTERM)
    assert started.wait(LIMIT) == 0
    assert "streamName = s\n" in properties
    assert "maxRecords = 7\n" in properties
    (executable,) = (line for line in properties.splitlines() if line.startswith("executableName = "))
    assert executable.endswith(f" 127.0.0.1:{server.getsockname()[1]} {seen.parent / 'secret'}")
    assert "<configuration>" in (seen / "logback.xml").read_text()
    events = logged(started)
    assert "correct-horse" not in str(events) + properties
    assert [event["event"] for event in events] == ["kcl.starting", "kcl.log", "kcl.exited"]
    assert events[0]["command"][1:] == ["-Daws.secretAccessKey=…", "-Xmx64m"]
    assert (events[0]["retrieval"], events[0]["properties"]["retrievalMode"]) == ("polling", "POLLING")
    assert "hush" not in str(events)
    assert events[1]["text"] == "up with -Xmx64m"
    assert events[2]["exit_code"] == 143
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the tether is Linux's")
def test_no_daemon_and_no_file_survives_a_killed_supervisor(
    started: subprocess.Popen[bytes], seen: Path, temporary: Path
) -> None:
    daemon = os.pidfd_open(int((seen / "pid").read_text()))
    started.kill()
    gone, _, _ = select.select([daemon], [], [], LIMIT)
    os.close(daemon)
    assert gone
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--region", "r"], "No stream was given"),
        (["--stream", "s"], "No region was given"),
        (["--stream", "s", "--region", "r", "--property", "x"], "is not KEY=VALUE"),
        (["--stream", "s", "--region", "r", "--initial-position", "now"], "no initial position"),
        (["--stream", "s", "--region", "r", "--app", " "], "application's name is empty"),
        (["--stream", "s", "--region", "r", "--connect", ":0"], "127.0.0.1:0 has port 0"),
        (["--stream", "s", "--region", "r", "--property", "maxRecords=many"], "'many' is not a whole number"),
        (["--stream", "s", "--region", "r", "--endpoint-url", "here"], "'here' is no endpoint"),
        (
            ["--stream", "s", "--region", "r", "--connect", "h.example:1"],
            "h.example:1 (command line --listen) is outside loopback",
        ),
        (["--stream", "s", "--region", "r", "--tls-certificate", "c.pem"], "Use --tls-ca FILE"),
        (
            ["--stream", "s", "--region", "r", "--tls-certificate", "/", "--tls-ca", "/"],
            "The certificate / cannot be used: Is a directory",
        ),
        (["--stream", "s", "--region", "r", "--listen-secret", "/none"], "secret, /none, cannot be read"),
        (["--stream", "no credentials", "--region", "r"], "there are no AWS credentials"),
    ],
)
def test_wrong_settings_are_one_sentence_and_exit_code_2(
    environment: dict[str, str],
    tmp_path: Path,
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    nobody = {name: text for name, text in environment.items() if not name.startswith("AWS_")}
    for name in os.environ.keys() - nobody.keys():
        monkeypatch.delenv(name)
    for name, text in {**nobody, "AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, text)
    assert run(["kcl", *([] if "--app" in arguments else APP), *arguments]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told


def test_its_log_file_is_a_path_as_the_server_takes_it_and_never_the_server_s(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "mldserver.toml").write_text('log_file = "server.log"')
    options = ["--stream", "s", "--region", "r", "--log-file", "~/daemon.log", "--java-home", "/nowhere"]
    done = subprocess.run(
        [sys.executable, "-m", "mldserver", "kcl", *APP, *options],
        env={**environment, "HOME": str(tmp_path), "MLDSERVER_LOG_FILE": "server.log"},
        cwd=tmp_path,
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 2
    assert (tmp_path / "daemon.log").exists()
    assert not (tmp_path / "server.log").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the tether is Linux's")
def test_the_tether_does_not_start_for_a_parent_that_is_gone() -> None:
    tether = sys.modules[prepare.__module__].TETHER
    done = subprocess.run(
        [sys.executable, "-ISE", tether, "1", "echo", "started"],
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux's")
def test_files_in_memory_can_be_read_and_executed_and_go_away() -> None:
    with private_files() as files:
        path = files.add("script", b"#!/bin/sh\nexit 7\n", executable=True)
        assert subprocess.run([path], check=False).returncode == 7
        assert Path(path).read_bytes() == Path(path).read_bytes() != b""
    assert not Path(path).exists()


def test_files_elsewhere_are_private_have_no_space_in_their_path_and_go_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    for place in (tmp_path, tmp_path / "a b"):
        place.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with private_files() as files:
            path = Path(files.add("script", b"#!/bin/sh\nexit 7\n", executable=True))
            assert " " not in str(path)
            assert path.parent.stat().st_mode & 0o777 == 0o700
            assert subprocess.run([path], check=False).returncode == 7
        assert not path.parent.exists()


def test_an_emulator_gets_json_and_a_given_region_stays(tmp_path: Path) -> None:
    files = Files(tmp_path, contextlib.ExitStack())
    properties = {"regionName": "r", "kinesisEndpoint": "http://127.0.0.1:1"}
    command, environment = prepare(
        files,
        java="java",
        jars=[Path("a.jar"), Path("b.jar")],
        properties=properties,
        environment={"A": "b"},
    )
    assert "-Daws.cborEnabled=false" in command
    assert f"a.jar{os.pathsep}b.jar" in command
    assert environment == {"AWS_REGION": "r", "A": "b"}
    command, environment = prepare(
        files, java="java", jars=[], properties={"regionName": "r"}, environment={"AWS_REGION": "x"}
    )
    assert "-Daws.cborEnabled=false" not in command
    assert environment["AWS_REGION"] == "x"


def test_a_server_that_is_not_there_is_waited_for_without_java(
    environment: dict[str, str], tmp_path: Path, seen: Path
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody answers yet
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "mldserver",
            "kcl",
            *APP,
            "--stream",
            "s",
            "--region",
            "eu-central-1",
        ]
        command += ["--connect", address, "--log-format", "json"]
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            waiting = json.loads(process.stdout.readline())
            assert (waiting["event"], waiting["address"]) == ("kcl.waiting", address)
            process.send_signal(signal.SIGUSR1)  # opens the log file again, where there is one
            server.listen()
            (seen / "pid").read_text()
            process.send_signal(signal.SIGUSR1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == 0
            assert next(event["event"] for event in logged(process)) == "kcl.starting"
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


# Several functions

SEVERAL = """
region = "eu-central-1"
[functions.departures]
handler = "h"
listen = "{departures}"
stream = "flights"
[functions.orders]
handler = "h"
listen = "{orders}"
stream = "orders"
[functions.shop]
handler = "h"
source = "dynamodb://orders?region=eu-central-1"
"""


@pytest.fixture
def several(tmp_path: Path, seen: Path, server: socket.socket) -> Iterator[socket.socket]:
    """Settings of two functions that daemons feed, and of one that reads by itself; give the second function's address."""
    for app in ("departures", "orders"):
        (seen / app).mkdir()
        os.mkfifo(seen / app / "pid")
    with socket.create_server(("127.0.0.1", 0)) as second:
        ports = [each.getsockname()[1] for each in (server, second)]
        (tmp_path / "mldserver.toml").write_text(
            SEVERAL.format(departures=f":{ports[0]}", orders=f":{ports[1]}")
        )
        yield second


@contextlib.contextmanager
def running(environment: dict[str, str], folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "mldserver", "kcl", "--log-format", "json", *options]
    process = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def properties_of(app: Path) -> dict[str, str]:
    (app / "pid").read_text()  # waits until the daemon runs
    return dict(line.split(" = ", 1) for line in (app / "properties").read_text().splitlines())


def test_one_command_runs_a_daemon_for_each_function_that_needs_one(
    environment: dict[str, str], tmp_path: Path, seen: Path, several: socket.socket
) -> None:
    with running(environment, tmp_path) as process:
        departures, orders = properties_of(seen / "departures"), properties_of(seen / "orders")
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
        events = logged(process)
    assert (departures["applicationName"], departures["streamName"]) == ("departures", "flights")
    assert (orders["applicationName"], orders["streamName"]) == ("orders", "orders")
    assert orders["executableName"].endswith(f" 127.0.0.1:{several.getsockname()[1]}")
    for name in ("departures", "orders"):
        mine = [event["event"] for event in events if event["pipeline"] == name]
        assert mine == ["kcl.starting", "kcl.log", "kcl.exited"]
    assert {event["pipeline"] for event in events} == {"departures", "orders"}


def test_a_daemon_that_fails_does_not_stop_the_others(
    environment: dict[str, str], tmp_path: Path, seen: Path, several: socket.socket
) -> None:
    (seen / "departures" / "broken").touch()
    with running(environment, tmp_path) as process:
        os.kill(int((seen / "orders" / "pid").read_text()), 0)
        assert process.stdout is not None
        ended: dict[str, Any] = {}
        while ended.get("event") != "kcl.exited":
            ended = json.loads(process.stdout.readline())
        assert (ended["pipeline"], ended["exit_code"]) == ("departures", 7)
        (seen / "departures" / "broken").unlink()
        assert properties_of(seen / "departures")["applicationName"] == "departures"
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
        exits = [(e["pipeline"], e["exit_code"]) for e in logged(process) if e["event"] == "kcl.exited"]
    assert sorted(exits)[-2:] == [("departures", 143), ("orders", 143)]


def test_one_function_is_named_and_its_application_may_have_another_name(
    environment: dict[str, str], tmp_path: Path, seen: Path, several: socket.socket
) -> None:
    with running({**environment, "KCL_APP": "night"}, tmp_path, "--function", "orders") as process:
        given = properties_of(seen)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
    assert (given["applicationName"], given["streamName"]) == ("night", "orders")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--app", "a"], "--app is for one function, and the settings have several: departures, orders."),
        (["--connect", "127.0.0.1:1"], "--connect is for one function"),
        (["--property", "tableName=t"], "--property tableName is for one function"),
        (["--function", "shop"], "No daemon is needed: shop"),
        (
            ["--function", "shops"],
            "There is no function 'shops'. The settings have: departures, orders, shop.",
        ),
    ],
)
def test_what_is_for_one_function_is_refused_for_several(
    environment: dict[str, str],
    tmp_path: Path,
    several: socket.socket,
    options: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["kcl", *options]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
