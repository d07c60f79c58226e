"""Settings in, parts out: the one place that knows how the parts of a pipeline fit together, and whether they work."""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

from mldserver.base.aws import aws_client
from mldserver.base.clock import CivilClock, Clock
from mldserver.base.disk import others_can_read
from mldserver.base.secret import read_secret
from mldserver.base.service import keep_memory
from mldserver.base.threads import run_in_daemon_thread
from mldserver.base.tls import ServerTLS
from mldserver.base.uris import hadoop_settings, redacted
from mldserver.config.locations import TABLES_OF_LETTERS, RemoteOut, SqlitePlace
from mldserver.config.resolve import home, ledger_file, side_sinks_of, sink_of
from mldserver.config.settings import Settings
from mldserver.consumer.claims import Claims
from mldserver.consumer.shard import ConsumerParts
from mldserver.coordinator.coordinator import Coordinator
from mldserver.coordinator.core.lineage import DRAIN
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.core.shape import Column, Shape
from mldserver.coordinator.firing import Firing
from mldserver.coordinator.flusher import Destination
from mldserver.coordinator.membership import ServerLocks
from mldserver.deadletters.destinations import FolderDestination, as_rows
from mldserver.deadletters.redriver import Redriver
from mldserver.engine_jobs import FunctionView
from mldserver.errors import ConfigError, NotThereYet, OperatorError
from mldserver.handler.inspection import load_spec
from mldserver.handler.loader import entries_of
from mldserver.handler.queries import LookupSpec
from mldserver.handler.spec import HandlerKind, HandlerSpec
from mldserver.jobs.engine import Engine
from mldserver.jobs.predecessors import Predecessors
from mldserver.jobs.predecessors import check as check_after
from mldserver.jobs.previous import PreviousResults
from mldserver.jobs.published import PublishedWindows
from mldserver.jobs.query_service import QueryService
from mldserver.jobs.runner import WindowRunner
from mldserver.jobs.side_tables import SideTables
from mldserver.jobs.steps import WindowSteps
from mldserver.ledger.operations import Ledger
from mldserver.ledger.sqlite import SqliteLedger
from mldserver.output.layout import DEAD_LETTERS, DRIVERS, PRIVATE, SERVERS, SPARK, server_tag
from mldserver.output.owner import FolderClaim
from mldserver.output.store import OutputStore
from mldserver.protocol.connection import ConnectionLimits
from mldserver.runtime.failure_policy import FailurePolicy, OnKeyFailure
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import Runtime
from mldserver.sinks import find
from mldserver.sources.listing import MakeKinesis, StreamLister
from mldserver.sources.mld import MLDListener
from mldserver.sources.source import MakeSource, Source, SourceParts
from mldserver.versions.code import Code, read_code
from mldserver.versions.swap import Swap
from mldserver.windows import WINDOW_COLUMNS, TimeWindows, do_overlap
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits
from mldserver.workers.worker_queries import LocalQueries

if TYPE_CHECKING:
    from mldserver.sinks.sink import SinkSpec
    from mldserver.spark.shared_driver import SharedDriver

_NO_REDRIVE: Final = (
    "A record processor of amazon_kclpy keeps its shard's position itself: it cannot be given older records."
)


@dataclass(frozen=True, slots=True)
class Parts:
    """One pipeline's parts, not started yet."""

    ledger: Ledger
    runtime: Runtime
    coordinator: Coordinator
    source: Source
    redriver: Redriver
    firing: Firing | None
    """None for a handler without timers."""
    letters: Destination | None
    engine: Engine | None
    runner: WindowRunner | None
    """Engine and runner are None for a handler without rows."""
    polling: StreamLister | None
    """None where no stream is named."""
    tls: ServerTLS | None
    """Of the listener; None for clear text."""
    queries: QueryService
    """Runs the handler's queries."""
    lookups: tuple[LookupSpec, ...]
    """The handler's lookup tables."""
    swap: Swap
    """Exchanges the handler's code."""
    handler_version: str
    """The version of the handler that was loaded first."""


def claim_of(settings: Settings, store: OutputStore) -> FolderClaim:
    """Return the pipeline's claim on the output folder; nothing is touched yet."""
    place, former = settings.ledger, None
    if isinstance(place, SqlitePlace):
        path = None if place.path is None else place.path.absolute()
        in_out_folder = isinstance(settings.out, Path) and path is None
        named = None if in_out_folder else str(SqlitePlace(path))
    else:
        # Without region and address: one server may take them from its settings, another from its environment.
        named = f"dynamodb://{place.table}/{settings.pipeline}"
        former = settings.rename_from and f"dynamodb://{place.table}/{settings.rename_from}"
    return FolderClaim(
        store, pipeline=settings.pipeline, ledger=named, former=former, new_ledger=settings.new_ledger
    )


def ledger_of(settings: Settings, *, server_id: str, clock: Clock) -> Ledger:
    """Return the ledger that the settings name, not opened yet. Raises ConfigError if the settings name none that can exist."""
    place = settings.ledger
    common: dict[str, Any] = {"pipeline": settings.pipeline, "rename_from": settings.rename_from}
    common |= {"server_id": server_id, "clock": clock}
    if isinstance(place, SqlitePlace):
        return SqliteLedger(ledger_file(settings), **common)
    from mldserver.ledger.dynamodb import DynamoLedger  # noqa: PLC0415  # most servers never need AWS's client

    region = place.region or settings.region
    return DynamoLedger(place.table, region=region, endpoint_url=place.endpoint_url, **common)


class Dependencies(NamedTuple):
    """What a server works with, besides its settings."""

    engine: Engine | None
    """Replaces Spark; None: use Spark."""
    kinesis: MakeKinesis | None
    """Returns a client that replaces AWS's; None: use AWS's."""
    source: MakeSource | None
    """Returns a source that replaces the one of the settings; None: use the settings'."""
    clock: Clock
    rng: Callable[[], float]
    """Returns floats in [0, 1) for jitter."""
    unique: Callable[[], str] = lambda: uuid.uuid4().hex[:12]
    """Returns a new unique part of a file name at each call."""
    drain: bool = False
    """Whether the server only drains the pipeline."""
    driver: SharedDriver | None = None
    """The Spark driver that the server's functions share; None: the pipeline has its own."""
    functions: frozenset[str] = frozenset()
    """The names of the server's functions; empty: there is only the one."""
    published: dict[str, PublishedWindows] | None = None
    """The published windows of the server's functions, by name: pipelines add theirs. None: queries see their own function's only."""


async def assemble(
    settings: Settings, around: Dependencies, *, step: Callable[[str], None], code_path: str = ""
) -> Parts:
    """Load the handler and build every part. Files, sockets and the ledger are not opened yet.

    A worker process loads the handler; if the settings have no workers, this process does. ``step`` is called with the name
    of each step as it begins. If cancelled, ``assemble`` leaves no process behind. It may leave a daemon thread that hangs in
    user code or in a file system; such a thread does not keep the process from ending. ``code_path``: the archive in the output
    store whose modules to load (``CodeVersion.path``); empty: the handler is loaded from the Python path.

    Raises HandlerError if the handler cannot be loaded, JavaError if Spark cannot start on this host, and OperatorError if
    the settings name a ledger or an output folder that cannot be used.
    """
    # Keep freed memory for the buffers of later lines. glibc keeps more by itself after a line that is longer than this.
    keep_memory(4 << 20)
    step("handler")
    code = {}
    if code_path:
        read = partial(_stored_code, settings, code_path)
        code = await run_in_daemon_thread(read, name="mldserver-code")
    # The handler's module may import the packages that Spark's executors get. Workers inherit this process's path.
    sys.path += [entry for entry in entries_of(settings.spark_py_files) if entry not in sys.path]
    queries = QueryService(
        {} if around.published is None else around.published,
        spill_bytes=settings.query_spill_bytes,
        clock=around.clock,
    )
    common: dict[str, Any] = {
        "query_seconds": settings.query_timeout_seconds,
        "policy": _failure_policy(settings),
        "deadline_seconds": settings.handler_timeout_seconds,
        "concurrency": settings.concurrency,
        "state_bytes": settings.state_bytes,
        "settings": settings.handler_settings,
    }
    runtime: InlineRuntime | WorkerRuntime
    if settings.workers is None:
        spec = await run_in_daemon_thread(
            partial(load_spec, settings.handler, code=code), name="mldserver-import"
        )
        local = LocalQueries(queries)
        runtime = InlineRuntime(
            spec, clock=around.clock, random=around.rng, at_once=True, queries=local, **common
        )
    else:  # this process runs no code of the user
        common |= {
            "pipeline": settings.pipeline,
            "workers": settings.workers,
            "limits": settings.part(Limits),
        }
        level = logging.getLevelNamesMapping()[settings.log_level.upper()]
        runtime = WorkerRuntime(settings.handler, log_level=level, code=code, queries=queries, **common)
        spec = await runtime.load()
    step("output folder")
    try:
        return await _assembled(settings, around, runtime, spec, code_path, queries)
    except BaseException:
        await runtime.close()
        raise


def _stored_code(settings: Settings, path: str) -> Code:
    """Return the modules of an archive in the output store. Blocking. Raises OperatorError."""
    return read_code(store_of(settings), path)


async def _assembled(
    settings: Settings,
    around: Dependencies,
    runtime: Runtime,
    spec: HandlerSpec,
    code_path: str,
    queries: QueryService,
) -> Parts:
    """Build the parts around a loaded handler. What reads files or imports much runs in a thread, not on the event loop.

    A handler without a schema gives no rows: it has neither Spark nor a window runner. With ``around.drain`` the parts belong to a
    server that only closes the open windows and reads no stream. A handler with state needs to know which keys each shard has, which
    only the stream's listing says (``_require_ranges``).
    """
    if spec.keyed and around.source is None and not around.drain:
        _require_ranges(settings)
    clock, rng, engine = around.clock, around.rng, around.engine
    store = await run_in_daemon_thread(partial(store_of, settings), name="mldserver-output")
    prefix = DRAIN if around.drain else ""
    server_id = settings.server_id or f"{prefix}{socket.gethostname()}:{os.getpid()}:{around.unique()}"
    # In a thread, because a ledger in DynamoDB imports a large part of AWS's client.
    make_ledger = partial(ledger_of, settings, server_id=server_id, clock=clock)
    ledger = await run_in_daemon_thread(make_ledger, name="mldserver-ledger")
    shape, runner = shape_of(settings, spec), None

    if spec.schema is None:
        _refuse_table_of_letters(settings)
        engine = None
    else:
        if engine is None:
            folder = f"{SPARK}/{server_tag(server_id)}"
            make_spark = partial(
                spark_of,
                settings,
                spec,
                around.driver,
                out=store.place,
                **({"clock": clock} if around.driver is None else {}),
                work_dir=home(settings) / folder,
                place=store.uri(folder) if store.place else "",
            )
            engine = await run_in_daemon_thread(make_spark, name="mldserver-spark")
        queries.ask = getattr(engine, "query", None)
        check_after(settings.pipeline, spec.after, around.functions, queries.published)
        runner = _runner(
            settings,
            spec,
            around,
            engine,
            ledger=ledger,
            store=store,
            queries=queries,
            coordinator=lambda: coordinator,
        )
    letters = await run_in_daemon_thread(
        partial(destination_of, settings, store, clock, rng), name="mldserver-letters"
    )
    civil = CivilClock(clock)
    polling = _polling(settings, around.kinesis, clock, civil)
    coordinator = Coordinator(
        rules=settings.part(
            CoordinatorRules,
            on_arrival=spec.time_column is None,
            disorder_ms=spec.windows.disorder_ms if isinstance(spec.windows, TimeWindows) else 0,
            overlap=do_overlap(spec.windows),
            in_order=spec.takes_previous,
            parks=settings.on_key_failure is OnKeyFailure.PARK,
            retention_ms=max(settings.retention_ms, settings.keep_segments_ms),
        ),
        spec=spec.windows if spec.schema else None,
        shape=shape,
        ledger=ledger,
        store=store,
        runner=runner,
        clock=clock,
        unique=around.unique,
        claim=claim_of(settings, store),
        locks=_locks(settings),
        letters=letters,
        ask_stream=None if polling is None else polling.ask,
        keyed=spec.keyed,
        civil=civil,
    )
    consumers = ConsumerParts(runtime, coordinator.shards, Claims(), clock, spec.keyed, civil)
    tls = None
    has_listener = settings.source == "mld" and not around.drain
    if settings.tls_certificate is not None and has_listener:
        files = (settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
        tls = await run_in_daemon_thread(
            partial(ServerTLS, *files, names=settings.tls_names), name="mldserver-tls"
        )
    secret = None
    if settings.listen_secret is not None and has_listener:
        secret = await run_in_daemon_thread(
            partial(read_secret, settings.listen_secret), name="mldserver-secret"
        )
    make_source = around.source or partial(_source_of, settings, tls, secret)
    redriver = Redriver(
        ledger=ledger,
        runtime=runtime,
        claims=consumers.claims,
        redriving=coordinator.redriving,
        clock=clock,
        parks=settings.on_key_failure is OnKeyFailure.PARK,
        keyed=spec.keyed,
        timed=bool(spec.timers),
        why_not=_NO_REDRIVE if spec.kind is HandlerKind.PROCESSOR else "",
    )
    firing = None
    if spec.timers:
        firing = Firing(runtime=runtime, claims=consumers.claims, timers=coordinator.timers, clock=clock)
    swap = Swap(
        runtime=runtime,
        engine=engine,
        shards=coordinator.shards,
        store=store,
        clock=clock,
        wanted=lambda: coordinator.ledger_view.state.life.deployed,
        seconds=settings.flush_interval_ms / 1000,
        path=code_path,
    )
    source = make_source(SourceParts(consumers, rng))
    queries.records = partial(_records, source)
    return Parts(
        ledger=ledger,
        runtime=runtime,
        coordinator=coordinator,
        source=source,
        redriver=redriver,
        firing=firing,
        letters=letters,
        engine=engine,
        runner=runner,
        polling=polling,
        tls=tls,
        queries=queries,
        lookups=spec.lookups,
        swap=swap,
        handler_version=spec.version,
    )


def _runner(
    settings: Settings,
    spec: HandlerSpec,
    around: Dependencies,
    engine: Engine,
    *,
    ledger: Ledger,
    store: OutputStore,
    queries: QueryService,
    coordinator: Callable[[], Coordinator],
) -> WindowRunner:
    """Return what computes a handler's windows, and make known where queries find them.

    ``coordinator`` returns the coordinator that will cut them, which is created later.
    """
    shape, clock, sink = shape_of(settings, spec), around.clock, sink_of(settings)
    view = _view(settings, spec, sink)
    if spec.takes_previous and settings.late != "separate":
        raise ConfigError(
            f"on_window takes previous, and late = {settings.late} ({settings.origin('late')}) would compute windows again behind"
            " those that were computed with their results.",
            advice="Say late = separate: late rows then go to the late dataset, or into a table (late_sink).",
        )
    if spec.takes_previous and sink is not None and not view.is_table:
        raise ConfigError(
            f"on_window takes previous, which cannot be read back from {sink}.",
            advice="Publish into files, Delta Lake or Iceberg; or keep what goes from window to window in keyed state.",
        )
    early_ms = getattr(spec.windows, "early_ms", None)
    published = PublishedWindows(
        shape=view,
        has_view=sink is None,
        ledger=ledger,
        store=store,
        clock=clock,
        after=spec.after,
        until_ms=lambda: coordinator().published_until_ms(),
    )
    queries.published[settings.pipeline] = published
    steps = WindowSteps(
        pipeline=settings.pipeline,
        ledger=ledger,
        store=store,
        engine=engine,
        clock=clock,
        retain=settings.late == "recompute" or settings.keep_segments_ms > 0,
        freed=lambda freed_bytes: coordinator().freed(freed_bytes),
        table=shape.table,
        overlap=do_overlap(spec.windows),
        predecessors=Predecessors(names=spec.after, published=queries.published) if spec.after else None,
        previous=PreviousResults(ledger=ledger, published=published) if spec.takes_previous else None,
        has_early=early_ms is not None,
    )
    retrying = {
        "random": around.rng,
        "log_error_messages": settings.log_error_messages,
        **settings.replaced("retry_seconds"),
    }
    early = {"early_ms": early_ms} | settings.replaced("early_ms") if early_ms is not None else {}
    gate = None if around.driver is None else around.driver.run_gate
    side_tables = _side_tables(settings, spec, steps, retrying)
    return WindowRunner(steps, settings, gate=gate, side_tables=side_tables, **early, **retrying)


def _refuse_table_of_letters(settings: Settings) -> None:
    """Raise ConfigError for a handler without rows whose dead letters go into a table."""
    if "dead_letters" in side_sinks_of(settings):
        raise ConfigError(
            f"dead_letters = {settings.dead_letters} ({settings.origin('dead_letters')}) is a table, and a handler without "
            "rows has no Spark that writes it.",
            advice="Name another place for dead letters.",
        )


def _side_tables(
    settings: Settings, spec: HandlerSpec, steps: WindowSteps, options: Mapping[str, Any]
) -> SideTables | None:
    """Return what writes late rows and dead letters into tables; None if none is set."""
    sinks = side_sinks_of(settings)
    if not sinks:
        return None
    tables = {content: str(sink) for content, sink in sinks.items()}
    letter_rows = partial(as_rows, pipeline=settings.pipeline) if "dead_letters" in sinks else None
    return SideTables(
        steps, tables=tables, window_columns=spec.window_columns, letter_rows=letter_rows, **options
    )


def _view(settings: Settings, spec: HandlerSpec, sink: SinkSpec | None) -> FunctionView:
    """Return the view of a function's published windows, without their files."""
    windows = spec.windows if isinstance(spec.windows, TimeWindows) else None
    return FunctionView(
        settings.pipeline,
        (),
        None if windows is None else spec.window_columns or WINDOW_COLUMNS,
        0 if windows is None else windows.size_ms,
        # What on_window makes of the rows is known when there is a window.
        "" if spec.schema is None or "on_window" in spec.hooks else spec.schema.ddl,
        is_table=sink is not None and hasattr(find(sink.format), "files"),
    )


def _records(source: Source) -> int:
    """Return how many records have come from a source."""
    counts = source.status().counts
    return 0 if counts is None else sum(each.records for each in (counts.gone, *counts.shards.values()))


def _require_ranges(settings: Settings) -> None:
    """Raise ConfigError if the handler keeps state and the settings do not say which keys a shard has."""
    if settings.source != "mld":
        return  # all descendants of a shard of a DynamoDB stream share a store: no range is needed
    if settings.stream is None:
        raise ConfigError(
            "The handler keeps state for each partition key, but no stream is named: only the stream's listing says which keys "
            "a shard has.",
            advice="Name the Kinesis stream that the daemons read: --stream NAME.",
        )
    if ":dynamodb:" in settings.stream:
        raise ConfigError(
            f"The handler keeps state, but {settings.stream} is a DynamoDB stream that daemons read: its listing has no ranges "
            "of keys.",
            advice="Read the table's stream directly: --source dynamodb:TABLE, without a daemon.",
        )


def destination_of(
    settings: Settings, store: OutputStore, clock: Clock, jitter: Callable[[], float]
) -> Destination | None:
    """Return where dead letters go; None for the ledger and for tables. Blocking. Raises OperatorError for a URI that leads nowhere."""
    place, pipeline = settings.dead_letters, settings.pipeline
    if place is None:
        return None
    if place.kind in TABLES_OF_LETTERS:
        return None  # they are segments until they are in the table
    if place.kind in {"jsonl", "parquet"}:
        kind = cast("Literal['jsonl', 'parquet']", place.kind)
        if not place.target:
            return FolderDestination(store, DEAD_LETTERS, pipeline=pipeline, kind=kind)
        other = _store_at(place.target, redacted(place.target), f"dead_letters = {place}")
        # Another pipeline on the same stream, with files of the same names, may have the same place.
        return FolderDestination(other, pipeline, pipeline=pipeline, kind=kind)
    from mldserver.deadletters.aws_destinations import DESTINATIONS  # noqa: PLC0415  # most servers never need AWS's client

    return DESTINATIONS[place.kind](
        place.target,
        pipeline=pipeline,
        clock=clock,
        jitter=jitter,
        region=settings.region,
        endpoint_url=settings.endpoint_url,
    )


def _source_of(settings: Settings, tls: ServerTLS | None, secret: bytes | None, parts: SourceParts) -> Source:
    """Return the listener for MultiLangDaemons, or the reader of a DynamoDB table's stream, as ``source`` says.

    Raises ConfigError if the file that ``from`` names cannot be read.
    """
    place = settings.source
    if place == "mld":
        return MLDListener(
            settings.listen,
            parts.consumers,
            random=parts.random,
            limits=settings.part(ConnectionLimits),
            tls=tls,
            secret=secret,
            allow_shards=settings.allow_shards,
            connection_limit=settings.connection_limit,
            answer_deadline=settings.answer_deadline_seconds,
            progress_seconds=settings.flush_interval_ms / 1000,
        )
    from mldserver.dynamodb_streams.direct_source import DirectSource  # noqa: PLC0415  # most servers never need AWS's client
    from mldserver.dynamodb_streams.positions import Beginning, parse_position  # noqa: PLC0415  # as above
    from mldserver.dynamodb_streams.streams_api import streams_client  # noqa: PLC0415  # as above

    written = settings.from_.strip()
    try:
        if not written.startswith("{") and Path(written).is_file():
            written = Path(written).read_text("utf-8")  # a file with a token of `Stream`
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"from = {written} cannot be read: {error}.", advice="Give a file that holds a token of Stream."
        ) from error
    region, endpoint_url = place.region or settings.region, place.endpoint_url or settings.endpoint_url
    return DirectSource(
        place.table,
        partial(streams_client, region=region, endpoint_url=endpoint_url),
        parts.consumers,
        random=parts.random,
        beginning=Beginning.of(parse_position(written)),
        accept_gap=settings.accept_gap,
        look_seconds=settings.flush_interval_ms / 1000,
        unclaimed_seconds=settings.server_timeout_ms / 1000,
        **settings.replaced("poll_seconds", "list_seconds"),
    )


def shape_of(settings: Settings, spec: HandlerSpec) -> Shape:
    """Return the pipeline's columns, windows and sink table, which all servers on a ledger must share."""
    columns = () if spec.schema is None else spec.schema.columns
    table = None
    if settings.sink is not None:  # what a log calls the table that windows are published into
        table = f"{settings.sink} {settings.sink_table or ''}".rstrip()
    return Shape.of(
        settings.pipeline,
        tuple(Column(column.name, column.sql, column.nullable) for column in columns),
        spec.windows if spec.schema else None,
        table,
    )


def _polling(
    settings: Settings, kinesis: MakeKinesis | None, clock: Clock, civil: CivilClock
) -> StreamLister | None:
    if settings.stream is None:
        return None
    make = kinesis or partial(
        aws_client, "kinesis", region=settings.region, endpoint_url=settings.endpoint_url
    )
    return StreamLister(settings.stream, make, clock=clock, civil=civil, **settings.replaced("list_seconds"))


def store_of(settings: Settings) -> OutputStore:
    """Return the output folder, not touched yet. Blocking. Raises OperatorError for a URI that leads nowhere."""
    out = settings.out
    uri = out.uri if isinstance(out, RemoteOut) else str(out)
    return _store_at(uri, str(out), f"The output folder {out}", home=home(settings))


def _store_at(uri: str, shown: str, what: str, *, home: Path | None = None) -> OutputStore:
    """Return the store at a path or URI; ``shown`` is that without secrets, and ``what`` the subject of the error's sentence."""
    try:
        return OutputStore(uri, home=home)
    except (OSError, ValueError, NotImplementedError) as error:
        text = str(error).replace(uri, shown)  # pyarrow repeats what it cannot read, secrets and all
        raise (NotThereYet if isinstance(error, OSError) else OperatorError)(
            f"{what} cannot be reached: {text}.",
            advice="Check the URI: its name, and the options after the question mark, are those of "
            "pyarrow.fs.FileSystem.from_uri.",
            path=shown,
        ) from error


def exposed(settings: Settings) -> dict[Path, str]:
    """Return what every user of this host can read and should not, with what it holds. Blocking."""
    found: dict[Path, str] = {}
    if isinstance(settings.out, Path):
        found |= {settings.out / PRIVATE: "ledger and segments", settings.out / DEAD_LETTERS: "dead letters"}
    if isinstance(settings.ledger, SqlitePlace) and settings.ledger.path is not None:
        found[settings.ledger.path] = "the ledger, with dead letters"
    found |= dict.fromkeys(settings.files_with_secrets(), "passwords")
    return {path: what for path, what in found.items() if others_can_read(path)}


def _locks(settings: Settings) -> ServerLocks | None:
    """Return the servers' locks; None if a lock could show a living server as dead.

    That can happen if each host has its own folder of locks and ``server_id`` gives the name: after the server moved to
    another host, this host still has its old lock, which no process holds. A generated name is never used again.
    """
    all_hosts_share_the_folder = not isinstance(settings.out, RemoteOut) or isinstance(
        settings.ledger, SqlitePlace
    )
    if all_hosts_share_the_folder or settings.server_id is None:
        return ServerLocks(home(settings) / SERVERS)
    return None


def driver_of(settings: Sequence[Settings], *, clock: Clock) -> SharedDriver:
    """Return the Spark driver that the functions of a server share, not started. ``settings``: of all functions."""
    from mldserver.spark.driver_messages import StartSession  # noqa: PLC0415  # slow to import, and not needed with another engine
    from mldserver.spark.driver_start import own_folder  # noqa: PLC0415  # see above
    from mldserver.spark.shared_driver import SharedDriver  # noqa: PLC0415  # see above

    session, own = _spark_arguments(settings[0])
    if len(settings) > 1:
        session["app_name"] = "mldserver"
    # Not in SPARK: there, each function removes what it does not know.
    work_dir = own_folder(home(settings[0]) / DRIVERS)
    return SharedDriver(StartSession(**session), clock=clock, work_dir=work_dir, **own)


def _spark_arguments(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the settings of the server say about Spark: fields of ``StartSession``, and of ``SharedDriver``."""
    session = {
        "master": settings.spark_master,
        "conf": dict(settings.spark_conf),
        "py_files": tuple(map(str, settings.spark_py_files)),
        "python": settings.spark_python,
        "app_name": f"mldserver: {settings.pipeline}",
        "concurrency": settings.window_concurrency,
        "query_concurrency": settings.query_concurrency,
    }
    driver = {
        "java_home": str(settings.java_home) if settings.java_home else None,
        "cache_dir": settings.cache_dir,
        "log_error_messages": settings.log_error_messages,
    }
    return session, driver


def spark_of(
    settings: Settings, spec: HandlerSpec, driver: SharedDriver | None = None, **more: Any
) -> Engine:
    """Return a function's engine on Spark as the settings say, not started.

    ``driver``: the one of its server; None: the engine has its own. ``more``: options of ``make_engine`` that are added or
    replaced.
    """
    from mldserver.spark.client import make_engine  # noqa: PLC0415  # slow to import, and not needed with another engine

    assert spec.schema is not None
    arguments: dict[str, Any] = {
        "job_deadline": settings.window_deadline_seconds,
        "storage": hadoop_settings(getattr(settings.out, "uri", ""), settings.spark_conf),
        "sink": sink_of(settings),
        "side_sinks": side_sinks_of(settings),
        "pipeline": settings.pipeline,
        "new_ledger": settings.new_ledger,
        "code": spec.code,
    }
    if driver is None:
        session, own = _spark_arguments(settings)
        arguments |= session | own
    return make_engine(spec.path, spec.schema.ddl, driver=driver, **(arguments | more))


def _failure_policy(settings: Settings) -> FailurePolicy:
    bad_above_ms = settings.max_ahead_ms if settings.on_ahead == "fail" else None
    return settings.part(FailurePolicy, max_ahead_ms=bad_above_ms)
