"""Raw values of settings, as the settings file, the files of functions and the environment give them, each with its origin."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from mldserver.base.kill_points import KILL_VARIABLE
from mldserver.config.settings import (
    CONFIG_FILE,
    ENV_PREFIX,
    FROM_VARIABLES,
    REMOVED,
    functions_folder,
    specs,
)
from mldserver.errors import ConfigError

CONFIG_VARIABLE: Final = f"{ENV_PREFIX}CONFIG"
FUNCTIONS: Final = "functions"
"""The TOML table whose tables are functions."""

_FUNCTION_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_CONSTANTS: Final = "settings"
"""The key of a function's table that gives ``handler_settings``, which handlers read as ``ctx.settings``."""
_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_KEY: Final = r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'"""
_LINE: Final = re.compile(rf"\s*(?P<header>\[?)\s*(?P<keys>(?:{_KEY})(?:\s*\.\s*(?:{_KEY}))*)\s*[\]=]")


class Raw(NamedTuple):
    """A value before it is parsed."""

    value: object
    origin: str
    """Where it was given, in words."""


Table = dict[str, Raw]
"""Values by setting name."""


class Given(NamedTuple):
    """What files and environment give."""

    file: Path
    """The settings file; it may be missing."""
    common: Table
    """For all functions, or for the only one; variables come before the file's top level."""
    functions: dict[str, Table]
    """By function name: what its table or its file gives. Empty without such tables and files."""


def read_given(
    environ: Mapping[str, str],
    folder: Path,
    config: Path | None,
    leave_out: Collection[str],
    more: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> Given:
    """Return what the settings file, the files of functions and the environment give; arguments as for ``resolve``.

    Raises ConfigError for an unreadable file, invalid TOML, and an unknown key or variable.
    """
    if config is None and (named := environ.get(CONFIG_VARIABLE)):
        config = folder / named
    file = config or folder / CONFIG_FILE
    content, source = _read(file, required=config is not None)
    tables = content.pop(FUNCTIONS, {})
    common = _table(content, file.name, source) | _from_environment(environ)
    if not (isinstance(tables, dict) and all(isinstance(table, dict) for table in tables.values())):
        raise ConfigError(
            f"{file.name}: {FUNCTIONS} has an entry that is not a table.",
            advice=f"Write one table for each function: [{FUNCTIONS}.NAME].",
        )
    functions = {}
    if FUNCTIONS not in leave_out:
        functions = {
            name: _function(name, _table(table, file.name, source, (FUNCTIONS, name)), environ)
            for name, table in tables.items()
        }
        further = functions_folder(file)
        files = {path.stem: _read(path, required=True) for path in _function_files(further)}
        files |= {name: (dict(table), "") for name, table in more.items()}
        for name, (table, source) in files.items():
            place = f"{further.name}/{name}.toml"
            if name in functions:
                raise ConfigError(
                    f"The function {name} is in {file.name} and in {place}.",
                    advice="Leave one of the two out, or rename one.",
                )
            functions[name] = _function(name, _table(table, place, source), environ)
    for values in (common, *functions.values()):
        for name in leave_out:
            values.pop(name, None)
    return Given(file, common, functions)


def _read(path: Path, *, required: bool) -> tuple[dict[str, object], str]:
    """Return a TOML file's content and text; nothing if the file is missing and not ``required``. Raises ConfigError."""
    try:
        if not required and not path.exists():
            return {}, ""
    except OSError as error:
        raise ConfigError(
            f"Whether there is a settings file {path} cannot be told: {error.strerror}.",
            advice=f"Start from a folder that you may read, or name a file with --config or {CONFIG_VARIABLE}.",
        ) from error
    try:
        source = path.read_text("utf-8")
        return tomllib.loads(source), source
    except OSError as error:
        raise ConfigError(
            f"The settings file {path} cannot be read: {error.strerror}.", advice="Check its path and rights."
        ) from error
    except ValueError as error:  # damaged TOML, or not UTF-8
        raise ConfigError(
            f"The settings file {path} is not valid TOML: {error}.", advice="Correct that line."
        ) from error


def _function_files(folder: Path) -> list[Path]:
    """Return the files of functions in a folder, by name. Raises ConfigError if it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".toml")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(
            f"The folder of functions {folder} cannot be read: {error.strerror}.",
            advice="Check its rights.",
        ) from error


def _table(content: Mapping[str, object], place: str, source: str, table: tuple[str, ...] = ()) -> Table:
    """Return a table's values by key. Raises ConfigError for a key that is not a setting's name.

    ``place``: the file's name. ``source``: its text. ``table``: the table's path in the file; () for the whole file.
    """
    raw, known = {}, {*specs(), *([_CONSTANTS] if table or "/" in place else [])}
    for key, value in content.items():
        line = _line_of(source, (*table, key))
        origin = f"{place} line {line}" if line else place
        origin += f" [{'.'.join(table)}]" if table else ""
        if key not in known:
            raise _unknown(f"{origin}: ", key, known)
        raw[key] = Raw(value, origin)
    return raw


def _line_of(source: str, path: tuple[str, ...]) -> int | None:
    """Return the number of the line of a TOML text that writes ``path``, if a search finds exactly one candidate."""
    table: tuple[str, ...] = ()
    found = []
    for number, line in enumerate(source.splitlines(), 1):
        if (match := _LINE.match(line)) is None:
            continue
        keys = tuple(key.strip("\"'") for key in re.findall(_KEY, match["keys"]))
        table, written = (keys, keys) if match["header"] else (table, table + keys)
        if written[: len(path)] == path and (match["header"] or len(table) < len(path)):
            found.append(number)
    return found[0] if len(found) == 1 else None


def _function(name: str, raw: Table, environ: Mapping[str, str]) -> Table:
    """Return the values of one function's table or file; ``${VARIABLE}`` in a text stands for the variable's value.

    Raises ConfigError for a name or a key that a function cannot have, and for a variable that is not set.
    """
    check_name(name, f"{FUNCTIONS}.{name}")
    for key, (_, origin) in raw.items():
        if key == "pipeline" or (key == "handler_settings" and _CONSTANTS in raw):
            given = f"the function's name, {name}," if key == "pipeline" else f"the key {_CONSTANTS}"
            raise ConfigError(f"{origin}: {given} gives {key} already.", advice="Leave it out.")
        if key in specs() and specs()[key].server:
            raise ConfigError(
                f"{origin}: {key} is a setting of the server, not of the function {name}.",
                advice=f"Move it to the top level of {CONFIG_FILE}.",
            )
    if _CONSTANTS in raw:
        raw["handler_settings"] = raw.pop(_CONSTANTS)
    return {key: _expanded(key, value, environ) for key, value in raw.items()}


def check_name(name: str, place: str) -> None:
    """Raise ConfigError unless a function may have this name. ``place``: where it was given, in words."""
    if not _FUNCTION_NAME.fullmatch(name):
        raise ConfigError(
            f"{place}: a function cannot have the name {name!r}.",
            advice="A function's name starts with a letter and has letters, digits and '_' only.",
        )


def _expanded(name: str, raw: Raw, environ: Mapping[str, str]) -> Raw:
    """Return a value with ``${VARIABLE}`` replaced in its texts. Raises ConfigError for a variable that is not set."""
    used: list[str] = []

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in environ:
            raise ConfigError(
                f"{name} ({raw.origin}) needs the environment variable {match[1]}, which is not set.",
                advice="Set the variable where the server starts, or write the value in its place.",
            )
        used.append(match[1])
        return environ[match[1]]

    def expanded(value: object) -> object:
        if isinstance(value, str):
            return _REFERENCE.sub(value_of, value)
        if isinstance(value, list):
            return [expanded(item) for item in value]
        return {key: expanded(item) for key, item in value.items()} if isinstance(value, dict) else value

    value = expanded(raw.value)
    return Raw(value, f"{raw.origin}{FROM_VARIABLES}{', '.join(used)}" if used else raw.origin)


def _from_environment(environ: Mapping[str, str]) -> Table:
    """Return the values of the ``MLDSERVER_`` variables by setting name, without empty ones.

    Raises ConfigError for a variable with that prefix that names no setting.
    """
    by_variable = {spec.variable: spec.name for spec in specs().values()}
    raw = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in {CONFIG_VARIABLE, KILL_VARIABLE}:
            continue
        if variable not in by_variable:
            raise _unknown("environment: ", variable, [*by_variable, CONFIG_VARIABLE])
        if value.strip():
            raw[by_variable[variable]] = Raw(value, f"environment {variable}")
    return raw


def _unknown(place: str, written: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not a setting's: it was removed, or a close match is suggested."""
    name = written.removeprefix(ENV_PREFIX)
    if name.lower() in REMOVED:
        return ConfigError(
            f"{place}the setting {written!r} was removed.", advice=f"Leave it out. {REMOVED[name.lower()]}"
        )
    # The common prefix of all variables makes none of them closer.
    close = difflib.get_close_matches(name, [each.removeprefix(ENV_PREFIX) for each in known], n=1)
    advice = "`mldserver serve --help-all` lists all settings."
    if close:
        advice = f"Did you mean {written.removesuffix(name) + close[0]!r}?"
    return ConfigError(f"{place}there is no setting {written!r}.", advice=advice)
