"""Holds log calls to the registry: tests run with this check, so that the documented schema is the real one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import structlog

from mldserver.observe.log_events import COMMON_FIELDS, EVENTS

__all__ = ["CheckedLogger", "SchemaError", "check_event"]

_LOGGING_OWN: Final = frozenset({"exc_info", "stack_info", "stack"})
"""Arguments and results of structlog itself."""
_LEVEL_OF_METHOD: Final = {"warn": "warning", "exception": "error", "fatal": "critical"}


class SchemaError(AssertionError):
    """A log call does not follow the registry in ``log_events.py``."""


def check_event(level: str, event: object, fields: Iterable[str]) -> None:
    """Raise SchemaError when the event is not registered, or not at this level, or not with these fields."""
    spec = EVENTS.get(event) if isinstance(event, str) else None
    if spec is None:
        raise SchemaError(f"log event {event!r} is not registered in mldserver/observe/log_events.py")
    if level not in spec.levels.split("|"):
        raise SchemaError(f"log event {event!r} is registered at {spec.levels}, not at {level}")
    unknown = sorted(set(fields) - COMMON_FIELDS - set(spec.fields) - _LOGGING_OWN)
    if unknown:
        raise SchemaError(f"log event {event!r} has no fields {', '.join(unknown)}")


class CheckedLogger(structlog.make_filtering_bound_logger(0)):  # type: ignore[misc]  # a class made at run time
    """A bound logger that checks each call, and remembers what it found even if the error is swallowed."""

    violations: Final[list[SchemaError]] = []

    def _proxy_to_logger(self, method_name: str, event: Any = None, *args: Any, **fields: Any) -> Any:
        known = self._context | structlog.contextvars.get_contextvars() | fields
        try:
            check_event(_LEVEL_OF_METHOD.get(method_name, method_name), event, known)
        except SchemaError as error:
            self.violations.append(error)
            raise
        return super()._proxy_to_logger(method_name, event, *args, **fields)
