"""Where output and ledger lie, as settings name them, and what follows from it for a server's own local files."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from mldserver.config.kinds import Kind, local_path
from mldserver.errors import ConfigError
from mldserver.remote import SCHEMES, redacted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mldserver.config.settings import Settings

__all__ = [
    "DynamoPlace",
    "LedgerPlace",
    "OutPlace",
    "RemoteOut",
    "SqlitePlace",
    "cache_folder",
    "home",
    "ledger",
    "ledger_file",
    "out",
]

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
_OPTIONS = frozenset({"region", "endpoint_url"})

LEDGER_FILE: Final = "_mldserver/ledger.sqlite"
"""Where SQLite's ledger lies in a local output folder (``coordinator/layout.py``)."""


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
        if not isinstance(raw, str):
            raise ValueError("it is not text")  # noqa: TRY004  # kinds promise ValueError, whatever is wrong
        given = raw.strip()
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
        if not isinstance(raw, str):
            raise ValueError("it is not text")  # noqa: TRY004  # kinds promise ValueError, whatever is wrong
        given = raw.strip()
        if not given:
            raise ValueError("it is empty")
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


def home(settings: Settings) -> Path:
    """Return the local folder of what never is output: the ledger in SQLite, life locks, Spark's scratch space.

    With a local output folder it is that one. Otherwise it lies beside the ledger, or in ``cache_dir`` when that is a
    table: each host then has its own, so that locks show the lives of one host's servers only.
    """
    if isinstance(settings.out, Path):
        return settings.out
    place = settings.ledger
    if isinstance(place, SqlitePlace):
        file = ledger_file(settings)
        return file.with_name(f"{file.name}.home")
    name = hashlib.sha256(f"{place}\n{settings.pipeline}".encode()).hexdigest()[:16]
    return settings.cache_dir / "pipelines" / name


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


def ledger_file(settings: Settings) -> Path:
    """Return the file of a ledger in SQLite. Raises ConfigError where there can be none, or the settings name a table."""
    place = settings.ledger
    if isinstance(place, SqlitePlace) and place.path is not None:
        return place.path
    if isinstance(place, SqlitePlace) and isinstance(settings.out, Path):
        return settings.out / LEDGER_FILE
    raise ConfigError(
        f"The output folder {settings.out} is not a local one, and SQLite needs a local file.",
        advice="Set ledger = dynamodb://TABLE, which several hosts can share, or ledger = sqlite:PATH with a path on "
        "this host's disk, for servers of this host only.",
    )
