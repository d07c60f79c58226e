"""Every log event by its stable name: level, fields and meaning. The schema of the log, as data.

Levels keep a contract:

* ``debug``: for a developer of mldserver; may be noisy, never needed to understand what happened to data.
* ``info``: normal life. One line a shard and flush interval, one a window, one a change of a connection, a shard or the server.
* ``warning``: something failed and the server dealt with it; data is safe; look at it when it repeats.
* ``error``: something needs a person: a dead letter was stored, a window waits, a connection was closed on purpose.
* ``critical``: the process cannot go on and says why before it exits.

Every event carries ``timestamp`` (ISO 8601, UTC), ``level``, ``event``, and where they apply ``pipeline``, ``shard``,
``connection``, ``window``. Times are in seconds (``…_seconds``) or milliseconds since the epoch (``…_ms``).
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

COMMON_FIELDS: Final = frozenset(
    "timestamp level event pipeline shard connection window exception error what did advice where".split()  # noqa: SIM905  # a line, not thirteen
)
"""Fields that any event may carry."""

TABLE: Final = """
server.starting  info  version pid handler out settings
    The process has read its settings.
server.listening  info  address
    The server accepts connections; ``address`` holds the actual port. When the server reads a stream,
    ``address`` is the stream's ARN.
server.ready  info  seconds
    Spark is warm and every part works: the server is ready.
server.unready  error  reason
    The server is not ready any more; ``reason`` says why.
server.stopping  info  reason connections
    The server stops: it accepts no more connections, and each shard finishes its request.
server.few_files  warning  limit needed
    The system's limit of open files is lower than the settings need: raise LimitNOFILE.
server.waiting  info  waiting_for seconds
    Shutdown (or start) still waits for these.
pipeline.drained  info  set_aside
    The drain is done: no window is open or waits; ``set_aside``: the windows that kept failing.
server.stopped  info  exit_code seconds
    The last line of the log.
server.failed  critical  exit_code traceback
    The process cannot go on.
function.failed  error  lasting traceback
    One of several functions has ended with an error; the others go on. ``lasting``: it waits for the
    server's restart; else it starts again after a back-off of 1 s to 1 min.
function.wanted  info  wanted before
    The server follows what an operator wants of its function: deployed, paused or undeployed.
function.swapped  info  version former
    The workers run another version of the function's code: the one that the ledger names.
function.refused  error  version traceback
    The deployed version does not run here: the old code stays, and readiness is red until a deploy or rollback.
server.expired  warning  server seconds
    Another server on the ledger is dead: this server expired it, and its shards and windows are free for
    others.
server.beat_failed  warning
    This server could not write its heartbeat into the ledger; after ``server_timeout`` other servers expire
    it.
tls.read  info  certificate
    The server read its certificates again on SIGHUP; open connections keep the earlier ones.
tls.failed  debug|warning  peer times
    A TLS handshake failed: the peer's certificate is missing or not from `tls_client_ca`, or the peer does
    not speak TLS.
tls.refused  error
    A certificate that the server read again cannot be used: the server keeps the former one.
admin.listening  info  address metrics
    The admin endpoint listens at ``address``; ``metrics`` is the address for metrics alone
    (`metrics_listen`), if it is set.
admin.unavailable  warning
    The server cannot listen on the default address, for example because another process uses it: the server
    continues without an admin endpoint.
admin.steering_unavailable  warning
    The server cannot create its Unix socket for steering in the output folder: it continues, and cannot be
    steered.
admin.refused  warning  requests status path who
    The admin endpoint refused ``requests`` requests since the last such line: with ``status`` 403 a steering
    request over TCP, a client without permission or a foreign Host header, with 404 an unknown path. ``path``
    and ``who`` describe the latest request. Logged also, with ``what``, if a connection cannot be accepted.
admin.failed  error  traceback times
    The server could not collect its status, and `/readyz` is red with the reason; or the endpoint could not
    answer ``times`` requests since the last such line.
admin.act  info|warning  act argument who done text
    A client steered the server: ``who`` requested ``act``; ``done`` and ``text`` hold the result.
connection.opened  debug  peer
    A peer connected.
connection.refused  warning  peer limit
    The connection limit is reached; further connections wait in the kernel's queue.
connection.closed  info  reason seconds batches records
    The connection ended in a way that the protocol allows.
connection.failed  warning|error  peer reason excerpt state handler hook sequence attempts times traceback
    The connection was closed because of an error.
connection.state  debug  from_state to_state on
    A transition of the protocol's state machine.
shard.opened  info  start position epoch version
    A connection opened a shard.
shard.gap_accepted  error  start position
    The daemon starts beyond the ledger's position; the operator accepted the gap.
shard.ended  info  position
    The shard was read to its end, and all its rows are durable.
shard.lost  info  position
    The lease went to another worker.
shard.shutdown_requested  info  position
    The daemon stops, or gives up the shard's lease in an orderly way.
shard.taken_over  warning  peer
    Another connection opened the shard; further batches on this connection are answered but not processed.
shard.disconnected  warning  position
    The connection ended before the shard's lease did; the shard holds the watermark.
shard.failed  error  delay_seconds
    The server could not continue to read a shard of its stream; it opens the shard again after the delay.
shard.missing  warning  seconds
    A known shard has had no connection for ``server_timeout``, here or elsewhere; it holds the watermark.
shard.left_out  error  seconds
    A missing shard no longer holds the watermark; its rows will be late.
shard.held  info  short_of used_bytes budget_bytes
    The shard is ahead, and memory or disk is short: the server delays its answer.
shard.released  info  seconds
    The server answers a shard again that it held back.
shard.range_unknown  warning  delay_seconds
    The handler keeps state, and the stream has not yet said which keys the shard has: the opening waits.
shard.discovered  info  parents
    The stream lists a new shard.
batch.done  info|debug  records rows duplicates dead_letters skipped discarded bytes first last \
    millis_behind_latest attempts handler_seconds held_seconds checkpoint seconds
    A batch is done. Logged at info if records failed or were delivered again, or if the batch was held back
    or answered early.
batches.done  info  batches records rows bytes first last millis_behind_latest slowest_seconds
    The sum of a shard's batches in one flush interval. Fields that are 0, and empty batches, are omitted.
batch.answered_early  warning  seconds batches bytes
    The server answered the daemon at the answer deadline; ``batches`` and ``bytes`` say how much is still
    being processed.
batch.given_up  warning  batches
    The lease moves to another worker: batches that were answered early are dropped, and the daemon delivers
    them again there.
checkpoint.done  debug  sequence seconds
    The daemon stored a checkpoint.
checkpoint.retried  warning  sequence attempt delay_seconds
    The daemon could not store a checkpoint; the server retries.
checkpoint.failed  error  sequence attempts
    All attempts to checkpoint failed; the server tries again with the shard's next checkpoint.
checkpoint.stopped  warning  sequence
    ShutdownException: the lease was lost, so the server checkpoints nothing more.
handler.loaded  info  handler hooks schema windows
    The handler was imported and checked.
handler.failed  warning|error|debug  handler hook sequence attempt delay_seconds traceback times
    A hook failed and is retried. Logged as an error if ``initialize`` keeps failing, since its shard waits.
    The same failure of a shard is logged once a minute, with the number of ``times`` since then, and at debug
    in between; the same holds for the next three events.
handler.dead_letter  error|debug  handler sequence partition_key timer attempts traceback times
    A record, or a timer of its key, failed for good and is a dead letter.
handler.skipped  warning|debug  handler sequence partition_key timer attempts traceback times
    A record, or a timer of its key, failed for good and is skipped: the server does not store it.
handler.hook_failed  error|debug  handler hook attempts traceback times
    A life-cycle hook failed for good; the server answers the daemon as after a success.
handler.discarded  debug  handler sequence partition_key timer attempts
    The handler discarded a record, or a timer of its key.
handler.halted  critical  handler hook sequence attempts traceback
    A record failed for good, and `on_failure` or a failure rule is halt.
handler.not_checkpointing  warning  handler seconds position
    A record processor of amazon_kclpy receives records, but has not checkpointed for ``seconds``.
handler.end_not_checkpointed  warning  handler
    A record processor of amazon_kclpy did not checkpoint its shard's end; the server does it.
handler.slow  warning  handler hook seconds
    A hook has run for longer than its deadline and is still running.
library.log  debug|info|warning|error|critical  logger text
    A library logged this message; from level warning on.
log.reopened  info  path
    SIGHUP or SIGUSR1: the log file was opened again.
log.reopen_failed  error
    SIGHUP or SIGUSR1: the log file could not be opened again; the old one stays in use.
log.lost  warning  lines
    ``lines`` log lines were lost before this one: the disk was full, the reader stalled or ended, or a flood of lines
    was limited.
worker.started  info  worker pid generation
    A worker process is ready for shards.
worker.lost  error  worker pid reason stacks batches delay_seconds
    A worker process died or was killed; the next process retries its ``batches`` and other requests.
worker.replaced  warning  worker pid reason bytes limit_bytes delay_seconds
    A worker process exceeded its memory limit; it finished its current work and was replaced.
worker.failed  critical  worker
    A worker's processes died eight times in a row before they completed a batch.
worker.not_started  error  delay_seconds
    A standby worker failed to start, or exited before it was used.
worker.garbled  error  pid
    A worker process sent a malformed message: the server kills it.
shard.reopened  info  worker
    The shard was opened again in another worker process.
state.loaded  info  store keys files seconds
    A process gets the state of a shard's store.
state.compacted  debug  files rows bytes
    Files of keyed state became one. The old files are deleted after `retention`.
state.compaction_failed  warning
    Files of keyed state could not be made one. They stay as they are, and the server tries again.
state.moved  warning  handler number
    The handler's state was not the one that the shard's next batch follows: the server loads the present state again.
timer.set_again  warning|debug  handler sequence partition_key timer attempts traceback times
    The callback of a timer failed: the timer is due again after a back-off.
timer.skipped  warning  handler timers
    So many timers were later than ``max_lateness`` of their callback allows: the server removed them without a call.
timer.unknown  warning  handler timers
    The store has so many timers whose callback the handler does not have: the server holds them.
lookup.done  debug  lookup
    A lookup table was computed, and the workers have it.
lookup.failed  warning  lookup delay_seconds
    A lookup table could not be computed: the workers keep the one before, and the server tries again.
query.per_record  warning  queries records seconds
    The handler makes so many queries that one Spark session cannot keep up: logged once.
handler.output  info  stream text
    What the handler printed.
flush.done  debug  rows segments late_rows bytes shards dead_letters seconds reason
    The rows of one flush are durable, and the shards' positions moved.
flush.refused  warning  lost_shards cut_windows expired_windows gone_letters
    The ledger refused some rows; the server writes the remaining rows again.
flush.failed  error  attempt delay_seconds
    The server could not make rows durable; it keeps them in memory and retries.
letter.too_large  warning  sequence bytes limit_bytes
    A dead letter is larger than its destination allows.
redrive.done  info  letters rows dead_letters seconds
    Dead letters were redriven; those that failed again are dead letters again.
redrive.waiting  warning
    The handler keeps state, and no server can run these dead letters now: the shard that has their keys is not read or not known.
    They stay wanted. Logged again if the reason changes.
redrive.failed  error
    Dead letters could not be redriven; they remain unchanged.
timer.failed  error  store
    The timers of a store could not be fired, or the store could not be adopted; the server tries again.
store.adopted  info  store epoch
    A shard ended without a child, and its store has timers: this server fires them.
watermark.advanced  debug  watermark_ms held_by server reason
    The pipeline's watermark moved.
watermark.held  info  watermark_ms held_by server reason seconds
    The watermark has not moved for a while; the shard ``held_by`` holds it, at ``server`` if not at this
    one.
row.ahead  warning  sequence ahead_seconds rows
    Since the last such event, ``rows`` rows were ahead of their arrival by more than ``max_ahead``;
    ``sequence`` and ``ahead_seconds`` describe the furthest row.
window.cut  debug  revision segments rows
    A window was closed: its set of segments is fixed.
window.expired  debug  windows segments
    The retention of windows ended: late rows for them go to the late dataset.
window.done  info  revision rows_in rows_out segments files attempt spark_seconds spark_jobs lag_seconds seconds path
    A window's output is visible; one event for each revision. Spark has read as many rows as the ledger
    registered (``rows_in``), and the files hold as many rows as Spark has written (``rows_out``).
window.late  warning  rows kind
    Rows arrived after their window was closed: they go to its next revision (``recompute``), or to the late
    dataset (``late``).
window.failed  warning  attempt delay_seconds traceback
    A window's job failed and is retried.
window.group_failed  warning  windows traceback
    A job over several windows failed; each of them runs alone.
window.slow  warning  seconds line
    ``on_window`` of the window runs for a minute or more; ``line`` is the line of your code that runs. The
    server may compute one other window meanwhile. At ``window_deadline`` the run is cancelled and counts as
    failed.
window.waiting  info  revision function
    A window waits until a function that comes first (``after`` in the handler) has published its windows.
window.early  info  rows_in rows_out segments files spark_seconds seconds
    An early result of an open window is visible (``early`` in ``tumbling`` and ``sliding``), in place of the one before.
window.early_failed  warning
    An early result could not be computed, or shown. The one before stays, and the server tries again at the next interval.
window.dropped  debug  revision
    This server drops its run of a window: another server has taken the window, or the window is done.
window.halted  error  attempts traceback
    A window's job kept failing; later windows wait, while the server continues to store rows. ``advice``
    names the command.
window.decided  warning  decision
    An operator has decided about a halted window: ``retry``, ``set_aside``, or ``skip`` (it counts as
    published, without output).
window.set_aside  error  attempts traceback
    A window's job kept failing; the window is set aside with its segments.
table.written  info  content rows path seconds
    Late rows of a window (``late_sink``), or dead letters (``dead_letters``), are in their table.
table.failed  warning  content attempt delay_seconds traceback
    Late rows or dead letters could not be written into their table; the server tries again, and later ones wait.
recovery.done  info  shards windows_published windows_restarted files_deleted late_published clock
    What the server found in the ledger at its start, and what it did.
recovery.quarantined  warning  count path
    Files in the output folder do not belong to this ledger: the server moved them to ``path``, and did not
    delete them.
file.exposed  warning  path
    Every user of this host can read a folder or a file that holds rows, dead letters or passwords.
ledger.accepted  warning
    Folder and ledger did not belong together; the server continued because of ``--new-ledger``.
ledger.not_shortened  warning
    The server could not shorten the log of a ledger in DynamoDB; it retries in a minute, and nothing waits
    for that.
stream.ended  info  shards
    Every known shard has ended; every window closes.
stream.quiet  info  seconds
    Every shard is caught up and silent; the open windows close.
stream.unlisted  warning  stream
    The server could not list the stream's shards; it uses those from the ledger, from connections and from
    earlier lists.
stream.retried  warning  action attempt delay_seconds times
    A request to DynamoDB Streams was throttled or failed; the server retries. Logged once a minute, with the
    number of ``times`` since then.
stream.gap  error  stream position gaps
    A shard's records were trimmed before the server read them: these records are lost; ``gaps`` counts such
    losses since this server reads the shard.
stream.shard_gone  error  stream position gaps
    For 15 seconds, DynamoDB neither lists the shard nor knows it by its name: its unread records are lost.
stream.shard_unknown  warning  stream position attempt
    DynamoDB lists the shard and answers that it does not exist. The server keeps asking. Logged once a minute.
stream.shard_passed_over  warning  stream seconds
    A shard has not answered a program's `Stream` for a minute; changes of other shards no longer wait for it.
stream.replaced  error  stream status newest
    The stream was disabled while it was read, or it does not exist any more (no ``status``). ``newest``: the table's
    enabled stream, if there is one. A server reads that one only under ``--accept-gap``.
stream.gap_accepted  warning  stream newest
    The stream ended, and the server continues with the table's new stream.
stream.disabled  warning  stream status newest
    The stream with the configured ARN was disabled; its table may have a newer stream.
spark.starting  info  master java start
    The driver process starts.
spark.ready  info  seconds spark_version ui application
    The Spark session is ready for windows.
spark.log  debug|info|warning|error  logger text
    A line of Spark's own log.
spark.lost  error  who reason exit_code delay_seconds
    The driver process died (who: driver), or its JVM died and ended the driver (who: jvm); the server starts
    a new driver.
kcl.waiting  warning  address seconds worker
    The server does not answer, or another process on this host is the same worker: the Java daemon is not started yet. Logged
    again every minute.
kcl.starting  info  command start properties java retrieval
    The Java MultiLangDaemon starts.
kcl.lease_gained  info  position
    The Java daemon has the shard's lease now.
kcl.lease_lost  info
    The Java daemon has lost the shard's lease, or has given it up.
kcl.shard_ended  info
    The Java daemon has delivered the shard's end.
kcl.lead_released  info  worker
    The JVM died with the leader's lock of the application. It was released: another daemon can lead at once.
kcl.fault  warning|error  text repeated
    The Java daemon reported a fault; `repeated`: how often it occurred again in the last minute.
kcl.no_leader  warning  leader seconds
    The leader of the KCL application no longer renews its lock; shards without a live owner wait.
kcl.log  debug|info|warning|error  logger text repeated
    A line of the Java daemon's log. A repeated warning or error is counted, and logged again once a minute at most.
kcl.cut_short  warning
    The Java daemon ends itself, because a connection to the server ended; `mldserver kcl` does not wait for
    it.
kcl.exited  warning|info  exit_code delay_seconds seconds
    The Java daemon exited; it is started again after the delay.
kcl.failed  error
    The daemon of one of several functions cannot run; `mldserver kcl` tries again, and the other functions' daemons go on.
"""
"""For each event: its name, its level (several if the outcome decides), its fields in addition to
COMMON_FIELDS (some may be absent), and on the next lines its meaning."""


class Event(NamedTuple):
    """One event of the table."""

    levels: str
    """Separated by ``|``."""
    fields: tuple[str, ...]
    meaning: str


def _read(table: str) -> dict[str, Event]:
    events = {}
    for entry in re.split(r"\n(?=\S)", table.strip()):
        head, _, meaning = entry.partition("\n")
        name, levels, *fields = head.split()
        events[name] = Event(levels, tuple(fields), " ".join(meaning.split()))
    return events


EVENTS: Final = _read(TABLE)
