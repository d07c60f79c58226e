"""Kinds of settings that name a place: output, ledger, sink, dead letters; and patterns for allowed names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from mldserver.base.uris import SCHEMES, local_path, redacted
from mldserver.config.kinds import as_text, folder, kind, listed
from mldserver.errors import ConfigError
from mldserver.sinks import SINKS, find
from mldserver.sinks.sink import SinkSpec

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
_STREAM_ARN = re.compile(r"arn:[\w-]+:dynamodb:([\w-]+):\d*:table/[A-Za-z0-9_.-]{3,255}/stream/[\w.:-]+")
_OPTIONS = frozenset({"region", "endpoint_url"})

LEDGER_FILE: Final = "_mldserver/ledger.sqlite"
"""Where SQLite's ledger lies in a local output folder (``output/layout.py``)."""


@dataclass(frozen=True, slots=True)
class RemoteOut:
    """An output folder that is not a local path."""

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
        return "sqlite" if self.path is None else f"sqlite:{self.path}"


class DynamoPlace(NamedTuple):
    """A table in DynamoDB: servers of many hosts share it. As a source also a stream's ARN."""

    table: str
    region: str | None = None
    endpoint_url: str | None = None

    def __str__(self) -> str:
        endpoint = None if self.endpoint_url is None else redacted(self.endpoint_url)
        options = {"region": self.region, "endpoint_url": endpoint}
        query = urlencode({key: value for key, value in options.items() if value is not None}, safe=":/@…")
        return f"dynamodb://{self.table}" + (f"?{query}" if query else "")


LedgerPlace = SqlitePlace | DynamoPlace
SourcePlace = DynamoPlace | Literal["mld"]


@kind("sqlite, sqlite:PATH, or dynamodb://TABLE?region=REGION", metavar="LEDGER")
def ledger(raw: object) -> LedgerPlace:
    """Parse the ledger's place: ``sqlite``, ``sqlite:PATH``, or ``dynamodb://TABLE?region=…&endpoint_url=…``."""
    written = as_text(raw)
    if written.lower() == "sqlite":
        return SqlitePlace()
    if written.lower().startswith("sqlite:"):
        path = written[len("sqlite:") :]
        if not path or path.endswith("/"):
            raise ValueError("it names no file")
        if path.startswith("//"):
            raise ValueError("it is a URL: after sqlite: comes a local path")
        return SqlitePlace(local_path(path))
    url = urlsplit(written)
    if url.scheme != "dynamodb":
        raise ValueError("it is neither sqlite nor dynamodb://…")
    # Not ``hostname``, which is lower case; DynamoDB's names (3 to 255 of these characters) are not.
    if not _TABLE.fullmatch(url.netloc) or url.path not in {"", "/"}:
        raise ValueError("it names no table of DynamoDB")
    return DynamoPlace(url.netloc, *_options(url.query))


@kind("mld, or dynamodb://TABLE?region=REGION (or a stream's ARN in place of the table)", metavar="SOURCE")
def source(raw: object) -> SourcePlace:
    """Parse where records come from: ``mld`` (MultiLangDaemon), or ``dynamodb://TABLE`` or ``dynamodb://ARN`` with options."""
    written = as_text(raw)
    if written.lower() == "mld":
        return "mld"
    url = urlsplit(written)
    stream = f"{url.netloc}{url.path}".removesuffix("/")
    if url.scheme != "dynamodb" or not (_TABLE.fullmatch(stream) or _STREAM_ARN.fullmatch(stream)):
        raise ValueError("it is neither mld nor dynamodb:// with a table's name or a stream's ARN")
    region, endpoint_url = _options(url.query)
    arn = _STREAM_ARN.fullmatch(stream)
    return DynamoPlace(stream, region or (arn and arn[1]) or None, endpoint_url)


def _options(query: str) -> tuple[str | None, str | None]:
    """Return the region and the endpoint that a URL's query names. Raises ValueError for any other option."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not options.keys() <= _OPTIONS or not all(options.values()):
        raise ValueError(f"only {' and '.join(sorted(_OPTIONS))} may follow the table")
    return options.get("region"), options.get("endpoint_url")


@kind(
    "a local path, or a URI such as s3://BUCKET/FOLDER?region=REGION (gs, abfs, hdfs …)", metavar="PATH|URI"
)
def out(raw: object) -> OutPlace:
    """Parse the output folder: a local path, ``file:///PATH``, or a URI of a file system that pyarrow knows."""
    if isinstance(raw, Path):
        return raw
    written = as_text(raw)
    if "://" not in written:
        return local_path(written)
    url = urlsplit(written)
    if url.scheme == "file":
        if url.netloc not in {"", "localhost"} or not url.path or url.query:
            raise ValueError("after file:// comes an absolute path, and nothing else")
        return Path(unquote(url.path))
    if url.scheme not in SCHEMES:
        raise ValueError(f"{url.scheme}: is not a file system that pyarrow knows")
    if url.fragment or not (url.netloc or url.path.strip("/")):
        raise ValueError("it names no folder")
    return RemoteOut(written)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the cache directory by the XDG Base Directory Specification, which ignores relative values.

    Raises ConfigError if no home directory is known.
    """
    folder = Path(environ.get("XDG_CACHE_HOME", ""))
    if folder.is_absolute():
        return folder / "mldserver"
    try:
        return Path.home() / ".cache" / "mldserver"
    except RuntimeError as error:
        raise ConfigError(
            f"There is no home directory for a cache: HOME is not set, and the system does not know user {os.getuid()}.",
            advice="Set cache_dir, or one of the variables HOME and XDG_CACHE_HOME.",
        ) from error


_MASTER = re.compile(r"local\b.*|local-cluster\[.*|yarn|(spark|k8s|sc)://.+")


@kind(
    "local, local[N], local[*], spark://HOST:PORT, yarn, k8s://URL or sc://HOST:PORT, as Spark takes them",
    metavar="MASTER",
)
def spark_master(raw: object) -> str:
    """Parse a Spark master of a known kind; Spark checks the rest. It may hold a token, so no message repeats it."""
    master = as_text(raw)
    if not _MASTER.fullmatch(master):
        raise ValueError("it is not a master that Spark knows")
    return master


_PARQUET: Final = "parquet"


@kind(
    ".py, .zip or .egg files, repeated or with commas between",
    lambda files: ", ".join(map(str, files)),
    many=True,
    metavar="PATH",
)
def python_files(raw: object) -> tuple[Path, ...]:
    """Parse files of Python code for Spark, as for spark-submit's ``--py-files``. Raises ValueError if one is missing."""
    files = tuple(map(folder.parse, listed(raw, "files")))
    for file in files:
        if file.suffix not in {".py", ".zip", ".egg"}:
            raise ValueError(f"{file} is neither a .py nor a .zip nor an .egg file")
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
    return files


@kind(
    "names with * and ? for any characters, repeated or with commas between, or any",
    lambda value: ", ".join(value) or "any",
    many=True,
    metavar="NAME",
)
def globs(raw: object) -> tuple[str, ...]:
    """Parse patterns of allowed names, with ``*`` and ``?``. The word ``any`` gives an empty tuple: every name is allowed."""
    names = tuple(listed(raw, "names"))
    if not names:  # an empty list from a template must not allow every name
        raise ValueError("it names nothing")
    return () if names == ("any",) else names


@kind(
    f"parquet, {', '.join(form for _, form in SINKS.values())}, or NAME:PLACE of an installed package's sink",
    lambda value: _PARQUET if value is None else str(value),
    metavar="SINK",
)
def sink(raw: object) -> SinkSpec | None:
    """Parse where Spark writes windows: ``parquet`` files (None), or ``NAME:PLACE`` of a registered sink (``sinks/__init__.py``)."""
    if raw is None or isinstance(raw, SinkSpec):
        return raw
    word, colon, target = as_text(raw).partition(":")
    name = word.lower()
    if name == _PARQUET and not colon:
        return None
    return SinkSpec(name, find(name).parse(target))


class LetterPlace(NamedTuple):
    """A place of dead letters that is not the ledger."""

    kind: str
    """A key of ``LETTER_PLACES``."""
    target: str = ""
    """Files: a folder or a URI, empty for the output folder; a queue's URL; ``bucket/prefix``; a stream's name."""

    def __str__(self) -> str:
        """Return it as it was written, without secrets."""
        colon = "://" if self.kind == "s3" else ":" if self.target else ""
        return redacted(f"{self.kind}{colon}{self.target}")


TABLES_OF_LETTERS: Final = ("delta", "iceberg")
"""The sinks that take dead letters."""
_FILES: Final = (r"(?s)(.*[^/].*)", "a folder or a URI")
LETTER_PLACES: Final[Mapping[str, tuple[str, str, str]]] = {
    "jsonl": ("jsonl, jsonl:PATH or URI", *_FILES),
    "parquet": ("parquet, parquet:PATH or URI", *_FILES),
    "sqs": ("sqs:QUEUE_URL", r"(https?://[^/]+/+[^/].*)", "a queue's URL"),
    "s3": (
        "s3://BUCKET/PREFIX",
        r"//+([^/@:]+(?:/.*?)?)/*",
        "//BUCKET or //BUCKET/PREFIX, without credentials: AWS's environment, profile or role has them",
    ),
    "kinesis": ("kinesis:STREAM", r"([A-Z0-9_.-]{1,128})", "a stream's name"),
    **{name: (SINKS[name][1], r"(?s)(.*)", "a table") for name in TABLES_OF_LETTERS},
}
"""By name: how the setting is written, what follows the colon (in any case of letters), and that in words."""


@kind(
    f"ledger, {', '.join(form for form, *_ in LETTER_PLACES.values())}",
    lambda value: "ledger" if value is None else str(value),
    metavar="PLACE",
)
def dead_letters(raw: object) -> LetterPlace | None:
    """Parse where dead letters (records that failed for good) are stored: ``ledger`` (None), or one of ``LETTER_PLACES``."""
    if raw is None or isinstance(raw, LetterPlace):
        return raw
    word, colon, target = as_text(raw).partition(":")
    word = word.lower()
    if word == "ledger" and not colon:
        return None
    in_files = word in {"jsonl", "parquet"}
    if in_files and not colon:
        return LetterPlace(word)
    if word not in LETTER_PLACES:
        raise ValueError("it names no place of these")
    _, pattern, wanted = LETTER_PLACES[word]
    match = re.fullmatch(pattern, target, re.IGNORECASE)
    if match is None:
        raise ValueError(f"after the colon comes {wanted}")
    if word in TABLES_OF_LETTERS:
        return LetterPlace(word, find(word).parse(target))
    is_path = in_files and "://" not in target
    return LetterPlace(word, str(local_path(target).absolute()) if is_path else match[1])
