from __future__ import annotations

import re
from pathlib import Path

import pytest
import structlog
from support.checked_logger import CheckedLogger, SchemaError, check_event
from support.generated import events_page

from mldserver.observe.log_events import COMMON_FIELDS, EVENTS, TABLE

pytestmark = pytest.mark.quick

DOCS = Path(__file__).parents[2] / "mldserver" / "docs"
LEVELS = {"debug", "info", "warning", "error", "critical"}


@pytest.fixture
def forgiven() -> object:
    """For tests that break the schema on purpose."""
    yield
    CheckedLogger.violations.clear()


def test_a_registered_event_passes() -> None:
    check_event("info", "server.ready", {"seconds", "pipeline", "exc_info"})


@pytest.mark.parametrize(
    ("level", "event", "fields", "told"),
    [
        ("info", "server.redy", (), "not registered"),
        ("info", None, (), "not registered"),
        ("info", ["server.ready"], (), "not registered"),
        ("error", "server.ready", (), "registered at info, not at error"),
        ("info", "server.ready", ("colour", "seconds", "alpha"), "no fields alpha, colour"),
    ],
)
def test_what_is_not_registered_is_refused(
    level: str, event: object, fields: tuple[str, ...], told: str
) -> None:
    with pytest.raises(SchemaError, match=told):
        check_event(level, event, fields)


@pytest.mark.usefixtures("forgiven")
def test_a_violation_is_remembered_even_when_the_error_is_swallowed() -> None:
    log = structlog.get_logger("mldserver")
    for call in (
        lambda: log.info("no.such"),
        lambda: log.bind(colour=1).info("server.ready"),
        lambda: log.exception("server.ready"),  # noqa: LOG004  # its level is what is wrong here
    ):
        with pytest.raises(SchemaError):
            call()
    with structlog.contextvars.bound_contextvars(colour=1), pytest.raises(SchemaError):
        log.info("server.ready", seconds=1)
    assert len(CheckedLogger.violations) == 4


def test_the_suite_sees_what_was_logged(logged: list[dict[str, object]]) -> None:
    with structlog.contextvars.bound_contextvars(pipeline="p"):
        structlog.get_logger("mldserver").info("server.ready", seconds=2)
    assert logged == [{"level": "info", "event": "server.ready", "seconds": 2, "pipeline": "p"}]


def test_every_event_is_described_by_the_rules() -> None:
    assert len(EVENTS) == len(re.findall(r"^\w", TABLE, re.MULTILINE)), "one name stands there twice"
    for name, spec in EVENTS.items():
        assert re.fullmatch(r"[a-z]+\.[a-z_]+", name), name
        assert set(spec.levels.split("|")) <= LEVELS, name
        assert spec.meaning.endswith("."), name
        assert not set(spec.fields) & COMMON_FIELDS, name
        assert len(set(spec.fields)) == len(spec.fields), name


def test_every_event_that_the_code_logs_is_registered() -> None:
    package = Path(__file__).parent.parent.parent / "mldserver"
    sources = [path.read_text("utf-8") for path in package.rglob("*.py") if path.name != "events.py"]
    called = re.compile(r"\.(?:debug|info|warning|error|critical|exception)\(\s*\"([a-z]+\.[a-z_]+)\"")
    logged = {name for source in sources for name in called.findall(source)}
    assert "log.reopened" in logged
    assert logged <= set(EVENTS)


def test_the_page_has_a_row_for_every_event() -> None:
    rows = [row for row in events_page().splitlines() if row.startswith("| `")]
    assert rows[0].startswith("| `server.starting` | info | ")
    assert sorted(row.split("`")[1] for row in rows) == sorted(EVENTS)
    assert all(row.count(" | ") == 3 for row in rows)


def test_the_page_is_what_the_registry_says() -> None:
    written = "python3 -m mldserver.observe > mldserver/docs/events.md"
    assert (DOCS / "events.md").read_text("utf-8") == events_page(), f"write it anew: {written}"
