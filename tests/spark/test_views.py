"""Views of published windows in one session, which jobs that run side by side share."""

from __future__ import annotations

from typing import Any

import pytest

from mldserver.engine_jobs import FunctionView
from mldserver.spark.query_job import Views


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The paths of the views that were made, in order."""
    found: list[tuple[str, ...]] = []

    class Frame:
        def __init__(self, view: FunctionView) -> None:
            self.paths = view.paths

        def createOrReplaceTempView(self, _name: str) -> None:  # noqa: N802  # Spark's name
            found.append(self.paths)

    monkeypatch.setattr(Views, "_frame", lambda _, view: Frame(view))
    return found


def view(serial: int, *paths: str) -> FunctionView:
    return FunctionView("payments", paths, serial=serial)


def test_a_view_is_made_again_only_where_its_files_changed(made: list[Any]) -> None:
    views = Views(None, lambda _: None)  # type: ignore[arg-type]  # no Spark is asked
    views.make([view(1, "a")])
    views.make([view(2, "a")])
    views.make([view(3, "a", "b")])
    assert made == [("a",), ("a", "b")]


def test_a_job_with_an_older_view_never_takes_away_what_a_job_beside_it_needs(made: list[Any]) -> None:
    views = Views(None, lambda _: None)  # type: ignore[arg-type]  # see above
    views.make([view(2, "a", "b")])
    views.make([view(1, "a")])
    views.make([view(2, "a", "b")])
    assert made == [("a", "b")]


def test_a_view_that_shows_nothing_yet_is_not_made(made: list[Any]) -> None:
    views = Views(None, lambda _: None)  # type: ignore[arg-type]  # see above
    views.make([view(1)])
    assert made == []
