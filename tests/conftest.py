"""Every test logs through a check of the event registry; ``logged`` holds what was logged."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from mldserver.observe.schema import CheckedLogger

if TYPE_CHECKING:
    from collections.abc import Iterator

# How fast a machine is, and what else runs on it, says nothing about what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


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
    yield
    root = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(root):
            del sys.modules[name]
