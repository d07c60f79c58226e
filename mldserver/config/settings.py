"""The table of settings: name, type, unit, default, bounds and help of each setting, in one place.

Each section holds the settings of one part of the server. ``Settings`` has all sections, and ``Settings.part``
returns the settings of one part. A field has the name of its setting; the field of a duration also has a unit, so ``grace_seconds`` holds ``grace``. Sizes are bytes.
"""

# ruff: noqa: RUF009  # `setting` and `rare` return dataclass fields, as `field` itself does
from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from mldserver.base.uris import redacted, redacted_pairs, secrets_in
from mldserver.config import kinds, locations
from mldserver.config.kinds import (
    Address,
    FailureRule,
    Kind,
    OnFailure,
    OnKeyFailure,
    TcpAddress,
    failure_rules,
)
from mldserver.config.kinds import duration_ms as ms
from mldserver.config.kinds import duration_seconds as seconds
from mldserver.config.locations import LedgerPlace, LetterPlace, OutPlace, SourcePlace, SqlitePlace
from mldserver.sinks.sink import SinkSpec

ENV_PREFIX: Final = "MLDSERVER_"
CONFIG_FILE: Final = "mldserver.toml"
FROM_VARIABLES: Final = " and environment "
"""Part of the origin of a value in which a file names variables."""
MIB: Final = 2**20
GIB: Final = 2**30
MINUTE_MS: Final = 60_000
DAY_MS: Final = 86_400_000

Level = Literal["debug", "info", "warning", "error", "critical"]
LogFormat = Literal["auto", "json", "pretty"]
Late = Literal["recompute", "separate"]
OnAhead = Literal["keep", "fail"]
OnWindowFailure = Literal["halt", "dead_letter"]

T = TypeVar("T")


class Made(NamedTuple, Generic[T]):
    """A default that depends on the machine or on other settings."""

    factory: Callable[[], T]
    shown: str


def setting(kind: Kind[T], default: T | Made[T], *, common: bool = True, server: bool = False) -> T:
    """Declare a setting that ``mldserver serve --help`` shows. The docstring below it is its help.

    ``server``: it has one value for all functions of a server. Other settings are each function's own.
    """
    about: dict[str, Any] = {"kind": kind, "common": common, "server": server}
    if isinstance(default, Made):
        return field(default_factory=default.factory, metadata=about | {"shown": default.shown})  # type: ignore[no-any-return]  # as a default, a field is of its value's type
    return field(default=default, metadata=about)


def rare(kind: Kind[T], default: T | Made[T], *, server: bool = False) -> T:
    """Declare a setting that new users do not need: only ``--help-all`` shows it."""
    return setting(kind, default, common=False, server=server)


_DERIVED: Final = Path()
"""Stands for "not given", by identity: an operator may well give ``.``."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """Pipeline: handler, name, and places of output and state."""

    handler: str = setting(kinds.dotted_path, Made(str, ""))
    """The handler's dotted path; the only setting without a default."""
    pipeline: str = setting(kinds.name, Made(str, "last part of `handler`"))
    """The pipeline's name, in logs and in the ledger."""
    rename_from: str | None = rare(kinds.optional(kinds.name), None)
    """The former name of a drained pipeline: it continues under the name `pipeline`, at its positions."""
    out: OutPlace = setting(locations.out, Made(lambda: _DERIVED, "out/PIPELINE"))
    """Folder of output and segments: a path, or a URI that pyarrow and Spark both reach. With several functions: the folder of their folders."""
    ledger: LedgerPlace = setting(locations.ledger, SqlitePlace())
    """Where positions and windows are kept: a file (in a local `out`, or at PATH), or a table for several hosts."""
    new_ledger: bool = rare(kinds.flag, False)
    """Accept a folder, or a table, whose ledger was lost or exchanged; segments that this ledger does not
    name are moved to quarantine."""
    sink: SinkSpec | None = setting(locations.sink, None)
    """Where published windows go: Parquet files in `out`, or a table that Spark writes into."""
    late_sink: SinkSpec | None = rare(locations.sink, None)
    """Where late rows go that are not computed into their window: Parquet files in `out`, or a table of Delta Lake or Iceberg."""
    sink_table: str | None = setting(
        kinds.optional(kinds.text("a table's name as SQL takes it, such as SCHEMA.TABLE")), None
    )
    """The table of a JDBC sink, or of another sink that needs a table's name."""
    sink_options: Mapping[str, str] = setting(kinds.pairs, Made(dict, "none"))
    """Options of Spark's table writer; for JDBC also user, password, driver; may be repeated."""
    dead_letters: LetterPlace | None = setting(locations.dead_letters, None)
    """Where records go that failed for good. Only letters in the ledger can be listed and redriven, and make
    later records of their key wait."""
    server_id: str | None = rare(
        kinds.optional(kinds.text("a name that no other server on the ledger has")), None, server=True
    )
    """This server's name in the ledger; none: HOST:PID:RANDOM."""
    grace_seconds: float = setting(seconds(), 30.0, server=True)
    """How long a shutdown may take before it is forced."""
    cache_dir: Path = rare(
        kinds.folder,
        Made(lambda: locations.cache_folder(os.environ), "$XDG_CACHE_HOME/mldserver"),
        server=True,
    )
    """Files that only save time, such as the JVM's class archive."""


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """Connections: limits for daemons."""

    listen: Address = setting(kinds.address, TcpAddress("127.0.0.1", 7070))
    """Where daemons connect."""
    connection_limit: int = rare(kinds.count, 1024)
    """Connections at a time; further connections wait in the kernel's queue."""
    # Java sets no limit; 10,000 records of 10 KiB come to about 140 MB a line, KPL-heavy streams above 100 MB.
    line_limit: int = rare(kinds.size(at_least=1024), 256 * MIB)
    """Longest message that a daemon may send."""
    initialize_timeout_seconds: float = rare(seconds(), 60.0)
    """A connection that sends no `initialize` within this time is closed."""
    answer_deadline_seconds: float | None = rare(kinds.optional(seconds()), 20.0)
    """If a batch takes longer, answer it while the handler continues; its checkpoint waits. none: answer only
    finished batches."""


@dataclass(frozen=True, kw_only=True)
class SecuritySettings:
    """Admin and security: which clients may read, steer and connect."""

    admin: Address | None = setting(kinds.optional(kinds.address), TcpAddress("127.0.0.1", 7071), server=True)
    """Address of the admin endpoint: the page, status and metrics, read-only on TCP; none: no endpoint, no steering."""
    metrics_listen: Address | None = rare(kinds.optional(kinds.address), None, server=True)
    """Another address, which serves `/metrics`, `/healthz` and `/readyz` to any client, and nothing else: for Prometheus and probes."""
    tls_certificate: Path | None = setting(kinds.optional(kinds.folder), None, server=True)
    """The server's certificate with its chain (PEM): `listen` speaks TLS, and so does `admin` outside loopback."""
    tls_key: Path | None = setting(kinds.optional(kinds.folder), None, server=True)
    """The certificate's private key (PEM); none: the certificate's file holds the key."""
    tls_client_ca: Path | None = setting(kinds.optional(kinds.folder), None, server=True)
    """Clients need a certificate from one of these authorities (PEM)."""
    tls_names: tuple[str, ...] = setting(locations.globs, (), server=True)
    """Names that clients' certificates may have (subject's CN or alternative names); may be repeated."""
    listen_secret: Path | None = setting(kinds.optional(kinds.folder), None)
    """A file with the secret that each daemon's bridge must show (mode 600 or 640); none: anyone who reaches `listen` may connect."""
    insecure: bool = setting(kinds.flag, False, server=True)
    """Listen outside loopback even without certificates: any client may connect, read, and send records."""
    allow_shards: tuple[str, ...] = setting(locations.globs, ())
    """Shards that daemons may connect for; may be repeated."""


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Log: destination, level and format."""

    log_file: Path | None = setting(kinds.optional(kinds.folder), None, server=True)
    """Log to this file, which SIGHUP or SIGUSR1 reopens; none: stdout."""
    log_level: Level = setting(kinds.choice(Level), "info", server=True)
    """The lowest level logged."""
    log_format: LogFormat = setting(kinds.choice(LogFormat), "auto", server=True)
    """auto: pretty on a terminal, else JSON lines."""
    log_error_messages: bool = setting(kinds.flag, False, server=True)
    """To debug, show the messages of your code's and Spark's errors in the log and the status: they may quote
    rows."""


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """Handler failures: attempts, back-off, and what happens to failed records."""

    on_failure: OnFailure = setting(kinds.choice(OnFailure), OnFailure.DEAD_LETTER)
    """When a record keeps failing: store it as a dead letter, skip and count it, or close its connection."""
    on_key_failure: OnKeyFailure = setting(kinds.choice(OnKeyFailure), OnKeyFailure.CONTINUE)
    """After a dead letter: process later records of its partition key, or park them as dead letters too."""
    failure_rules: tuple[FailureRule, ...] = setting(failure_rules, Made(tuple, "none"))
    """`on_failure` for an error class and its subclasses; may be repeated."""
    attempts: int = setting(kinds.count, 3)
    """Calls of the handler for one record."""
    max_age_ms: int | None = rare(kinds.optional(ms()), None)
    """Do not retry a failed record that arrived longer ago than this."""
    retry_base_seconds: float = rare(seconds(), 0.1)
    """First wait between calls; each further wait is twice as long, up to 10 s."""


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """Handler calls and workers: time limits, concurrency and processes."""

    handler_timeout_seconds: float = setting(seconds(), 60.0)
    """A hook that runs longer fails (`async`) or is logged as slow (synchronous)."""
    concurrency: int | None = setting(kinds.optional(kinds.count), None)
    """Records of one batch with different keys that `process_record` handles at a time; none: the handler's
    own value."""
    handler_settings: Mapping[str, str] = setting(kinds.pairs, Made(dict, "none"))
    """Constants that a hook with a context reads as `ctx.settings`: texts by name, such as `threshold=20`; may be repeated."""
    workers: int | None = setting(
        kinds.optional(kinds.count, word="inline"),
        Made(lambda: max(1, (os.cpu_count() or 1) - 1), "one fewer than cores, at least one"),
    )
    """Processes that run the handler; `inline`: the server's process runs it."""
    worker_memory: int | None = rare(kinds.optional(kinds.size(at_least=MIB)), None)
    """A worker whose memory grows beyond this is replaced; beyond 1.5 times this it is killed."""
    worker_kill_after_ms: int | None = rare(kinds.optional(ms()), 2 * MINUTE_MS)
    """Kill a worker when a handler call takes longer, or the worker does not answer for longer."""
    state_bytes: int = setting(kinds.size(at_least=MIB), 256 * MIB)
    """Memory that the keyed state of this server may take, all workers together. Beyond it, records with new keys fail
    with StateFull; from 90 % of it the server is not ready."""


@dataclass(frozen=True, kw_only=True)
class FlowSettings:
    """Segments and watermark: limits and times of the coordinator."""

    flush_interval_ms: int = setting(ms(), 5_000)
    """Rows become durable at least this often."""
    flush_bytes: int = rare(kinds.size(), 64 * MIB)
    """Write rows at once beyond this size; a window's first and last rows already beyond a part of this
    size."""
    buffer_bytes: int = rare(kinds.size(), 512 * MIB)
    """Limit of rows in memory; near it, shards that are ahead wait."""
    segment_disk_bytes: int = setting(kinds.size(), 50 * GIB)
    """Limit of segments on disk; near it, shards that are ahead wait."""
    late: Late = setting(kinds.choice(Late), "recompute")
    """For late rows: compute their window again, or write them to the late dataset."""
    recompute_delay_ms: int = rare(ms(zero=True), MINUTE_MS)
    """How long to collect a window's late rows before the window is computed again."""
    retention_ms: int = setting(ms(zero=True), DAY_MS)
    """How long to keep finished windows, and their segments for late rows."""
    keep_segments_ms: int = rare(ms(zero=True), 0)
    """How long to keep the segments of finished windows, if that is longer than `retention`: for `windows replay`, also with
    `late = separate`."""
    retention_bytes: int = rare(kinds.size(), 10 * GIB)
    """Limit of segments kept for late rows (and at most half of `segment_disk_bytes`)."""
    idle_time_ms: int = setting(ms(), 30_000)
    """A shard that is caught up and gives no row for this long does not hold windows open."""
    max_ahead_ms: int | None = rare(kinds.optional(ms()), 10 * MINUTE_MS)
    """How far a row's time may run ahead of its record's arrival and still close windows; none: any time."""
    on_ahead: OnAhead = rare(kinds.choice(OnAhead), "keep")
    """For a row beyond `max_ahead`: keep it in its own window, or fail its record like one with a bad row."""
    quiet_time_ms: int = setting(ms(), MINUTE_MS)
    """When all shards are silent for this long, open windows close."""
    missing_limit_ms: int = rare(ms(), 10 * MINUTE_MS)
    """A known shard without a connection holds windows open for this long."""
    shard_retention_ms: int = rare(ms(), 8 * DAY_MS)
    """How long to remember ended shards, at least: longer than the stream keeps records. With `stream`, they
    are remembered for as long as the stream lists them."""
    accept_gap: bool = rare(kinds.flag, False)
    """Allow a shard to start past its stored position (records were skipped), or on another stream;
    logged."""
    server_timeout_ms: int = rare(ms(), 30_000)
    """The other servers take over from a server that is silent for this long."""


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """Windows: attempts, deadlines, and what happens to failed windows."""

    window_on_failure: OnWindowFailure = setting(kinds.choice(OnWindowFailure), "halt")
    """When a window keeps failing: halt all windows until a person decides, or set that window aside."""
    window_attempts: int = setting(kinds.count, 3)
    """Runs of `on_window` for one window."""
    window_deadline_seconds: float | Literal["by_size"] | None = rare(
        kinds.optional(kinds.or_word(seconds(), "by_size", "by_size")), "by_size"
    )
    """A run that takes longer is cancelled. by_size: 15 minutes, and 10 s for each MiB of its segments (for a write
    into a table 5 s for each 1,000 rows). A wait for a cluster's executors does not count."""
    window_concurrency: int = setting(kinds.count, 2, server=True)
    """Windows that Spark computes at a time, of all functions together."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """Stream: where records come from, and which stream's shards are listed."""

    source: SourcePlace = setting(locations.source, "mld")
    """Where records come from: daemons that connect, or a DynamoDB stream that the server reads itself."""
    from_: str = setting(
        kinds.text("trim_horizon, latest, a time with its offset, or a token (JSON, or a file of it)"),
        "trim_horizon",
    )
    """Where a stream that is read directly begins, at the pipeline's first start."""
    stream: str | None = setting(kinds.optional(kinds.text("a Kinesis stream's name")), None)
    """Stream whose shards the server lists (ListShards), to detect missing shards."""
    region: str | None = setting(kinds.optional(kinds.text("an AWS region's name")), None)
    """AWS region of stream and source."""
    endpoint_url: str | None = rare(kinds.optional(kinds.text("a URL")), None)
    """Endpoint of stream and source, for tests and emulators."""


@dataclass(frozen=True, kw_only=True)
class SparkSettings:
    """Spark: where windows and queries are computed."""

    spark_master: str = setting(locations.spark_master, "local[*]", server=True)
    """Spark master, or a Spark Connect URL."""
    spark_conf: Mapping[str, str] = setting(kinds.pairs, Made(dict, "none"), server=True)
    """Spark properties, such as `spark.ui.enabled=true`; may be repeated."""
    spark_py_files: tuple[Path, ...] = setting(locations.python_files, Made(tuple, "none"), server=True)
    """Further Python code that executors import, in addition to the handler's modules; may be repeated."""
    spark_python: str | None = setting(
        kinds.optional(kinds.text("a command or path on executors")), None, server=True
    )
    """Python that executors run; none: `PYSPARK_PYTHON`, then the server's Python on a local master,
    `python3` on others."""
    query_concurrency: int = setting(kinds.count, 2, server=True)
    """Queries of handlers (`ctx.sql`) that Spark runs at a time, of all functions together. Windows come first."""
    query_timeout_seconds: float = setting(seconds(), 30.0)
    """A query that takes longer, with all waiting, fails; at the latest it ends 2 s before the time of its hook is over."""
    query_spill_bytes: int = rare(kinds.size(at_least=MIB), GIB)
    """Largest result of a query with `stream=True`. It takes so much of the disk with Spark's temporary files."""
    java_home: Path | None = setting(kinds.optional(kinds.folder), None, server=True)
    """Java to run Spark with; none: `JAVA_HOME`, then `PATH`."""


PartT = TypeVar("PartT")


@dataclass(frozen=True, kw_only=True)
class Settings(
    PipelineSettings,
    ConnectionSettings,
    SecuritySettings,
    LogSettings,
    FailureSettings,
    CallSettings,
    FlowSettings,
    WindowSettings,
    StreamSettings,
    SparkSettings,
):
    """Every setting of one server, in the order of the page. A section's docstring begins with its title there."""

    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """For settings that were given: where, in words."""
    file: Path | None = field(default=None, compare=False, repr=False)
    """Where the settings file is, if there is one."""
    own: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Settings that the function's own table or file gives, by name."""
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Values that replace constants of the parts, by parameter name. Tests and `mldserver sim` pass them; no option,
    variable or file sets them."""

    def __post_init__(self) -> None:
        if not self.pipeline:
            object.__setattr__(self, "pipeline", re.split(r"[.:]", self.handler)[-1] or "pipeline")
        if self.out is _DERIVED:
            object.__setattr__(self, "out", Path("out") / self.pipeline)

    def part(self, section: type[PartT], **own: Any) -> PartT:
        """Return the settings of one part: a section, plus the part's ``own`` fields."""
        names = {field.name for field in dataclasses.fields(section)} - own.keys()  # type: ignore[arg-type]  # sections are dataclasses
        own |= {name: getattr(self, name) for name in names if hasattr(self, name)}
        return section(**own, **self.replaced(*names))

    def replaced(self, *names: str) -> dict[str, Any]:
        """Return the ``constants`` of these names that are replaced."""
        return {name: self.constants[name] for name in names if name in self.constants}

    def origin(self, name: str) -> str:
        """Return where a setting's value came from, e.g. ``environment MLDSERVER_LISTEN``."""
        return self.origins.get(name, "default")

    def given(self) -> dict[str, str]:
        """Return the settings that differ from their defaults, as text with their origin, without secrets."""
        shown = {}
        for name, origin in self.origins.items():
            value, show = getattr(self, specs()[name].field), specs()[name].kind.show
            safe = show(redacted_pairs(value)) if isinstance(value, Mapping) else redacted(show(value))
            shown[name] = f"{safe} ({origin})"
        return shown

    def files_with_secrets(self) -> set[Path]:
        """Return the files, of the settings file and the function's own, that give a setting which holds a secret."""
        if self.file is None:
            return set()
        function = f"{functions_folder(self.file).name}/{self.pipeline}.toml"
        return {
            self.file.parent / place
            for place in (self.file.name, function)
            for name, origin in self.origins.items()
            if origin.startswith(place)
            and FROM_VARIABLES not in origin
            and _secrets_in(getattr(self, specs()[name].field))
        }

    def secrets(self) -> set[str]:
        """Return the secrets that URLs and pairs of any setting hold: the log hides them.

        A password that equals the pipeline's name is left out: commands need the name to find the server.
        """
        found = {
            secret for name in self.origins for secret in _secrets_in(getattr(self, specs()[name].field))
        }
        return found - {self.pipeline}


def functions_folder(file: Path) -> Path:
    """Return the folder next to a settings file with one file NAME.toml for each further function.

    Settings files of several servers may lie in one folder, as those of the unit ``mldserver@.service`` do: each has a different one.
    """
    return file.with_name("functions.d" if file.name == CONFIG_FILE else f"{file.stem}.functions.d")


def _secrets_in(value: object) -> set[str]:
    """Return the secrets in the texts and pairs of a setting's value."""
    if isinstance(value, str | Path | Mapping):
        return secrets_in(value if isinstance(value, Mapping) else str(value))
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    parts = value if isinstance(value, list | tuple) else ()
    return {secret for part in parts for secret in _secrets_in(part)}


@dataclass(frozen=True, slots=True)
class Spec:
    """One line of the table."""

    field: str
    """The attribute of ``Settings``."""
    name: str
    """The setting's name, which is its key in TOML too: the field's, without a unit."""
    option: str
    """E.g. ``--line-limit``."""
    variable: str
    """Of the environment, e.g. ``MLDSERVER_LINE_LIMIT``."""
    section: str
    kind: Kind[Any]
    common: bool
    server: bool
    """Whether all functions of a server have the same value."""
    shown_default: str

    @property
    def help(self) -> str:
        """What the setting does, with the words that are allowed where they are a few."""
        return _docstrings()[self.field] + (f" ({self.kind.allowed})" if self.kind.choice else "")


REMOVED: Final[Mapping[str, str]] = {
    "admin_token_file": "The admin endpoint is read-only on TCP; commands steer the server over its Unix socket (--out finds it).",
    "close_timeout": "A daemon may leave an ended connection open for 5 s.",
    "list_shards_interval": "Shards are listed every 30 s, and when an unknown shard connects.",
    "partial_line_timeout": "A message that stops arriving for 1 min closes its connection.",
    "poll_interval": "A shard is asked for new records every second, a quiet shard every 5 s.",
    "retry_cap": "The longest wait between calls is 10 s, or retry_base if that is longer.",
    "settle_time": "After the start and after each new shard, windows wait 10 s for other shards.",
    "spark_properties_file": "Move the properties to spark_conf, or into spark-defaults.conf in the folder that the "
    "variable SPARK_CONF_DIR names: Spark reads it.",
    "spark_ui": "Set spark.ui.enabled = true in spark_conf.",
    "window_group": "Up to 16 small windows share one Spark job.",
    "window_retry_base": "The first wait between runs is 1 s.",
    "window_retry_cap": "The longest wait between runs is 1 min.",
}
"""Names of settings that earlier versions had, with what holds instead."""


@functools.cache
def specs() -> dict[str, Spec]:
    """Return the table by the settings' names, in order."""
    table = {}
    for section in Settings.__bases__:
        title = (section.__doc__ or "").partition(":")[0]
        for member in dataclasses.fields(section):
            about, kind = member.metadata, member.metadata["kind"]
            shown = about["shown"] if "shown" in about else kind.show(member.default)
            # `from` is a word of Python's.
            name = member.name.removesuffix("_ms").removesuffix("_seconds").removesuffix("_")
            option, variable = f"--{name.replace('_', '-')}", f"{ENV_PREFIX}{name.upper()}"
            table[name] = Spec(
                member.name, name, option, variable, title, kind, about["common"], about["server"], shown
            )
    return table


@functools.cache
def _docstrings() -> dict[str, str]:
    """Return the docstring of each field, which Python itself does not keep."""
    source = ast.parse(inspect.getsource(sys.modules[__name__]))
    return {
        ast.unparse(one.target): " ".join(ast.literal_eval(other.value).split())
        for section in source.body
        if isinstance(section, ast.ClassDef)
        for one, other in itertools.pairwise(section.body)
        if isinstance(one, ast.AnnAssign) and isinstance(other, ast.Expr)
    }
