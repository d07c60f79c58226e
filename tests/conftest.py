"""Lanes of tests (see support/lanes.py), and a log that is checked: ``logged`` holds what a test logged."""

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
from support.lanes import EXAMPLES, PROCESSES, allowed_seconds, dealt, is_quick, needs_services
from support.spark_classes import archiving

from mldserver.observe.writer import LogWriter

pytest_plugins = ["support.spark_session"]

# The tests start hundreds of interpreters: without bytecode each would compile all of mldserver.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The default port is one, and tests run side by side: who wants an admin endpoint says where.
os.environ["MLDSERVER_ADMIN"] = "none"

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
    """Draw as many examples as the lane has time for."""
    settings.load_profile(lane_of(config))


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Iterator[object]:
    """Have Spark's classes archived beside a whole run with Spark, for all its processes."""
    whole = config.args_source is config.ArgsSource.TESTPATHS and not config.option.collectonly
    with_spark = whole and not config.option.markexpr and not hasattr(config, "workerinput")
    with archiving() if with_spark else nullcontext():
        return (yield)


def lane_of(config: pytest.Config) -> str:
    """Return which lane was asked for."""
    return "long" if config.option.long else "quick" if config.option.markexpr == "quick" else "day"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A whole lane runs in some processes; what is named runs in this one, where a debugger reaches it."""
    return PROCESSES[lane_of(config)] if config.args_source is config.ArgsSource.TESTPATHS else 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the quick lane nothing else is even imported."""
    quick = config.option.markexpr == "quick"
    return True if quick and collection_path.suffix == ".py" and not is_quick(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark what is quick, leave out what other lanes run, and let each process begin with what takes longest."""
    for item in items:
        if is_quick(item.path):
            item.add_marker("quick")
        if needs_services(item.path):
            item.add_marker("services")
    if not config.option.long:
        whole = config.args_source is config.ArgsSource.TESTPATHS
        services = whole and config.option.markexpr != "services"
        others = [
            item
            for item in items
            if item.get_closest_marker("long") or (services and item.get_closest_marker("services"))
        ]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    yield
    # After ``-m`` and ``-k`` have chosen.
    if (processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        items[:] = dealt(items, processes)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the tests that take longer than their lane allows, and the long lane's seeds."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        if config.option.long and report.when == "call":
            for line in report.capstdout.splitlines():
                if "seed" in line.lower():
                    terminalreporter.write_line(f"{report.nodeid}: {line}")
        allowed = allowed_seconds(lane := lane_of(config), report.keywords)
        if report.when == "call" and report.duration > allowed:
            took = f"{report.duration:.0f} s, of {allowed:.0f} s"
            terminalreporter.write_line(f"too slow for the {lane} lane: {report.nodeid} ({took})")


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether this is the long lane."""
    return bool(request.config.option.long)


@pytest.fixture
def no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a worker alone never dies: no process waits in reserve, which costs a second of the processor."""
    monkeypatch.setattr("mldserver.workers.spares.Spares.run", lambda _: asyncio.Event().wait())


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
