from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mldserver.base import kill_points
from mldserver.config.resolve import resolve

PACKAGE = Path(kill_points.__file__).parents[1]


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that this process would have sent itself; disarmed in the end."""
    signals: list[int] = []
    monkeypatch.setattr(kill_points.os, "kill", lambda _pid, number: signals.append(number))
    yield signals
    kill_points.arm(None)


def named_in_calls() -> set[str]:
    """The texts in the arguments of every call of ``kill_point`` in the package."""
    calls = [
        node
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "kill_point"
    ]
    texts = [[n.value for n in ast.walk(call) if isinstance(n, ast.Constant)] for call in calls]
    assert all(texts), "a step is named where it is, so that it can be found"
    return {str(text) for each in texts for text in each}


def test_every_call_names_a_listed_step_and_every_listed_step_has_a_call() -> None:
    assert named_in_calls() == set(kill_points.STEPS)


def test_nothing_happens_where_nothing_is_armed(killed: list[int]) -> None:
    kill_points.arm(None)
    for step in kill_points.STEPS:
        kill_points.kill_point(step)
    kill_points.arm("")
    kill_points.kill_point("window.cut")
    assert killed == []


def test_the_process_ends_the_nth_time_it_comes_to_its_step_and_at_no_other(killed: list[int]) -> None:
    kill_points.arm("window.cut:3")
    kill_points.kill_point("window.cut")
    kill_points.kill_point("window.committed")
    kill_points.kill_point("window.cut")
    assert killed == []
    kill_points.kill_point("window.cut")
    assert killed == [signal.SIGKILL]
    kill_points.arm("window.cut")
    kill_points.kill_point("window.cut")
    assert killed == [signal.SIGKILL] * 2


def test_of_several_steps_it_ends_at_the_first_that_comes_and_tells_which(killed: list[int]) -> None:
    told: list[str] = []
    kill_points.arm("window.cut:2,flush.done,window.committed", tell=told.append)
    kill_points.kill_point("window.cut")
    assert (killed, told) == ([], [])
    for step in ("window.committed", "window.cut", "flush.done"):
        kill_points.kill_point(step)
    assert (killed, told) == ([signal.SIGKILL], ["window.committed"])


def test_a_process_may_hang_at_its_step_instead(killed: list[int]) -> None:
    kill_points.arm("window.cut", signal.SIGSTOP)
    kill_points.kill_point("window.cut")
    kill_points.kill_point("window.cut")
    assert killed == [signal.SIGSTOP]


@pytest.mark.parametrize(
    "told", ["window.shut", "window.cut:0", "window.cut:-1", "window.cut:x", ":1", "window.cut,,flush.done"]
)
def test_a_step_that_is_none_is_refused_with_its_name(told: str) -> None:
    with pytest.raises(ValueError, match=f"MLDSERVER_KILL_AT={told}: "):
        kill_points.arm(told)


def test_the_environment_arms_a_process_and_is_no_setting() -> None:
    program = "from mldserver.base.kill_points import kill_point as k\nk('window.cut'); print('once', flush=True); k('window.cut')"
    environ = {**os.environ, kill_points.KILL_VARIABLE: "window.cut:2"}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"once\n")
    assert (
        resolve({"handler": "h"}, environ={kill_points.KILL_VARIABLE: "window.cut"}, folder=Path("/")).handler
        == "h"
    )
