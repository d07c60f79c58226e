"""The pages hang together: what they name is there, and every one is found."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support import generated, reference
from support.pages import DOCS, PAGES, ROOT, prose

import mldserver
from mldserver import Window, dynamodb_streams
from mldserver.base.kill_points import STEPS
from mldserver.cli import run
from mldserver.config.settings import specs
from mldserver.handler.spec import HandlerSpec
from mldserver.observe.log_events import EVENTS

pytestmark = pytest.mark.quick

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_DAEMONS_OWN = {"shutdownGraceMillis", "callProcessRecordsEvenForEmptyRecordList", "timeoutInSeconds"}


def codes(page: Path) -> Iterator[str]:
    """What a page sets in type, line by line."""
    for line in prose(page).splitlines():
        yield from _CODE.findall(line)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_the_readme_is_short() -> None:
    assert 6_000 <= (ROOT / "README.md").stat().st_size <= 8_500


def test_the_readme_links_every_page() -> None:
    linked = {Path(link).name for link in _LINK.findall((ROOT / "README.md").read_text("utf-8"))}
    assert {page.name for page in DOCS.iterdir()} - linked == set()


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


@each_page
def test_a_page_begins_with_its_title_and_what_it_tells(page: Path) -> None:
    title, nothing, summary, *_ = page.read_text("utf-8").splitlines()
    assert title.startswith("# ")
    assert (nothing, summary[:1].isupper() or summary.startswith("`mldserver")) == ("", True)


@each_page
def test_files_that_a_page_names_are_there(page: Path) -> None:
    rooms = ("mldserver/", "tests/", "deploy/", "handlers/", ".github/", ".ci/")
    named = {code.split()[0].rstrip("/") for code in codes(page) if code.startswith(rooms)}
    named |= {code for code in codes(page) if re.fullmatch(r"[\w/]+/\w+\.py", code)}
    places = (ROOT, ROOT / "mldserver")
    assert {name for name in named if not any((place / name).exists() for place in places)} == set()


@each_page
def test_events_that_a_page_names_are_logged(page: Path) -> None:
    subjects = {name.partition(".")[0] for name in EVENTS}
    named = {code for code in codes(page) if re.fullmatch(r"[a-z]+\.[a-z_]+", code)}
    attributes = {f"window.{name}" for name in inspect.signature(Window).parameters}
    assert {
        n for n in named - attributes - STEPS.keys() if n.partition(".")[0] in subjects and n not in EVENTS
    } == set()


@each_page
def test_settings_that_a_page_names_are_there(page: Path) -> None:
    set_to = re.compile(r"(\w+) = ")
    named = {match[1] for code in codes(page) if (match := set_to.match(code))}
    in_handlers = set(inspect.signature(HandlerSpec).parameters) | {"version", "plain_numbers"}
    assert named - set(specs()) - in_handlers - _DAEMONS_OWN == set()


def options_of(source: Path) -> Iterator[str]:
    """What a module of the command line, or a benchmark, may take: by its parameters, and by what it spells out."""
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        match node:
            case ast.arg(arg=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield f"--{name.replace('_', '-')}"
            case ast.Constant(value=str(text)) if text.startswith("--"):
                yield text


@cache
def known_options() -> set[str]:
    sources = [*(ROOT / "mldserver" / "cli").glob("*.py"), *(ROOT / "tests" / "bench").rglob("*.py")]
    settings = {f"--{name.replace('_', '-')}" for name in specs()}
    return (
        {option for source in sources for option in options_of(source)} | settings | {"--help", "--version"}
    )


@each_page
def test_options_that_a_page_names_are_some_commands(page: Path) -> None:
    named = {option for code in codes(page) for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", code)}
    assert named - known_options() == set()


@pytest.mark.parametrize("name", generated.PAGES)
def test_a_page_that_is_made_from_the_program_says_what_it_does(name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == generated.PAGES[name](), f"write it anew: {generated.COMMAND}"


def test_the_reference_has_every_name_that_a_handler_imports() -> None:
    described = {each.__name__ for objects in reference.SECTIONS.values() for each in objects}
    assert described == {*mldserver.__all__, *dynamodb_streams.__all__} - {"__version__", "Stream"}


def test_contributors_are_shown_every_command_of_the_task_runner() -> None:
    recipes = set(re.findall(r"^([a-z]\w*)[^:\n]*:$", (ROOT / ".justfile").read_text("utf-8"), re.MULTILINE))
    shown = set(re.findall(r"`just (\w+)`", (ROOT / ".github" / "CONTRIBUTING.md").read_text("utf-8")))
    assert shown == recipes


# mldserver help


def test_the_pages_are_listed_with_what_they_tell(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help"]) == 0
    told = capsys.readouterr().out
    for page in DOCS.iterdir():
        summary = page.read_text("utf-8").splitlines()[2]
        assert re.search(rf"^{page.stem} +{re.escape(summary)}$", told, re.MULTILINE)


@pytest.mark.parametrize("page", sorted(DOCS.iterdir()), ids=lambda page: page.stem)
def test_a_page_goes_as_it_is_to_what_is_no_terminal(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", page.stem]) == 0
    assert capsys.readouterr().out == page.read_text("utf-8")


def test_a_terminal_gets_a_page_set_for_reading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(["help", "failures"]) == 0
    told = capsys.readouterr().out
    assert "## One record" not in told
    assert "One record\n" in re.sub(r"\x1b\[[\d;]*m| +$", "", told, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("topic", "told"),
    [
        ("letters", "There is no page 'letters'. Near to it are: dead-letters"),
        ("xyz", "There are: amazon-kclpy, "),
    ],
)
def test_an_unknown_page_is_told_with_the_nearest(
    topic: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["help", topic]) == 2
    assert told in capsys.readouterr().err


def test_the_pages_are_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["mldserver"]
    shipped = {path for pattern in patterns for path in (ROOT / "mldserver").glob(pattern)}
    assert set(DOCS.iterdir()) <= shipped


# The walk


def stations() -> list[tuple[str, str, str]]:
    walk = (DOCS / "architecture.md").read_text("utf-8").partition("## A record's walk")[2]
    return re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \|", walk, re.MULTILINE)


def test_the_walk_has_its_stations_in_order() -> None:
    numbers = [int(number) for number, _, _ in stations()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 40


@pytest.mark.parametrize(("number", "file", "function"), stations(), ids=lambda value: value)
def test_a_station_of_the_walk_is_there(number: str, file: str, function: str) -> None:
    where = f"station {number} of mldserver/docs/architecture.md"
    assert (ROOT / "mldserver" / file).is_file(), f"{where}: there is no mldserver/{file}"
    module = "mldserver." + file.removesuffix(".py").replace("/", ".")
    found: object = importlib.import_module(module)
    for name in function.split("."):
        found = getattr(found, name, None)
        assert found is not None, f"{where}: mldserver/{file} has no {function}"
    assert inspect.unwrap(found).__module__ == module, (
        f"{where}: {function} is not defined in mldserver/{file}"
    )


def test_the_steps_at_which_the_walk_lets_the_process_die_are_kill_points() -> None:
    dies = (
        (DOCS / "architecture.md")
        .read_text("utf-8")
        .partition("### If the process dies")[2]
        .partition("\n## ")[0]
    )
    named = {
        code
        for row in dies.splitlines()
        if row.startswith("| `")
        for code in _CODE.findall(row.split("|")[1])
    }
    assert named
    assert named <= STEPS.keys()
