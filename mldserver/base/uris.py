"""URIs of output folders on other file systems: as pyarrow takes them, as Spark does, and as a log may show them.

pyarrow's URIs carry options as their query (``s3://bucket/prefix?endpoint_override=…``), and credentials as user and
password. Spark's are names only: ``s3://bucket/prefix/x``, and how they are reached is said in its configuration.

Settings also hold secrets: in URLs of any kind, in pairs, in addresses of Spark Connect and among Java's options. ``redacted``
hides them where a setting is shown. ``redaction`` hides the same values in what other programs write.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlsplit

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

SCHEMES: Final = frozenset({"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"})
"""What ``pyarrow.fs.FileSystem.from_uri`` understands, beside ``file``."""

NOTHING_RENAMED: Final = frozenset({"s3", "gcs", "abfs"})
"""Types of pyarrow's file systems that hold objects under names, and know folders by those only."""

_CONTAINERS: Final = frozenset({"abfs", "abfss"})
"""Where the user's place in a URI names a container, for Hadoop as for pyarrow."""

HIDDEN: Final = "…"
"""Stands for a secret where a setting is shown."""


def local_path(given: str) -> Path:
    """Return a path whose ``~`` is a home directory. Raises ValueError where there is none."""
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ValueError(f"there is no home directory for {given.partition('/')[0]}") from error


def spark_uri(uri: str) -> str:
    """Return the name that Spark knows a place by: no query, no password, nothing escaped, no slash at its end."""
    found = urlsplit(uri)
    user, at, host = found.netloc.rpartition("@")
    kept = f"{user.partition(':')[0]}{at}" if found.scheme in _CONTAINERS else ""
    return f"{found.scheme}://{kept}{host}{unquote(found.path)}".rstrip("/")


def hadoop_settings(uri: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return Hadoop's settings that lead Spark to the bucket of an ``s3://`` URI as its options lead pyarrow there.

    They are per-bucket settings, so a job reaches all other buckets as before. What ``given``, Spark's configuration,
    says for this bucket or for all is left out. Empty for other URIs.
    """
    bucket, said = urlsplit(uri).netloc.rpartition("@")[2], s3_options(uri)
    if not said:
        return {}
    wanted = {
        "access.key": said["key"],
        "secret.key": said["secret"],
        "endpoint": said["endpoint"],
        "endpoint.region": said["region"],
        "path.style.access": "true" if said["endpoint"] else None,
        "connection.ssl.enabled": "false" if said["scheme"] == "http" else None,
    }
    configured = {name.removeprefix("spark.hadoop.") for name in given}
    settings = {"fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem"}
    settings |= {
        f"fs.s3a.bucket.{bucket}.{name}": value
        for name, value in wanted.items()
        if value and f"fs.s3a.{name}" not in configured
    }
    return {name: value for name, value in settings.items() if name not in configured}


def s3_options(uri: str) -> dict[str, str | None]:
    """Return what an ``s3://`` URI says of key, secret, endpoint, region and scheme; empty for other URIs."""
    found = urlsplit(uri)
    if found.scheme != "s3":
        return {}
    key, _, secret = map(unquote, found.netloc.rpartition("@")[0].partition(":"))
    options = dict(parse_qsl(found.query))
    names = {"endpoint": "endpoint_override", "region": "region", "scheme": "scheme"}
    return {"key": key, "secret": secret} | {name: options.get(option) for name, option in names.items()}


def opened(uri: str) -> tuple[FileSystem, str]:
    """Return the file system of a URI and the path in it, without a slash at its end. Blocking; may ask S3 for the region.

    Raises OSError; ValueError and NotImplementedError for what pyarrow does not take.
    """
    from pyarrow import fs  # noqa: PLC0415  # settings name places long before one is opened

    found = None
    if uri.startswith("s3:") and "allow_delayed_open" not in uri:
        # A small file is one request then, not three; an older pyarrow does not know the option.
        with contextlib.suppress(ValueError):
            found = fs.FileSystem.from_uri(f"{uri}{'&' if '?' in uri else '?'}allow_delayed_open=true")
    filesystem, base = found or fs.FileSystem.from_uri(uri)
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

_OPTION_ENDS = re.compile(r"[;?&:=]")
_SECRET_WORD = re.compile(r"secret|passw|pwd|token|key|credential|signature", re.IGNORECASE)
_LEADS = re.compile(r"[,'\"(]")
"""What an option may begin with in the middle of a text."""
_IN_BRACES = re.compile(r"\{[^}]*\}")
_VALUE = re.compile(r"[^;&\s]*")
_UNTIL_AT = re.compile(r"(?<![^?#\s])[^?#\s]*@")
"""Part of a text, without white space, up to its last ``@``: what ``_USER_INFO`` is looked for in."""
_USER_INFO = re.compile(
    r"((?<![\w.+-])[A-Za-z][\w.+-]*:)?//"
    # A password may hold an unescaped '/', as AWS's secret keys do.
    r"(?:([^/?#@:\s]*)(:[^/?#\s]*)?|([^/?#@:\s]+)(:(?!\d+/)[^?#\s]*))@"
)
"""``//user:password@`` of a URL. The user is hidden too: it is an access key where the URL names a bucket."""
_ORACLE_LOGIN = re.compile(r"(?<![^@;?\s])(?=[^@;?\s]*@)([^@;?\s]*?jdbc:oracle:\w+:[^/:@;?\s]+/)([^@;?\s]+)@")
"""``:user/password@host`` of Oracle's JDBC driver."""

_CONNECT_OPTION = re.compile(r";(?!(?:use_ssl|user_id|user_agent|session_id|grpc_\w+)=)([^;=]*=)([^;]*)")
"""``;token=…`` of Spark Connect. Names that Spark does not know become headers of each call: they may open a proxy."""

_SHORTEST = 6
"""Characters of a secret that is searched for. A shorter one is a word of any text, such as ``true``."""


def redacted(text: str) -> str:
    """Return a URL of any kind, JDBC's and Spark Connect's too, without its user, its password and its secret options."""
    if text.startswith("sc://"):
        return _CONNECT_OPTION.sub(rf";\1{HIDDEN}", text)
    copied_to, shown = 0, list[str]()
    for value in _secret_values(text):
        shown += text[copied_to : value.start()], HIDDEN
        copied_to = value.end()
    text = _UNTIL_AT.sub(_without_users, "".join([*shown, text[copied_to:]]))
    return _ORACLE_LOGIN.sub(rf"\1{HIDDEN}@", text)


def _secret_values(text: str) -> Iterator[re.Match[str]]:
    """Find ``?password=…``, ``;token={…}`` and the like in a URL of any kind; yield the matches of their values.

    A name begins at the start of the text, behind ``? & ;``, or in the middle of a word behind ``, ' " (``.
    Each character is looked at a bounded number of times, since other programs may write long texts.
    """
    at, first, last_brace = 0, True, text.rfind("}")
    while (ends := _OPTION_ENDS.search(text, at)) is not None:
        name, at = text[at : ends.start()], ends.end()
        if ends[0] == "=" and _is_secret(name, first=first):
            # A search for a brace that is not there would go to the end of the text each time.
            value = (_IN_BRACES.match(text, at) if at < last_brace else None) or _VALUE.match(text, at)
            assert value is not None
            yield value
            at, first = value.end(), False
        else:
            first = ends[0] in "?&;"


def _is_secret(name: str, *, first: bool) -> bool:
    """Return whether an option's name has a secret word; ``first``: whether the option begins with the name."""
    # Of each word only the part behind ``, ' " (`` can be an option's name; of the first one the whole, if ``first``.
    possible_names = [
        word if first and not number else "".join(_LEADS.split(word, maxsplit=1)[1:])
        for number, word in enumerate(re.split(r"\s+", name))
    ]
    return any(map(_SECRET_WORD.search, possible_names))


def _without_users(part: re.Match[str]) -> str:
    return _USER_INFO.sub(_without_user, part[0])


def _without_user(found: re.Match[str]) -> str:
    """Return ``//user:password@`` with both hidden; the user stays where it names a container (Azure). ``_USER_INFO`` matched."""
    scheme, *parts = found.groups(default="")
    user, password = (first or second for first, second in zip(parts[:2], parts[2:], strict=True))
    shown_user = user if scheme.removesuffix(":") in _CONTAINERS else ""
    colon = ":" if shown_user and password else ""
    return f"{scheme}//{shown_user}{colon}{HIDDEN if password or not shown_user else ''}@"


def secrets_of(value: Mapping[str, str]) -> dict[str, str]:
    """Return the pairs whose values are secret, or, as Spark sees it, hold one (``-DkeyStorePassword=…``)."""
    return {key: item for key, item in value.items() if _SECRET_NAME.search(key) or _SECRET_NAME.search(item)}


def redacted_pairs(value: Mapping[str, str]) -> dict[str, str]:
    """Return pairs without the values that are secret, and without what opens a URL in the others."""
    secret = secrets_of(value)
    return {redacted(key): HIDDEN if key in secret else redacted(item) for key, item in value.items()}


def secrets_in(*found: str | Mapping[str, str]) -> set[str]:
    """Return the secrets that URLs and pairs hold: passwords, and values of secret options, as written and unescaped."""
    secrets: set[str] = set()
    for one in found:
        if not isinstance(one, str):
            secrets |= {*secrets_of(one).values()} | secrets_in(*one, *one.values())
        elif one.startswith("sc://"):
            secrets |= {option[2] for option in _CONNECT_OPTION.finditer(one)}
        else:
            secrets |= {value[0] for value in _secret_values(one)}
            users = (user for part in _UNTIL_AT.finditer(one) for user in _USER_INFO.finditer(part[0]))
            secrets |= {(user[3] or user[5] or "").removeprefix(":") for user in users}
            secrets |= {login[2] for login in _ORACLE_LOGIN.finditer(one)}
    return (secrets | set(map(unquote, secrets))) - {""}


def redaction(secrets: Iterable[str], *, in_json: bool = False) -> Callable[[str], str]:
    """Return what hides these secrets in text that others have written, in JSON too. Secrets under 6 characters stay.

    ``in_json``: the text is compact JSON. Field names stay, even if a weak password equals one.
    """
    wanted = {secret for secret in secrets if len(secret) >= _SHORTEST}
    wanted |= {json.dumps(secret, ensure_ascii=False)[1:-1] for secret in wanted}
    if not wanted:
        return lambda text: text
    # The longest first: one may begin as another does.
    found = sorted(wanted, key=len, reverse=True)
    pattern = f"(?:{'|'.join(map(re.escape, found))})" + (r'(?![^"\\]*":)' if in_json else "")
    return partial(re.compile(pattern).sub, HIDDEN)


def redacted_option(option: str) -> str:
    """Return an option of the JVM such as ``-Daws.secretAccessKey=…`` without its value, where that is secret."""
    name, equals, _ = option.partition("=")
    return f"{name}={HIDDEN}" if equals and _SECRET_NAME.search(option) else option
