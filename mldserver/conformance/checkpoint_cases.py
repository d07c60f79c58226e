"""Cases of checkpoints: where they may stand, what the daemon replies, and every error by name."""

from __future__ import annotations

from typing import Final

from mldserver.conformance.cases import (
    CHECKPOINT,
    CHECKPOINTER,
    ENDS,
    FUTURE,
    KCL3,
    MALFORMED,
    NEVER,
    OLD,
    PROCESSOR,
    PROTOCOL,
    V1,
    V2,
    Provoke,
    Quiet,
    Reopen,
    Resume,
    Section,
    Want,
    batch,
    initialize,
    lease_lost,
    line,
    plain,
    record,
    sequence,
    shard_ended,
    shutdown_requested,
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


def _checkpoints() -> Section:
    section = Section("F", "checkpoints")
    for form in (KCL3, V2, V1):
        source = OLD if form is V1 else CHECKPOINT
        section.add(
            "a checkpoint under a batch has exactly the keys of its version",
            source,
            *(initialize(form), Provoke(form), lease_lost(form)),
            form=form,
        )
        section.add(
            "checkpoints under batches never go back",
            CHECKPOINTER,
            *(initialize(form), Provoke(form, (None,) * 3), lease_lost(form)),
            form=form,
        )
        section.add(
            "nothing is asked for between two requests",
            f"{PROTOCOL}: what comes early is taken for the next answer",
            *(initialize(form), Provoke(form), Quiet(1.0), batch(form=form), Quiet(0.5), lease_lost(form)),
            form=form,
        )
        section.add(
            "the shard's end is checkpointed though its last record was already",
            f"{CHECKPOINTER}: the same place again stores nothing, and reports success",
            *(initialize(form), Provoke(form), batch(form=form), shard_ended(form)),
            form=form,
        )
        section.add(
            "the next child begins at the checkpoint, and goes on from there",
            f"{PROCESSOR}: initialize contains the lease's checkpoint",
            *(initialize(form), Provoke(form), Resume(form), Provoke(form), lease_lost(form)),
            form=form,
        )
    for form in (KCL3, V2):
        section.add(
            "before the lease goes all that was delivered is checkpointed",
            ENDS,
            *(initialize(form), batch(plain(1, form), plain(2, form), form=form)),
            *(shutdown_requested(checkpoint=True, covers=True), lease_lost(form)),
            form=form,
            strict=False,
        )
    section.add(
        "before the lease goes an aggregate is checkpointed to its last record",
        CHECKPOINTER,
        *(initialize(), batch(*(record(1, sub) for sub in range(4)))),
        *(shutdown_requested(checkpoint=True, covers=True), lease_lost()),
        strict=False,
    )
    section.add(
        "the first checkpoint after a start at a record does not go behind it",
        CHECKPOINTER,
        *(initialize(start=sequence(5)), batch(record(6)), shutdown_requested(checkpoint=True), lease_lost()),
    )
    section.add(
        "an empty batch behind the start moves no checkpoint",
        CHECKPOINTER,
        *(initialize(start=sequence(5)), batch(), batch(), shutdown_requested(), lease_lost()),
    )
    slow = 1.0
    section.add(
        "a slow reply under a batch is waited for, and not asked for twice",
        PROTOCOL,
        *(initialize(), Provoke(KCL3, reply_after=slow), lease_lost()),
    )
    section.add(
        "a slow reply before the lease goes is waited for",
        PROTOCOL,
        *(
            initialize(),
            batch(record(1)),
            shutdown_requested(checkpoint=True, reply_after=slow),
            lease_lost(),
        ),
    )
    for form in (KCL3, V2, V1):
        section.add(
            "a slow reply at the shard's end is waited for",
            PROTOCOL,
            *(initialize(form), batch(plain(1, form), form=form), shard_ended(form, reply_after=slow)),
            form=form,
        )
    return section


def _errors() -> Section:
    section = Section("G", "checkpoint errors")
    for name, meaning in ERRORS.items():
        told, source = name or "an empty name", f"{CHECKPOINT}: {meaning}"
        for form in (KCL3, V2, V1):
            section.add(
                f"under a batch: after {told} processing goes on",
                source,
                *(initialize(form), Provoke(form, (name,)), batch(plain(2_000, form), form=form)),
                lease_lost(form),
                form=form,
            )
        for form in (KCL3, V2):
            section.add(
                f"before the lease goes: {told} is answered all the same",
                source,
                *(initialize(form), batch(plain(1, form), form=form)),
                *(shutdown_requested(checkpoint=True, replies=(name,)), lease_lost(form)),
                form=form,
            )
        for form in (KCL3, V2, V1):
            what = "is answered all the same" if name == GONE else "is not taken for stored"
            section.add(
                f"at the shard's end: {told} {what}",
                source if name == GONE else f"{source}; {CHECKPOINTER}: there is one chance",
                *(initialize(form), batch(plain(1, form), form=form)),
                shard_ended(form, replies=(name,), want=Want.STATUS if name == GONE else Want.EITHER),
                form=form,
            )
    for name in ERRORS:
        if name == GONE:
            continue
        section.add(
            f"under a batch: the next checkpoint after {name or 'an empty name'} is stored",
            f"{CHECKPOINTER}: an error ends nothing",
            *(initialize(), Provoke(KCL3, (name, None)), lease_lost()),
        )
        section.add(
            f"at the shard's end: {name or 'an empty name'} three times is not taken for stored",
            f"{PROTOCOL}, {CHECKPOINTER}: there is one chance",
            *(initialize(), batch(record(1)), shard_ended(replies=(name,) * 3, want=Want.EITHER)),
            patience=2,
        )
    for name in _PASSING:
        section.add(
            f"at the shard's end: after {name} the checkpoint is tried again until it is stored",
            "KCL's documentation: back off and retry",
            *(initialize(), batch(record(1)), shard_ended(replies=(name,) * 2)),
            strict=False,
        )
    for name in (*_PASSING, "InvalidStateException"):
        section.add(
            f"under a batch: {name} for ever ends in a status",
            "the daemon waits for the status while the lease table is away",
            *(
                initialize(),
                Provoke(KCL3, (name,)),
                batch(record(2_000), replies=(name,) * 100),
                lease_lost(),
            ),
            patience=3,
        )
        section.add(
            f"at the shard's end: {name} for ever never ends in a status",
            f"{PROTOCOL}, {CHECKPOINTER}: there is one chance",
            *(initialize(), batch(record(1)), shard_ended(replies=(name,) * 100, want=Want.NO_STATUS)),
        )
    section.add(
        "two different errors come one after the other",
        CHECKPOINT,
        *(initialize(), Provoke(KCL3, (THROTTLED, "IllegalArgumentException", None)), lease_lost()),
    )
    for name, more in {
        "an empty batch": (batch(),),
        "shutdownRequested": (shutdown_requested(),),
    }.items():
        section.add(
            f"once the lease is gone, {name} is answered without a checkpoint",
            "capture kcl313-moto-conn-002: every checkpoint fails until leaseLost comes",
            *(initialize(), Provoke(KCL3, (GONE,)), *more, lease_lost()),
        )
    return section


def _replies() -> Section:
    section = Section("H", "replies to checkpoints")
    more = {"action": "checkpoint", "sequenceNumber": None, "subSequenceNumber": None, "error": None}
    for name, raw in {
        "a reply echoes null": line(more),
        "a reply has a field more": line({**more, "lease": 1}),
        "the keys of a reply stand in another order": line(dict(reversed(more.items()))),
        "a reply comes behind a blank line": b"\n" + line(more),
    }.items():
        section.add(
            name,
            CHECKPOINT if "null" in name else FUTURE,
            *(initialize(), Provoke(KCL3, (raw,)), batch(record(2_000)), lease_lost()),
            strict="null" in name,
        )
    section.add(
        "a reply in the form of V1 echoes null",
        OLD,
        *(initialize(V1), Provoke(V1, (line({"action": "checkpoint", "checkpoint": None, "error": None}),))),
        lease_lost(V1),
        form=V1,
    )
    wrong = {
        "a reply without the field error": line(
            {key: value for key, value in more.items() if key != "error"}
        ),
        "a reply whose error is a number": line({**more, "error": 7}),
        "a reply that is no JSON": b'{"action":"checkpoint"\n',
        "a batch in place of a reply": batch(record(7)).line,
        "an initialize in place of a reply": initialize().line,
        "leaseLost in place of a reply": lease_lost().line,
        "a status in place of a reply": line({"action": "status", "responseFor": "shardEnded"}),
    }
    for name, data in wrong.items():
        section.add(
            f"at the shard's end comes {name}",
            NEVER if "place" in name else MALFORMED,
            *(initialize(), batch(record(1)), shard_ended(replies=(data,), want=Want.REFUSAL)),
            *(Reopen(), initialize(), lease_lost()),
        )
    return section


SECTIONS: Final = (_checkpoints, _errors, _replies)
