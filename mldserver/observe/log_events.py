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
    Connections are accepted; ``address`` holds the real port. Or a stream is read: then it is the stream's ARN.
server.ready  info  seconds
    Spark is warm, every part works: readiness is green.
server.unready  error  reason
    Readiness went red; ``reason`` says what waits for what.
server.stopping  info  reason connections
    No more connections; each shard finishes its request.
server.few_files  warning  limit needed
    The process may have fewer files open than its settings need, and the system lets it have no more: raise LimitNOFILE.
server.waiting  info  waiting_for seconds
    Shutdown (or start) still waits for these.
pipeline.drained  info  set_aside
    No window is open or waits; ``set_aside``: those that kept failing.
server.stopped  info  exit_code seconds
    The last line of the log.
server.failed  critical  exit_code traceback
    The process cannot go on.
server.buried  warning  server seconds
    Another server on the ledger is dead: its shards and windows are free for others.
server.beat_failed  warning
    The ledger could not be told that this server lives; after long others take it for dead.
tls.read  info  certificate
    On SIGHUP certificates were read again; connections that are there keep theirs.
tls.failed  debug|warning  peer times
    No TLS connection came about: a certificate is missing or none of ours, or the peer does not speak TLS.
tls.refused  error
    A certificate that was to be read again cannot be used: the one before it stays.
admin.listening  info  address metrics token_file
    The server is seen and steered there; ``metrics`` is the address for metrics alone (`metrics_listen`), if there is one; ``token_file`` holds the token for steering, and is empty where none counts.
admin.unavailable  warning
    The default address cannot be listened on, as when another process has it: the server goes on without an admin endpoint.
admin.token_unusable  warning
    The server cannot make its token file, or keep it from others: over loopback nobody steers it, and nothing else is concerned.
admin.refused  warning  requests statuses path who
    Requests of the last minute that the admin endpoint refused: 401 and 403 for want of the right token or certificate, 404 for a path
    that is not there. ``path`` and ``who`` are of the latest.
admin.lost  warning  reason delay_seconds
    The admin endpoint's process ended; a fresh one starts after the delay. Nothing else is concerned.
admin.failed  error  traceback
    The server's status could not be made: `/readyz` is red and `/status` says why. Told again when the reason changes.
admin.act  info|warning  act argument who done text
    Somebody steered the server: ``who`` asked for what, and what became of it.
connection.opened  debug  peer
    A peer connected.
connection.refused  warning  peer limit
    The connection limit holds; connections wait in the kernel's queue.
connection.closed  info  reason seconds batches records
    The connection ended as the protocol foresees.
connection.failed  warning|error  peer reason excerpt state handler hook sequence attempts times traceback
    The connection was closed because of an error.
connection.state  debug  from_state to_state on
    A transition of the protocol's state machine.
shard.opened  info  start position epoch version
    A connection took a shard.
shard.gap_accepted  error  start position
    The daemon starts beyond the ledger; the operator accepts the gap.
shard.ended  info  position
    The shard is read to its end and durable.
shard.lost  info  position
    The lease went to another worker.
shard.shutdown_requested  info  position
    The daemon stops or hands the shard over.
shard.taken_over  warning  peer
    Another connection opened the shard; what still comes on this one is answered unread.
shard.disconnected  warning  position
    The connection is gone without an ending; the shard holds the watermark.
shard.failed  error  delay_seconds
    A shard of a stream that is read directly could not be read on; it is begun again after the delay.
shard.missing  warning  seconds
    A known shard has had no connection for ``server_timeout``, here or elsewhere; it holds the watermark.
shard.left_out  error  seconds
    A missing shard does not hold the watermark any longer; its rows will be late.
shard.held  info  short_of used_bytes budget_bytes
    The shard is ahead and memory or disk is short: its answer waits.
shard.released  info  seconds
    The shard goes on.
shard.discovered  info  parents
    The stream lists a shard that was not known.
batch.done  info|debug  records rows duplicates dead_letters skipped discarded bytes first last \
    millis_behind_latest attempts handler_seconds held_seconds checkpoint seconds
    A batch is done. At info where it was unusual: records failed or came again, or it was held back or answered
    early.
batches.done  info  batches records rows bytes first last millis_behind_latest slowest_seconds
    A shard's batches of one flush interval, together. What is 0 is left out, and so are empty batches.
batch.answered_early  warning  seconds batches bytes
    The daemon was answered after the answer deadline; so many batches, and bytes of lines, are still worked
    on.
batch.given_up  warning  batches
    The lease goes elsewhere: batches that were answered early are dropped, and delivered again there.
checkpoint.done  debug  sequence seconds
    The daemon stored a checkpoint.
checkpoint.retried  warning  sequence attempt delay_seconds
    The daemon could not store a checkpoint; it is asked again.
checkpoint.failed  error  sequence attempts
    A checkpoint was given up for now; the next chance tries again.
checkpoint.stopped  warning  sequence
    ShutdownException: the lease is gone, nothing more is checkpointed.
handler.loaded  info  handler hooks schema windows
    The handler was imported and checked.
handler.failed  warning|error|debug  handler hook sequence attempt delay_seconds traceback times
    A hook failed and is tried again; an error when ``initialize`` keeps failing, since its shard waits. The
    same failure of a shard is told once a minute, with how many ``times`` it came since, and meanwhile at
    debug; so are the next three events.
handler.dead_letter  error|debug  handler sequence partition_key attempts traceback times
    A record failed for good and is a dead letter.
handler.skipped  warning|debug  handler sequence partition_key attempts traceback times
    A record failed for good and is skipped: nothing of it is kept.
handler.hook_failed  error|debug  handler hook attempts traceback times
    A life-cycle hook failed for good; the daemon is answered all the same.
handler.discarded  debug  handler sequence partition_key attempts
    The handler discarded a record.
handler.halted  critical  handler hook sequence attempts traceback
    A record failed for good, and the policy or a rule says halt.
handler.not_checkpointing  warning  handler seconds position
    A record processor of amazon_kclpy takes records, but has not checkpointed for so long.
handler.end_not_checkpointed  warning  handler
    A record processor of amazon_kclpy did not checkpoint its shard's end; the server does.
handler.slow  warning  handler hook seconds
    A hook has run for longer than its deadline and is still running.
library.log  debug|info|warning|error|critical  logger text
    What a library logged, from warnings on.
log.reopened  info  path
    SIGHUP or SIGUSR1: the log file was opened again.
log.reopen_failed  error
    SIGHUP or SIGUSR1: the log file could not be opened again; the old one stays in use.
log.lost  warning  lines since
    So many lines are missing here, the first from `since`: the disk was full, the reader stalled or gone, or
    a flood was cut.
worker.started  info  worker pid generation
    A worker process takes shards.
worker.lost  error  worker pid reason stacks batches delay_seconds
    A worker process died or was killed; what it had in hand is given to the next one: so many batches, and other requests.
worker.replaced  warning  worker pid reason bytes limit_bytes delay_seconds
    A worker process had grown beyond its memory limit; it finished what it had begun.
worker.failed  critical  worker
    A worker's processes die before they do anything.
worker.not_started  error  delay_seconds
    A worker process did not come to be used: it could not start, or ended before.
worker.garbled  error  pid
    A worker process sent what is no message: it is killed.
shard.reopened  info  worker
    The shard's handler was opened again in another worker process.
handler.output  info  stream text
    What the handler printed.
flush.done  debug  rows segments late_rows bytes shards dead_letters seconds reason
    Rows are durable, positions moved.
flush.refused  warning|debug  lost_shards cut_windows expired_windows gone_letters
    The ledger refused some rows, or other servers had filled a batch (debug); the rest is written again.
flush.failed  error  attempt delay_seconds
    Rows could not be made durable; they stay in memory and are tried again.
letter.too_large  warning  sequence bytes limit_bytes
    A dead letter is larger than the place takes where dead letters go.
redrive.done  info  letters rows dead_letters seconds
    Dead letters ran once more; those that failed again are dead letters again.
redrive.failed  error
    Dead letters could not be run once more; they stay as they are.
watermark.advanced  debug  watermark_ms held_by server reason
    The pipeline's watermark moved.
watermark.held  info  watermark_ms held_by server reason seconds
    The watermark has not moved for a while; the shard ``held_by`` holds it, at ``server`` if not at this
    one.
row.ahead  warning  sequence ahead_seconds rows
    So many rows since the last such line run ahead of arrival by more than ``max_ahead``; the furthest is
    named.
window.cut  debug  revision segments rows
    A window's segments are fixed.
window.expired  debug  windows segments
    Windows are not retained any more: late rows for them go to the late dataset.
window.done  info  revision rows_in rows_out segments files attempt spark_seconds lag_seconds seconds path
    The one line of a window, when its output is visible. Spark has read as many rows as the ledger
    registered (``rows_in``), and the files hold as many as it has written (``rows_out``).
window.late  warning  rows kind
    Rows came after their window was cut: for its next revision (``recompute``), or the late dataset
    (``late``).
window.failed  warning  attempt delay_seconds traceback
    A window's job failed and is tried again.
window.group_failed  warning  windows traceback
    A job over several windows failed; each of them runs alone.
window.slow  warning  seconds line
    ``on_window`` of the window runs for a minute or more; ``line`` is the line of your code that runs. One window beside it
    may be computed meanwhile. At ``window_deadline`` the run is cancelled and counts as failed.
window.dropped  debug  revision
    Another server has taken the window, or it is done: nothing is left to do here.
window.halted  error  attempts traceback
    A window's job kept failing; windows wait, ingestion goes on. ``advice`` names the command.
window.decided  warning  decision
    An operator has decided about a halted window: ``retry``, ``set_aside``, or ``skip`` (it counts as
    published, without output).
window.set_aside  error  attempts traceback
    A window's job kept failing; it is set aside with its segments.
recovery.done  info  shards windows_published windows_restarted files_deleted late_published clock
    What the start found in the ledger and did.
recovery.quarantined  warning  count path
    Files in the output folder were not written for this ledger: they were moved to ``path``, not deleted.
file.exposed  warning  path
    Every user of this host can read a folder or a file that holds rows, dead letters or passwords.
ledger.accepted  warning
    Folder and ledger did not belong together; ``--new-ledger`` said to go on with both.
ledger.not_shortened  warning
    The log of a ledger in DynamoDB could not be shortened now; it is tried again in a minute, nothing waits
    for it.
stream.ended  info  shards
    Every known shard has ended; every window closes.
stream.quiet  info  seconds
    Every shard is caught up and silent; the open windows close.
stream.unlisted  warning  stream
    The stream could not be listed; shards are known from the ledger, from connections and from before.
stream.retried  warning  action attempt delay_seconds times
    DynamoDB Streams was throttled, out of reach or at fault; it is asked again. Told once a minute, with how
    many ``times`` it came since.
stream.gap  error  stream position gaps
    A shard's position was trimmed before it could be read: records are lost, so many times since this server reads it.
stream.shard_gone  error  stream position gaps
    DynamoDB neither lists the shard nor knows it by its name, for 15 seconds: what it still held is lost.
stream.shard_unknown  warning  stream position attempt
    DynamoDB lists the shard and answers that it does not exist. The server keeps asking. Logged once a minute.
stream.shard_passed_over  warning  stream seconds
    A shard has not answered a program's `Stream` for a minute; changes of other shards no longer wait for it.
stream.replaced  error  stream status newest
    The stream was disabled while it was read, or it does not exist any more (no ``status``). ``newest``: the table's
    enabled stream, if there is one. A server reads that one only under ``--accept-gap``.
stream.gap_accepted  warning  stream newest
    The stream is over, and the server goes on with the table's new one.
stream.disabled  warning  stream status newest
    The stream that is named by its ARN was disabled; its table may have a newer one.
spark.starting  info  master java start
    The driver process starts.
spark.ignored  warning  file names
    Properties in ``spark_properties_file`` whose names do not begin with ``spark.``: Spark takes no others.
spark.ready  info  seconds spark_version ui
    The session is warm.
sink.untested  warning  table
    This project's tests know what such a table is handed, and have no real one: try it before you rely on it.
spark.progress  debug  job stages tasks tasks_done
    A running job's tasks.
spark.log  debug|info|warning|error  logger text
    A line of Spark's own log.
spark.lost  error  who reason exit_code delay_seconds
    The driver process died (who: driver), or its JVM did and took it along (who: jvm); a fresh one starts.
kcl.waiting  warning  address seconds worker
    The server does not answer, or another process on this host is the same worker: the Java daemon is not started yet. Logged
    again every minute.
kcl.starting  info  command start properties java retrieval
    The Java MultiLangDaemon starts.
kcl.lease_gained  info  position
    The Java daemon has the shard's lease now.
kcl.lease_lost  info
    The Java daemon has lost the shard's lease, or gave it up.
kcl.shard_ended  info
    The Java daemon has delivered the shard's end.
kcl.lead_released  info  worker
    The JVM died with the leader's lock of the application. It was released: another daemon can lead at once.
kcl.no_leader  warning  count seconds shards
    Shards have no live owner and wait, because no daemon leads the application.
kcl.fault  warning|error  text repeated
    The Java daemon met a fault; `repeated`: so often again in the last minute.
kcl.log  debug|info|warning|error  logger text repeated
    A line of the Java daemon's log. A warning or error that comes again is counted, and told once a minute.
kcl.cut_short  warning
    The Java daemon ends itself, because a connection to the server ended; it is not waited for.
kcl.exited  warning|info  exit_code delay_seconds seconds
    The Java daemon exited; it is started again after the delay.
"""
"""Of each event: name, the level it is logged at (several where the outcome decides), its own fields beside
COMMON_FIELDS (not all need be present), and below what it means."""


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
