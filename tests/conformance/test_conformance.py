"""The judge catches what a child does wrong, each kind of it; a child that does all right, and the server, pass."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance import comparison
from conformance.children import Child, listening
from support.processes import held_port
from support.serving import KEEP_EVERYTHING, quick, serving
from support.virtual_loop import IdleLoop

from mldserver import cli
from mldserver.conformance import catalogue
from mldserver.conformance.cases import NEW, SHARD, Ask, Case, record
from mldserver.conformance.judge import Judge
from mldserver.conformance.player import Grade, Play, Result, Target, play_all
from mldserver.conformance.wire_cases import aggregate
from mldserver.protocol.batch_decoder import deaggregate
from mldserver.testing import Form

TRANSCRIPTS = Path(__file__).parents[1] / "transcripts"
CASES = {case.title: case for case in catalogue()}


def played(kind: type[Child], folder: Path, cases: list[Case]) -> list[Result]:
    """Play cases at children of this kind, in time that passes only while both wait."""

    async def all_of_them() -> list[Result]:
        async with listening(kind, folder / "s") as address:
            return await play_all(cases, Target(address), at_a_time=64, patience=20)

    with asyncio.Runner(loop_factory=IdleLoop) as runner:
        return runner.run(all_of_them())


# The catalogue.


def test_every_case_has_a_number_a_title_of_its_own_and_a_source() -> None:
    cases = catalogue()
    assert len(cases) >= 200
    assert len({case.number for case in cases}) == len({case.title for case in cases}) == len(cases)
    assert all(case.source for case in cases)
    # Long lines are made when they are played, each by a function of its own.
    assert len({(case.form, case.strict, case.steps) for case in cases}) == len(cases)


def test_a_line_is_as_long_as_its_case_says() -> None:
    for length in (2**16 - 1, 2**16, 2**16 + 1):
        case = CASES[f"a line of {length:,} bytes"]
        assert len(case.steps[1].line) == length + 1  # type: ignore[union-attr]  # a batch, and its line feed


def test_an_aggregate_of_the_catalogue_is_one() -> None:
    assert deaggregate(aggregate(3)) == (("key", b"0"), ("key", b"1"), ("key", b"2"))
    assert deaggregate(aggregate(3)[:-1] + b"\0") is None


def captured(name: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """What the Java of KCL 3.1.3 sent (parsed, and as it came), and what it was told before."""
    told = ""
    for entry in map(json.loads, (TRANSCRIPTS / f"{name}.jsonl").read_text("utf-8").splitlines()):
        if entry["dir"] == "in":
            yield json.loads(entry["line"]), entry["line"], told
        told = entry["line"]


def as_the_catalogue_has_it(message: dict[str, Any]) -> Ask:
    match message["action"]:
        case "initialize":
            return NEW.initialize(start=message["sequenceNumber"], sub=message["subSequenceNumber"])
        case "processRecords":
            records = [
                record(
                    each["sequenceNumber"],
                    each["subSequenceNumber"],
                    data=base64.b64decode(each["data"]),
                    partitionKey=each["partitionKey"],
                    approximateArrivalTimestamp=each["approximateArrivalTimestamp"],
                )
                for each in message["records"]
            ]
            return NEW.batch(*records, behind=message["millisBehindLatest"])
    ends = {"shutdownRequested": NEW.shutdown_requested, "leaseLost": NEW.lease_lost}
    ends["shardEnded"] = NEW.shard_ended
    return ends[message["action"]]()


@pytest.mark.parametrize(
    "name", ["main-conn-001", "main-conn-002", "main-conn-003", "main-conn-004", "moto-conn-001"]
)
def test_the_catalogue_speaks_as_the_java_did_and_the_judge_replies_as_it_did(name: str) -> None:
    judge, compared = Judge(Form.KCL3), 0
    for message, line, told in captured(f"kcl313-{name}"):
        if message["action"] == "checkpoint":
            said = judge.receive_line(told, 0.0)
        else:
            ask = as_the_catalogue_has_it(message)
            judge.begin_request(ask)
            said = ask.line.replace(SHARD.encode(), str(message.get("shardId")).encode())
        assert said is not None
        assert said.decode() == line + "\n"
        compared += 1
    assert compared > 10


# A child that does everything right.


@pytest.mark.parametrize(
    "section", [*("checkpoints", "replies to checkpoints", "answers", "endings", "batches", "framing")]
)
def test_a_child_that_does_everything_right_passes(section: str, tmp_path: Path) -> None:
    results = played(Child, tmp_path, [case for case in catalogue() if case.section == section])
    assert [(result.case.title, result.why) for result in results if result.verdict is not Grade.PASS] == []


# Children that do one thing wrong.


class Silent(Child):
    async def answer(self, action: str) -> None:
        if action != "processRecords":
            await super().answer(action)


class Mistaken(Child):
    async def answer(self, action: str) -> None:
        await super().answer("processRecords" if action == "leaseLost" else action)


class Twice(Child):
    async def answer(self, action: str) -> None:
        await super().answer(action)
        await super().answer(action)


class TwiceMuchLater(Child):
    async def answer(self, action: str) -> None:
        await super().answer(action)
        if action == "processRecords":
            await asyncio.sleep(0.1)
            await super().answer(action)


class Talkative(Child):
    async def answer(self, action: str) -> None:
        await self.say({"action": "status", "responseFor": action, "took": 7})


class Printing(Child):
    async def answer(self, action: str) -> None:
        await self.write(b"handled " + action.encode() + b"\n")
        await super().answer(action)


class Babbling(Child):
    async def answer(self, action: str) -> None:
        while True:
            await self.write(b"still working\n" * 100)


class Deaf(Child):
    async def answer(self, action: str) -> None:
        await super().answer(action)
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's
        await asyncio.sleep(3600)


class Null(Child):
    async def answer(self, action: str) -> None:
        await self.say(None)


class OnOneLine(Child):
    async def answer(self, action: str) -> None:
        status = json.dumps({"action": "status", "responseFor": action}).encode()
        await self.write(status + status + b"\n")


class Crashing(Child):
    async def answer(self, action: str) -> None:
        if action == "processRecords":
            raise RuntimeError
        await super().answer(action)


class Rounding(Child):
    async def ask(self, number: str | None, sub: int | None) -> str | None:
        return await super().ask(number and str(int(float(number))), sub)


class Backward(Child):
    asked: tuple[str | None, ...] = ()

    async def ask(self, number: str | None, sub: int | None) -> str | None:
        self.asked += (number,)
        return await super().ask(self.asked[0] if len(self.asked) > 2 else number, sub)


class OldForm(Child):
    async def ask(self, number: str | None, sub: int | None) -> str | None:
        self.v1 = True
        return await super().ask(number, sub)


class Early(Child):
    async def request(self, action: str, message: dict[str, Any]) -> None:
        if action == "initialize":
            await self.ask(None, None)
        await super().request(action, message)


class Clinging(Child):
    async def request(self, action: str, message: dict[str, Any]) -> None:
        if action == "leaseLost":
            await self.ask(None, None)
        await super().request(action, message)


class Impatient(Child):
    async def pause(self, attempt: int) -> None:
        pass


class Endless(Child):
    retries = 10_000

    async def pause(self, attempt: int) -> None:
        await asyncio.sleep(0)


class NeverGone(Child):
    async def checkpoint(self, number: str | None, sub: int | None) -> bool:
        await self.ask(number, sub)
        return True


class NoCheckpoint(Child):
    async def checkpoint(self, number: str | None, sub: int | None) -> bool:
        return True


class Truthy(Child):
    async def ask(self, number: str | None, sub: int | None) -> str | None:
        return await super().ask(number, sub) or None


class OneTry(Child):
    async def end(self) -> None:
        await self.ask(None, None)


class Hasty(Child):
    async def end(self) -> None:
        await self.say({"action": "checkpoint", "sequenceNumber": None, "subSequenceNumber": None})
        await super().end()


class NoLastCheckpoint(Child):
    async def request(self, action: str, message: dict[str, Any]) -> None:
        if action != "processRecords":
            await super().request(action, message)
            return
        first = message["records"][0]
        await self.checkpoint(first["sequenceNumber"], first["subSequenceNumber"])
        await self.answer(action)

    async def checkpoint(self, number: str | None, sub: int | None) -> bool:
        return await super().checkpoint(number or self.last, sub)

    last = ""

    async def ask(self, number: str | None, sub: int | None) -> str | None:
        self.last = str(number)
        return await super().ask(number, sub)


class Stubborn(Child):
    async def run(self) -> None:
        await super().run()
        await asyncio.sleep(3600)


class Waiting(Child):
    async def run(self) -> None:
        await super().run()
        await self.reader.read()


class Lenient(Child):
    async def run(self) -> None:
        while raw := await self.reader.readline():
            await self.answer(json.loads(raw).get("action"))


class Ignorant(Child):
    async def run(self) -> None:
        while raw := await self.reader.readline():
            message = json.loads(raw)
            if message.get("action") in {"initialize", "leaseLost", "processRecords"}:
                await self.request(message["action"], message)


class TakesHalves(Child):
    async def run(self) -> None:
        while raw := await self.reader.readline():
            message = json.loads(raw)
            await self.answer(message["action"])


class SplitsLines(Child):
    async def run(self) -> None:
        text = ""
        while raw := await self.reader.readline():
            for text in raw.decode().splitlines():
                message = json.loads(text)
                await self.request(message["action"], message)


BATCHES = "three batches of ten records"
ENDS_WITH_BATCH = "the shard ends after a batch"
WRONG: list[tuple[type[Child], str, Grade, str]] = [
    (Silent, BATCHES, Grade.FAIL, "did not answer processRecords in time"),
    (Mistaken, BATCHES, Grade.FAIL, "answered processRecords, not leaseLost"),
    (Twice, BATCHES, Grade.FAIL, "answers no request"),
    (TwiceMuchLater, "processRecords is answered once, and by its name", Grade.FAIL, "answers no request"),
    (Talkative, BATCHES, Grade.FAIL, "status has no property took"),
    (Printing, BATCHES, Grade.NON_STRICT, "skips (not JSON"),
    (Babbling, BATCHES, Grade.FAIL, "nothing but lines that the daemon skips"),
    (Deaf, "one record of 10 MiB, the most that Kinesis takes", Grade.FAIL, "does not read"),
    (Null, BATCHES, Grade.FAIL, "a literal null"),
    (OnOneLine, BATCHES, Grade.FAIL, "two messages on a line"),
    (Crashing, BATCHES, Grade.FAIL, "closed in place of answering processRecords"),
    (
        *(Rounding, "neighbours that differ in their last digit alone are told apart"),
        *(Grade.FAIL, "which was never delivered"),
    ),
    (Backward, "checkpoints under batches never go back", Grade.NON_STRICT, "a checkpoint that cannot be"),
    (OldForm, BATCHES, Grade.FAIL, "checkpoint has no property checkpoint"),
    (Early, BATCHES, Grade.NON_STRICT, "while answering initialize"),
    (Clinging, BATCHES, Grade.NON_STRICT, "while answering leaseLost"),
    (
        *(Impatient, "under a batch: after ThrottlingException processing goes on"),
        *(Grade.NON_STRICT, "asked again at once"),
    ),
    (Endless, "under a batch: InvalidStateException for ever ends in a status", Grade.FAIL, "more than 60"),
    (
        *(NeverGone, "once the lease is gone, shutdownRequested is answered without a checkpoint"),
        *(Grade.NON_STRICT, "after ShutdownException"),
    ),
    (NoCheckpoint, BATCHES, Grade.PASS, ""),
    (
        NoCheckpoint,
        "a checkpoint under a batch has exactly the keys of its version",
        Grade.NOT_SHOWN,
        "too few",
    ),
    (
        NoCheckpoint,
        "a sub-sequence number is 1",
        Grade.NOT_SHOWN,
        "no checkpoint while answering shutdownRequested",
    ),
    (NoCheckpoint, ENDS_WITH_BATCH, Grade.FAIL, "its children are blocked"),
    (
        Truthy,
        "at the shard's end: an empty name is not taken for stored",
        Grade.FAIL,
        "its children are blocked",
    ),
    (
        OneTry,
        "at the shard's end: ThrottlingException is not taken for stored",
        Grade.FAIL,
        "children are blocked",
    ),
    (
        OneTry,
        "at the shard's end: ThrottlingException for ever never ends in a status",
        Grade.FAIL,
        "never stored",
    ),
    (
        *(Hasty, "a slow reply at the shard's end is waited for"),
        *(Grade.FAIL, "before the daemon had replied to its checkpoint"),
    ),
    (
        *(NoLastCheckpoint, "before the lease goes all that was delivered is checkpointed"),
        *(Grade.NON_STRICT, "the rest is delivered again"),
    ),
    (Stubborn, BATCHES, Grade.FAIL, "drains it for ever"),
    (
        *(Waiting, "when the lease is lost the output ends by itself: some bridges end by nothing else"),
        *(Grade.NON_STRICT, "leaves its output open after the last status"),
    ),
    (Lenient, "leaseLost comes before initialize", Grade.NON_STRICT, "answered what no daemon sends"),
    (Ignorant, "there comes a status", Grade.NON_STRICT, "neither closed nor answered"),
    (
        TakesHalves,
        "the daemon closes before the line feed of a batch",
        Grade.NON_STRICT,
        "answers no request",
    ),
    (
        *(SplitsLines, "a partition key is LINE SEPARATOR (U+2028), which some readers take for a line end"),
        *(Grade.FAIL, "closed in place of answering processRecords"),
    ),
]


@pytest.mark.parametrize(
    ("kind", "title", "verdict", "why"), WRONG, ids=lambda value: getattr(value, "__name__", None)
)
def test_what_a_child_does_wrong_is_caught(
    kind: type[Child], title: str, verdict: Grade, why: str, tmp_path: Path
) -> None:
    (result,) = played(kind, tmp_path, [CASES[title]])
    assert result.verdict is verdict, result.why
    assert why in result.why


async def test_a_child_that_is_not_there_is_an_error_and_no_verdict() -> None:
    with held_port() as nobodys, pytest.raises(OSError, match="Connect"):
        await Play(CASES[BATCHES], Target(f"127.0.0.1:{nobodys}"), "shardId-000000000001", 1).run()


# On the pipes of a process, and as a command.

COMMAND = (sys.executable, str(comparison.PROCESSOR))


@pytest.mark.parametrize(
    ("title", "verdict", "why", "said"),
    [
        (BATCHES, Grade.PASS, "", ""),
        ("the shard ends after a batch", Grade.PASS, "", ""),
        (
            "the arrival time is null",
            Grade.FAIL,
            "closed in place of answering processRecords",
            "TypeError",
        ),
        ("the daemon closes inside a line", Grade.NON_STRICT, "exited with 1", "JSONDecodeError"),
    ],
)
async def test_a_command_is_played_at_on_its_pipes(title: str, verdict: Grade, why: str, said: str) -> None:
    result = await Play(CASES[title], Target(command=COMMAND), "shardId-000000000001", 30).run()
    assert (result.verdict, result.why.startswith(why)) == (verdict, True), result.why
    assert said in result.said


def test_the_command_tells_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    only = ["--only", CASES[BATCHES].number, "--only", CASES["the arrival time is null"].number]
    assert cli.run(["conformance", "--json", str(file), *only, "--", *COMMAND]) == 1
    told = capsys.readouterr().out
    assert re.search(r"^records and nulls +1 +0 +0 +0 +1$", told, re.MULTILINE)
    assert re.search(r"^all +2 +1 +0 +0 +1$", told, re.MULTILINE)
    assert "the arrival time is null" in told
    assert BATCHES not in told
    report = json.loads(file.read_text("utf-8"))
    assert report["schema"] == 1
    assert report["child"] == list(COMMAND)
    assert report["sections"]["batches"] == {"pass": 1, "non-strict": 0, "not shown": 0, "fail": 0}
    assert {case["verdict"] for case in report["cases"]} == {"pass", "fail"}
    assert all(case["source"] for case in report["cases"])


def test_cases_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["conformance", "--list", "--only", "limits"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^E03 +limits +a line of 65,537 bytes +MessageWriter", told, re.MULTILINE)
    assert "framing" not in told


def test_a_run_without_a_failure_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["conformance", "--only", CASES[BATCHES].number, "--", *COMMAND]) == 0
    assert "all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ([], 2, "No child is named."),
        (["127.0.0.1:1", "--only", "Z99"], 2, "No case is named Z99."),
        (["127.0.0.1:1"], 1, "The child cannot be reached"),
        (["--", "/no/such/program"], 1, "The child cannot be reached"),
    ],
)
def test_what_cannot_be_played_at_is_told(
    arguments: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["conformance", *arguments]) == code
    assert told in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_amazon_kclpy_comes_to_what_the_page_says() -> None:
    told = json.loads(comparison.RESULTS.read_text("utf-8"))["others"]
    assert {number: verdict for number, (verdict, _) in comparison.play().items()} == {
        number: verdict for number, (verdict, _) in told.items()
    }


# The server.


async def test_the_server_passes_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keeps_everything.py").write_text(KEEP_EVERYTHING)
    monkeypatch.syspath_prepend(str(tmp_path))
    # The catalogue begins shards in their middle, as daemons do whose checkpoints were made by another child.
    settings = quick(tmp_path / "out", "keeps_everything", accept_gap=True)
    async with serving(settings) as server:
        results = await play_all(catalogue(), Target(await server.listening()), at_a_time=32, patience=60)
    others = [
        (one.case.number, one.case.title, one.verdict, one.why) for one in results if one.verdict != "pass"
    ]
    assert others == []
