"""What values of settings may look like, and where they are given: parsing from text and TOML, and showing them again.

A kind's ``parse`` takes what a source gives (text from the command line and the environment; text, numbers, booleans
and tables from TOML) and raises ValueError when it is none of the kind. Sizes are int bytes.

Last comes what becomes of records by the class of their error, as the setting ``failure_rules`` says it.
"""

from __future__ import annotations

import enum
import ipaddress
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from mldserver import windows
from mldserver.base.uris import local_path

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
HIGHEST_PORT = 65_535

_LARGEST = 2**63 - 1
"""What SQLite, Arrow and messages between processes hold; more than there is of anything."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)?", re.IGNORECASE)
_DECIMAL_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_SIZE_UNITS = _DECIMAL_UNITS | {unit.lower(): factor for unit, factor in _BINARY_UNITS.items()}
_DAY_MS = 86_400_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_IDENTIFIER = r"[^\W\d]\w*"
_DOTTED_PATH = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*(:{_IDENTIFIER}(\.{_IDENTIFIER})*)?")


class TcpAddress(NamedTuple):
    """A TCP address to listen on; port 0 lets the system choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return ``host:port``, with brackets around an IPv6 host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UnixAddress(NamedTuple):
    """A Unix socket to listen on."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address = TcpAddress | UnixAddress


def is_local(address: Address) -> bool:
    """Whether only processes of this host can reach it."""
    return isinstance(address, UnixAddress) or is_loopback(address.host)


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is loopback: reachable from this host only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """One kind of value."""

    allowed: str
    """What may be written, as the end of the sentence "allowed is …"."""
    parse: Callable[[object], T]
    """Make the value of what a source gave. Raises ValueError."""
    show: Callable[[T], str] = str
    """Write the value so that ``parse`` reads it again."""
    flag: bool = False
    """On the command line a bare ``--name`` or ``--no-name``."""
    many: bool = False
    """On the command line it may be given repeatedly."""
    choice: bool = False
    """One of a few words."""
    metavar: str = "TEXT"
    """What stands for the value in ``--help``."""


def kind(
    allowed: str, show: Callable[[Any], str] = str, **form: Any
) -> Callable[[Callable[[object], T]], Kind[T]]:
    """Make a kind of the function below, which is its ``parse``; ``form``: how it looks on the command line."""
    return lambda parse: Kind(allowed, parse, show, **form)


def as_text(raw: object) -> str:
    """Return text without the space around it. Raises ValueError where it is none."""
    if not isinstance(raw, str):
        raise ValueError("it is not text")  # noqa: TRY004  # kinds promise ValueError, whatever is wrong
    stripped = raw.strip()
    if not stripped:
        raise ValueError("it is empty")
    return stripped


def _number(raw: object) -> float | None:
    """Return a number of TOML; None for all else."""
    return raw if isinstance(raw, int | float) and not isinstance(raw, bool) else None


def text(allowed: str) -> Kind[str]:
    """Any text that is not empty."""
    return Kind(allowed, as_text)


@kind("a name of letters, digits, '.', '_' and '-' that starts with a letter or digit", metavar="NAME")
def name(raw: object) -> str:
    """Parse a name that is safe as a directory's name and in a log line."""
    word = as_text(raw)
    if not _NAME.fullmatch(word):
        raise ValueError("it has characters that a directory's name should not have")
    return word


@kind("package.module or package.module:Name")
def dotted_path(raw: object) -> str:
    """Parse the import path of a module, or of a name in it: ``package.module`` or ``package.module:Name``."""
    path = as_text(raw)
    if not _DOTTED_PATH.fullmatch(path):
        hint = "; a file's path is none" if path.endswith(".py") or "/" in path else ""
        raise ValueError(f"it is no dotted path{hint}")
    return path


@kind("a local path", metavar="PATH")
def folder(raw: object) -> Path:
    """Parse a local path; ``~`` is the home directory, relative paths start at the working directory."""
    if isinstance(raw, Path):
        return raw
    path = as_text(raw)
    if "://" in path:
        raise ValueError("it is a URL")
    return local_path(path)


@kind("host:port, :port (loopback; 0 takes any free port), [IPv6]:port or unix:/path", metavar="ADDRESS")
def address(raw: object) -> Address:
    """Parse an address to listen on: ``host:port``, ``:port`` on loopback, ``[v6]:port``, or ``unix:/path``."""
    written = as_text(raw)
    if written.startswith("unix:"):
        path = written.removeprefix("unix:").removeprefix("//")
        if not path:
            raise ValueError("the socket's path is missing")
        return UnixAddress(local_path(path))
    if "://" in written:
        raise ValueError("it is a URL, and only its host and port are wanted")
    host, colon, port = written.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > HIGHEST_PORT:
        raise ValueError(f"it does not end in a port (0-{HIGHEST_PORT})")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare and bare == host:
        raise ValueError("a host has no ':' in it, and an IPv6 host needs brackets")
    try:  # what a resolver can be asked for: no part of a name is empty or above 63 characters (RFC 1035)
        bare.encode("idna")
    except UnicodeError as error:
        raise ValueError("its host is not a name: a part of it is empty, too long, or no text") from error
    return TcpAddress(bare or LOOPBACK, int(port))


@kind("a whole number from 1 on", metavar="N")
def count(raw: object) -> int:
    """Parse a whole number above zero."""
    if isinstance(raw, str) and raw.strip().isascii() and raw.strip().isdigit():
        number = int(raw)
    elif isinstance(raw, int) and not isinstance(raw, bool):
        number = raw
    else:
        raise ValueError("it is no whole number")
    if number < 1:
        raise ValueError("it is too small")
    if number > _LARGEST:
        raise ValueError("it is too large")
    return number


def size(*, at_least: int = 1) -> Kind[int]:
    """Return the kind of sizes: bytes, given as a number or as text such as ``256 MiB``."""

    def parse(raw: object) -> int:
        number = _number(raw)
        if number is None:
            match = _SIZE.fullmatch(as_text(raw))
            unit = _SIZE_UNITS.get((match[2] or "b").lower()) if match else None
            if match is None or unit is None:
                raise ValueError("it is no size")
            number = float(match[1]) * unit
        if number < at_least:
            raise ValueError("it is too small")
        if not number <= _LARGEST:
            raise ValueError("it is too large" if number > _LARGEST else "it is no number")
        return int(number)

    return Kind(
        f"a size such as '64 MiB', or bytes, at least {show_size(at_least)}", parse, show_size, metavar="SIZE"
    )


def show_size(value: int) -> str:
    """Return bytes in the largest binary unit that divides them."""
    for unit, factor in _BINARY_UNITS.items():
        if value and value % factor == 0:
            return f"{value // factor} {unit}"
    return f"{value} B"


def duration_seconds() -> Kind[float]:
    """Return the kind of durations in seconds above zero, given as a number or as text such as ``10 minutes``."""
    ms = duration_ms()
    return Kind(
        ms.allowed,
        lambda raw: ms.parse(raw) / 1000,
        lambda value: show_duration(round(value * 1000)),
        metavar=ms.metavar,
    )


def duration_ms(*, zero: bool = False) -> Kind[int]:
    """Return the kind of durations in milliseconds, given as ``duration_seconds`` are. ``zero``: whether zero is allowed."""

    def parse(raw: object) -> int:
        number = _number(raw)
        if number is None and _NUMBER.fullmatch(text := as_text(raw)):
            number = float(text)
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError("it is no number")
        ms = windows.duration_ms(text if number is None else number)
        if ms == 0 and not zero:
            raise ValueError("it is zero, or shorter than a millisecond")
        return ms

    end = "" if zero else ", above zero"
    allowed = f"a duration such as '30 s' or '10 minutes', or seconds{end}"
    return Kind(allowed, parse, show_duration, metavar="DURATION")


def show_duration(ms: int) -> str:
    """Return milliseconds in the largest unit that divides them."""
    if ms == _DAY_MS:
        return "1 day"
    for unit, factor in (("days", _DAY_MS), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms % factor == 0 and (ms or unit == "s"):
            return f"{ms // factor} {unit}"
    return f"{ms} ms"


def choice(of: Any) -> Kind[Any]:
    """Return the kind of one of a few words: those of a ``Literal`` or of an enumeration (``of``)."""
    by_word = {str(option): option for option in get_args(of) or of}

    def parse(raw: object) -> Any:
        word = as_text(raw).lower().replace("-", "_")
        if word not in by_word:
            raise ValueError("it is none of the choices")
        return by_word[word]

    return Kind(" | ".join(by_word), parse, choice=True, metavar="WORD")


@kind("true | false (also yes | no, on | off, 1 | 0)", lambda value: str(value).lower(), flag=True)
def flag(raw: object) -> bool:
    """Parse a boolean: true or false, yes or no, on or off, 1 or 0."""
    if isinstance(raw, bool):
        return raw
    word = as_text(raw).lower()
    if word in {"true", "yes", "on", "1"}:
        return True
    if word in {"false", "no", "off", "0"}:
        return False
    raise ValueError("it is neither yes nor no")


@kind(
    "key=value, repeated (with ';' between pairs in a variable), or a TOML table",
    lambda value: "; ".join(f"{key}={item}" for key, item in value.items()),
    many=True,
    metavar="KEY=VALUE",
)
def pairs(raw: object) -> Mapping[str, str]:
    """Parse keys and values: a TOML table, repeated ``key=value`` options, or one text with ``;`` between the pairs."""
    if isinstance(raw, Mapping):
        return dict(_leaves(raw))
    items = raw.split(";") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple):
        raise ValueError("it is not a list of key=value")  # noqa: TRY004  # kinds promise ValueError
    table = {}
    for number, item in enumerate(map(str, items), 1):
        key, equals, value = (part.strip() for part in item.partition("="))
        if item.strip() and not (equals and key):
            # It may be the rest of a secret that has a ';' in it.
            raise ValueError(f"the pair {number} is not key=value")
        if key:
            table[key] = value
    return table


def _leaves(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a TOML table's leaves; bare dotted keys (``spark.ui.port = 4040``) arrive as nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            yield prefix + key, str(value).lower()
        elif isinstance(value, str | int | float):
            yield prefix + key, str(value)
        else:
            raise ValueError(f"the value of {prefix + key!r} is neither text nor a number")  # noqa: TRY004  # kinds promise ValueError


def listed(raw: object, what: str, *, between: str = ",") -> list[str]:
    """Return the texts of a list, or of one text with commas ``between`` them. Raises ValueError for anything else."""
    texts = [raw] if isinstance(raw, str) else raw
    if not isinstance(texts, list | tuple):
        raise ValueError(f"it is not a list of {what}")  # noqa: TRY004  # kinds promise ValueError
    items = (item.strip() for text in texts for item in re.split(between, str(text)))
    return [item for item in items if item]


def optional(of: Kind[T], *, word: str = "none") -> Kind[T | None]:
    """Return the kind of values of ``of``, or a ``word`` for None."""
    return or_word(of, word, None)


def or_word(of: Kind[Any], word: str, meaning: object) -> Kind[Any]:
    """Return the kind of values of ``of``, or a ``word`` that stands for ``meaning``."""

    def parse(raw: object) -> Any:
        is_word = isinstance(raw, str) and raw.strip().lower().replace("-", "_") == word
        return meaning if is_word or (raw is None and meaning is None) else of.parse(raw)

    return Kind(
        f"{of.allowed}, or {word}",
        parse,
        lambda value: word if value == meaning else of.show(value),
        metavar=of.metavar,
    )


_CLASS_NAME = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*")
_RETRY = re.compile(r"retry(?::(?P<attempts>[1-9]\d{0,8}))?")


class OnFailure(enum.StrEnum):
    """What becomes of a record that failed for good."""

    DEAD_LETTER = "dead_letter"
    """It is stored with its error, and the shard goes on."""
    SKIP = "skip"
    """It is counted and logged, nothing of it is kept, and the shard goes on."""
    HALT = "halt"
    """The shard's connection is closed on purpose."""


class OnKeyFailure(enum.StrEnum):
    """What becomes of the later records of a partition key, once one of its records is a dead letter."""

    CONTINUE = "continue"
    """They are processed."""
    PARK = "park"
    """They become dead letters too, without a call, so that none overtakes."""


@dataclass(frozen=True, slots=True)
class FailureRule:
    """What to do about errors of one class."""

    name: str
    """A class's name (``KeyError``), or a dotted one (``requests.Timeout``): its name and how its module begins."""
    on_failure: OnFailure | None = None
    """How the record ends, without further attempts; None: it is called again."""
    attempts: int | None = None
    """Calls in all; None: as many as the policy says."""

    def __post_init__(self) -> None:
        """Refuse with ValueError what no class can be named, and impossible numbers."""
        if not _CLASS_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of a class")
        if self.attempts is not None and (self.attempts < 1 or self.on_failure is not None):
            raise ValueError("attempts must be at least 1, and are only for errors that are tried again")

    def __str__(self) -> str:
        """Return the rule as ``failure_rule`` reads it: ``name=action``."""
        retry = "retry" if self.attempts is None else f"retry:{self.attempts}"
        return f"{self.name}={self.on_failure or retry}"

    def matches(self, dotted: str) -> bool:
        """Whether the rule is about a class of this full dotted name."""
        prefix, _, last = self.name.rpartition(".")
        return dotted.rpartition(".")[2] == last and (not prefix or dotted.startswith(f"{prefix}."))


def failure_rule(text: str) -> FailureRule:
    """Read ``CLASS=dead_letter | skip | halt | retry | retry:N``. Raises ValueError."""
    name, equals, action = (part.strip() for part in text.partition("="))
    retry = _RETRY.fullmatch(action)
    if not equals or (retry is None and action not in list(OnFailure)):
        raise ValueError(f"{text.strip()!r} is not CLASS=dead_letter, skip, halt, retry or retry:N")
    if retry is None:
        return FailureRule(name, OnFailure(action))
    return FailureRule(name, attempts=int(retry["attempts"]) if retry["attempts"] else None)


@kind(
    "CLASS=dead_letter | skip | halt | retry | retry:N, repeated or with commas between, or a TOML table",
    lambda rules: ", ".join(map(str, rules)),
    many=True,
    metavar="CLASS=ACTION",
)
def failure_rules(raw: object) -> tuple[FailureRule, ...]:
    """Parse rules on what to do with records by their error's class: ``CLASS=ACTION``, repeated or with commas, or a table."""
    if isinstance(raw, Mapping):
        raw = [f"{name}={action}" for name, action in pairs.parse(raw).items()]
    rules = tuple(map(failure_rule, listed(raw, "CLASS=ACTION", between="[,;]")))
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} has two rules")
    return rules
