"""Puts the sources of settings in order: command line > environment > TOML file > default."""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from mldserver.base.kill_points import KILL_VARIABLE
from mldserver.base.uris import redacted
from mldserver.config.kinds import OnKeyFailure, UnixAddress, is_local, pairs, show_size
from mldserver.config.locations import LEDGER_FILE, SqlitePlace, cache_folder
from mldserver.config.settings import ENV_PREFIX, REMOVED, Settings, specs
from mldserver.errors import ConfigError
from mldserver.sinks import find
from mldserver.sinks.sink import SinkSpec

CONFIG_FILE: Final = "mldserver.toml"
CONFIG_VARIABLE: Final = f"{ENV_PREFIX}CONFIG"


class _Raw(NamedTuple):
    value: object
    origin: str


def resolve(
    command_line: Mapping[str, object],
    *,
    environ: Mapping[str, str],
    folder: Path,
    config: Path | None = None,
    handler_required: bool = True,
    leave_out: Collection[str] = (),
) -> Settings:
    """Return the checked settings, each with its origin. Precedence: command line, environment, file, default.

    - ``command_line``: raw values by setting name. None means that the option was not given.
    - ``environ``: an empty variable counts as not set.
    - ``folder``: the directory of ``mldserver.toml``, which may be missing.
    - ``config``: the file to read instead; without it, the file that ``MLDSERVER_CONFIG`` names. It must exist.
    - ``handler_required``: False for tools that run no handler: a missing handler and listening without TLS are
      then no errors.
    - ``leave_out``: settings to ignore in the file and the environment.

    Raises ConfigError for unknown keys, impossible values, and a file that cannot be read.
    """
    if config is None and (named := environ.get(CONFIG_VARIABLE)):
        config = folder / named
    file = config or folder / CONFIG_FILE
    raw = _from_file(file, required=config is not None)
    raw |= _from_environment(environ)
    raw = {name: value for name, value in raw.items() if name not in leave_out}
    # A parameter named like a Python keyword has a trailing underscore.
    options = {name.removesuffix("_"): value for name, value in command_line.items() if value is not None}
    raw |= {name: _Raw(value, f"command line {specs()[name].option}") for name, value in options.items()}
    values = {specs()[name].field: _parsed(name, value) for name, value in raw.items()}
    if "cache_dir" not in values:
        values["cache_dir"] = cache_folder(environ)
    origins = {name: raw[name].origin for name in specs() if name in raw}
    settings = Settings(**values, origins=origins, file=file)
    if handler_required and not settings.handler:
        raise ConfigError(
            "No handler was named.",
            advice="Give its dotted path, for example `mldserver serve handlers.departures`, or set handler in "
            f"{CONFIG_FILE}.",
        )
    _check(settings)
    if handler_required:
        _check_security(settings)
    return settings


def _from_file(path: Path, *, required: bool) -> dict[str, _Raw]:
    """Return the values of the TOML file by setting name; none if the file is missing and not ``required``.

    Raises ConfigError for an unreadable file, invalid TOML, and an unknown key.
    """
    try:
        if not required and not path.exists():
            return {}
    except OSError as error:
        raise ConfigError(
            f"Whether there is a settings file {path} cannot be told: {error.strerror}.",
            advice=f"Start from a folder that you may read, or name a file with --config or {CONFIG_VARIABLE}.",
        ) from error
    try:
        source = path.read_text("utf-8")
        table = tomllib.loads(source)
    except OSError as error:
        raise ConfigError(
            f"The settings file {path} cannot be read: {error.strerror}.", advice="Check its path and rights."
        ) from error
    except ValueError as error:  # damaged TOML, or not UTF-8
        raise ConfigError(
            f"The settings file {path} is not valid TOML: {error}.", advice="Correct that line."
        ) from error
    raw, known = {}, specs()
    for key, value in table.items():
        # Report the line if a search finds exactly one candidate for a top-level key.
        written = re.compile(rf"""^\s*\[?\s*["']?{re.escape(key)}["']?\s*[\].=]""")
        lines = [number for number, line in enumerate(source.splitlines(), 1) if written.match(line)]
        place = f"{path.name} line {lines[0]}" if len(lines) == 1 else path.name
        if key not in known:
            raise _unknown(f"{place}: ", key, known)
        raw[key] = _Raw(value, place)
    return raw


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Raw]:
    """Return the values of the ``MLDSERVER_`` variables by setting name, without empty ones.

    Raises ConfigError for a variable with that prefix that names no setting.
    """
    by_variable = {spec.variable: spec.name for spec in specs().values()}
    raw = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in {CONFIG_VARIABLE, KILL_VARIABLE}:
            continue
        if variable not in by_variable:
            raise _unknown("environment: ", variable, [*by_variable, CONFIG_VARIABLE])
        if value.strip():
            raw[by_variable[variable]] = _Raw(value, f"environment {variable}")
    return raw


def _unknown(place: str, written: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not a setting's: it was removed, or a close match is suggested."""
    name = written.removeprefix(ENV_PREFIX)
    if name.lower() in REMOVED:
        return ConfigError(
            f"{place}the setting {written!r} was removed.", advice=f"Leave it out. {REMOVED[name.lower()]}"
        )
    # The common prefix of all variables makes none of them closer.
    close = difflib.get_close_matches(name, [each.removeprefix(ENV_PREFIX) for each in known], n=1)
    advice = "`mldserver serve --help-all` lists all settings."
    if close:
        advice = f"Did you mean {written.removesuffix(name) + close[0]!r}?"
    return ConfigError(f"{place}there is no setting {written!r}.", advice=advice)


def _parsed(name: str, raw: _Raw) -> Any:
    """Return the value of the setting's type. Raises ConfigError, with secrets redacted, if the value is not allowed."""
    kind, value = specs()[name].kind, raw.value
    try:
        return kind.parse(value)
    except ValueError as error:
        shown = f" = {redacted(value)!r}" if isinstance(value, str) else f" = {redacted(repr(value))}"
        if kind is pairs:
            shown = ""  # the error names the wrong pair; other pairs may be secrets
        raise ConfigError(
            f"{name}{shown} ({raw.origin}) is not possible: {redacted(str(error))}.",
            advice=f"Allowed is {kind.allowed}.",
        ) from error


def _check(settings: Settings) -> None:
    """Check settings against each other. Raises ConfigError."""
    if settings.flush_bytes > settings.buffer_bytes:
        raise ConfigError(
            f"flush_bytes = {show_size(settings.flush_bytes)} ({settings.origin('flush_bytes')}) is above "
            f"buffer_bytes = {show_size(settings.buffer_bytes)} ({settings.origin('buffer_bytes')}).",
            advice="Lower flush_bytes or raise buffer_bytes.",
        )
    if isinstance(settings.ledger, SqlitePlace):
        ledger_file(settings)
    _check_sink(settings)
    _check_spark(settings)
    if settings.source != "mld" and settings.stream is not None:
        raise ConfigError(
            f"stream = {settings.stream} ({settings.origin('stream')}) names what daemons read; source = {settings.source} "
            "is read without any.",
            advice="Leave one of the two out.",
        )
    if settings.dead_letters is not None and settings.on_key_failure is OnKeyFailure.PARK:
        raise ConfigError(
            f"on_key_failure = park ({settings.origin('on_key_failure')}) needs dead letters in the ledger: only it "
            "knows which keys wait.",
            advice="Leave dead_letters out, or set on_key_failure = continue.",
        )


def _check_sink(settings: Settings) -> None:
    """Raise ConfigError if the sink's settings do not fit together, or not the sink's format."""
    sink = sink_of(settings)
    for name in ("sink_table", "sink_options"):
        if sink is None and getattr(settings, name):
            raise ConfigError(
                f"{name} ({settings.origin(name)}) means nothing without a sink.",
                advice=f"Set sink too, or leave {name} out.",
            )
    try:
        if sink is not None:
            find(sink.format).check_settings(sink)
    except ValueError as error:
        raise ConfigError(
            f"sink = {sink} ({settings.origin('sink')}) does not go with the other settings: {error}."
        ) from error


def _check_spark(settings: Settings) -> None:
    """Raise ConfigError if settings of Spark contradict each other."""
    if "spark.master" in settings.spark_conf:
        raise ConfigError(
            f"spark_conf ({settings.origin('spark_conf')}) contains spark.master.",
            advice="Name the master with the setting spark_master.",
        )
    if settings.spark_python is not None and settings.spark_master.startswith("sc://"):
        raise ConfigError(
            f"spark_python ({settings.origin('spark_python')}) has no effect on a Spark Connect server: it starts the "
            "executors' Python itself.",
            advice="Leave it out, and set PYSPARK_PYTHON where that server starts.",
        )


def _check_security(settings: Settings) -> None:
    """Raise ConfigError if the TLS and listening settings do not fit together.

    Outside loopback, client and server must both show certificates, unless ``insecure`` is set.
    """
    for name, needs in (
        ("tls_key", "tls_certificate"),
        ("tls_client_ca", "tls_certificate"),
        ("tls_names", "tls_client_ca"),
    ):
        if getattr(settings, name) and not getattr(settings, needs):
            raise ConfigError(
                f"{name} ({settings.origin(name)}) means nothing without {needs}.",
                advice=f"Set {needs} too, or leave {name} out.",
            )
    if isinstance(settings.metrics_listen, UnixAddress):
        raise ConfigError(
            f"metrics_listen = {settings.metrics_listen} ({settings.origin('metrics_listen')}) is not host:port.",
            advice="Give an address that Prometheus reaches, as 0.0.0.0:9464.",
        )
    if settings.metrics_listen is not None and settings.admin is None:
        raise ConfigError(
            f"metrics_listen ({settings.origin('metrics_listen')}) means nothing without the admin endpoint.",
            advice="Leave admin = none out: by default it is on loopback.",
        )
    mutual_tls = settings.tls_certificate is not None and settings.tls_client_ca is not None
    for name, address in (("listen", settings.listen), ("admin", settings.admin)):
        if not (mutual_tls or settings.insecure or address is None or is_local(address)):
            raise ConfigError(
                f"{name} = {address} ({settings.origin(name)}) is outside loopback, where anyone could connect.",
                advice="Set tls_certificate and tls_client_ca, so that both sides show certificates; or set "
                "insecure = true if the network itself is isolated.",
            )


def sink_of(settings: Settings) -> SinkSpec | None:
    """Return the sink with its table and options, from the three settings; None if no sink is set."""
    if settings.sink is None:
        return None
    return replace(settings.sink, table=settings.sink_table or "", options=dict(settings.sink_options))


def home(settings: Settings) -> Path:
    """Return the local folder of this server's own files: the ledger in SQLite, life locks, Spark's scratch space.

    With a local output folder, return that folder. Otherwise return the ledger's folder, or ``cache_dir`` if the ledger is
    a table: each host then has a separate folder, so that locks show only the servers of one host.
    """
    if isinstance(settings.out, Path):
        return settings.out
    place = settings.ledger
    if isinstance(place, SqlitePlace):
        file = ledger_file(settings)
        return file.with_name(f"{file.name}.home")
    name = hashlib.sha256(f"{place}\n{settings.pipeline}".encode()).hexdigest()[:16]
    return settings.cache_dir / "pipelines" / name


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
