"""Test lanes (see .github/CONTRIBUTING.md), and a checked log: ``logged`` holds the events that a test logged."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from support.checked_logger import CheckedLogger
from support.lanes import EXAMPLES, PROCESSES
from support.parsed_once import parse_once
from support.spark_classes import archiving

from mldserver.observe.writer import LogWriter

pytest_plugins = ["support.spark_session"]

# The tests start hundreds of interpreters: without bytecode each would compile all of mldserver.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The default port is one, and tests run side by side: who wants an admin endpoint says where.
os.environ["MLDSERVER_ADMIN"] = "none"

parse_once()

# A log is written to its end, however slow the machine is.
LogWriter.close.__defaults__ = (600.0,)

# How fast a machine is, and what else runs on it, says nothing about what is tested.
for lane, examples in EXAMPLES.items():
    settings.register_profile(
        lane, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the long lane."""
    parser.addoption("--long", action="store_true", help="soak: many more worlds, kills and examples")


def pytest_configure(config: pytest.Config) -> None:
    """Load the lane's number of Hypothesis examples."""
    settings.load_profile(lane_of(config))


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Iterator[object]:
    """Archive Spark's classes during a whole run with Spark, for all its processes."""
    whole = config.args_source is config.ArgsSource.TESTPATHS and not config.option.collectonly
    with_spark = whole and not config.option.markexpr and not hasattr(config, "workerinput")
    with archiving() if with_spark else nullcontext():
        return (yield)


def lane_of(config: pytest.Config) -> str:
    """Return the lane that the command line asks for."""
    marker = str(config.option.markexpr).partition(" ")[0]
    return "long" if config.option.long else marker if marker in EXAMPLES else "day"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run a whole lane in several processes, and named tests in this process, where a debugger reaches them."""
    return PROCESSES[lane_of(config)] if config.args_source is config.ArgsSource.TESTPATHS else 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files without the lane's marker: importing all of them takes longer than the quick tests."""
    if (lane := lane_of(config)) not in {"quick", "core", "services"} or collection_path.suffix != ".py":
        return None
    return None if f"mark.{lane}" in collection_path.read_text("utf-8") else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other lanes, and put the tests that start a JVM first.

    xdist gives each process a run of neighbouring tests, and balances later. The JVM tests thus start at once, in
    one process, where they share a Spark session.
    """
    if not config.option.long:
        whole = config.args_source is config.ArgsSource.TESTPATHS
        others = {"long"} | ({"services"} if whole and lane_of(config) != "services" else set())
        left_out = {item for item in items if any(map(item.get_closest_marker, others))}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the seeds of the long lane."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        if config.option.long and report.when == "call":
            for line in report.capstdout.splitlines():
                if "seed" in line.lower():
                    terminalreporter.write_line(f"{report.nodeid}: {line}")


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether this is the long lane."""
    return bool(request.config.option.long)


@pytest.fixture
def no_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a worker alone never dies: no standby worker is started, which would cost a second of the processor."""
    monkeypatch.setattr("mldserver.workers.standby.StandbyWorkers.run", lambda _: asyncio.Event().wait())


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[dict[str, Any]]]:
    """The events that the test logged, each with ``event`` and ``level``; unregistered ones fail the test."""
    events: list[dict[str, Any]] = []

    def capture(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        events.append(event)
        raise structlog.DropEvent

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            capture,
        ],
        wrapper_class=CheckedLogger,
        cache_logger_on_first_use=False,
    )
    CheckedLogger.violations.clear()
    yield events
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    violations = list(CheckedLogger.violations)
    CheckedLogger.violations.clear()
    assert not violations, violations


@pytest.fixture(autouse=True)
def forgotten_handlers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A handler that a test wrote is imported by that test alone, whatever others of its name there were before."""
    before = set(sys.modules)
    yield
    root = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(root):
            del sys.modules[name]
