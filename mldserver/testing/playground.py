"""What ``sim`` and ``demo`` need around a simulation: input, settings, a Spark that starts quickly, and errors from the log."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import itertools
import lzma
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import orjson

from mldserver.config import locations
from mldserver.config.locations import RemoteOut
from mldserver.config.raw import FUNCTIONS
from mldserver.config.resolve import home, resolve
from mldserver.config.settings import Settings
from mldserver.errors import ConfigError
from mldserver.handler.inspection import load_spec
from mldserver.handler.spec import HandlerSpec
from mldserver.jobs.engine import Engine
from mldserver.output.layout import SPARK
from mldserver.records import DeadLetter
from mldserver.spark.session import is_local

DEPARTURES: Final = "flights-2013-01.jsonl.xz"
"""The bundled input: 27,004 departures from New York's airports in January 2013."""

_LOG: Final = "_server.log"
"""In the output folder; readers of the folder skip names that begin with an underscore."""
_BAD: Final = frozenset({"error", "critical"})
_SETTLE_MS: Final = 2000
"""Every shard of the fake connects at once, so two seconds are enough to see them all."""

_OUTWARD: Final = frozenset(
    {
        # Test records must never get into a ledger, a table or a dead-letter destination that others read.
        *("ledger", "pipeline", "rename_from", "server_id"),
        *("sink", "late_sink", "sink_table", "sink_options", "dead_letters"),
        # The real stream's shards are none of the fake one's.
        *("source", "from", "stream", "region", "endpoint_url"),
        # Only the fake daemon connects, and no client reads the status.
        *(
            "allow_shards",
            "listen_secret",
            "tls_certificate",
            "tls_key",
            "tls_client_ca",
            "tls_names",
            "insecure",
        ),
        *("admin", "metrics_listen"),
        # The run has one function, whose handler the command names.
        FUNCTIONS,
    }
)
"""Settings that name things outside a run's folder. ``cache_dir`` does too, but its files only save time."""


def read_lines(path: Path | None, *, limit: int | None = None) -> list[bytes]:
    """Return the lines of a file (gzip or xz by its suffix), blank ones left out; without a path the bundled departures.

    Raises ConfigError when the file cannot be read or holds no line.
    """
    if path is None:
        # ``handlers`` is a namespace package, which has no single folder; the module next to the data has one.
        spec = find_spec("handlers.departures")
        if spec is None or spec.origin is None:
            raise ConfigError(
                "The bundled departures were not found.",
                advice="Another package called handlers hides the examples: run from a different folder.",
            )
        path = Path(spec.origin).parent / "data" / DEPARTURES
    try:
        data = path.read_bytes()
        data = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)(data)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", advice="Check its path and rights.") from error
    lines = list(itertools.islice((line for line in data.splitlines() if line.strip()), limit))
    if not lines:
        raise ConfigError(f"{path} holds no records.", advice="Give a file with one record a line.")
    return lines


def arrival_times(lines: Sequence[bytes], field: str) -> list[int]:
    """Return each record's arrival time in ms since the epoch: the latest time in a JSON field of the records so far.

    The field holds ISO 8601 (UTC unless it says) or ms since the epoch. Raises ConfigError when no record has it.
    """
    known: list[int | None] = []
    for line in lines:
        value, at = _parsed(line).get(field), None
        with contextlib.suppress(ValueError):
            if isinstance(value, int | float):
                at = max(0, int(value))
            else:
                when = datetime.fromisoformat(str(value))
                at = max(0, int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000))
        known.append(at)
    first = next((at for at in known if at is not None), None)
    if first is None:
        raise ConfigError(
            f"No record has a time in {field}.",
            advice="Name a field of JSON with ISO 8601 or ms since the epoch.",
        )
    return list(itertools.accumulate((first if at is None else at for at in known), max))


def partition_keys(lines: Sequence[bytes], fields: str) -> list[str]:
    """Return each record's partition key: a field of its JSON as text, or the JSON of several (``carrier,flight``).

    A record without a field has null in its place. Raises ConfigError when no record has one of the fields.
    """
    names = [name.strip() for name in fields.split(",")]
    rows = list(map(_parsed, lines))
    for name in names:
        if not any(name in row for row in rows):
            raise ConfigError(f"No record has a field {name!r}.", advice="Name fields of JSON records.")
    keys = []
    for row in rows:
        values = [row.get(name) for name in names]
        whole = values if len(values) > 1 else values[0]
        keys.append(whole if isinstance(whole, str) else orjson.dumps(whole).decode())
    return keys


def fresh_folder(wanted: str | Path | None, name: str) -> Path:
    """Return ``wanted``, created if it does not exist, or a new temporary folder.

    Raises ConfigError when the folder is not empty or not local. A run needs a ledger of its own (over an old one every
    record would be a duplicate), and its log and its results are read from the disk.
    """
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix=f"mldserver-{name}-"))
    try:
        place = locations.out.parse(wanted)
        if isinstance(place, RemoteOut):
            raise ConfigError(
                f"{place} is not on this machine, and `mldserver {name}` keeps ledger, log and output in one folder.",
                advice="Name a local folder; `mldserver serve` writes to other file systems.",
            )
        place.mkdir(parents=True, exist_ok=True)
        taken = any(place.iterdir())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{wanted} cannot be used: {error}.", advice="Choose another folder.") from error
    if taken:
        raise ConfigError(f"{place} is not empty.", advice="Name a folder that is new, or empty it.")
    return place.resolve()


def play_settings(
    handler: str, out: Path, *, environ: Mapping[str, str], folder: Path, spark_master: str | None = None
) -> Settings:
    """Return settings for a run on this machine: the user's own, except address, log, and everything outside ``out``.

    Spark runs on this machine, unless ``spark_master`` names another place. Raises ConfigError.
    """
    fixed = {
        "handler": handler,
        "out": str(out),
        "listen": "127.0.0.1:0",
        "log_file": str(out / _LOG),
        "log_format": "json",
        "log_error_messages": "true",
        "flush_interval": "1 s",
    }
    settings = resolve(fixed, environ=environ, folder=folder, leave_out=_OUTWARD)
    # The user's cluster is not used: its machines may not see the folder ``out``.
    master = spark_master or (settings.spark_master if is_local(settings.spark_master) else "local[*]")
    settings = resolve(fixed | {"spark_master": master}, environ=environ, folder=folder, leave_out=_OUTWARD)
    return dataclasses.replace(settings, constants={"settle_time_ms": _SETTLE_MS})


def fitted(settings: Settings, spec: HandlerSpec) -> Settings:
    """Return the settings with what the handler cannot do without."""
    if spec.keyed:
        # The fake stream's listing says which keys a shard has.
        settings = dataclasses.replace(settings, stream="simulated")
    return dataclasses.replace(settings, late="separate") if spec.takes_previous else settings


def quick_spark(settings: Settings) -> Engine | None:
    """Return a Spark that starts quickly, or None for a handler without rows. Raises HandlerError."""
    from mldserver.assembly import spark_of  # noqa: PLC0415  # the server's imports

    spec = load_spec(settings.handler)
    if spec.schema is None:
        return None
    return spark_of(
        settings, spec, work_dir=home(settings) / SPARK, group_limit=1, quick=True, archive_after=None
    )


async def dead_letters(settings: Settings) -> list[DeadLetter]:
    """Return the dead letters that a run has left in its ledger, in the order in which they were stored."""
    from mldserver.assembly import ledger_of  # noqa: PLC0415  # the server's imports
    from mldserver.base.clock import SystemClock  # noqa: PLC0415  # see above

    ledger = ledger_of(settings, server_id=f"tool:{os.getpid()}", clock=SystemClock())
    try:
        held = await ledger.peek()
        return list(await ledger.dead_letters(held.dead_letters)) if held.dead_letters else []
    finally:
        await ledger.close()


def logged_failures(log_file: Path | None, *, most: int = 5) -> list[str]:
    """Return the log's latest errors, one paragraph each, at most ``most``."""
    if log_file is None or not log_file.exists():
        return []
    paragraphs = []
    for event in map(_parsed, log_file.read_bytes().splitlines()):
        if event.get("level") not in _BAD:
            continue
        parts = [str(event[key]) for key in ("what", "did", "advice") if event.get(key)]
        if not parts and event.get("exception"):
            parts = [str(event["exception"]).strip().splitlines()[-1]]
        if not parts:
            parts = [": ".join(str(event[key]) for key in ("event", "reason") if event.get(key))]
        paragraphs.append(" ".join(parts))
    return list(dict.fromkeys(filter(None, paragraphs)))[-most:]


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:  # a line cut off by a crash
        return {}
    return event if isinstance(event, dict) else {}
