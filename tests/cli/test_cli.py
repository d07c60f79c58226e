from __future__ import annotations

import asyncio
import platform
import re
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cyclopts
import pytest
from support.store import SqliteStore

import mldserver
from mldserver import cli
from mldserver.cli import serve
from mldserver.config.settings import Settings, specs
from mldserver.errors import (
    ConfigError,
    HandlerNotFound,
    InternalError,
    JavaError,
    LedgerError,
    LedgerUnusable,
    NotThereYet,
)
from mldserver.output.layout import LEDGER


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], int]:
    """Run ``mldserver check`` with something else in its place; return the exit code."""

    def install(does: Callable[[], Any]) -> int:
        module = types.ModuleType("mldserver.cli.check")
        module.app = cyclopts.App(name="check")  # type: ignore[attr-defined]  # what a command's module has
        module.app.default(does)
        monkeypatch.setitem(sys.modules, "mldserver.cli.check", module)
        return cli.run(["check"])

    return install


def raising(error: BaseException) -> Callable[[], None]:
    def does() -> None:
        raise error

    return does


# The whole


def test_the_help_names_every_command_and_imports_none() -> None:
    script = (
        "import sys\nfrom mldserver import cli\ncode = cli.run(['--help'])\n"
        "heavy = {'pyarrow', 'pyspark', 'aioboto3', 'pandas', 'uvloop', 'mldserver.server', 'mldserver.cli.serve'}\n"
        "sys.exit(code or sorted(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name in cli._COMMANDS:
        assert f"│ {name} " in done.stdout


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"mldserver {mldserver.__version__} (")
    assert told.endswith(f"Python {platform.python_version()})\n")


def test_the_option_of_a_removed_setting_is_refused_with_what_holds_instead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["serve", "handlers.raw", "--settle-time=1 s"]) == 2
    told = capsys.readouterr().err
    assert (
        "mldserver: --settle-time was removed. Leave it out. After the start and after each new shard" in told
    )


def test_an_unknown_option_is_told_with_a_close_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "--line-limt", "3"]) == 2
    assert "--line-limit" in capsys.readouterr().err


def test_the_module_runs_as_the_command_does(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mldserver", "serve"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("mldserver: No handler was named.")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("safe", "found"), [([], True), (["-P"], False)], ids=["as always", "where Python must not look there"]
)
def test_modules_in_the_working_directory_are_found(tmp_path: Path, safe: list[str], found: bool) -> None:
    (tmp_path / "mine.py").write_text("")
    script = (
        "import sys\nfrom mldserver import cli\nsys.path[:] = [p for p in sys.path if p]\n"
        "cli.run = lambda arguments: __import__('mine') and 7\ncli.main()"
    )
    done = subprocess.run(
        [sys.executable, *safe, "-c", script], capture_output=True, check=False, cwd=tmp_path
    )
    assert (done.returncode == 7) is found


# Errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("It is wrong.", advice="Correct it."), 2),
        (JavaError("It is wrong.", advice="Correct it."), 2),
        (HandlerNotFound("It is wrong.", advice="Correct it."), 2),
        (LedgerError("It is wrong.", advice="Correct it."), 1),
        (LedgerUnusable("It is wrong.", advice="Correct it."), 2),
        (NotThereYet("It is wrong.", advice="Correct it."), 1),
        (InternalError("It is wrong.", advice="Correct it."), 1),
    ],
)
def test_an_error_is_one_paragraph_and_an_exit_code(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    assert command(raising(error)) == code
    assert capsys.readouterr().err == "mldserver: It is wrong. Correct it.\n"


def test_errors_out_of_a_task_group_are_told_each(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    inner = ExceptionGroup("g", [ConfigError("Two.")])
    assert command(raising(ExceptionGroup("g", [ConfigError("One."), inner]))) == 2
    assert capsys.readouterr().err == "mldserver: One.\nmldserver: Two.\n"
    assert command(raising(ExceptionGroup("g", [ConfigError("One."), LedgerError("Two.")]))) == 1


@pytest.mark.parametrize("errors", [[ValueError("a bug")], [ConfigError("One."), ValueError("a bug")]])
def test_bugs_are_not_hidden(command: Callable[..., int], errors: list[Exception]) -> None:
    with pytest.raises(ExceptionGroup, match="g"):
        command(raising(ExceptionGroup("g", errors)))
    with pytest.raises(ValueError, match="a bug"):
        command(raising(ValueError("a bug")))


def test_an_interrupt_is_told_by_the_exit_code_alone(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("result", "code"), [(None, 0), (3, 3), ("text", 0)])
def test_a_command_returns_its_exit_code(command: Callable[..., int], result: object, code: int) -> None:
    assert command(lambda: result) == code


# serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings with which a server was run; it is a fake one that exits with 1."""
    seen: list[Settings] = []

    class Server:
        def __init__(
            self, functions: Sequence[Settings], *, drain: bool, endpoint: object, **others: object
        ) -> None:
            seen.extend(functions)
            print("drains" if drain else "serves", "with" if endpoint else "without", "an endpoint")

        async def run(self) -> int:
            print("from inside")
            return 1

        async def forced(self) -> None:
            await asyncio.Event().wait()

        def report(self) -> None:
            pass

    monkeypatch.setattr("mldserver.server.Server", Server)
    for variable in (spec.variable for spec in specs().values()):
        monkeypatch.delenv(variable, raising=False)
    return seen


@pytest.mark.parametrize("command", ["serve", "drain"])
def test_the_help_shows_the_settings_of_the_first_days_and_help_all_every_one(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert cli.run([command, "--help"]) == 0
    few = re.findall(r"--[\w-]+", capsys.readouterr().out)
    assert cli.run([command, "--help-all"]) == 0
    every = re.findall(r"--[\w-]+", capsys.readouterr().out)
    options = {spec.option: spec.common for name, spec in specs().items() if name != "handler"}
    assert {name for name in every if name in options} == set(options)
    assert {name for name in few if name in options} - {"--line-limit"} == {
        name for name, common in options.items() if common
    }, "`--line-limit` stands in the text"
    assert "--help-all" in few
    assert {"--listen", "--out", "--on-failure", "--stream"} <= set(few)


def test_the_help_tells_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "--help"]) == 0
    assert "Exit codes: 0 clean" in capsys.readouterr().out


def test_serve_runs_a_server_with_what_the_options_say(
    served: list[Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLDSERVER_GRACE", "7")
    (tmp_path / "other.toml").write_text("attempts = 5\ngrace = 8\n")
    options = ["--config", "other.toml", "--listen", ":0", "--accept-gap", "--log-file", "m.log"]
    options += ["--spark-conf", "a=1", "--spark-conf", "b=2"]
    assert cli.run(["serve", "a.b", *options]) == 1
    (settings,) = served
    assert (settings.handler, settings.attempts, settings.grace_seconds, settings.accept_gap) == (
        "a.b",
        5,
        7.0,
        True,
    )
    assert settings.spark_conf == {"a": "1", "b": "2"}
    assert str(settings.listen) == "127.0.0.1:0"
    assert b"serves with an endpoint" in (tmp_path / "m.log").read_bytes()
    assert capsys.readouterr().err == "mldserver: stopped with exit code 1; m.log says why.\n"


def test_serve_runs_all_handlers_in_one_server(
    served: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["serve", "a.orders", "b:Trips", "--out", "o", "--log-file", "m.log"]) == 1
    assert [(each.handler, str(each.out), str(each.listen)) for each in served] == [
        ("a.orders", "o/orders", "127.0.0.1:7070"),
        ("b:Trips", "o/Trips", "127.0.0.1:7080"),
    ]


def test_serve_alone_runs_the_functions_of_the_settings_file(
    served: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = '[functions.{0}]\nhandler = "a.{0}"\nlisten = ":0"\n'
    (tmp_path / "mldserver.toml").write_text(table.format("orders") + table.format("trips"))
    assert cli.run(["serve", "--log-file", "m.log"]) == 1
    assert [(each.pipeline, each.handler) for each in served] == [
        ("orders", "a.orders"),
        ("trips", "a.trips"),
    ]


def test_serve_needs_a_handler_from_somewhere(
    served: list[Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["serve"]) == 2
    assert "No handler was named." in capsys.readouterr().err
    assert served == []


def test_drain_runs_a_server_that_only_drains(
    served: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = SqliteStore(tmp_path / "o" / LEDGER, pipeline="b", server_id="one")
    ledger.open(now_ms=0)
    ledger.close()
    assert cli.run(["drain", "a.b", "--out", "o", "--log-file", "m.log"]) == 1
    (settings,) = served
    assert (settings.handler, str(settings.out)) == ("a.b", "o")
    assert b"drains without an endpoint" in (tmp_path / "m.log").read_bytes()


def test_a_drain_where_there_is_no_ledger_is_refused_and_makes_none(
    served: list[Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["drain", "a.b", "--out", "o"]) == 2
    told = capsys.readouterr().err
    assert "There is no ledger at o/_mldserver/ledger.sqlite." in told
    assert "Name the output folder of a pipeline that ran." in told
    assert (served, list(tmp_path.iterdir())) == ([], [])


def test_serve_tells_wrong_settings_before_it_starts_anything(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", "a.b", "--grace", "soon"]) == 2
    assert "grace = 'soon' (command line --grace)" in capsys.readouterr().err
    assert served == []


def test_other_commands_can_leave_settings_out() -> None:
    parameters = serve.settings_parameters(leave_out=frozenset({"handler", "listen"}))
    names = {each.name.removesuffix("_") for each in parameters}
    assert names == set(specs()) - {"handler", "listen"}
