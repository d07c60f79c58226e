"""systemd's units and logrotate's file, as those programs judge them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mldserver.cli import command_line

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
EXPOSURE = 13
"""Tenths of what systemd's scale of 0 to 10 may say; 20 is where it stops to say OK."""


def needs(program: str, package: str) -> pytest.MarkDecorator:
    reason = f"{program} is not installed (Debian: {package})"
    return pytest.mark.skipif(shutil.which(program) is None and "CI" not in os.environ, reason=reason)


def run(*command: str | Path) -> str:
    """Run a program; return all that it says. Fails when it is not content."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def commands(unit: Path) -> list[list[str]]:
    """Return what a unit starts, for the pipeline ``departures``."""
    lines = re.findall(r"^ExecStart=(.*)$", unit.read_text("utf-8"), re.MULTILINE)
    variables = {
        "$KCL_OPTIONS": "--retrieval polling",
        "%i": "departures",
        "%H": "h",
    }
    for name, value in variables.items():
        lines = [line.replace(name, value) for line in lines]
    return [shlex.split(line) for line in lines]


def test_there_are_units_of_server_and_daemon() -> None:
    assert [unit.name for unit in UNITS] == ["mldserver-kcl@.service", "mldserver@.service"]


@needs("systemd-analyze", "systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_wrong_with_a_unit(unit: Path, tmp_path: Path) -> None:
    # What it starts must be there; all else is as it is shipped.
    text = unit.read_text("utf-8").replace("/opt/mldserver/bin/mldserver", sys.executable)
    (tmp_path / unit.name).write_text(text)
    assert run("systemd-analyze", "verify", "--man=no", tmp_path / unit.name) == ""


@needs("systemd-analyze", "systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_leaves_little_open(unit: Path) -> None:
    run("systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}", unit)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_what_a_unit_starts_is_a_command_with_options_that_it_has(unit: Path) -> None:
    ((program, *arguments),) = commands(unit)
    assert program == "/opt/mldserver/bin/mldserver"
    command_line(arguments).parse_args(arguments, exit_on_error=False)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_ends_what_takes_no_orders_any_more_and_lets_the_rest_take_its_time(unit: Path) -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text("utf-8"), re.MULTILINE))
    # The notifications of mldserver/base/service.py: ready, alive, and more time while it starts or stops.
    assert settings["Type"] == "notify"
    assert int(settings["WatchdogSec"]) > 10
    assert int(settings["TimeoutStartSec"]) >= 60
    assert (settings["KillMode"], settings["RestartPreventExitStatus"]) == ("mixed", "2")


@needs("logrotate", "logrotate")
def test_logrotate_rotates_the_logs_and_asks_each_process_for_a_new_file(tmp_path: Path) -> None:
    """As it is shipped but for the folder, the user, and who is asked: there is no systemd in a test."""
    logs, asked = tmp_path / "logs", tmp_path / "asked"
    logs.mkdir(mode=0o755)
    (logs / "departures.log").write_text("a line\n")
    text = (DEPLOY / "logrotate").read_text("utf-8")
    assert "--no-block try-reload-or-restart 'mldserver@*.service' 'mldserver-kcl@*.service'" in text
    text = text.replace("/var/log/mldserver", str(logs)).replace("    su mldserver mldserver\n", "")
    (tmp_path / "conf").write_text(re.sub(r"systemctl .*", f"echo >> {asked}", text))
    (tmp_path / "conf").chmod(0o644)
    for _ in range(2):
        run("logrotate", "--force", "--state", tmp_path / "state", tmp_path / "conf")
    assert (logs / "departures.log.1").read_text() == "a line\n"
    assert not (logs / "departures.log").exists()
    assert asked.read_text() == "\n"
