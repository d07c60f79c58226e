"""The table of settings: names, types, defaults and meaning, once, as a frozen dataclass."""

# ruff: noqa: RUF009  # `_setting` and `_made` return dataclass fields, as `field` itself does
from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mldserver.config import failures, kinds, locations, redaction
from mldserver.config.kinds import (
    ENV_PREFIX,
    Address,
    Kind,
    Late,
    Level,
    LogFormat,
    OnAhead,
    OnFailure,
    OnKeyFailure,
    OnWindowFailure,
    Spec,
    TcpAddress,
)
from mldserver.config.locations import LedgerPlace, OutPlace, SqlitePlace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mldserver.config.locations import LetterPlace, TableSink
    from mldserver.runtime.failure_policy import FailureRule

__all__ = ["ENV_PREFIX", "MAY_HOLD_SECRETS", "Settings", "Spec", "default_pipeline", "specs"]

MAY_HOLD_SECRETS: Final = frozenset({"spark_conf", "sink_options"})
"""Settings that are pairs, some of whose values may be secret."""

MIB: Final = 2**20
GIB: Final = 2**30

T = TypeVar("T")


def _setting(kind: Kind[T], default: T, meaning: str, section: str) -> T:
    told = {"kind": kind, "help": meaning, "section": section, "shown": kind.show(default)}
    return field(default=default, metadata=told)


def _made(kind: Kind[T], factory: Callable[[], T], shown: str, meaning: str, section: str) -> T:
    """A setting whose default depends on others or on the machine; ``shown`` tells it in words."""
    told = {"kind": kind, "help": meaning, "section": section, "shown": shown}
    return field(default_factory=factory, metadata=told)


def default_pipeline(handler: str) -> str:
    """Return the last part of a handler's dotted path."""
    return re.split(r"[.:]", handler)[-1]


_DERIVED: Final = Path()
"""Stands for "not given", by identity: an operator may well give ``.``."""

_PIPELINE = "Pipeline"
_CONNECTIONS = "Connections"
_LOG = "Log"
_HANDLER = "Handler failures"
_WORKERS = "Worker processes"
_COORDINATOR = "Segments and watermark"
_WINDOWS = "Window failures"
_STREAM = "Stream"
_SPARK = "Spark"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting of one server. Durations are seconds, sizes are bytes."""

    handler: str = _made(
        kinds.dotted_path(),
        str,
        "",
        "The handler's dotted path; the one setting without a default.",
        _PIPELINE,
    )
    pipeline: str = _made(
        kinds.name(),
        str,
        "last part of `handler`",
        "The pipeline's name, in logs and in the ledger.",
        _PIPELINE,
    )
    rename_from: str | None = _setting(
        kinds.optional(kinds.name()),
        None,
        "The name that the pipeline had until it was drained: it goes on under `pipeline`, at its positions.",
        _PIPELINE,
    )
    out: OutPlace = _made(
        locations.out(),
        lambda: _DERIVED,
        "out/PIPELINE",
        "Folder of output and segments: a path, or a URI that pyarrow and Spark both reach.",
        _PIPELINE,
    )
    ledger: LedgerPlace = _setting(
        locations.ledger(),
        SqlitePlace(),
        "Where positions and windows are kept: a file (in a local `out`, or at PATH), or a table for several hosts.",
        _PIPELINE,
    )
    new_ledger: bool = _setting(
        kinds.flag(),
        default=False,
        meaning="Begin anew in a folder whose ledger was lost or exchanged; what this one does not name is set apart.",
        section=_PIPELINE,
    )
    sink: TableSink | None = _setting(
        locations.sink(),
        None,
        "What readers read: Parquet files in `out`, or a table that Spark writes into.",
        _PIPELINE,
    )
    sink_table: str | None = _setting(
        kinds.optional(locations.table_name()), None, "The table of a JDBC sink.", _PIPELINE
    )
    sink_options: Mapping[str, str] = _made(
        kinds.pairs(),
        dict,
        "none",
        "Options of Spark's writer into the table; for JDBC also user, password, driver; may be repeated.",
        _PIPELINE,
    )
    server_id: str | None = _setting(
        kinds.optional(kinds.text("a name that no other server on the ledger has")),
        None,
        "This server's name on the ledger; none: HOST:PID:RANDOM.",
        _PIPELINE,
    )
    server_timeout: float = _setting(
        kinds.duration(), 30.0, "A server silent for this long is taken for dead by the others.", _PIPELINE
    )
    grace: float = _setting(
        kinds.duration(), 30.0, "How long a shutdown may take before it is forced.", _PIPELINE
    )
    cache_dir: Path = _made(
        kinds.folder(),
        lambda: locations.cache_folder(os.environ),
        "$XDG_CACHE_HOME/mldserver",
        "Files that only save time, such as the JVM's class archive.",
        _PIPELINE,
    )

    listen: Address = _setting(
        kinds.address(), TcpAddress("127.0.0.1", 7070), "Where daemons connect.", _CONNECTIONS
    )
    connection_limit: int = _setting(
        kinds.count(at_least=1), 1024, "Connections at a time; more wait in the kernel's queue.", _CONNECTIONS
    )
    line_limit: int = _setting(
        kinds.size(at_least=1024), 256 * MIB, "Longest message that a daemon may send.", _CONNECTIONS
    )
    initialize_timeout: float = _setting(
        kinds.duration(),
        60.0,
        "A connection that sends no `initialize` within this time is closed.",
        _CONNECTIONS,
    )
    partial_line_timeout: float = _setting(
        kinds.duration(),
        60.0,
        "A message that stops arriving for this long closes its connection.",
        _CONNECTIONS,
    )
    close_timeout: float = _setting(
        kinds.duration(), 5.0, "How long a daemon may leave an ended connection open.", _CONNECTIONS
    )

    log_file: Path | None = _setting(
        kinds.optional(kinds.folder()), None, "Log to this file, opened again on SIGHUP; none: stdout.", _LOG
    )
    log_level: Level = _setting(
        kinds.choice("debug", "info", "warning", "error", "critical"),
        "info",
        "The lowest level logged.",
        _LOG,
    )
    log_format: LogFormat = _setting(
        kinds.choice("auto", "json", "pretty"), "auto", "auto: pretty on a terminal, else JSON lines.", _LOG
    )

    on_failure: OnFailure = _setting(
        kinds.choice("dead_letter", "skip", "halt"),
        "dead_letter",
        "What becomes of a record that keeps failing: stored aside, only counted, or its connection is closed.",
        _HANDLER,
    )
    on_key_failure: OnKeyFailure = _setting(
        kinds.choice("continue", "park"),
        "continue",
        "Later records of a dead letter's partition key go on, or wait behind it as dead letters too.",
        _HANDLER,
    )
    dead_letters: LetterPlace | None = _setting(
        locations.dead_letters(),
        None,
        "Where records go that failed for good; only those in the ledger can be listed, parked behind and redriven.",
        _HANDLER,
    )
    failure_rules: tuple[FailureRule, ...] = _made(
        failures.failure_rules(),
        tuple,
        "none",
        "What becomes of records by the class of their error, with its bases; may be repeated.",
        _HANDLER,
    )
    attempts: int = _setting(kinds.count(at_least=1), 3, "Calls of the handler for one record.", _HANDLER)
    max_age: float | None = _setting(
        kinds.optional(kinds.duration()),
        None,
        "A failed record that arrived this long ago is not called again.",
        _HANDLER,
    )
    retry_base: float = _setting(kinds.duration(), 0.1, "First wait between calls; it doubles.", _HANDLER)
    retry_cap: float = _setting(kinds.duration(), 10.0, "Longest wait between calls.", _HANDLER)
    answer_deadline: float | None = _setting(
        kinds.optional(kinds.duration()),
        20.0,
        "A batch that takes longer is answered while the handler works on; its checkpoint waits.",
        _CONNECTIONS,
    )
    handler_timeout: float = _setting(
        kinds.duration(), 60.0, "A hook that runs longer has failed (`async`) or is logged as slow.", _HANDLER
    )
    workers: int | None = _made(
        kinds.optional(kinds.count(at_least=1), word="inline"),
        lambda: max(1, (os.cpu_count() or 1) - 1),
        "one fewer than cores, at least one",
        "Processes that the handler runs in; `inline`: it runs in the server's own.",
        _WORKERS,
    )
    worker_memory: int | None = _setting(
        kinds.optional(kinds.size(at_least=MIB)),
        None,
        "A worker that grows beyond this is replaced; half as much again, and it is killed.",
        _WORKERS,
    )
    worker_kill_after: float | None = _setting(
        kinds.optional(kinds.duration()),
        120.0,
        "A worker is killed when a call of the handler, or its silence, lasts longer.",
        _WORKERS,
    )

    concurrency: int | None = _setting(
        kinds.optional(kinds.count(at_least=1)),
        None,
        "Records of one batch and of different keys that `process_record` works on at a time; none: what it says.",
        _HANDLER,
    )

    flush_interval: float = _setting(
        kinds.duration(), 5.0, "Rows become durable at least this often.", _COORDINATOR
    )
    flush_bytes: int = _setting(
        kinds.size(), 64 * MIB, "Rows become durable at once beyond this size.", _COORDINATOR
    )
    buffer_bytes: int = _setting(
        kinds.size(), 512 * MIB, "Rows in memory at most; shards that are ahead wait.", _COORDINATOR
    )
    segment_disk_bytes: int = _setting(
        kinds.size(), 50 * GIB, "Segments on disk at most; shards that are ahead wait.", _COORDINATOR
    )
    late: Late = _setting(
        kinds.choice("recompute", "separate"),
        "recompute",
        "What becomes of late rows: their window is computed again, or they go to the late dataset.",
        _COORDINATOR,
    )
    recompute_delay: float = _setting(
        kinds.duration(zero=True),
        60.0,
        "How long late rows of a window are gathered before it is computed again.",
        _COORDINATOR,
    )
    retention: float = _setting(
        kinds.duration(zero=True),
        86_400.0,
        "How long finished windows are remembered, and their segments kept for late rows.",
        _COORDINATOR,
    )
    retention_bytes: int = _setting(
        kinds.size(),
        10 * GIB,
        "Segments kept for late rows at most (and at most half of `segment_disk_bytes`).",
        _COORDINATOR,
    )
    idle_time: float = _setting(
        kinds.duration(),
        30.0,
        "A shard that is caught up and gives no row for this long holds no window.",
        _COORDINATOR,
    )
    max_ahead: float | None = _setting(
        kinds.optional(kinds.duration()),
        600.0,
        "How far a row's time may run ahead of its record's arrival and still close windows; none: any time.",
        _COORDINATOR,
    )
    on_ahead: OnAhead = _setting(
        kinds.choice("keep", "fail"),
        "keep",
        "What becomes of such a row: it is kept in its own window, or its record fails as one with a bad row does.",
        _COORDINATOR,
    )
    quiet_time: float = _setting(
        kinds.duration(), 60.0, "When all shards are silent for this long, open windows close.", _COORDINATOR
    )
    settle_time: float = _setting(
        kinds.duration(zero=True),
        10.0,
        "After start and after each new shard windows wait this long for other shards.",
        _COORDINATOR,
    )
    missing_limit: float = _setting(
        kinds.duration(), 600.0, "A known shard without a connection holds windows this long.", _COORDINATOR
    )

    window_on_failure: OnWindowFailure = _setting(
        kinds.choice("halt", "dead_letter"),
        "halt",
        "What becomes of a window that keeps failing: windows wait for a person, or it is set aside.",
        _WINDOWS,
    )
    window_attempts: int = _setting(
        kinds.count(at_least=1), 3, "Runs of `on_window` for one window.", _WINDOWS
    )
    window_retry_base: float = _setting(
        kinds.duration(), 1.0, "First wait between runs; it doubles.", _WINDOWS
    )
    window_retry_cap: float = _setting(kinds.duration(), 60.0, "Longest wait between runs.", _WINDOWS)
    window_deadline: float | None = _setting(
        kinds.optional(kinds.duration()), None, "A run that takes longer is cancelled.", _WINDOWS
    )
    window_concurrency: int = _setting(
        kinds.count(at_least=1), 1, "Windows that Spark computes at a time.", _WINDOWS
    )
    window_group: int = _setting(
        kinds.count(at_least=1),
        16,
        "Small windows that are ready together share one Spark job, up to so many; 1: each has its own.",
        _WINDOWS,
    )

    stream: str | None = _setting(
        kinds.optional(kinds.text("a Kinesis stream's name")),
        None,
        "Stream whose shards are listed (ListShards), so that missing ones are known.",
        _STREAM,
    )
    region: str | None = _setting(
        kinds.optional(kinds.text("an AWS region's name")), None, "AWS region of the stream.", _STREAM
    )
    endpoint_url: str | None = _setting(
        kinds.optional(kinds.text("a URL")), None, "Kinesis endpoint, for tests and emulators.", _STREAM
    )
    list_shards_interval: float = _setting(kinds.duration(), 30.0, "How often shards are listed.", _STREAM)
    shard_retention: float = _setting(
        kinds.duration(),
        8 * 86_400.0,
        "How long ended shards are remembered, at least: longer than the stream keeps records. With `stream` they are "
        "for as long as it lists them.",
        _STREAM,
    )
    accept_gap: bool = _setting(
        kinds.flag(),
        default=False,
        meaning="Take a daemon that skipped records; counted, logged.",
        section=_STREAM,
    )

    spark_master: str = _setting(
        kinds.text("a Spark master or an sc:// URL"),
        "local[*]",
        "Spark master, or a Spark Connect URL.",
        _SPARK,
    )
    spark_conf: Mapping[str, str] = _made(
        kinds.pairs(), dict, "none", "Spark properties; may be repeated.", _SPARK
    )
    spark_ui: bool = _setting(
        kinds.flag(), default=False, meaning="Whether Spark's web page is served.", section=_SPARK
    )
    java_home: Path | None = _setting(
        kinds.optional(kinds.folder()),
        None,
        "Java to run Spark with; none: `JAVA_HOME`, then `PATH`.",
        _SPARK,
    )

    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """For settings that were given: where, in words."""

    def __post_init__(self) -> None:
        """Fill in what follows from the handler's name."""
        if not self.pipeline:
            object.__setattr__(self, "pipeline", default_pipeline(self.handler) or "pipeline")
        if self.out is _DERIVED:
            object.__setattr__(self, "out", Path("out") / self.pipeline)

    def origin(self, name: str) -> str:
        """Return where a setting's value came from, e.g. ``environment MLDSERVER_LISTEN``."""
        return self.origins.get(name, "default")

    def given(self) -> dict[str, str]:
        """Return what was not left at its default, as text with its origin; for the log, so without secrets."""
        return {
            name: f"{_shown(name, getattr(self, name))} ({origin})" for name, origin in self.origins.items()
        }


def _shown(name: str, value: Any) -> str:
    if name in MAY_HOLD_SECRETS:
        value = redaction.pairs(value)
    return specs()[name].kind.show(value)


def specs() -> dict[str, Spec]:
    """Return the table by name, in order."""
    return {
        each.name: Spec(each.name, *(each.metadata[key] for key in ("kind", "help", "section", "shown")))
        for each in dataclasses.fields(Settings)
        if "kind" in each.metadata
    }
