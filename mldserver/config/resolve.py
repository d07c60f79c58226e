"""Puts the sources of settings in order: command line > environment > TOML file > default; and each function's table over them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from mldserver.base.uris import redacted
from mldserver.config.kinds import OnKeyFailure, TcpAddress, UnixAddress, is_local, pairs, show_size
from mldserver.config.locations import (
    LEDGER_FILE,
    TABLES_OF_LETTERS,
    OutPlace,
    RemoteOut,
    SqlitePlace,
    cache_folder,
)
from mldserver.config.raw import FUNCTIONS, Given, Raw, Table, check_name, read_given
from mldserver.config.settings import CONFIG_FILE, Settings, specs
from mldserver.engine_jobs import Content
from mldserver.errors import ConfigError
from mldserver.sinks import find
from mldserver.sinks.sink import SinkSpec

_DIVIDED: Final = ("buffer_bytes", "state_bytes", "segment_disk_bytes")
"""Limits that count for the whole server: functions without a limit of their own get equal parts."""
_OF_ONE: Final = ("handler", "pipeline", "rename_from")
"""Settings that name one function: they cannot be defaults of several."""
_PORT_STEP: Final = 10
"""Between the ports of functions that the command line names."""
_READERS: Final = 2
"""Readers of one shard of a DynamoDB stream, by AWS's limit."""


_TABLE_NAME: Final = "the function's name"
"""Where the name of a function comes from that has a table of its own."""


def resolve(
    command_line: Mapping[str, object],
    *,
    environ: Mapping[str, str],
    folder: Path,
    config: Path | None = None,
    handler_required: bool = True,
    leave_out: Collection[str] = (),
    function: str | None = None,
) -> Settings:
    """Return the checked settings of one function, each with its origin. Precedence: command line, environment, file, default.

    - ``command_line``: raw values by setting name. None means that the option was not given.
    - ``environ``: an empty variable counts as not set.
    - ``folder``: the directory of ``mldserver.toml``, which may be missing.
    - ``config``: the file to read instead; without it, the file that ``MLDSERVER_CONFIG`` names. It must exist.
    - ``handler_required``: False for tools that run no handler: a missing handler and listening without TLS are
      then no errors.
    - ``leave_out``: settings to ignore in the file and the environment; ``functions`` ignores the tables of functions.
    - ``function``: which function, where the file has tables of functions. With a single one it may be None. The command line
      then overrides the function's table, the table overrides variables, and ``out`` of the command line is the function's folder.

    If the command line gives ``out`` or ``ledger`` and no function, the values at the top level count, and no table.

    Raises ConfigError for unknown keys, impossible values, a file that cannot be read, and a function that does not exist
    or is not named although there are several.
    """
    given = read_given(environ, folder, config, leave_out)
    options = _options(command_line)
    common = given.common | options
    if not given.functions and function is not None and not {"handler", "pipeline"} & common.keys():
        given.functions[function] = {}  # the command line of the server named it
    is_elsewhere = function is None and not {"out", "ledger"}.isdisjoint(options)
    pipeline = options.get("pipeline")
    if is_elsewhere and (pipeline is None or pipeline.value not in given.functions):
        given.functions.clear()
    if not given.functions:
        settings = _parsed_all(common, environ, given.file)
        choose([settings.pipeline], function)
    else:
        named = function if pipeline is None else str(options.pop("pipeline").value)
        if function not in {None, named}:
            raise ConfigError(f"--pipeline {named} is not the function {function}.", advice="Leave it out.")
        name = choose(tuple(given.functions), named)
        given.functions[name] |= options
        settings = _function(name, given, given.common, environ)
    _check(settings, handler_required=handler_required)
    return settings


def resolve_functions(
    command_line: Mapping[str, object],
    *,
    environ: Mapping[str, str],
    folder: Path,
    config: Path | None = None,
    handlers: Sequence[str] = (),
    handler_required: bool = True,
    leave_out: Collection[str] = (),
    more: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> tuple[Settings, ...]:
    """Return the checked settings of each function of a server, in order; all agree on every setting of the server.

    The functions are the tables of the settings file, or the ``handlers`` of the command line. Values of the command line, the
    environment and the file's top level count for all functions; a function's table overrides them. ``out`` is then
    the folder of all functions' folders. A single handler, named as ever, gives the same settings as ``resolve``.
    ``leave_out`` is as for ``resolve``. ``more`` are tables by function name, which count as files of the functions' files do.

    Raises ConfigError as ``resolve``, and if two functions cannot run in one server.
    """
    given = read_given(environ, folder, config, leave_out, more)
    options = _options(command_line)
    if given.functions and handlers:
        raise ConfigError(
            f"The command line names the handler {handlers[0]}, and {given.file.name} has functions: "
            f"{', '.join(given.functions)}.",
            advice="Leave the handler out, or start in another folder.",
        )
    common = given.common | options
    if len(handlers) > 1:
        common.pop("handler", None)  # the command line overrides it
        given = given._replace(functions=_of_command_line(handlers, common))
    if given.functions:
        functions = tuple(_function(name, given, common, environ) for name in given.functions)
    else:
        if handlers:
            common["handler"] = Raw(handlers[0], "command line --handler")
        functions = (_parsed_all(common, environ, given.file),)
    for settings in functions:
        _check(settings, handler_required=handler_required)
    _check_clashes(functions)
    return functions


def choose(names: Sequence[str], function: str | None) -> str:
    """Return the name of the function that a command means: ``function``, or the only one of ``names``.

    Raises ConfigError if the function does not exist, or if there are several and the command names none.
    """
    if function is None and len(names) > 1:
        raise ConfigError(
            f"The settings have several functions: {', '.join(names)}.", advice="Name one with --function."
        )
    if function is not None and function not in names:
        raise ConfigError(
            f"There is no function {function!r}.", advice=f"The settings have: {', '.join(names)}."
        )
    return function or names[0]


def _options(command_line: Mapping[str, object]) -> Table:
    # A parameter named like a Python keyword has a trailing underscore.
    options = {name.removesuffix("_"): value for name, value in command_line.items() if value is not None}
    return {name: Raw(value, f"command line {specs()[name].option}") for name, value in options.items()}


def _of_command_line(handlers: Sequence[str], common: Table) -> dict[str, Table]:
    """Return the tables of functions that the command line names by their handlers; each next one listens 10 ports higher."""
    functions: dict[str, Table] = {}
    for number, handler in enumerate(handlers):
        place = f"command line, handler {number + 1}"
        name = re.split(r"[.:]", handler)[-1]
        check_name(name, place)
        if name in functions:
            raise ConfigError(
                f"Two handlers of the command line have the name {name}.",
                advice=f"Give each function a name in {CONFIG_FILE}: [{FUNCTIONS}.NAME] with its handler.",
            )
        functions[name] = {"handler": Raw(handler, place)}
        first = _parsed("listen", common["listen"]) if "listen" in common else Settings().listen
        if isinstance(first, TcpAddress) and first.port:
            listen = f"{TcpAddress(first.host, first.port + _PORT_STEP * number)}"
            functions[name]["listen"] = Raw(
                listen, f"{place}: {_PORT_STEP} ports above the one before" if number else place
            )
    return functions


def _function(name: str, given: Given, common: Table, environ: Mapping[str, str]) -> Settings:
    """Return the settings of one of several functions, over the values that are ``common`` to all. Raises ConfigError."""
    own = given.functions[name]
    for setting in _OF_ONE:
        if setting in common:
            raise ConfigError(
                f"{setting} ({common[setting].origin}) stands beside functions: {', '.join(given.functions)}.",
                advice=f"Leave it out, or move it into the table [{FUNCTIONS}.NAME] of one function.",
            )
    # A function reads one stream, by itself or through daemons: its own choice replaces the common one.
    reads_itself = "source" in own and own["source"].value != "mld"
    hidden = "stream" if reads_itself else "source" if "stream" in own else None
    raw = {setting: value for setting, value in common.items() if setting != hidden}
    raw |= {"pipeline": Raw(name, _TABLE_NAME)} | own
    settings = _parsed_all(raw, environ, given.file, frozenset(own))
    changes: dict[str, Any] = {}
    if "out" in common and "out" not in own:
        changes["out"] = _below(settings.out, name)
    for setting in (*_DIVIDED, "workers"):
        among = sum(setting not in table for table in given.functions.values())
        is_divided = among > 1 and setting not in own and (setting in _DIVIDED or setting not in common)
        if is_divided:
            changes[setting] = max(1, getattr(settings, setting) // among)
            raw[setting] = Raw(None, f"{settings.origin(setting)}, divided among {among} functions")
    if "flush_bytes" not in raw and "buffer_bytes" in changes:
        changes["flush_bytes"] = min(settings.flush_bytes, changes["buffer_bytes"] // 2)
    return replace(settings, **changes, origins=_origins(raw))


def _below(out: OutPlace, name: str) -> OutPlace:
    """Return a function's folder in the folder of all functions."""
    if isinstance(out, Path):
        return out / name
    parts = urlsplit(out.uri)
    return RemoteOut(urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}")))


def _check_clashes(functions: Sequence[Settings]) -> None:
    """Raise ConfigError if two functions use one address, folder or ledger file, or three read one DynamoDB stream."""
    users: dict[tuple[str, object], list[Settings]] = {}
    for each in functions:
        used: dict[str, object] = {"out": each.out}
        if isinstance(each.ledger, SqlitePlace):
            used["ledger"] = ledger_file(each)
        if each.source != "mld":
            used["source"] = each.source
        elif isinstance(each.listen, UnixAddress) or each.listen.port:
            used["listen"] = each.listen
        for name, place in used.items():
            whole = os.path.normpath(place.absolute()) if isinstance(place, Path) else place
            users.setdefault((name, whole), []).append(each)
    for (name, place), those in users.items():
        if len(those) > (_READERS if name == "source" else 1):
            names = " and ".join(each.pipeline for each in those)
            advice = f"Give each function its own: {name} in its table."
            if name == "source":
                advice = f"AWS allows {_READERS} readers of a shard: let daemons read it for the others."
            raise ConfigError(
                f"The functions {names} have the same {name}: {place} ({those[-1].origin(name)}).",
                advice=advice,
            )


def _origins(raw: Table) -> dict[str, str]:
    return {name: raw[name].origin for name in specs() if name in raw}


def _parsed_all(
    raw: Table, environ: Mapping[str, str], file: Path, own: frozenset[str] = frozenset()
) -> Settings:
    """Return settings of these raw values. Raises ConfigError if a value is not allowed."""
    values = {specs()[name].field: _parsed(name, value) for name, value in raw.items()}
    if "cache_dir" not in values:
        values["cache_dir"] = cache_folder(environ)
    return Settings(**values, origins=_origins(raw), file=file, own=own)


def _parsed(name: str, raw: Raw) -> Any:
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


def _check(settings: Settings, *, handler_required: bool) -> None:
    """Check the settings of one function against each other. Raises ConfigError."""
    if handler_required and not settings.handler:
        raise ConfigError(
            "No handler was named."
            if settings.origins.get("pipeline") != _TABLE_NAME
            else f"The function {settings.pipeline} has no handler.",
            advice="Give its dotted path, for example `mldserver serve handlers.departures`, or set handler in "
            f"{CONFIG_FILE}.",
        )
    _check_together(settings)
    if handler_required:
        check_security(settings)


def _check_together(settings: Settings) -> None:
    """Raise ConfigError if values contradict each other."""
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
    sink, side_sinks = sink_of(settings), side_sinks_of(settings)
    for name in ("sink_table", "sink_options"):
        has_options = name == "sink_options" and bool(side_sinks)
        if sink is None and getattr(settings, name) and not has_options:
            raise ConfigError(
                f"{name} ({settings.origin(name)}) means nothing without a sink.",
                advice=f"Set sink too, or leave {name} out.",
            )
    late_sink = settings.late_sink
    if late_sink is not None and not hasattr(find(late_sink.format), "files"):
        raise ConfigError(
            f"late_sink = {late_sink} ({settings.origin('late_sink')}) is not a table of files.",
            advice="Name a table of Delta Lake or Iceberg, or leave late_sink out: late rows then go to `_late` in `out`.",
        )
    tables = [] if sink is None else [("sink", sink)]
    tables += [("late_sink" if each == "late_rows" else each, table) for each, table in side_sinks.items()]
    of_table: dict[tuple[str, str], str] = {}
    for name, table in tables:
        try:
            find(table.format).check_settings(table)
        except ValueError as error:
            raise ConfigError(
                f"{name} = {table} ({settings.origin(name)}) does not go with the other settings: {error}."
            ) from error
        other = of_table.setdefault((table.format, table.target), name)
        if other != name:
            raise ConfigError(
                f"{other} and {name} ({settings.origin(name)}) name the same table, {table}.",
                advice="They have different columns: name another table.",
            )


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


def check_security(settings: Settings) -> None:
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


def side_sinks_of(settings: Settings) -> dict[Content, SinkSpec]:
    """Return the tables of late rows and of dead letters, if they have any.

    Each has the ``sink_options``, unless ``sink`` has another format.
    """
    found: dict[Content, SinkSpec] = {}
    if settings.late_sink is not None:
        found["late_rows"] = settings.late_sink
    letters = settings.dead_letters
    if letters is not None and letters.kind in TABLES_OF_LETTERS:
        found["dead_letters"] = SinkSpec(letters.kind, letters.target)
    of_sink = None if settings.sink is None else settings.sink.format
    options = dict(settings.sink_options)
    return {
        content: replace(sink, options=options if of_sink in {None, sink.format} else {})
        for content, sink in found.items()
    }


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
