"""Cases of a child's life: each request answered once, every end, orders that are not allowed, and time."""

from __future__ import annotations

from typing import Any, Final

from mldserver.conformance.cases import (
    BATCH,
    DRAIN,
    ENDS,
    INITIALIZE,
    KCL1,
    KCL3,
    MALFORMED,
    NEVER,
    PROCESSOR,
    PROTOCOL,
    READER,
    SHARD,
    V1,
    V2,
    EndsItself,
    HangUp,
    Provoke,
    Quiet,
    Reopen,
    Section,
    Step,
    Want,
    Write,
    batch,
    initialize,
    lease_lost,
    line,
    odd,
    plain,
    record,
    shard_ended,
    shutdown_requested,
)

_ALIVE: Final = (Reopen(), initialize(), batch(record(1)), lease_lost())
"""A child that received lines that no daemon sends still serves the next shard."""


def _answers() -> Section:
    section = Section("I", "answers")
    pause = Quiet(0.3)
    for form in (KCL3, V2, V1):
        start, lost = initialize(form), lease_lost(form)
        full = batch(plain(1, form), form=form)
        ends: dict[str, tuple[str, tuple[Step, ...]]] = {
            "initialize": (INITIALIZE, (start, pause, lost)),
            "processRecords": (BATCH, (start, full, pause, full, pause, lost)),
            "processRecords without records": (
                BATCH,
                (start, batch(form=form), pause, batch(form=form), pause, lost),
            ),
            "the loss of the lease": (ENDS if form is KCL3 else KCL1, (start, full, lost, pause)),
            "the shard's end": (ENDS if form is KCL3 else KCL1, (start, full, shard_ended(form), pause)),
        }
        if form is not V1:
            ends["shutdownRequested"] = (ENDS, (start, full, shutdown_requested(), pause, lost))
        for name, (source, steps) in ends.items():
            section.add(f"{name} is answered once, and by its name", source, *steps, form=form)
    requested = odd({"action": "shutdown", "reason": "REQUESTED"}, want=Want.STATUS)
    section.add(
        "shutdown with REQUESTED is answered once, and by its name",
        KCL1,
        *(initialize(V2), batch(plain(1, V2), form=V2), requested, pause, lease_lost(V2)),
        form=V2,
    )
    return section


def _ends() -> Section:
    section = Section("J", "endings")
    for form in (KCL3, V2, V1):
        full, empty = batch(plain(1, form), form=form), batch(form=form)
        before: dict[str, tuple[Step, ...]] = {
            "right after initialize": (),
            "after a batch": (full,),
            "after an empty batch": (empty,),
            "after a checkpoint": (Provoke(form),),
        }
        if form is not V1:
            before["after shutdownRequested"] = (full, shutdown_requested())
            before["after shutdownRequested without any batch"] = (shutdown_requested(),)
        source = ENDS if form is KCL3 else KCL1
        for name, steps in before.items():
            if name != "after a checkpoint":  # so cases of checkpoints end
                lost = lease_lost(form)
                section.add(f"the lease is lost {name}", source, initialize(form), *steps, lost, form=form)
            section.add(
                f"the shard ends {name}", source, initialize(form), *steps, shard_ended(form), form=form
            )
        for end in (lease_lost(form), shard_ended(form)):
            name = "the lease is lost" if not end.ends else "the shard has ended"
            section.add(
                f"when {name} the output ends by itself: some bridges end by nothing else",
                "nc and others leave the daemon's pipe open until their peer closes",
                *(initialize(form), full, end, EndsItself()),
                form=form,
            )
    drains = f"{DRAIN}: without a time limit"
    hang_ups: dict[str, tuple[Step, ...]] = {
        "before initialize": (HangUp(),),
        "after initialize": (initialize(),),
        "after a batch": (initialize(), batch(record(1))),
        "after shutdownRequested, at SIGTERM": (initialize(), batch(record(1)), shutdown_requested()),
        "inside a line": (initialize(), Write(b'{"action":"processRec')),
        "before the line feed of a batch": (initialize(), Write(batch(record(1)).line[:-1])),
        "while a batch is worked on": (initialize(), Write(batch(record(1)))),
        "while shardEnded is worked on": (initialize(), Write(shard_ended(want=Want.EITHER))),
    }
    for name, steps in hang_ups.items():
        section.add(
            f"the daemon closes {name}", drains, *steps, strict="inside" not in name and "feed" not in name
        )
    for name in ("after a batch", "while a batch is worked on", "inside a line"):
        section.add(
            f"the connection is reset {name}, and the next one is served",
            "a JVM that exits, or is killed, resets its children's pipes",
            *(*hang_ups[name], Reopen(cut=True)),
            *(initialize(), batch(record(1)), lease_lost()),
        )
    return section


def _orders() -> Section:
    section = Section("K", "orders that are not allowed")
    begin = initialize()
    full = batch(record(1))
    reply = odd({"action": "checkpoint", "sequenceNumber": None, "subSequenceNumber": None, "error": None})
    requests = {
        "processRecords": odd(full.line, "processRecords", places=full.places),
        "shutdownRequested": odd({"action": "shutdownRequested"}),
        "leaseLost": odd({"action": "leaseLost"}),
        "shardEnded": odd({"action": "shardEnded"}),
        "shutdown": odd({"action": "shutdown", "reason": "ZOMBIE"}),
        "a reply to no checkpoint": reply,
        "initialize": odd(begin.line, "initialize"),
    }
    for name, request in requests.items():
        if name != "initialize":
            section.add(f"{name} comes before initialize", NEVER, request, *_ALIVE)
    after: dict[str, tuple[Step, ...]] = {
        "initialize": (begin,),
        "a batch": (begin, full),
        "shutdownRequested": (begin, full, shutdown_requested()),
        "leaseLost": (begin, full, lease_lost()),
        "shardEnded": (begin, full, shard_ended()),
    }
    allowed = {"processRecords", "shutdownRequested", "leaseLost", "shardEnded", "shutdown"}
    for name, steps in after.items():
        for other, request in requests.items():
            over = name in {"leaseLost", "shardEnded"}
            if (other in allowed and not over and name != "shutdownRequested") or (
                name == "shutdownRequested" and other in {"leaseLost", "shardEnded", "shutdown"}
            ):
                continue
            section.add(f"{other} comes after {name}", NEVER, *steps, request, *_ALIVE)
    return section


def _malformed() -> Section:
    section = Section("L", "malformed messages")
    full = batch(record(1))
    begin = {"action": "initialize", "shardId": SHARD, "sequenceNumber": "LATEST", "subSequenceNumber": 0}
    first: dict[str, Any] = {
        "no JSON": b"initialize\n",
        "half a message": b'{"action":"initialize"\n',
        "a list": b"[]\n",
        "null": b"null\n",
        "a number": b"7\n",
        "an empty object": b"{}\n",
        "a byte that is no UTF-8": b'{"action":"initialize","shardId":"\xff"}\n',
        "100,000 brackets": b"[" * 100_000 + b"\n",
        "an action that is null": {**begin, "action": None},
        "an action that is a number": {**begin, "action": 7},
        "an unknown action": {**begin, "action": "initialise"},
        "an action in capitals": {**begin, "action": "INITIALIZE"},
        "initialize without a shard": {"action": "initialize", "sequenceNumber": None},
        "initialize whose shard is null": {**begin, "shardId": None},
        "initialize whose shard is a number": {**begin, "shardId": 7},
        "initialize whose start is a number": {**begin, "sequenceNumber": 7},
        "initialize whose start is a word": {**begin, "sequenceNumber": "SOMEWHERE"},
        "initialize whose sub-sequence is text": {**begin, "subSequenceNumber": "7"},
    }
    for name, message in first.items():
        section.add(f"the first line is {name}", MALFORMED, odd(message, "initialize"), *_ALIVE)
    whole = {"action": "processRecords", "records": [record(1)], "millisBehindLatest": 0}

    def one(**changes: Any) -> dict[str, Any]:
        changed = {key: value for key, value in {**record(1), **changes}.items() if value is not ...}
        return {**whole, "records": [changed]}

    later: dict[str, Any] = {
        "without records": {"action": "processRecords", "millisBehindLatest": 0},
        "whose records are null": {**whole, "records": None},
        "whose records are an object": {**whole, "records": {}},
        "of a record that is null": {**whole, "records": [None]},
        "of a record that is text": {**whole, "records": ["record"]},
        "of a record without a sequence number": one(sequenceNumber=...),
        "of a record whose sequence number is null": one(sequenceNumber=None),
        "of a record whose sequence number is a number": one(sequenceNumber=7),
        "of a record whose sequence number is not digits": one(sequenceNumber="12x"),
        "of a record whose sequence number is empty": one(sequenceNumber=""),
        "of a record whose sequence number is negative": one(sequenceNumber="-7"),
        "of a record without data": one(data=...),
        "of a record whose data is a number": one(data=7),
        "of a record whose data is a list": one(data=[1]),
        "of a record whose partition key is a number": one(partitionKey=7),
        "of a record whose arrival time is text": one(approximateArrivalTimestamp="now"),
        "of a record whose sub-sequence is negative": one(subSequenceNumber=-1),
        "of a record whose sub-sequence is text": one(subSequenceNumber="0"),
        "whose lag is text": {**whole, "millisBehindLatest": "0"},
        "whose lag is negative": {**whole, "millisBehindLatest": -1},
        "whose sequence numbers go down": {**whole, "records": [record(2), record(1)]},
        "with another message behind it on its line": line(whole)[:-1] + line({"action": "leaseLost"}),
    }
    for name, message in later.items():
        request = odd(message, "processRecords", places=full.places)
        section.add(f"a batch {name}", MALFORMED, initialize(), request, *_ALIVE)
    for name, message in {
        "shutdown without a reason": {"action": "shutdown"},
        "shutdown with an unknown reason": {"action": "shutdown", "reason": "WHATEVER"},
        "shutdown whose reason is null": {"action": "shutdown", "reason": None},
        "a status": {"action": "status", "responseFor": "processRecords"},
    }.items():
        section.add(f"there comes {name}", MALFORMED, initialize(), odd(message), *_ALIVE)
    section.add(
        "a record's data is not base64",
        f"{MALFORMED}; the suite does not judge what the handler makes of it",
        *(initialize(), odd(one(data="***"), places=full.places, want=Want.EITHER), *_ALIVE),
    )
    return section


def _time() -> Section:
    section = Section("M", "time")
    idle = "an idle shard gets no calls unless callProcessRecordsEvenForEmptyRecordList is set"
    wait = Quiet(3.0)
    section.add("nothing comes for a while before initialize", PROCESSOR, wait, initialize(), lease_lost())
    section.add(
        "nothing comes for a while after initialize", idle, initialize(), wait, batch(record(1)), lease_lost()
    )
    section.add(
        "nothing comes for a while after a batch", idle, *(initialize(), batch(record(1))), wait, lease_lost()
    )
    section.add(
        "nothing comes for a while after shutdownRequested",
        "shutdownGraceMillis, gracefulLeaseHandoffTimeoutMillis",
        *(initialize(), batch(record(1)), shutdown_requested(), wait, lease_lost()),
    )
    section.add(
        "a batch takes three seconds to arrive",
        READER,
        *(initialize(), batch(*(record(n) for n in range(50)), piece=500, pause=0.2), lease_lost()),
    )
    section.add(
        "a checkpoint's reply takes three seconds",
        PROTOCOL,
        *(initialize(), batch(record(1)), shard_ended(reply_after=3.0)),
    )
    return section


SECTIONS: Final = (_answers, _ends, _orders, _malformed, _time)
