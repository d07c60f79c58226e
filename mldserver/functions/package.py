"""Packages: one function as a file that another server takes in. Pure: bytes in, bytes out.

    function.toml    the function's name and handler, what the handler declares, and the function's own settings
    code/…           the handler's modules, as in an archive of ``versions/code.py``
    manifest.json    the format, and the SHA-256 of each other file

A package holds no secret: a secret setting is written as ``"${NAME}"``, the name of a variable of the environment. Equal
functions give equal bytes, so the package of an imported function is the package that was imported.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from mldserver.base.uris import HIDDEN, redacted, redacted_pairs
from mldserver.config.settings import Settings, specs
from mldserver.errors import OperatorError
from mldserver.versions.archive import archive, unarchived

Values: TypeAlias = Mapping[str, str | Mapping[str, str]]
"""Settings as texts by name; some are pairs of texts."""

_FORMAT: Final = 1
_MANIFEST: Final = "manifest.json"
_FUNCTION: Final = "function.toml"
_CODE: Final = "code/"
_TEXTS: Final = ("name", "handler", "version", "schema", "windows")
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_PLACES: Final = frozenset({"handler", "pipeline", "out", "ledger", "server_id", "rename_from", "new_ledger"})
"""The settings that say which function it is, and where its data is."""
_OPEN: Final = frozenset({"failure_rules"})
"""Settings that hold no secret, although ``KeyError=skip`` looks like the option of a URL that does."""
VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A value that the environment gives."""


@dataclass(frozen=True, slots=True)
class Package:
    """A function as a package holds it."""

    name: str
    handler: str
    """The handler's dotted path."""
    version: str
    """As in ``HandlerSpec.version``."""
    schema: str
    """The schema as DDL; empty for a handler without rows."""
    windows: str
    """How windows are cut, for people."""
    settings: Values
    """The function's own settings, without secrets (``without_secrets``)."""
    code: Mapping[str, bytes]
    """The files of the version's archive by their paths."""

    def files(self) -> dict[str, bytes]:
        """Return the package's files by their paths, without the manifest."""
        table = {key: getattr(self, key) for key in _TEXTS} | {"settings": self.settings}
        return {_FUNCTION: toml(table).encode()} | {
            f"{_CODE}{path}": text for path, text in self.code.items()
        }

    def packed(self) -> bytes:
        """Return the package's bytes."""
        files = self.files()
        manifest = json.dumps({"format": _FORMAT, "files": _hashes(files)}, indent=2, sort_keys=True)
        return archive(files | {_MANIFEST: f"{manifest}\n".encode()})

    def variables(self) -> list[str]:
        """Return the variables of the environment that the settings name."""
        texts = [text for value in self.settings.values() for text in _texts(value)]
        return sorted({found[1] for text in texts if (found := VARIABLE.fullmatch(str(text)))})

    def settings_file(self) -> str:
        """Return the settings as ``functions.d/NAME.toml`` holds them."""
        return toml({"handler": self.handler, **self.settings})


def is_package(data: bytes) -> bool:
    """Return whether the data is an archive with a manifest."""
    try:
        return _MANIFEST in unarchived(data, "")
    except OperatorError:
        return False


def own_settings(settings: Settings) -> dict[str, str | dict[str, str]]:
    """Return the function's own settings as texts, secrets included: those that its table or file gives.

    For the only function of a server, these are all settings that were given and that are not the server's. The places of
    output and ledger are left out.
    """
    known = specs()
    names = settings.own or {name for name in settings.origins if not known[name].server}
    shown: dict[str, str | dict[str, str]] = {}
    for name in names - _PLACES:
        value = getattr(settings, known[name].field)
        shown[name] = dict(value) if isinstance(value, Mapping) else known[name].kind.show(value)
    return shown


def read_package(data: bytes, what: str) -> Package:
    """Return the function in a package. ``what`` names the package in errors.

    Raises OperatorError if the data is not a package, is damaged, was changed, or has a format that this version cannot read.
    """
    files = unarchived(data, what)
    try:
        manifest = json.loads(files.pop(_MANIFEST))
        form, hashes = manifest["format"], manifest["files"]
    except (KeyError, TypeError, ValueError) as error:
        raise OperatorError(
            f"{what} is not a package: it has no {_MANIFEST} that can be read.",
            advice="Make a package with `mldserver functions export`.",
        ) from error
    if form != _FORMAT:
        raise OperatorError(
            f"{what} has the format {form!r}; this version reads format {_FORMAT}.",
            advice="Update mldserver on this host, or export the function with this version.",
        )
    if hashes != (found := _hashes(files)):
        changed = sorted(path for path in {*hashes, *found} if hashes.get(path) != found.get(path))
        raise OperatorError(
            f"{what} was changed after its export: {', '.join(changed)}.", advice="Export the function again."
        )
    try:
        table = tomllib.loads(files.pop(_FUNCTION).decode())
        texts = {key: table.pop(key) for key in _TEXTS}
        settings = table.pop("settings")
        valid = not table and all(isinstance(text, str) for text in [*texts.values(), *_texts(settings)])
    except (KeyError, AttributeError, ValueError) as error:
        raise OperatorError(f"{what} has no {_FUNCTION} that can be read: {error}.") from error
    if not valid or not all(path.startswith(_CODE) for path in files):
        raise OperatorError(f"{what} holds what a package of format {_FORMAT} does not have.")
    code = {path.removeprefix(_CODE): text for path, text in files.items()}
    return Package(**texts, settings=settings, code=code)


def without_secrets(name: str, settings: Values) -> dict[str, str | dict[str, str]]:
    """Return settings of the function ``name`` in order, each secret value as ``${NAME_SETTING}`` or ``${NAME_SETTING_KEY}``."""
    taken: list[str] = []

    def hidden(*words: str) -> str:
        variable = re.sub(r"\W", "_", "_".join((name, *words)), flags=re.ASCII).upper()
        taken.append(variable)
        again = taken.count(variable)
        return f"${{{variable}}}" if again == 1 else f"${{{variable}_{again}}}"

    shown: dict[str, str | dict[str, str]] = {}
    for key, value in sorted(settings.items()):
        if isinstance(value, str):
            # Some kinds of settings are shown without their secrets.
            safe = key in _OPEN or (redacted(value) == value and HIDDEN not in value)
            shown[key] = value if safe else hidden(key)
            continue
        without = redacted_pairs(value)
        shown[key] = {
            item: text if without.get(item) == text else hidden(key, item)
            for item, text in sorted(value.items())
        }
    return shown


def differences(before: Package, now: Package) -> list[str]:
    """Return the lines of a unified diff of two packages' files; none if they are equal."""
    old, new = before.files(), now.files()
    lines: list[str] = []
    for path in sorted({*old, *new}):
        one, other = (files.get(path, b"").decode(errors="replace").splitlines() for files in (old, new))
        lines += difflib.unified_diff(one, other, f"deployed/{path}", f"package/{path}", lineterm="")
    return lines


def toml(table: Mapping[str, Any], above: str = "") -> str:
    """Return a table of texts and of further tables as TOML, in its order. ``above``: the name of the table, with a dot."""
    lines = [f"{_key(key)} = {_quoted(text)}\n" for key, text in table.items() if isinstance(text, str)]
    for key, inner in table.items():
        if not isinstance(inner, str):
            lines.append(f"\n[{above}{_key(key)}]\n{toml(inner, f'{above}{_key(key)}.')}")
    return "".join(lines)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _quoted(key)


def _quoted(text: str) -> str:
    # TOML's basic strings have JSON's escapes. JSON leaves DEL as it is, TOML does not.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _texts(value: object) -> Iterator[object]:
    """Yield what is not a table in a value."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    else:
        yield value


def _hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
