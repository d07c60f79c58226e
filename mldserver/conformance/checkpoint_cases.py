"""Cases of checkpoints: where they may stand, what the daemon replies, and every error by name."""

from __future__ import annotations

from typing import Final

from mldserver.conformance import origin
from mldserver.conformance.cases import (
    DAEMONS,
    NEW,
    V1,
    Quiet,
    Reopen,
    Resume,
    Section,
    Want,
    line,
    record,
    sequence,
)

GONE: Final = "ShutdownException"
THROTTLED: Final = "ThrottlingException"
ERRORS: Final = {
    GONE: "the lease is gone",
    THROTTLED: "the lease table is throttled",
    "KinesisClientLibDependencyException": "the lease table cannot be reached",
    "InvalidStateException": "the lease table is not there",
    "IllegalArgumentException": "the place is refused",
    "NullPointerException": "any other Throwable, by its simple class name",
    "OutOfMemoryError": "an Error, which is not an Exception",
    "": "an anonymous class, whose simple name is empty: a failure all the same",
}
"""What a reply may hold in place of null, and what it means."""
_PASSING: Final = (THROTTLED, "KinesisClientLibDependencyException")
_SLOW: Final = 1.0


def _checkpoints() -> Section:
    """Return the cases of checkpoints that succeed: their keys and order, and slow replies. See ``Section`` and ``Daemon``."""
    section = Section("F", "checkpoints")
    for daemon in DAEMONS:
        source = origin.OLD if daemon.form is V1 else origin.CHECKPOINT
        title = "a checkpoint under a batch has exactly the keys of its version"
        section.life(daemon, title, source, daemon.provoke())
        again = daemon.provoke(None, None, None)
        section.life(daemon, "checkpoints under batches never go back", origin.CHECKPOINTER, again)
        source = f"{origin.PROTOCOL}: what comes early is taken for the next answer"
        steps = daemon.provoke(), Quiet(1.0), daemon.batch(), Quiet(0.5)
        section.life(daemon, "nothing is asked for between two requests", source, *steps)
        title = "the shard's end is checkpointed though its last record was already"
        source = f"{origin.CHECKPOINTER}: the same place again stores nothing, and reports success"
        section.life(daemon, title, source, daemon.provoke(), daemon.batch(), end=daemon.shard_ended())
        title = "the next child begins at the checkpoint, and goes on from there"
        source = f"{origin.PROCESSOR}: initialize contains the lease's checkpoint"
        section.life(daemon, title, source, daemon.provoke(), Resume(daemon.form), daemon.provoke())
    last = NEW.shutdown_requested(checkpoint=True, covers=True)
    for daemon in DAEMONS[:2]:
        title = "before the lease goes all that was delivered is checkpointed"
        section.life(daemon, title, origin.ENDS, daemon.batch(1, 2), last, strict=False)
    title = "before the lease goes an aggregate is checkpointed to its last record"
    aggregate = NEW.batch(*(record(1, sub) for sub in range(4)))
    section.life(NEW, title, origin.CHECKPOINTER, aggregate, last, strict=False)
    begin = NEW.initialize(start=sequence(5))
    title = "the first checkpoint after a start at a record does not go behind it"
    asked = NEW.shutdown_requested(checkpoint=True)
    section.life(NEW, title, origin.CHECKPOINTER, NEW.batch(6), asked, begin=begin)
    title = "an empty batch behind the start moves no checkpoint"
    empty = NEW.batch()
    section.life(NEW, title, origin.CHECKPOINTER, empty, empty, NEW.shutdown_requested(), begin=begin)
    title = "a slow reply under a batch is waited for, and not asked for twice"
    section.life(NEW, title, origin.PROTOCOL, NEW.provoke(reply_after=_SLOW))
    title = "a slow reply before the lease goes is waited for"
    asked = NEW.shutdown_requested(checkpoint=True, reply_after=_SLOW)
    section.life(NEW, title, origin.PROTOCOL, NEW.batch(1), asked)
    for daemon in DAEMONS:
        end = daemon.shard_ended(reply_after=_SLOW)
        section.life(
            daemon, "a slow reply at the shard's end is waited for", origin.PROTOCOL, daemon.batch(1), end=end
        )
    return section


def _errors() -> Section:
    """Return the cases of checkpoints that the daemon refuses: each error under a batch, before the lease goes, at the end."""
    section = Section("G", "checkpoint errors")
    for name, meaning in ERRORS.items():
        called, source = name or "an empty name", f"{origin.CHECKPOINT}: {meaning}"
        for daemon in DAEMONS:
            title = f"under a batch: after {called} processing goes on"
            section.life(daemon, title, source, daemon.provoke(name), daemon.batch(2_000))
        for daemon in DAEMONS[:2]:
            title = f"before the lease goes: {called} is answered all the same"
            last = daemon.shutdown_requested(checkpoint=True, replies=(name,))
            section.life(daemon, title, source, daemon.batch(1), last)
        what = "is answered all the same" if name == GONE else "is not taken for stored"
        if name != GONE:
            source += f"; {origin.CHECKPOINTER}: there is one chance"
        for daemon in DAEMONS:
            end = daemon.shard_ended(replies=(name,), want=Want.STATUS if name == GONE else Want.EITHER)
            section.life(daemon, f"at the shard's end: {called} {what}", source, daemon.batch(1), end=end)
    for name in list(ERRORS)[1:]:
        called = name or "an empty name"
        title = f"under a batch: the next checkpoint after {called} is stored"
        source = f"{origin.CHECKPOINTER}: an error ends nothing"
        section.life(NEW, title, source, NEW.provoke(name, None))
        title = f"at the shard's end: {called} three times is not taken for stored"
        source = f"{origin.PROTOCOL}, {origin.CHECKPOINTER}: there is one chance"
        end = NEW.shard_ended(replies=(name,) * 3, want=Want.EITHER)
        section.life(NEW, title, source, NEW.batch(1), end=end, patience=2)
    for name in _PASSING:
        title = f"at the shard's end: after {name} the checkpoint is tried again until it is stored"
        source = "KCL's documentation: back off and retry"
        section.life(NEW, title, source, NEW.batch(1), end=NEW.shard_ended(replies=(name,) * 2), strict=False)
    for name in (*_PASSING, "InvalidStateException"):
        title = f"under a batch: {name} for ever ends in a status"
        source = "the daemon waits for the status while the lease table is away"
        steps = NEW.provoke(name), NEW.batch(2_000, replies=(name,) * 100)
        section.life(NEW, title, source, *steps, patience=3)
        title = f"at the shard's end: {name} for ever never ends in a status"
        source = f"{origin.PROTOCOL}, {origin.CHECKPOINTER}: there is one chance"
        end = NEW.shard_ended(replies=(name,) * 100, want=Want.NO_STATUS)
        section.life(NEW, title, source, NEW.batch(1), end=end)
    errors = NEW.provoke(THROTTLED, "IllegalArgumentException", None)
    section.life(NEW, "two different errors come one after the other", origin.CHECKPOINT, errors)
    for name, more in {"an empty batch": NEW.batch(), "shutdownRequested": NEW.shutdown_requested()}.items():
        title = f"once the lease is gone, {name} is answered without a checkpoint"
        source = "capture kcl313-moto-conn-002: every checkpoint fails until leaseLost comes"
        section.life(NEW, title, source, NEW.provoke(GONE), more)
    return section


def _replies() -> Section:
    """Return the cases of unusual and malformed replies to a checkpoint."""
    section = Section("H", "replies to checkpoints")
    more = {"action": "checkpoint", "sequenceNumber": None, "subSequenceNumber": None, "error": None}
    for name, raw in {
        "a reply echoes null": line(more),
        "a reply has a field more": line({**more, "lease": 1}),
        "the keys of a reply stand in another order": line(dict(reversed(more.items()))),
        "a reply comes behind a blank line": b"\n" + line(more),
    }.items():
        source = origin.CHECKPOINT if "null" in name else origin.FUTURE
        section.life(NEW, name, source, NEW.provoke(raw), NEW.batch(2_000), strict="null" in name)
    old = DAEMONS[2]
    echo = old.provoke(line({"action": "checkpoint", "checkpoint": None, "error": None}))
    section.life(old, "a reply in the form of V1 echoes null", origin.OLD, echo)
    wrong = {
        "a reply without the field error": line({key: more[key] for key in list(more)[:3]}),
        "a reply whose error is a number": line({**more, "error": 7}),
        "a reply that is no JSON": b'{"action":"checkpoint"\n',
        "a batch in place of a reply": NEW.batch(7).line,
        "an initialize in place of a reply": NEW.initialize().line,
        "leaseLost in place of a reply": NEW.lease_lost().line,
        "a status in place of a reply": line({"action": "status", "responseFor": "shardEnded"}),
    }
    for name, data in wrong.items():
        source = origin.NEVER if "place" in name else origin.MALFORMED
        refused = NEW.shard_ended(replies=(data,), want=Want.REFUSAL)
        steps = NEW.batch(1), refused, Reopen(), NEW.initialize()
        section.life(NEW, f"at the shard's end comes {name}", source, *steps)
    return section


SECTIONS: Final = (_checkpoints, _errors, _replies)
