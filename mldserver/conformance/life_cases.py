"""Cases of a child's life: each request answered once, every end, orders that are not allowed, and time."""

from __future__ import annotations

from typing import Any, Final

from mldserver.conformance import origin
from mldserver.conformance.cases import (
    DAEMONS,
    NEW,
    SHARD,
    V1,
    EndsItself,
    HangUp,
    Quiet,
    Reopen,
    Section,
    Step,
    Want,
    Write,
    line,
    odd,
    record,
)

_BEGIN: Final = NEW.initialize()
_FULL: Final = NEW.batch(1)
_ALIVE: Final = (Reopen(), _BEGIN, _FULL, NEW.lease_lost())
"""A child that received lines that no daemon sends still serves the next shard."""


def _answers() -> Section:
    """Return the cases that each request is answered by exactly one status: pauses show a second one."""
    section = Section("I", "answers")
    pause = Quiet(0.3)
    for daemon in DAEMONS:
        start, lost, full, empty = daemon.initialize(), daemon.lease_lost(), daemon.batch(1), daemon.batch()
        ending = origin.ENDS if daemon is NEW else origin.KCL1
        steps: dict[str, tuple[str, tuple[Step, ...]]] = {
            "initialize": (origin.INITIALIZE, (start, pause, lost)),
            "processRecords": (origin.BATCH, (start, full, pause, full, pause, lost)),
            "processRecords without records": (origin.BATCH, (start, empty, pause, empty, pause, lost)),
            "the loss of the lease": (ending, (start, full, lost, pause)),
            "the shard's end": (ending, (start, full, daemon.shard_ended(), pause)),
        }
        if daemon.form is not V1:
            steps["shutdownRequested"] = (
                origin.ENDS,
                (start, full, daemon.shutdown_requested(), pause, lost),
            )
        for name, (source, whole) in steps.items():
            section.add(daemon, f"{name} is answered once, and by its name", source, *whole)
    second = DAEMONS[1]
    requested = odd({"action": "shutdown", "reason": "REQUESTED"}, want=Want.STATUS)
    title = "shutdown with REQUESTED is answered once, and by its name"
    section.life(second, title, origin.KCL1, second.batch(1), requested, pause)
    return section


def _ends() -> Section:
    """Return the cases of a shard's end: each ending after each beginning, then connections that close or are cut."""
    section = Section("J", "endings")
    for daemon in DAEMONS:
        full = daemon.batch(1)
        before: dict[str, tuple[Step, ...]] = {
            "right after initialize": (),
            "after a batch": (full,),
            "after an empty batch": (daemon.batch(),),
            "after a checkpoint": (daemon.provoke(),),
        }
        if daemon.form is not V1:
            before["after shutdownRequested"] = (full, daemon.shutdown_requested())
            before["after shutdownRequested without any batch"] = (daemon.shutdown_requested(),)
        source = origin.ENDS if daemon is NEW else origin.KCL1
        for name, steps in before.items():
            if name != "after a checkpoint":  # the section on checkpoints has this case
                section.life(daemon, f"the lease is lost {name}", source, *steps)
            section.life(daemon, f"the shard ends {name}", source, *steps, end=daemon.shard_ended())
        for name, end in {
            "the lease is lost": daemon.lease_lost(),
            "the shard has ended": daemon.shard_ended(),
        }.items():
            title = f"when {name} the output ends by itself: some bridges end by nothing else"
            source = "nc and others leave the daemon's pipe open until their peer closes"
            section.add(daemon, title, source, daemon.initialize(), full, end, EndsItself())
    hang_ups: dict[str, tuple[Step, ...]] = {
        "before initialize": (HangUp(),),
        "after initialize": (_BEGIN,),
        "after a batch": (_BEGIN, _FULL),
        "after shutdownRequested, at SIGTERM": (_BEGIN, _FULL, NEW.shutdown_requested()),
        "inside a line": (_BEGIN, Write(b'{"action":"processRec')),
        "before the line feed of a batch": (_BEGIN, Write(_FULL.line[:-1])),
        "while a batch is worked on": (_BEGIN, Write(_FULL)),
        "while shardEnded is worked on": (_BEGIN, Write(NEW.shard_ended(want=Want.EITHER))),
    }
    for name, steps in hang_ups.items():
        strict = "inside" not in name and "feed" not in name
        source = f"{origin.DRAIN}: without a time limit"
        section.add(NEW, f"the daemon closes {name}", source, *steps, strict=strict)
    for name in ("after a batch", "while a batch is worked on", "inside a line"):
        title = f"the connection is reset {name}, and the next one is served"
        source = "a JVM that exits, or is killed, resets its children's pipes"
        steps = (*hang_ups[name], Reopen(cut=True), _BEGIN, _FULL, NEW.lease_lost())
        section.add(NEW, title, source, *steps)
    return section


def _orders() -> Section:
    """Return the cases of each request at a time at which no daemon sends it: the child must refuse, and serve the next shard."""
    section = Section("K", "orders that are not allowed")
    reply = {"action": "checkpoint", "sequenceNumber": None, "subSequenceNumber": None, "error": None}
    requests = {
        "processRecords": odd(_FULL.line, "processRecords", places=_FULL.places),
        "shutdownRequested": odd({"action": "shutdownRequested"}),
        "leaseLost": odd({"action": "leaseLost"}),
        "shardEnded": odd({"action": "shardEnded"}),
        "shutdown": odd({"action": "shutdown", "reason": "ZOMBIE"}),
        "a reply to no checkpoint": odd(reply),
        "initialize": odd(_BEGIN.line, "initialize"),
    }
    ends = {"leaseLost", "shardEnded", "shutdown"}
    going_on = ends | {"processRecords", "shutdownRequested"}
    after: dict[str, tuple[tuple[Step, ...], set[str]]] = {
        "before initialize": ((), {"initialize"}),
        "after initialize": ((_BEGIN,), going_on),
        "after a batch": ((_BEGIN, _FULL), going_on),
        "after shutdownRequested": ((_BEGIN, _FULL, NEW.shutdown_requested()), ends),
        "after leaseLost": ((_BEGIN, _FULL, NEW.lease_lost()), set()),
        "after shardEnded": ((_BEGIN, _FULL, NEW.shard_ended()), set()),
    }
    for when, (steps, allowed) in after.items():
        for name, request in requests.items():
            if name not in allowed:
                section.add(NEW, f"{name} comes {when}", origin.NEVER, *steps, request, *_ALIVE)
    return section


def _malformed() -> Section:
    """Return the cases of malformed lines, first and later ones: the child must refuse, and serve the next shard."""
    section = Section("L", "malformed messages")
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
        section.add(NEW, f"the first line is {name}", origin.MALFORMED, odd(message, "initialize"), *_ALIVE)
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
        request = odd(message, "processRecords", places=_FULL.places)
        section.add(NEW, f"a batch {name}", origin.MALFORMED, _BEGIN, request, *_ALIVE)
    for name, message in {
        "shutdown without a reason": {"action": "shutdown"},
        "shutdown with an unknown reason": {"action": "shutdown", "reason": "WHATEVER"},
        "shutdown whose reason is null": {"action": "shutdown", "reason": None},
        "a status": {"action": "status", "responseFor": "processRecords"},
    }.items():
        section.add(NEW, f"there comes {name}", origin.MALFORMED, _BEGIN, odd(message), *_ALIVE)
    source = f"{origin.MALFORMED}; the suite does not judge what the handler makes of it"
    request = odd(one(data="***"), places=_FULL.places, want=Want.EITHER)
    section.add(NEW, "a record's data is not base64", source, _BEGIN, request, *_ALIVE)
    return section


def _time() -> Section:
    section = Section("M", "time")
    idle = "an idle shard gets no calls unless callProcessRecordsEvenForEmptyRecordList is set"
    wait, nothing = Quiet(3.0), "nothing comes for a while"
    section.add(NEW, f"{nothing} before initialize", origin.PROCESSOR, wait, _BEGIN, NEW.lease_lost())
    section.life(NEW, f"{nothing} after initialize", idle, wait, _FULL)
    section.life(NEW, f"{nothing} after a batch", idle, _FULL, wait)
    source = "shutdownGraceMillis, gracefulLeaseHandoffTimeoutMillis"
    section.life(NEW, f"{nothing} after shutdownRequested", source, _FULL, NEW.shutdown_requested(), wait)
    slow = NEW.batch(*range(50), piece=500, pause=0.2)
    section.life(NEW, "a batch takes three seconds to arrive", origin.READER, slow)
    end = NEW.shard_ended(reply_after=3.0)
    section.life(NEW, "a checkpoint's reply takes three seconds", origin.PROTOCOL, _FULL, end=end)
    return section


SECTIONS: Final = (_answers, _ends, _orders, _malformed, _time)
