"""The protocol core against the fake daemon, back to back in memory.

The invariant: whatever the daemon sends, in whatever pieces, and whatever it throws at checkpoints, every request gets
exactly one status, a checkpoint is asked only while one is allowed and one at a time, no checkpoint lies ahead of what
the server calls durable, and the daemon never waits for something that nobody owes it.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mldserver.config.settings import Settings
from mldserver.errors import InternalError
from mldserver.protocol import events as ev
from mldserver.protocol.connection import ConnectionLimits, MLDConnection, RetryPolicy
from mldserver.protocol.events import ConnectionTimer
from mldserver.protocol.messages import Initialize, ProcessRecords
from mldserver.protocol.states import State
from mldserver.records import Sequence
from mldserver.testing import DaemonProtocol, Form, JavaThrow, JvmExit, Place, StreamRecord
from mldserver.testing.fake_stream import SHARD_END

RETRIES: Final = RetryPolicy(attempts=3, base_seconds=1.0, cap_seconds=4.0)
LIMITS: Final = Settings().part(ConnectionLimits, retries=RETRIES, end_retries=RETRIES)
ERRORS: Final = (
    "ThrottlingException",
    "KinesisClientLibDependencyException",
    "InvalidStateException",
    "NullPointerException",
)
CAN_CHECKPOINT: Final = {State.PROCESSING, State.DRAINING, State.ENDING}
CAN_ANSWER: Final = {State.INITIALIZING, State.PROCESSING, State.DRAINING, State.ENDED, State.LOSING}
OWED: Final = {ConnectionTimer.CHECKPOINT_RETRY}


class BackToBack(RuleBasedStateMachine):
    """One connection from ``initialize`` to its ending; ``form`` is set by the subclasses."""

    form: Form

    @initialize(known=st.booleans())
    def connect(self, known: bool) -> None:
        self.records: list[StreamRecord] = []
        self.accepted = 0  # how many of them the server has taken
        self.durable = 0  # how many of those are durable
        self.stolen = False
        self.errors: list[str] = []
        self.thrown_at_end = 0
        self.requests = 0
        self.statuses = 0
        self.asked = 0
        self.replied = 0
        self.timers: set[ConnectionTimer] = set()
        self.to_server = b""
        self.over = False
        self.next_number = 10**20 - 3
        start = Place(str(self.next_number)) if known else Place("TRIM_HORIZON")
        self.daemon = DaemonProtocol(
            "shard-0", form=self.form, start=start, store=self.store, on_line=self.note_line
        )
        self.server = MLDConnection(LIMITS, random=lambda: 0.5)
        self.collect()
        self.daemon.initialize()
        self.collect()

    # What the daemon does.

    def can_request(self, *, draining: bool = False) -> bool:
        allowed = {"initialize", "processRecords"} | ({"shutdownRequested"} if draining else set())
        return not self.over and self.daemon.outstanding is None and self.daemon.last_answered in allowed

    @precondition(lambda self: self.can_request())
    @rule(sizes=st.lists(st.integers(1, 3), max_size=4))
    def send_batch(self, sizes: list[int]) -> None:
        batch = []
        for size in sizes:
            self.next_number += 1
            users = 1 if self.form is Form.V1 else size
            batch += [
                StreamRecord(str(self.next_number), b"x", "k", 7, sub, aggregated=users > 1)
                for sub in range(users)
            ]
        self.records += batch
        self.daemon.process_records(batch, 0)
        self.collect()

    @precondition(lambda self: self.can_request() and self.form is not Form.V1)
    @rule()
    def request_shutdown(self) -> None:
        self.daemon.shutdown_requested()
        self.collect()

    @precondition(lambda self: self.can_request(draining=True))
    @rule()
    def lose_lease(self) -> None:
        self.stolen = True
        self.daemon.lease_lost()
        self.collect()

    @precondition(lambda self: self.can_request(draining=True))
    @rule()
    def end_shard(self) -> None:
        self.daemon.shard_ended()
        self.collect()

    @rule()
    def steal_lease(self) -> None:
        self.stolen = True

    @rule(error=st.sampled_from(ERRORS), times=st.integers(1, 4))
    def refuse_checkpoints(self, error: str, times: int) -> None:
        self.errors += [error] * times

    def store(self, place: Place) -> None:
        if self.stolen:
            raise JavaThrow("ShutdownException", "stolen")
        if self.errors:
            self.thrown_at_end += self.server.state is State.ENDING_CHECKPOINT
            raise JavaThrow(self.errors.pop(0), "refused")
        if place == SHARD_END:
            assert self.durable == len(self.records)
        else:
            durable = self.records[self.durable - 1]
            assert place.order() <= Place(durable.sequence_number, durable.sub_sequence_number).order()

    # What carries bytes.

    @precondition(lambda self: self.to_server)
    @rule(data=st.data())
    def carry(self, data: st.DataObject) -> None:
        self.carry_bytes(data.draw(st.integers(1, len(self.to_server))))

    @precondition(lambda self: self.to_server)
    @rule()
    def carry_all(self) -> None:
        self.carry_bytes(len(self.to_server))

    def carry_bytes(self, count: int) -> None:
        piece, self.to_server = self.to_server[:count], self.to_server[count:]
        self.server.receive_data(piece)
        self.collect()

    # What the server does.

    @precondition(lambda self: self.durable < self.accepted)
    @rule(data=st.data())
    def make_durable(self, data: st.DataObject) -> None:
        self.durable = data.draw(st.integers(self.durable + 1, self.accepted))

    @precondition(lambda self: self.server.state in CAN_CHECKPOINT and self.checkpointable())
    @rule()
    def checkpoint(self) -> None:
        self.server.checkpoint(None if self.server.state is State.ENDING else self.position())
        self.collect()

    def checkpointable(self) -> bool:
        everything = self.durable == len(self.records)
        return everything if self.server.state is State.ENDING else self.durable > 0

    def position(self) -> Sequence:
        last = self.records[self.durable - 1]
        return Sequence(int(last.sequence_number), last.sub_sequence_number)

    def can_answer(self) -> bool:
        at_lost_end = self.server.state is State.ENDING and self.server.checkpoints_stopped
        return self.server.state in CAN_ANSWER or at_lost_end

    @precondition(can_answer)
    @rule()
    def answer(self) -> None:
        self.server.answer()
        self.collect()

    @precondition(lambda self: not self.can_answer())
    @rule()
    def answer_out_of_turn(self) -> None:
        with pytest.raises(InternalError):
            self.server.answer()
        assert self.server.data_to_send() == []

    @precondition(lambda self: self.server.state not in CAN_CHECKPOINT)
    @rule()
    def checkpoint_out_of_turn(self) -> None:
        with pytest.raises(InternalError):
            self.server.checkpoint(None)
        assert self.server.data_to_send() == []

    @precondition(lambda self: self.timers & OWED)
    @rule()
    def retry_is_due(self) -> None:
        self.timers.discard(ConnectionTimer.CHECKPOINT_RETRY)
        self.server.timer_fired(ConnectionTimer.CHECKPOINT_RETRY)
        self.collect()

    # What both sides tell.

    def note_line(self, direction: str, text: str) -> None:
        reply = text.startswith('{"action":"checkpoint"')
        if direction == "in":
            self.requests += not reply
            self.replied += reply
        else:
            self.statuses += '"status"' in text
            self.asked += '"checkpoint"' in text

    def collect(self) -> None:
        """Take what each side has to say; lines for the daemon arrive at once, lines for the server wait."""
        for event in self.server.events_received():
            self.take(event)
        for data in self.server.data_to_send():
            for byte in data:
                self.daemon.receive_data(bytes([byte]))
        self.to_server += self.daemon.data_to_send()
        if self.daemon.finished and not self.over:
            self.over = True
            self.server.receive_eof()
            self.collect()
            assert self.server.state is State.CLOSED
            self.daemon.receive_eof()

    def take(self, event: Any) -> None:
        match event:
            case ev.Request(Initialize() as message):
                assert (message.version == 1) is (self.form is Form.V1)
            case ev.Request(ProcessRecords()):
                self.accepted = len(self.records)
            case ev.StartTimer(name, seconds):
                assert seconds > 0
                self.timers.add(name)
            case ev.CancelTimer(name):
                self.timers.discard(name)
            case ev.Closed(reason) if not self.over:
                # Only a shard's end that cannot be checkpointed is worth the JVM's life.
                assert reason == "failed"
                assert self.thrown_at_end >= RETRIES.attempts
                self.over = True
                with pytest.raises(JvmExit):
                    self.daemon.receive_eof()
                self.daemon.violations.clear()

    @invariant()
    def the_daemon_has_nothing_to_complain_of(self) -> None:
        assert self.daemon.violations == []
        assert self.daemon.hang is None

    @invariant()
    def every_request_has_one_status(self) -> None:
        open_requests = int(self.daemon.outstanding is not None)
        assert self.requests == self.statuses + open_requests

    @invariant()
    def one_checkpoint_is_outstanding_at_most(self) -> None:
        waiting = self.server.state.endswith("_checkpoint")
        assert self.asked == self.replied
        assert not waiting or self.to_server

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        if self.over or self.to_server:
            return
        owes = self.can_answer() or self.server.state in CAN_CHECKPOINT or bool(self.timers & OWED)
        assert (self.daemon.outstanding is not None) is owes

    def teardown(self) -> None:
        """Whatever happened, the connection can be brought to its end."""
        self.errors.clear()
        for _ in range(100):
            if self.over:
                return
            self.advance()
        raise AssertionError(f"stuck in {self.server.state}, the daemon awaits {self.daemon.outstanding}")

    def advance(self) -> None:
        self.durable = self.accepted
        if self.to_server:
            self.carry_bytes(len(self.to_server))
        elif self.timers & OWED:
            self.retry_is_due()
        elif self.can_answer():
            self.answer()
        elif self.server.state is State.ENDING:
            self.checkpoint()
        else:
            self.end_shard()


class V1(BackToBack):
    form = Form.V1


class V2(BackToBack):
    form = Form.V2


class KCL3(BackToBack):
    form = Form.KCL3


LENGTHS: Final = settings(max_examples=settings().max_examples // 3, stateful_step_count=40)
TestV1 = V1.TestCase
TestV2 = V2.TestCase
TestKCL3 = KCL3.TestCase
TestV1.settings = TestV2.settings = TestKCL3.settings = LENGTHS
