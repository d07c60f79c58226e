"""Plays cases against children. A child is a connection over TCP or a Unix socket, or a process; each case has a new child.

Input is read as the Java reads it: a line ends at CR, LF or both. A child may take ``patience`` for each line; after that,
the daemon would wait for ever.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import enum
import os
import random
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO, Final

from mldserver.conformance.cases import (
    FIRST,
    SHARD,
    Ask,
    Case,
    Daemon,
    EndsItself,
    HangUp,
    Provoke,
    Quiet,
    Reopen,
    Resume,
    Step,
    Want,
    Write,
)
from mldserver.conformance.judge import Judge
from mldserver.testing.daemon_session import abort, connect

_READ_BYTES: Final = 1 << 16
_SURPLUS_SECONDS: Final = 0.01
"""How long the player waits for a surplus line after each answer."""
_NO_STATUS_SECONDS: Final = 2.0
"""How long the player waits for a status that must not come."""
_ENDS_ITSELF_SECONDS: Final = 5.0
_BETWEEN_BATCHES_SECONDS: Final = 0.05
_FIRST_RECORD: Final = 1_000
"""The first record's place while no checkpoint is stored."""
_ERROR_BYTES: Final = 2000
"""How much of the end of a child's standard error is kept."""


class Grade(enum.StrEnum):
    """A case's verdict, from best to worst."""

    PASS = "pass"  # noqa: S105  # no secret
    NON_STRICT = "non-strict"
    """A mistake that does no harm with a real daemon."""
    NOT_SHOWN = "not shown"
    """The child did not ask for the checkpoint that the case tests."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a case."""

    case: Case
    verdict: Grade
    why: str
    """The first thing that went wrong."""
    seconds: float
    said: str = ""
    """The end of a child's standard error, where something went wrong."""


@dataclass(frozen=True, slots=True)
class Target:
    """How to reach a new child: an address (``host:port`` or ``unix:PATH``), or a command to run."""

    address: str = ""
    command: tuple[str, ...] = ()

    async def open(self) -> ChildPipes:
        """Connect, or run the command, and return the new child's input and output. Raises OSError."""
        if self.command:
            errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the channel
            pipe = asyncio.subprocess.PIPE
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command, stdin=pipe, stdout=pipe, stderr=errors
                )
            except BaseException:
                errors.close()
                raise
            assert process.stdin is not None, "stdin is a pipe"
            assert process.stdout is not None, "stdout is a pipe"
            return ChildPipes(process.stdout, process.stdin, process, errors)
        return ChildPipes(*await connect(self.address))


@dataclass(slots=True)
class ChildPipes:
    """The daemon's ends of a child's input and output."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    process: asyncio.subprocess.Process | None = None
    errors: IO[bytes] | None = None
    ended: bool = False
    """Whether the child has ended its output."""
    _lines: deque[str] = field(default_factory=deque)
    _partial: str = ""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    async def line(self, seconds: float) -> str | None:
        """Return the next line; None at the end of the output. Raises TimeoutError after ``seconds``."""
        async with asyncio.timeout(seconds):
            while not self._lines and not self.ended:
                try:
                    data = await self.reader.read(_READ_BYTES)
                except OSError:  # a reset counts as the end of the output
                    data = b""
                self.ended = not data
                text = self._partial + self._decoder.decode(data, final=self.ended)
                *lines, self._partial = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
                self._lines.extend(lines)
        return self._lines.popleft() if self._lines else None

    async def close(self, *, cut: bool = False) -> str:
        """Close the connection (with ``cut`` by a reset) or kill the process; return the end of its standard error."""
        if self.process is None:
            abort(self.writer, reset=cut)
        else:
            self.writer.close()
            if self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    # Not ``kill``, which takes the exit code away from asyncio's own watcher.
                    os.kill(self.process.pid, signal.SIGKILL)
            await self.process.wait()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        if self.errors is None:
            return ""
        with self.errors as errors:
            errors.seek(0)
            return errors.read().decode(errors="replace")[-_ERROR_BYTES:]


class _CaseDecided(Exception):
    """The case is decided: the remaining steps are not played."""


class Play:
    """Plays one case, at one child or several in turn."""

    def __init__(self, case: Case, target: Target, shard_id: str, patience: float) -> None:
        """Prepare. The child may take ``patience`` seconds for each line, times the case's own factor."""
        self._case = case
        self._target = target
        self._shard = shard_id.encode()
        self._patience = patience * case.patience
        self.judge = Judge(case.form)
        self.not_shown = ""
        """Why the case proved nothing; empty if it did."""
        self._left_unanswered = False
        """Whether the child has left a request unanswered: its later lines are not judged."""
        self._child: ChildPipes
        """Set while steps are played."""

    async def run(self) -> Result:
        """Play every step, release the child, and return the result. Raises OSError if the child does not exist."""
        now = asyncio.get_running_loop().time
        began = now()
        self._child = await self._target.open()
        try:
            for step in self._case.steps:
                await self._play_step(step)
        except _CaseDecided:
            pass
        finally:
            said = await self._child.close()
        faults, remarks = self.judge.faults, self.judge.remarks
        verdict, why = Grade.PASS, ""
        if faults:
            verdict, why = Grade.FAIL if self._case.strict else Grade.NON_STRICT, faults[0]
        elif self.not_shown:
            verdict, why = Grade.NOT_SHOWN, self.not_shown
        elif remarks:
            verdict, why = Grade.NON_STRICT, remarks[0]
        return Result(self._case, verdict, why, now() - began, said if why else "")

    async def _play_step(self, step: Step) -> None:  # noqa: C901  # one case for each kind of step
        """Play one step of the case's conversation. Raises _CaseDecided after a fault: the remaining steps are skipped."""
        match step:
            case Ask():
                await self._send_request(step)
            case Provoke():
                await self._provoke(step)
            case Quiet(seconds):
                await self._expect_silence(seconds)
            case Write(what):
                if isinstance(what, Ask):
                    self.judge.begin_request(what)
                await self._write(what.line if isinstance(what, Ask) else what)
            case EndsItself():
                await self._expect_silence(_ENDS_ITSELF_SECONDS)
                if not self._child.ended:
                    self.judge.remarks.append("leaves its output open after the last status")
            case HangUp():
                await self._hang_up()
            case Reopen(cut):
                await self._reopen(cut=cut)
            case Resume(form):
                # ``_reopen`` replaces the judge, so read the last checkpoint first.
                place = self.judge.checkpointer.last
                await self._reopen()
                await self._send_request(Daemon(form).initialize(place.number, place.sub))
        if self.judge.faults:
            raise _CaseDecided

    async def _reopen(self, *, cut: bool = False) -> None:
        """Replace the child by a new one, and the judge by one that keeps the faults and remarks. ``cut``: by a reset."""
        await self._child.close(cut=cut)
        judge = Judge(self._case.form)
        judge.faults, judge.remarks = self.judge.faults, self.judge.remarks
        child = await self._target.open()
        self.judge, self._child, self._left_unanswered = judge, child, False

    async def _send_request(self, ask: Ask) -> None:
        """Send a request, in pieces if the case says so, and judge the child's lines until it is answered."""
        data = ask.make() if ask.make else ask.line.replace(SHARD.encode(), self._shard)
        self.judge.begin_request(ask)
        piece_bytes = ask.piece or len(data)
        for start in range(0, len(data), piece_bytes):
            if start > 0 and ask.pause:
                await asyncio.sleep(ask.pause)
            await self._write(data[start : start + piece_bytes])
        await self._judge_until_answered(ask)
        if ask.checkpoint and not self.judge.asked and not self.judge.faults:
            self.not_shown = f"it asked for no checkpoint while answering {ask.action}"
            raise _CaseDecided

    async def _write(self, data: bytes) -> None:
        """Write to the child; if it does not read in time, record a fault and end the case."""
        try:
            async with asyncio.timeout(self._patience):
                with contextlib.suppress(OSError):  # the next read finds out that the child is gone
                    self._child.writer.write(data)
                    await self._child.writer.drain()
        except TimeoutError:
            self.judge.faults.append("does not read what the daemon writes")
            raise _CaseDecided from None

    async def _judge_until_answered(self, ask: Ask) -> None:
        """Judge lines, and reply to checkpoints, until the request is answered, the child closes, or time is up.

        For Want.NO_STATUS the whole wait is limited; for other answers, the wait for each line is.
        """
        judge = self.judge
        now = asyncio.get_running_loop().time
        until = now() + _NO_STATUS_SECONDS if ask.want is Want.NO_STATUS else None
        while judge.asking is not None and not judge.faults:
            try:
                text = await self._child.line(self._patience if until is None else max(0.0, until - now()))
            except TimeoutError:
                self._left_unanswered = True
                if ask.want is Want.REFUSAL:
                    judge.remarks.append("neither closed nor answered")
                elif ask.want is not Want.NO_STATUS:
                    because = f": {judge.skipped}" if judge.skipped else ""
                    wrong = f"did not answer {ask.action} in time; the daemon waits for ever{because}"
                    judge.faults.append(wrong)
                return
            if text is None:
                judge.asking = None
                if ask.want is Want.STATUS:
                    judge.faults.append(f"closed in place of answering {ask.action}: the JVM exits")
                return
            reply = judge.receive_line(text, now())
            if reply is not None:
                judge.replying = True
                await self._expect_silence(ask.reply_after)
                judge.replying = False
                await self._write(reply.replace(SHARD.encode(), self._shard))
        await self._expect_silence(_SURPLUS_SECONDS)

    async def _expect_silence(self, seconds: float) -> None:
        """Wait ``seconds`` in which the child must not write, and judge lines that it writes. The first fault ends the wait."""
        now = asyncio.get_running_loop().time
        until = now() + seconds
        while (left := until - now()) > 0:
            if self._child.ended or self._left_unanswered or self.judge.faults:
                return
            with contextlib.suppress(TimeoutError):
                if text := await self._child.line(left):
                    self.judge.receive_line(text, now())

    async def _provoke(self, step: Provoke) -> None:
        """Send batches of one record until the child has asked for as many checkpoints as the step has replies to them."""
        judge, now = self.judge, asyncio.get_running_loop().time
        deadline, replies_left = now() + self._patience, list(step.replies)
        # Records begin after the checkpoint: a daemon does not deliver records before it again.
        stored = judge.checkpointer.last.number
        record_number = int(stored) - FIRST + 1 if stored.isdigit() else _FIRST_RECORD
        while replies_left:
            batch = Daemon(step.form).batch(
                record_number, replies=tuple(replies_left), reply_after=step.reply_after, want=step.want
            )
            await self._send_request(batch)
            if judge.faults or self._child.ended:
                return
            if judge.asked:
                del replies_left[: judge.asked]
                deadline = now() + self._patience
            record_number += 1
            if replies_left and now() > deadline:
                self.not_shown = "it asked for too few checkpoints while answering processRecords"
                raise _CaseDecided
            await self._expect_silence(_BETWEEN_BATCHES_SECONDS)

    async def _hang_up(self) -> None:
        """End the daemon's output and wait until the child has ended its own (and a process has exited)."""
        with contextlib.suppress(OSError):
            if self._child.writer.can_write_eof():
                self._child.writer.write_eof()
        try:
            async with asyncio.timeout(self._patience):
                while (text := await self._child.line(self._patience)) is not None:
                    if not self._left_unanswered:
                        self.judge.receive_line(text, asyncio.get_running_loop().time())
                code = None if self._child.process is None else await self._child.process.wait()
        except TimeoutError:
            self.judge.faults.append(
                "leaves its output open after the daemon has gone: the daemon drains it for ever"
            )
            return
        refused = any(isinstance(step, Ask) and step.want is not Want.STATUS for step in self._case.steps)
        if code and not refused:
            self.judge.remarks.append(f"exited with {code}")


async def play_all(
    cases: Sequence[Case],
    target: Target,
    *,
    at_a_time: int,
    patience: float,
    on_result: Callable[[Result], None] = lambda _result: None,
) -> list[Result]:
    """Play cases, several at a time, each with a separate shard; return the results in the cases' order.

    Raises OSError when the child cannot be reached or started.
    """
    run = random.randrange(10**8)  # noqa: S311  # separates the shard ids of two runs; not a secret
    slots = asyncio.Semaphore(at_a_time)

    async def play_one(index: int, case: Case) -> Result:
        async with slots:
            result = await Play(case, target, f"shardId-{run:08d}{index:04d}", patience).run()
            on_result(result)
            return result

    longest_first = sorted(enumerate(cases), key=lambda pair: -pair[1].patience)
    async with asyncio.TaskGroup() as group:
        tasks = {index: group.create_task(play_one(index, case)) for index, case in longest_first}
    return [tasks[index].result() for index in sorted(tasks)]


def counts(results: Iterable[Result]) -> dict[str, dict[Grade, int]]:
    """Return the number of cases of each section by verdict."""
    table: dict[str, dict[Grade, int]] = {}
    for result in results:
        row = table.setdefault(result.case.section, dict.fromkeys(Grade, 0))
        row[result.verdict] += 1
    return table
