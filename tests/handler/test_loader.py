"""From a dotted path to a module or class: what is missing is told apart from what is broken."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import structlog

from mldserver.errors import HandlerInvalid, HandlerNotFound, HandlerUnready
from mldserver.handler import loader
from mldserver.handler.loader import load, relative

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Work in a folder of our own; what is imported from it is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(path: Any, text: Any = "") -> Any:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()
        return file

    return write


def test_a_module_in_the_working_directory_is_found(write: Any) -> None:
    write("mine_one.py", "x = 1")
    loaded = load("mine_one")
    assert isinstance(loaded.target, ModuleType)
    assert (loaded.target, loaded.name, loaded.target.x) == (loaded.module, "", 1)


def test_another_directory_can_be_named_and_comes_first(write: Any, tmp_path: Path) -> None:
    write("elsewhere/mine_two.py", "x = 2")
    assert load("mine_two", directory=tmp_path / "elsewhere").target.x == 2


def test_a_directory_that_is_first_already_is_not_put_there_twice(write: Any, tmp_path: Path) -> None:
    write("mine_three.py")
    load("mine_three")
    load("mine_three")
    assert sys.path.count(str(tmp_path.resolve())) == 1


def test_a_class_is_found_also_inside_another(write: Any) -> None:
    write("mine_four.py", "class Outer:\n    class Inner: pass")
    loaded = load("mine_four:Outer.Inner")
    assert (loaded.target.__qualname__, loaded.name) == ("Outer.Inner", "Outer.Inner")


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("handlers/departures.py", "Write it as a module, not as a file: handlers.departures"),
        ("departures.py:", "Write package.module or package.module:Name."),
        ("a b", "Write package.module or package.module:Name."),
        ("", "Write package.module or package.module:Name."),
        ("a..b", "Write package.module or package.module:Name."),
    ],
)
def test_what_is_no_dotted_path_is_told_with_the_right_form(path: Any, advice: Any) -> None:
    with pytest.raises(HandlerNotFound, match="is not a dotted path") as caught:
        load(path)
    assert caught.value.advice == advice


@pytest.mark.parametrize("path", ["mine_file.py", "./mine_file.py"])
def test_a_file_in_the_folder_is_no_module(write: Any, path: str) -> None:
    write("mine_file.py")
    with pytest.raises(HandlerNotFound, match="is not a dotted path") as caught:
        load(path)
    assert caught.value.advice == "Write it as a module, not as a file: mine_file"


def test_an_import_that_hangs_is_told_with_its_place(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, over = threading.Event(), threading.Event()
    monkeypatch.setattr(loader, "hanging", hanging, raising=False)
    monkeypatch.setattr(loader, "over", over, raising=False)

    class UntilItHangs(threading.Event):
        """What waits for its end sees it only when it hangs, however long that takes."""

        def wait(self, timeout: float | None = None) -> bool:
            return super().wait() if timeout is None else not hanging.wait()

    waiting = SimpleNamespace(Event=UntilItHangs, Thread=threading.Thread)
    monkeypatch.setattr(loader, "threading", waiting)
    write(
        "mine_hangs.py",
        "from mldserver.handler import loader\n\ndef connect():\n    loader.hanging.set()\n    loader.over.wait()\n\nconnect()\n",
    )
    with pytest.raises(HandlerUnready) as caught:
        load("mine_hangs")
    over.set()
    where = caught.value.where
    assert (where["file"].rpartition("/")[2], where["line"] in {4, 5}) == ("mine_hangs.py", True)
    assert "importing the handler takes longer than 120 s." in caught.value.what
    assert "Move slow or blocking code" in caught.value.advice


def test_a_missing_module_is_told_with_the_folder_searched_and_a_close_match(
    write: Any, tmp_path: Path
) -> None:
    write("departures_mine.py")
    with pytest.raises(HandlerNotFound) as caught:
        load("departure_mine")
    assert caught.value.what == "There is no module 'departure_mine'."
    assert str(tmp_path.resolve()) in caught.value.advice
    assert caught.value.advice.endswith("Did you mean departures_mine?")


def test_a_missing_module_of_a_package_is_told_with_a_close_match_in_it(write: Any) -> None:
    write("shop/__init__.py")
    write("shop/orders.py")
    with pytest.raises(HandlerNotFound) as caught:
        load("shop.order")
    assert caught.value.what == "There is no module 'shop.order'."
    assert caught.value.advice == "It was searched in the package shop. Did you mean shop.orders?"


def test_a_missing_package_is_told_by_its_own_name() -> None:
    with pytest.raises(HandlerNotFound, match="There is no module 'nowhere_at_all'") as caught:
        load("nowhere_at_all.x.y")
    assert "Did you mean" not in caught.value.advice


def test_a_module_under_a_plain_module_is_missing(write: Any) -> None:
    write("flat.py")
    with pytest.raises(HandlerNotFound, match=r"There is no module 'flat\.x'"):
        load("flat.x")


def test_a_missing_attribute_is_told_differently_with_a_close_match(write: Any) -> None:
    write("mine_five.py", "class Clicks:\n    class Deep: pass\n_Clack = 1")
    with pytest.raises(HandlerNotFound) as caught:
        load("mine_five:Click")
    assert caught.value.what == "The module mine_five is there, but mine_five has no attribute 'Click'."
    assert caught.value.advice == "Did you mean Clicks?"
    with pytest.raises(HandlerNotFound, match=r"but mine_five\.Clicks has no attribute 'Zebra'") as caught:
        load("mine_five:Clicks.Zebra")
    assert caught.value.advice == ""


def test_an_import_error_inside_the_users_module_is_shown_as_it_is(write: Any) -> None:
    write("mine_six.py", "\nimport no_such_thing_anywhere\n")
    with pytest.raises(HandlerInvalid) as caught:
        load("mine_six")
    assert caught.value.what == "mine_six.py:2: ModuleNotFoundError: No module named 'no_such_thing_anywhere'"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "import no_such_thing_anywhere" in caught.value.where["traceback"]


def test_an_error_deep_below_the_users_module_is_placed_where_it_was_raised(write: Any) -> None:
    write("mine_seven.py", "import mine_eight\n")
    write("mine_eight.py", "def f():\n    raise ValueError('a\\nb')\nf()\n")
    with pytest.raises(HandlerInvalid) as caught:
        load("mine_seven")
    assert caught.value.what == "mine_eight.py:2: ValueError: a\nb"
    assert caught.value.where["line"] == 2


def test_a_syntax_error_is_placed_in_the_users_file(write: Any) -> None:
    write("mine_nine.py", "x = 1\ndef f(:\n")
    with pytest.raises(HandlerInvalid, match=r"mine_nine\.py:2: SyntaxError: invalid syntax"):
        load("mine_nine")


def test_a_file_that_is_no_source_is_told_without_a_place(tmp_path: Path) -> None:
    (tmp_path / "mine_ten.py").write_bytes(b"\0")
    with pytest.raises(HandlerInvalid, match="source code string cannot contain null bytes"):
        load("mine_ten")


def test_a_service_that_does_not_answer_at_import_may_by_the_next_start(write: Any) -> None:
    write("asks.py", "raise ConnectionRefusedError(111, 'Connection refused')")
    with pytest.raises(
        HandlerUnready, match=r"asks\.py:1: ConnectionRefusedError: .*Connection refused"
    ) as caught:
        load("asks")
    assert not caught.value.lasting


def test_ending_the_process_at_import_does_not_end_it(write: Any) -> None:
    write("mine_eleven.py", "import sys\nsys.exit(3)")
    with pytest.raises(HandlerInvalid, match=r"mine_eleven\.py:2: it ends the process .* \(sys\.exit\(3\)\)"):
        load("mine_eleven")


def test_ctrl_c_at_import_is_the_operators(write: Any) -> None:
    write("mine_twelve.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load("mine_twelve")


def test_a_package_of_the_users_does_not_hide_the_ready_made_one(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "handlers"]:
        monkeypatch.delitem(sys.modules, name)
    write("handlers/__init__.py")
    write("handlers/mine.py", "x = 1")
    assert load("handlers.mine").target.x == 1
    assert load("handlers.raw").target.schema.startswith("data BINARY")
    with pytest.raises(HandlerNotFound, match=r"There is no module 'handlers\.nothing'"):
        load("handlers.nothing")


@pytest.mark.parametrize(
    "text",
    [
        "structlog.configure(processors=[], logger_factory=structlog.PrintLoggerFactory())",
        "structlog.reset_defaults()",
        "structlog.get_config()['processors'].clear()",
    ],
)
def test_what_a_module_does_to_structlog_at_import_is_undone(
    write: Any, text: str, logged: list[dict[str, Any]]
) -> None:
    write("loud.py", f"import structlog\n{text}\n")
    load("loud")
    structlog.get_logger("mldserver").info("server.stopped", exit_code=0, seconds=0.0)
    assert [entry["event"] for entry in logged] == ["server.stopped"]


def test_structlog_is_not_configured_by_an_import_where_it_was_not_before(write: Any) -> None:
    write("loud.py", "import structlog\nstructlog.configure(processors=[])\n")
    structlog.reset_defaults()
    load("loud")
    assert not structlog.is_configured()


def test_an_import_that_leaves_structlog_alone_never_touches_its_configuration(
    write: Any, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in ("configure", "reset_defaults"):
        monkeypatch.setattr(structlog, change, lambda *_, **__: pytest.fail("the loop may log just now"))
    write("quiet.py", "import structlog\n")
    load("quiet")


def test_files_below_the_working_directory_are_told_by_their_path_from_it(tmp_path: Path) -> None:
    assert relative(str(tmp_path.resolve() / "a" / "b.py")) == "a/b.py"
    assert relative("/nowhere/b.py") == "/nowhere/b.py"
