"""The status document as metrics for Prometheus: one table says what each is called, where it is read, and what it means.

Names follow Prometheus' conventions: base units, ``_total`` for what only grows. Each series of a function has the label
``function``; those of the server have not. Labels are bounded: a function's shards beyond ``MOST_SHARDS`` are one series,
``other``, which shows the worst of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from prometheus_client import exposition as text
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from mldserver.status_document import SECONDS, FunctionStatus, Status

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

MOST_SHARDS: Final = 200
PREFIX: Final = "mldserver_"

TABLE: Final = """
info  INFO
    What runs: version, pipeline, handler and its version, server and host.
ready  READY
    1 while the function is ready; no series while it is undeployed.
function_state  LIFECYCLE
    1 for the state of the function's life cycle, such as deployed, paused or failed.
paused  paused
    1 while an operator has paused all shards of the function.
status_timestamp_seconds  taken_ms
    When this status was collected, since the epoch.
start_time_seconds  started_ms
    When the server started, since the epoch.
event_loop_lag_seconds  loop_lag_seconds
    The longest that the event loop was late within the last second.
resident_memory_bytes  resident_bytes
    Memory of the server's process.
cpu_seconds_total  cpu_seconds
    CPU time of the server's process, its threads included.
open_files  open_files
    File descriptors that the server's process has open.
open_files_limit  open_files_limit
    How many it may have.
log_lines_lost_total  totals.log_lines_lost
    Lines that the log has lost.
reloads_total  totals.reloads
    Reloads of the handler.
reloads_refused_total  totals.reloads_refused
    Reloads that were refused: the old code went on.
batches_total  totals.batches
    Batches that held records.
records_total  totals.records
    Records that came, those within KPL aggregates counted singly.
duplicate_records_total  totals.duplicates
    Records that had been taken in before, and were dropped unseen.
received_bytes_total  totals.bytes
    Bytes of batches that held records, as they came.
rows_total  totals.rows
    Rows that the handler gave.
durable_rows_total  totals.rows_durable
    Rows that were made durable.
late_rows_total  totals.rows_late
    Rows that came after their window was cut.
ahead_rows_total  totals.rows_ahead
    Rows whose time ran too far ahead of their records' arrival.
batch_seconds  batch_seconds
    From the last byte of a batch that held records until it was done with.
handler_seconds_total  totals.handler_seconds
    Time in which batches were worked on by handlers.
held_seconds_total  totals.held_seconds
    Time in which answers were held back for want of memory or disk.
early_answers_total  totals.answered_early
    Batches that were answered before they were done.
handler_retries_total  totals.retries
    Calls of the handler that were made again after a failure.
failed_records_total  OUTCOMES
    Records that ended without a row: dead_letter, skipped, or discarded by the handler.
dead_letter_errors_total  failures
    Dead letters by the class of their error, at most a hundred classes.
dead_letters_waiting  dead_letters.waiting
    Dead letters that the ledger keeps.
dead_letters_redriving  dead_letters.redriving
    Dead letters that wait for a redrive.
connections  connections
    Connections by the state of the protocol.
connections_accepted_total  totals.connections
    Connections that were accepted.
connection_failures_total  totals.connections_failed
    Connections that were closed because of an error.
stream_retries_total  totals.stream_retries
    Requests to DynamoDB Streams that were repeated after an error or a throttle.
stream_gaps_total  totals.stream_gaps
    Places where records expired before they were read, or were skipped and an operator accepted it.
shards  SHARDS
    Shards of this server by their state, the missing ones among them.
shard_lag_seconds  shards.lag_ms
    How far a shard is behind the stream's tip at least: what its latest batch reported, plus the time since.
shard_durable_age_seconds  shards.durable_age_seconds
    How long a shard's oldest record that is not durable has been here.
shard_checkpoint_age_seconds  shards.checkpoint_age_seconds
    How long a shard's oldest durable position that no checkpoint covers has waited.
checkpoints_total  totals.checkpoints
    Checkpoints that daemons have stored.
checkpoint_retries_total  totals.checkpoints_retried
    Checkpoints that were asked for again.
checkpoint_failures_total  totals.checkpoints_failed
    Checkpoints that were given up for then.
watermark_timestamp_seconds  watermark.at_ms
    Up to which event time no more rows are expected, since the epoch.
watermark_lag_seconds  WATERMARK_LAG
    How far the watermark is behind the time of day.
watermark_holder  HOLDER
    1 for the shard that holds the watermark, the server that does if it is another, and why.
watermark_stuck  watermark.stuck
    1 while windows that are due wait for it for too long.
unread_shards  unread_shards
    Shards that have not ended, where none has been connected for 5 minutes (or missing_limit, if that is shorter); else 0.
stream_ended  stream_ended
    1 once every shard has ended and every window is cut.
windows  WINDOWS
    Windows that are open, cut and not published yet (computing), or halted.
windows_published_total  windows.published
    Windows that this server has published.
windows_set_aside_total  windows.set_aside
    Windows that kept failing and were set aside.
early_results_total  windows.early
    Early results of open windows that were shown.
early_result_failures_total  windows.early_failed
    Early results whose jobs failed.
window_failures_total  totals.windows_failed
    Attempts at windows that failed.
window_rows_total  windows.rows_out
    Rows of published windows.
window_seconds  windows.seconds
    From a window's cut to its visible output.
window_oldest_age_seconds  OLDEST_WINDOW
    How long the oldest window that is cut and not published has waited; 0 while none waits.
flushes_total  totals.flushes
    Flushes that made rows or positions durable.
flush_failures_total  totals.flushes_failed
    Cycles of the coordinator that failed, and were tried again.
segments_total  totals.segments
    Files of rows that were made durable.
segment_bytes_total  totals.segment_bytes
    Bytes of those files.
budget_used_bytes  budgets.used_bytes
    What is used of what is bounded: rows in memory (buffer), unread messages (lines), disk (segments), keyed state in memory (state).
budget_limit_bytes  budgets.limit_bytes
    The bounds of these.
state_keys  state.keys
    Keys whose state this server holds.
state_files  state.files
    Files of keyed state that a store needs, of all servers on the ledger.
state_file_bytes  state.file_bytes
    Bytes of those files.
state_snapshots_total  state.snapshots
    How often a process got the state of a store: when a shard was opened, or a worker replaced.
state_snapshot_seconds_total  state.snapshot_seconds
    Time that reading these states took.
state_compactions_total  state.compactions
    How often several files of keyed state became one.
timers_set_total  timers.set
    How often the handler has set a timer; a timer that is set again counts again.
timers_cancelled_total  timers.cancelled
    Timers that the handler or an operator has cancelled.
timers_fired_total  timers.fired
    Timers whose callback was called and that are done.
timers_skipped_total  timers.skipped
    Timers that were later than their max_lateness.
timers_failed_total  timers.failed
    Calls of callbacks that failed, and are repeated later.
timer_lateness_seconds  timers.lateness
    From a timer's due time to the first call of its callback.
timers_pending  timers.pending
    Timers that this server's stores hold.
timers_unknown  timers.unknown
    Pending timers whose callback the handler does not have. They wait for a version that has it.
timers_held  timers.held
    Shards with due timers that wait, because the shard lags, is paused, or has no room in memory.
timers_held_seconds  timers.held_seconds
    For how long the oldest of these timers has been due.
ledger_calls_total  totals.ledger_calls
    Transactions of the ledger.
ledger_faults_total  totals.ledger_faults
    Transactions of the ledger that failed.
ledger_seconds_total  totals.ledger_seconds
    Time that transactions of the ledger took; they may overlap.
servers  SERVERS
    Servers on the ledger, this one included.
worker_resident_memory_bytes  workers.resident_bytes
    Memory of a worker's process.
worker_running_seconds  workers.running_seconds
    How long a worker's present synchronous call of the handler runs, or it has blocked the worker's event loop.
worker_shards  workers.shards
    Shards of a worker.
worker_restarts_total  workers.restarts
    Processes that a worker had before its present one.
workers_lost_total  totals.workers_lost
    Worker processes that died or were killed.
workers_replaced_total  totals.workers_replaced
    Worker processes that had grown beyond their memory limit.
spark_ready  spark.ready
    1 while a window's job would start at once.
spark_jobs  spark.jobs
    Jobs that Spark runs.
spark_jvm_resident_memory_bytes  spark.jvm_resident_bytes
    Memory of the driver's JVM: its heap (spark.driver.memory), and what it needs beside.
spark_start_seconds  spark.start_seconds
    How long Spark's latest start took.
spark_starts_total  totals.spark_starts
    Starts of Spark's driver.
spark_lost_total  totals.spark_lost
    Drivers of Spark that died.
"""
"""Of each metric: its name without ``PREFIX``, the field of ``Status`` that it is read from, and below what it means.

A field in ms is exposed in seconds. ``shards.…``, ``workers.…`` and ``budgets.…`` are a series for each; what stands in
capitals is made of several.
"""


Series: TypeAlias = tuple[tuple[str, ...], Any]
"""The labels of one series of a metric, and its value: a number, a ``Histogram``, the labels of an info."""


class Metric(NamedTuple):
    """One metric."""

    name: str
    """With the prefix; that of a histogram without its suffixes."""
    kind: str
    """``counter``, ``gauge``, ``histogram`` or ``info``."""
    labels: tuple[str, ...]
    help: str
    of_server: bool
    """Whether there is one for the server, and not one for each function."""
    read: Callable[[Status, FunctionStatus], list[Series]]
    """Returns nothing where there is nothing to report of a function of a server."""


_LABELS: Final = {
    "OUTCOMES": ("outcome",),
    "SHARDS": ("state",),
    "WINDOWS": ("state",),
    "HOLDER": ("shard", "server", "reason"),
    "LIFECYCLE": ("state",),
    "failures": ("error",),
    "connections": ("state",),
    "shards": ("shard",),
    "workers": ("worker",),
    "budgets": ("budget",),
}
"""Of a field of the table that has any: by its name, or the name before its dot."""
_KINDS: Final = {
    **dict.fromkeys(("batch_seconds", "window_seconds", "timer_lateness_seconds"), "histogram"),
    "info": "info",
}
"""Of metrics that are neither counters nor gauges."""
_OF_SERVER: Final = {
    *(set(Status.__struct_fields__) - set(FunctionStatus.__struct_fields__)),
    *("totals.log_lines_lost", "totals.spark_starts", "totals.spark_lost"),
}
"""Fields of the table, or their sections, that are facts of the server."""


def _field_value(within: Any, field: str) -> Any:
    """Return the field at a dotted path below ``within``; milliseconds as seconds. None if a part of the path is None."""
    value = within
    for name in field.split("."):
        value = None if value is None else getattr(value, name)
    return value / 1000 if field.endswith("_ms") and value is not None else value


def _single_value(field: str, status: Status, function: FunctionStatus) -> Any:
    """Return the value of a metric without labels. ``field``: as in ``TABLE``. None: the function has no value for it."""
    if field == "INFO":
        names = ("pipeline", "handler", "handler_version", "server_id")
        about = {name: getattr(function, name) for name in names}
        return about | {"version": status.version, "host": status.host}
    if field == "READY":
        return function.ready if function.is_wanted else None
    if field == "OLDEST_WINDOW":
        return function.windows.oldest_age_seconds or 0.0
    if field == "SERVERS":
        return len(function.servers)
    if field == "WATERMARK_LAG":
        at_ms = function.watermark.at_ms
        return None if at_ms is None else (status.taken_ms - at_ms) / 1000
    return _field_value(function, field)


def _read_series(field: str, status: Status, function: FunctionStatus) -> list[Series]:
    """Return all series of one metric: pairs of label values and a value. ``field``: as in ``TABLE``.

    ``function`` is a function of the server, or the server's ``status`` for a metric of the server.
    """
    section, _, inner = field.partition(".")
    counts: Mapping[str, float]  # by the value of the metric's only label
    match section:
        case "shards":
            values = [(shard.id, _field_value(shard, inner)) for shard in function.shards]
            known = [(shard_id, value) for shard_id, value in values if value is not None]
            # Shards beyond the limit are one series, "other", with the worst value. A shard that has this name comes last.
            known.sort(key=lambda pair: pair[0] == "other")
            others = [value for _, value in known[MOST_SHARDS:]]
            counts = dict(known[:MOST_SHARDS]) | ({"other": max(others)} if others else {})
        case "workers":
            counts = {str(worker.number): _field_value(worker, inner) for worker in function.workers}
        case "budgets":
            counts = {name: _field_value(budget, inner) for name, budget in function.budgets.items()}
        case "OUTCOMES":
            totals = function.totals
            counts = {
                "dead_letter": totals.dead_letters,
                "skipped": totals.skipped,
                "discarded": totals.discarded,
            }
        case "SHARDS":
            states = Counter(shard.state for shard in function.shards)
            names = ("connected", "held", "paused", "missing", "left_out", "ended")
            counts = {name: states[name] for name in names}
        case "WINDOWS":
            windows = function.windows
            counts = {"open": windows.open, "computing": windows.waiting, "halted": len(windows.halted)}
        case "failures" | "connections":
            counts = getattr(function, field)
        case "HOLDER":
            mark = function.watermark
            return [((mark.held_by or "", mark.server or "", mark.reason), 1)]
        case "LIFECYCLE":
            counts = {function.lifecycle: 1}
        case _:
            value = _single_value(field, status, function)
            return [] if value is None else [((), value)]
    return [((name,), count) for name, count in counts.items()]


def _metric(name: str, field: str, meaning: str) -> Metric:
    """Return the metric of one entry of ``TABLE``."""
    section = field.partition(".")[0]
    of_server = field in _OF_SERVER or section in _OF_SERVER
    kind = _KINDS.get(name, "counter" if name.endswith("_total") else "gauge")
    labels = (*(() if of_server else ("function",)), *_LABELS.get(section, ()))
    return Metric(PREFIX + name, kind, labels, meaning, of_server, partial(_read_series, field))


METRICS: Final = {
    PREFIX + name: _metric(name, field, meaning)
    for name, field, meaning in re.findall(r"^(\w+)  ([\w.]+)\n    (.+)$", TABLE, re.MULTILINE)
}

OPENMETRICS: Final = openmetrics.CONTENT_TYPE_LATEST
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


def content_type(accept: str) -> str:
    """Return which of the two formats a client's ``Accept`` asks for."""
    return OPENMETRICS if "application/openmetrics-text" in accept else TEXT


def exposed(status: Status, kind: str) -> bytes:
    """Return a document's metrics in the format of a content type."""
    generate = openmetrics.generate_latest if kind == OPENMETRICS else text.generate_latest
    return bytes(generate(_Families(status)))


class _Families(Collector):
    """Adapts ``METRICS`` to prometheus-client, which calls ``collect`` when it writes a status as text."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Family]:
        """Yield each metric that has a value, with its series, as the library's class for its kind."""
        status = self._status
        for metric in METRICS.values():
            series: list[Series] = []
            if metric.of_server:
                series = metric.read(status, status)
            else:
                for name, function in status.by_name.items():
                    read = metric.read(status, function)
                    series += [((name, *values), value) for values, value in read]
            if series:
                yield _family(metric, series)


def _family(metric: Metric, series: list[Series]) -> Family:
    """Return a metric with its series as the library's class for its kind."""
    if metric.kind == "info":
        info = InfoMetricFamily(metric.name.removesuffix("_info"), metric.help, labels=metric.labels)
        for values, about in series:
            info.add_metric(values, about)
        return info
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for values, durations in series:
            # Prometheus counts in each bucket all values up to its bound.
            buckets = zip((*map(str, SECONDS), "+Inf"), accumulate(durations.counts), strict=True)
            histogram.add_metric(values, list(buckets), durations.sum_seconds)
        return histogram
    family_class = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = family_class(metric.name, metric.help, labels=metric.labels)
    for values, value in series:
        family.add_metric(values, value)
    return family
