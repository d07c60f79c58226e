"""URIs of output folders on other file systems: as pyarrow takes them, as Spark does, and as a log may show them.

pyarrow's URIs carry options as their query (``s3://bucket/prefix?endpoint_override=…``), and credentials as user and
password. Spark's are names only: ``s3://bucket/prefix/x``, and how they are reached is said in its configuration.

Settings hold more that must not be told a log or a terminal: values that open something, in pairs, in databases' URLs and
among Java's options.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyarrow.fs import FileSystem

SCHEMES: Final = frozenset({"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"})
"""What ``pyarrow.fs.FileSystem.from_uri`` understands, beside ``file``."""

_CONTAINERS: Final = frozenset({"abfs", "abfss"})
"""Where the user's place in a URI names a container, for Hadoop as for pyarrow."""

_SECRET: Final = re.compile(r"secret|password|token|key|credential", re.IGNORECASE)
_HIDDEN: Final = "…"


def local_path(given: str) -> Path:
    """Return a path whose ``~`` is a home directory. Raises ValueError where there is none."""
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ValueError(f"there is no home directory for {given.partition('/')[0]}") from error


def redacted(uri: str) -> str:
    """Return a URI without what opens it: user and password, and values of the query that look like secrets."""
    place, mark, query = uri.partition("?")
    scheme, colon, rest = place.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    name, word, _ = user.partition(":")
    if at:
        user = f"{name}{word}{_HIDDEN if word else ''}" if scheme in _CONTAINERS else _HIDDEN
    return f"{scheme}{colon}{user}{at}{host}{slash}{path}{mark}{'&'.join(map(_shown, query.split('&')))}"


def _shown(option: str) -> str:
    key, equals, value = option.partition("=")
    return f"{key}{equals}{_HIDDEN if _SECRET.search(key) else value}"


def spark_uri(uri: str) -> str:
    """Return the name that Spark knows a place by: no query, no password, nothing escaped, no slash at its end."""
    found = urlsplit(uri)
    user, at, host = found.netloc.rpartition("@")
    kept = f"{user.partition(':')[0]}{at}" if found.scheme in _CONTAINERS else ""
    return f"{found.scheme}://{kept}{host}{unquote(found.path)}".rstrip("/")


def opened(uri: str) -> tuple[FileSystem, str]:
    """Return a file system and the place's path in it, without a slash at its end. Blocking; S3 may be asked for the region.

    Raises OSError; ValueError and NotImplementedError for what pyarrow does not take.
    """
    from pyarrow import fs  # noqa: PLC0415  # settings name places long before one is opened

    filesystem, base = fs.FileSystem.from_uri(uri)
    return filesystem, base.rstrip("/")


# Two jobs need not make the client of an object store, and ask for its region, twice.
_opened_once = lru_cache(maxsize=8)(opened)


def reach(place: str, out: str) -> tuple[FileSystem, str]:
    """Return the file system that a path lies in, and its path there; ``out`` is empty for local paths.

    Otherwise ``out`` is the URI of the output folder and ``place`` the Spark name of something in it. Raises as
    ``opened`` does, and ValueError when ``place`` lies elsewhere.
    """
    if not out:
        from pyarrow import fs  # noqa: PLC0415  # see above

        return fs.LocalFileSystem(), place
    root = spark_uri(out)
    if not place.startswith(f"{root}/"):
        raise ValueError(f"{place} does not lie in {root}")
    filesystem, base = _opened_once(out)
    return filesystem, base + place.removeprefix(root)


_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|pwd|token|private.?key|(access|account)[._-]?key|\.sas\.", re.IGNORECASE
)
"""What Spark redacts (its default of ``spark.redaction.regex``), and names of Azure and of databases."""

_SECRET_OPTION = re.compile(r"([^;?&:=]*(?:secret|password|token|key)[^;?&:=]*=)[^;&]*", re.IGNORECASE)
_PASSWORD = re.compile(r"([:/][^/:@;?]+[/:])[^/@;?]+@")
"""``//user:password@host``, and Oracle's ``:user/password@host``."""


def redacted_pairs(value: Mapping[str, str]) -> dict[str, str]:
    """Return pairs without the values that are secret, or, as Spark sees it, hold one (``-DkeyStorePassword=…``)."""
    return {
        key: _HIDDEN if _SECRET_NAME.search(key) or _SECRET_NAME.search(item) else item
        for key, item in value.items()
    }


def redacted_url(text: str) -> str:
    """Return a URL, JDBC's too, without its password and secret options."""
    return _PASSWORD.sub(rf"\1{_HIDDEN}@", _SECRET_OPTION.sub(rf"\1{_HIDDEN}", text))


def redacted_option(option: str) -> str:
    """Return an option of the JVM such as ``-Daws.secretAccessKey=…`` without its value, where that is secret."""
    name, equals, _ = option.partition("=")
    return f"{name}={_HIDDEN}" if equals and _SECRET_NAME.search(option) else option
