"""The settings that say what becomes of records that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mldserver.assembly import _failure_policy
from mldserver.config.kinds import failure_rules
from mldserver.config.resolve import resolve
from mldserver.config.settings import Settings
from mldserver.errors import ConfigError
from mldserver.runtime.failure_policy import FailurePolicy, FailureRule, OnFailure, OnKeyFailure

pytestmark = pytest.mark.quick

RULES = (FailureRule("KeyError", OnFailure.SKIP), FailureRule("requests.Timeout", attempts=10))


@pytest.mark.parametrize(
    "raw",
    [
        "KeyError=skip,requests.Timeout=retry:10",
        " KeyError = skip ; requests.Timeout=retry:10 ;",
        ["KeyError=skip", "requests.Timeout=retry:10"],
        ("KeyError=skip, requests.Timeout=retry:10",),
        {"KeyError": "skip", "requests": {"Timeout": "retry:10"}},
    ],
)
def test_rules_are_read_from_every_source(raw: Any) -> None:
    kind = failure_rules
    assert kind.parse(raw) == RULES
    assert kind.parse(kind.show(RULES)) == RULES


@pytest.mark.parametrize("raw", [5, "KeyError", "KeyError=explode", "KeyError=skip,KeyError=halt"])
def test_impossible_rules_are_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match=r"it is not a list|is not CLASS|has two rules"):
        failure_rules.parse(raw)


def test_impossible_rules_end_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="failure_rules"):
        resolve({"handler": "h", "failure_rules": ["KeyError=explode"]}, environ={}, folder=tmp_path)


def test_the_settings_make_the_policy() -> None:
    settings = Settings(
        handler="h",
        attempts=5,
        retry_base_seconds=0.5,
        on_failure=OnFailure.SKIP,
        max_age_ms=60_000,
        failure_rules=RULES,
        on_key_failure=OnKeyFailure.PARK,
    )
    assert _failure_policy(settings) == FailurePolicy(
        attempts=5,
        retry_base_seconds=0.5,
        on_failure=OnFailure.SKIP,
        max_age_ms=60_000,
        failure_rules=RULES,
        on_key_failure=OnKeyFailure.PARK,
        log_error_messages=False,
    )
    assert _failure_policy(Settings(handler="h")) == FailurePolicy(log_error_messages=False)


@pytest.mark.parametrize(
    ("given", "bound_ms"),
    [({}, None), ({"on_ahead": "fail"}, 600_000), ({"on_ahead": "fail", "max_ahead_ms": None}, None)],
)
def test_rows_that_run_ahead_fail_only_where_they_are_to(given: dict[str, Any], bound_ms: int | None) -> None:
    assert _failure_policy(Settings(handler="h", **given)).max_ahead_ms == bound_ms
