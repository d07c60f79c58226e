"""amazon_kclpy's stand-in: there while a handler is imported, and only where nothing is installed."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from mldserver.handler.kclpy.amazon_kclpy import CheckpointError, checkpoint_error, standing_in

pytestmark = pytest.mark.quick

ABSENT = pytest.mark.usefixtures("without_amazon_kclpy")


@ABSENT
def test_every_name_that_processors_take_is_there_while_it_stands_in() -> None:
    with standing_in():
        from amazon_kclpy import kcl, messages  # noqa: F401
        from amazon_kclpy.checkpoint_error import CheckpointError as TheirError
        from amazon_kclpy.messages import ProcessRecordsInput, ShutdownInput  # noqa: F401
        from amazon_kclpy.v2 import processor as v2
        from amazon_kclpy.v3 import processor as v3
    assert kcl.CheckpointError is TheirError is CheckpointError
    bases = [kcl.RecordProcessorBase, v2.RecordProcessorBase, v3.RecordProcessorBase]
    assert [base.version for base in bases] == [1, 2, 3]
    assert {base().shutdown_requested(None) for base in bases} == {None}


@ABSENT
def test_what_a_hook_imports_later_is_there_too_once_a_handler_has_imported_any_of_it() -> None:
    with standing_in():
        import amazon_kclpy  # noqa: F401
    assert importlib.import_module("amazon_kclpy.v3.processor") is sys.modules["amazon_kclpy.v3.processor"]


@ABSENT
def test_without_such_a_handler_there_is_no_amazon_kclpy() -> None:
    before = list(sys.meta_path)
    with standing_in():
        pass
    assert sys.meta_path == before
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("amazon_kclpy")


@ABSENT
def test_a_handler_that_cannot_be_imported_leaves_nothing_behind() -> None:
    before = list(sys.meta_path)

    def broken() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), standing_in():
        broken()
    assert sys.meta_path == before


@ABSENT
def test_a_process_that_is_run_at_import_is_refused_with_advice() -> None:
    with standing_in():
        from amazon_kclpy import kcl
    with pytest.raises(RuntimeError, match="__main__"):
        kcl.KCLProcess(object()).run()


@ABSENT
def test_it_stands_in_for_nothing_else() -> None:
    with standing_in(), pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module")


@ABSENT
def test_a_part_that_an_installed_package_lacks_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amazon_kclpy", ModuleType("amazon_kclpy"))
    with standing_in(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("amazon_kclpy.v3.processor")


def test_an_installed_package_is_used_as_it_is() -> None:
    with standing_in():
        from amazon_kclpy import kcl
        from amazon_kclpy.checkpoint_error import CheckpointError as TheirError
    assert kcl.KCLProcess.__init__.__module__ == "amazon_kclpy.kcl"
    assert TheirError is not CheckpointError
    assert checkpoint_error() is TheirError


@ABSENT
def test_the_error_is_found_where_old_versions_have_it_and_is_ours_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert checkpoint_error() is CheckpointError

    class Theirs(Exception):
        pass

    old = ModuleType("amazon_kclpy.kcl")
    old.CheckpointError = Theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "amazon_kclpy.kcl", old)
    assert checkpoint_error() is Theirs
