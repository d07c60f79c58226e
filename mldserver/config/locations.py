"""Where things lie and where they go, as settings name it: output, ledger, what windows are published into, dead letters."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from mldserver.base.uris import SCHEMES, local_path, redacted
from mldserver.config.kinds import Kind, as_text
from mldserver.errors import ConfigError
from mldserver.spark.sinks.registry import SINKS, find
from mldserver.spark.sinks.sink import SinkSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


__all__ = [
    "DynamoPlace",
    "LedgerPlace",
    "LetterPlace",
    "OutPlace",
    "RemoteOut",
    "SqlitePlace",
    "cache_folder",
    "dead_letters",
    "ledger",
    "out",
    "sink",
    "table_name",
]

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
_OPTIONS = frozenset({"region", "endpoint_url"})

LEDGER_FILE: Final = "_mldserver/ledger.sqlite"
"""Where SQLite's ledger lies in a local output folder (``output/layout.py``)."""


@dataclass(frozen=True, slots=True)
class RemoteOut:
    """An output folder that is no local path."""

    uri: str
    """As pyarrow.fs takes it: its query holds options, and user and password may be credentials."""

    def __str__(self) -> str:
        """Return the URI without its secrets: for logs and messages."""
        return redacted(self.uri)

    __repr__ = __str__


OutPlace = Path | RemoteOut


class SqlitePlace(NamedTuple):
    """A file that servers of one host share."""

    path: Path | None = None
    """None: in the output folder."""

    def __str__(self) -> str:
        """Return ``sqlite`` or ``sqlite:PATH``."""
        return "sqlite" if self.path is None else f"sqlite:{self.path}"


class DynamoPlace(NamedTuple):
    """A table in DynamoDB: servers of many hosts share it."""

    table: str
    region: str | None = None
    endpoint_url: str | None = None

    def __str__(self) -> str:
        """Return ``dynamodb://TABLE?…``."""
        given = {"region": self.region, "endpoint_url": self.endpoint_url}
        query = urlencode({key: value for key, value in given.items() if value is not None}, safe=":/")
        return f"dynamodb://{self.table}" + (f"?{query}" if query else "")


LedgerPlace = SqlitePlace | DynamoPlace


def ledger() -> Kind[LedgerPlace]:
    """``sqlite``, ``sqlite:PATH``, or ``dynamodb://TABLE`` with ``region`` and ``endpoint_url`` as query."""

    def parse(raw: object) -> LedgerPlace:
        given = as_text(raw)
        if given.lower() == "sqlite":
            return SqlitePlace()
        if given.lower().startswith("sqlite:"):
            return _sqlite(given[len("sqlite:") :])
        found = urlsplit(given)
        if found.scheme != "dynamodb":
            raise ValueError("it is neither sqlite nor dynamodb://…")
        # Not ``hostname``, which is lower case; DynamoDB's names (3 to 255 of these characters) are not.
        if not _TABLE.fullmatch(found.netloc) or found.path not in {"", "/"}:
            raise ValueError("it names no table of DynamoDB")
        options = dict(parse_qsl(found.query, keep_blank_values=True))
        if not options.keys() <= _OPTIONS or not all(options.values()):
            raise ValueError(f"only {' and '.join(sorted(_OPTIONS))} may follow the table")
        return DynamoPlace(found.netloc, options.get("region"), options.get("endpoint_url"))

    return Kind("sqlite, sqlite:PATH, or dynamodb://TABLE?region=REGION", parse, metavar="LEDGER")


def _sqlite(path: str) -> SqlitePlace:
    if not path or path.endswith("/"):
        raise ValueError("it names no file")
    if path.startswith("//"):
        raise ValueError("it is a URL: after sqlite: comes a local path")
    return SqlitePlace(local_path(path))


def out() -> Kind[OutPlace]:
    """A local path, ``file:///PATH``, or a URI of a file system that pyarrow knows."""

    def parse(raw: object) -> OutPlace:
        if isinstance(raw, Path):
            return raw
        given = as_text(raw)
        if "://" not in given:
            return local_path(given)
        found = urlsplit(given)
        if found.scheme == "file":
            if found.netloc not in {"", "localhost"} or not found.path or found.query:
                raise ValueError("after file:// comes an absolute path, and nothing else")
            return Path(unquote(found.path))
        if found.scheme not in SCHEMES:
            raise ValueError(f"{found.scheme}: is no file system that pyarrow knows")
        if found.fragment or not (found.netloc or found.path.strip("/")):
            raise ValueError("it names no folder")
        return RemoteOut(given)

    return Kind(
        "a local path, or a URI such as s3://BUCKET/FOLDER?region=REGION (gs, abfs, hdfs …)",
        parse,
        metavar="PATH|URI",
    )


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the cache directory by the XDG Base Directory Specification: relative values are to be ignored.

    Raises ConfigError where nothing tells a home directory.
    """
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "mldserver"
    try:
        return Path.home() / ".cache" / "mldserver"
    except RuntimeError as error:
        raise ConfigError(
            f"There is no home directory for a cache: HOME is not set, and the system does not know user {os.getuid()}.",
            advice="Set cache_dir, or one of the variables HOME and XDG_CACHE_HOME.",
        ) from error


_PARQUET: Final = "parquet"
_SQL_PART: Final = r"(?:[\w$#]+|\"[^\"]+\"|`[^`]+`|\[[^\]]+\])"
_SQL_NAME = re.compile(rf"{_SQL_PART}(?:\.{_SQL_PART})*")


def sink() -> Kind[SinkSpec | None]:
    """``parquet`` (None), or ``NAME:PLACE`` of a sink that is registered (``spark/sinks/registry.py``)."""

    def parse(raw: object) -> SinkSpec | None:
        if raw is None or isinstance(raw, SinkSpec):
            return raw
        word, colon, target = as_text(raw).partition(":")
        name = word.lower()
        if name == _PARQUET and not colon:
            return None
        return SinkSpec(name, find(name).parse(target))

    forms = ", ".join(form for _, form in SINKS.values())
    return Kind(
        f"parquet, {forms}, or NAME:PLACE of an installed package's sink",
        parse,
        lambda value: _PARQUET if value is None else str(value),
        metavar="SINK",
    )


def table_name() -> Kind[str]:
    """A table as SQL names it, with or without its schema, its parts in quotes or not."""

    def parse(raw: object) -> str:
        if not isinstance(raw, str) or not _SQL_NAME.fullmatch(raw.strip()):
            raise ValueError("it is no table's name")
        return raw.strip()

    return Kind("a table's name as SQL takes it, such as SCHEMA.TABLE", parse, metavar="TABLE")


_LEDGER: Final = "ledger"
_STREAM = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class LetterPlace(NamedTuple):
    """A place that is not the ledger."""

    kind: Literal["jsonl", "parquet", "sqs", "s3", "kinesis"]
    target: str = ""
    """Files: a folder or a URI, empty for the output folder; a queue's URL; ``bucket/prefix``; a stream's name."""

    def __str__(self) -> str:
        """Return it as it was written, without secrets."""
        if self.kind == "s3":
            return f"s3://{self.target}"
        return f"{self.kind}:{redacted(self.target)}" if self.target else self.kind


def dead_letters() -> Kind[LetterPlace | None]:
    """``ledger`` (None), ``jsonl`` or ``parquet`` with or without a place, ``sqs:…``, ``s3://…`` or ``kinesis:…``."""

    def parse(raw: object) -> LetterPlace | None:
        if raw is None or isinstance(raw, LetterPlace):
            return raw
        word, colon, target = as_text(raw).partition(":")
        word = word.lower()
        if word == _LEDGER and not colon:
            return None
        if word in {"jsonl", "parquet"} and not colon:
            return LetterPlace(word)  # type: ignore[arg-type]  # one of the two
        if word not in _TARGETS:
            raise ValueError("it names no place of these")
        return LetterPlace(word, _TARGETS[word](target))  # type: ignore[arg-type]  # its keys are the kinds

    return Kind(
        "ledger, jsonl, parquet, jsonl:PATH or URI, parquet:PATH or URI, sqs:QUEUE_URL, s3://BUCKET/PREFIX, or "
        "kinesis:STREAM",
        parse,
        lambda value: _LEDGER if value is None else str(value),
        metavar="PLACE",
    )


def _letters_folder(target: str) -> str:
    if not target.strip("/"):
        raise ValueError("after the colon comes a folder or a URI")
    return target if "://" in target else str(local_path(target).absolute())


def _queue(target: str) -> str:
    found = urlsplit(target)
    if found.scheme not in {"http", "https"} or not found.path.strip("/"):
        raise ValueError("after sqs: comes a queue's URL")
    return target


def _bucket(target: str) -> str:
    if not target.startswith("//") or not target.strip("/"):
        raise ValueError("after s3:// comes BUCKET or BUCKET/PREFIX")
    return target.strip("/")


def _stream(target: str) -> str:
    if not _STREAM.fullmatch(target):
        raise ValueError("after kinesis: comes a stream's name")
    return target


_TARGETS: Final[Mapping[str, Callable[[str], str]]] = {
    "jsonl": _letters_folder,
    "parquet": _letters_folder,
    "sqs": _queue,
    "s3": _bucket,
    "kinesis": _stream,
}
