from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
from pyspark.sql import DataFrame

from mldserver.engine_jobs import FINAL, REVISION, WINDOW
from mldserver.errors import HandlerInvalid
from mldserver.sinks.sink import check_result
from mldserver.spark.window_job import WindowHook, hook_of
from mldserver.windows import Window

A_WINDOW = Window("w", None, None)


class Rows(DataFrame):
    """A DataFrame in name: what is tested does not look inside."""

    def __new__(cls) -> Self:
        return object.__new__(cls)


def test_without_on_window_the_rows_are_the_result() -> None:
    rows = Rows()
    assert hook_of(SimpleNamespace()).apply(rows, A_WINDOW) is rows


def test_a_modules_function_is_called_with_rows_and_window() -> None:
    seen = []

    def on_window(rows: Any, window: Window) -> Any:
        seen.append((rows, window))
        return rows

    rows = Rows()
    assert hook_of(SimpleNamespace(on_window=on_window)).apply(rows, A_WINDOW) is rows
    assert seen == [(rows, A_WINDOW)]


def test_a_function_that_takes_the_result_before_gets_it_and_none_for_the_first_window() -> None:
    seen = []

    def on_window(rows: Any, window: Window, previous: Any) -> Any:
        seen.append(previous)
        return rows

    rows, before = Rows(), Rows()
    hook = replace(hook_of(SimpleNamespace(on_window=on_window)), read_view={"v": before}.get)
    assert hook.apply(rows, A_WINDOW) is rows
    hook.apply(rows, A_WINDOW, cast("Any", "v"))
    assert seen == [None, before]


def test_a_class_is_instantiated_once() -> None:
    class Handler:
        made = 0

        def __init__(self) -> None:
            Handler.made += 1

        def on_window(self, rows: Any, window: Window) -> Any:
            return rows

    pipeline = hook_of(Handler)
    for _ in range(3):
        pipeline.apply(Rows(), A_WINDOW)
    assert Handler.made == 1


def test_an_async_hook_is_run_to_its_end() -> None:
    async def on_window(rows: Any, window: Window) -> Any:
        await asyncio.sleep(0)
        return rows

    rows = Rows()
    assert hook_of(SimpleNamespace(on_window=on_window)).apply(rows, A_WINDOW) is rows


def test_none_is_an_answer_of_a_handler_that_says_it_writes_for_itself() -> None:
    handler = SimpleNamespace(on_window=lambda _rows, _window: None, writes_for_itself=True)
    assert hook_of(handler).apply(Rows(), A_WINDOW) is None


def test_the_columns_of_the_bounds_are_those_that_the_handler_names() -> None:
    assert hook_of(SimpleNamespace()).window_columns == ("window_start", "window_end")
    named = SimpleNamespace(window_columns=("since", "until"), on_window=lambda rows, _window: rows)
    assert hook_of(named).window_columns == ("since", "until")
    assert hook_of(SimpleNamespace(window_columns=None, on_window=None)) == WindowHook(
        None, window_columns=None
    )


@pytest.mark.parametrize(
    ("value", "said"), [(None, "nothing"), (5, "an int"), ("x", "a str"), ([], "a list")]
)
def test_anything_else_is_the_handlers_error(value: object, said: str) -> None:
    with pytest.raises(HandlerInvalid, match=f"on_window returned {said}, not a Spark DataFrame"):
        hook_of(SimpleNamespace(on_window=lambda _rows, _window: value)).apply(Rows(), A_WINDOW)


def test_columns_that_a_table_adds_itself_are_the_handlers_error() -> None:
    check_result(["carrier", "_final"])
    with pytest.raises(ValueError, match="returned the column _window, which the table sink adds"):
        check_result(["carrier", "_WINDOW"])
    with pytest.raises(ValueError, match="returned the column _final, which"):
        check_result(["carrier", "_final"], (WINDOW, REVISION, FINAL))
