"""Where letters go that do not go to the ledger: durable before the position moves, whatever dies in between."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coordinator.outcomes import dead_letter
from coordinator.writing import Writing
from msgspec import structs
from support.serving import quick

from mldserver.assembly import destination_of
from mldserver.config.locations import LetterPlace, dead_letters
from mldserver.config.resolve import resolve
from mldserver.deadletters import aws_destinations
from mldserver.deadletters.destinations import FolderDestination, read_letters
from mldserver.errors import ConfigError, LedgerError, OperatorError
from mldserver.output.layout import DEAD_LETTERS
from mldserver.output.store import OutputStore
from mldserver.records import DeadLetter
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick

LETTERS = (dead_letter("a", 1), dead_letter("b", 1), dead_letter("a", 2))


class Place:
    """Takes letters, or does not."""

    def __init__(self) -> None:
        self.held: list[DeadLetter] = []
        self.error: Exception | None = None
        self.too_large: tuple[DeadLetter, ...] = ()

    async def store(self, letters: tuple[DeadLetter, ...]) -> tuple[DeadLetter, ...]:
        if self.error is not None:
            raise self.error
        self.held += [each for each in letters if each not in self.too_large]
        return self.too_large

    async def close(self) -> None: ...


def files(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


async def writing_to(place: Place, out: Path) -> Writing:
    writing = await Writing.begin(out, None)
    writing.flusher.letters = place
    return writing


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
async def test_a_folder_has_a_file_for_each_shard_of_a_flush(tmp_path: Path, kind: Any) -> None:
    folder = FolderDestination(OutputStore(str(tmp_path)), DEAD_LETTERS, pipeline="p", kind=kind)
    for _ in range(2):  # a repeat writes over
        assert await folder.store(LETTERS) == ()
    await folder.close()
    assert files(tmp_path) == [f"{DEAD_LETTERS}/a/1-0.{kind}", f"{DEAD_LETTERS}/b/1-0.{kind}"]
    assert read_letters(str(tmp_path / DEAD_LETTERS), "p") == [LETTERS[0], LETTERS[2], LETTERS[1]]


async def test_letters_are_there_before_the_position_moves(tmp_path: Path) -> None:
    place = Place()
    writing = await writing_to(place, tmp_path)
    shard = await writing.ledger.open_shard("a")
    batch = writing.batch(shard, (1, 5), rows=[], letters=[LETTERS[0]])
    for place.error in (OSError("full"), LedgerError("away")):
        with pytest.raises((OSError, LedgerError)):
            await writing.flush([batch])
        assert (await writing.ledger.peek()).shards["a"].position is None
    place.error = None
    await writing.flush([batch])
    assert place.held == [LETTERS[0]]
    state = await writing.ledger.peek()
    assert (state.shards["a"].position, state.dead_letters) == (LETTERS[0].sequence, 0)


async def test_what_is_too_large_for_the_place_is_the_ledgers(tmp_path: Path) -> None:
    place = Place()
    place.too_large = (LETTERS[2],)
    writing = await writing_to(place, tmp_path)
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 5), (2, 6), rows=[], letters=[LETTERS[0], LETTERS[2]])])
    assert place.held == [LETTERS[0]]
    assert await writing.ledger.dead_letters() == (LETTERS[2],)


async def test_redriven_letters_that_fail_again_stay_in_the_ledger(tmp_path: Path) -> None:
    place = Place()
    writing = await writing_to(place, tmp_path)
    await writing.ledger.add_letters(LETTERS[:1], wanted=True)
    ids = tuple(each.id for each in await writing.ledger.letters())
    shard = await writing.ledger.open_shard("a")
    again = replace(LETTERS[0], attempts=6)
    made = writing.batch(shard, (1, 5), rows=[], letters=[again])
    await writing.flush([structs.replace(made, epoch=0, last=None, redriven=ids)])
    assert place.held == []
    assert [each.letter for each in await writing.ledger.letters()] == [again]
    # Who took them as well has what it gave left out, and says so.
    await writing.flush([structs.replace(made, epoch=0, last=None, redriven=ids)])
    assert len(await writing.ledger.letters()) == 1


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("ledger", None),
        ("jsonl", LetterPlace("jsonl")),
        ("Parquet:s3://b/x", LetterPlace("parquet", "s3://b/x")),
        ("jsonl:/var/letters", LetterPlace("jsonl", "/var/letters")),
        ("sqs:https://sqs.eu-central-1.amazonaws.com/1/q", None),
        ("s3://bucket/pre/fix/", LetterPlace("s3", "bucket/pre/fix")),
        ("kinesis:dead", LetterPlace("kinesis", "dead")),
    ],
)
def test_the_setting_names_a_place(given: str, place: LetterPlace | None) -> None:
    found = dead_letters.parse(given)
    if given.startswith("sqs"):
        place = LetterPlace("sqs", given.removeprefix("sqs:"))
    assert found == place
    assert dead_letters.parse(found) == found
    assert dead_letters.parse(dead_letters.show(found)) == found


@pytest.mark.parametrize(
    "given",
    [1, "", "ledger:x", "jsonl:", "sqs:queue", "s3:bucket", "s3://", "kinesis:", "kinesis:a/b", "ftp://x"],
)
def test_what_names_no_place_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        dead_letters.parse(given)


def test_parking_needs_the_ledger(tmp_path: Path) -> None:
    given = {"dead_letters": "jsonl", "on_key_failure": "park", "out": str(tmp_path)}
    with pytest.raises(ConfigError, match="needs dead letters in the ledger"):
        resolve(given, environ={}, folder=tmp_path, config=None, handler_required=False)


@pytest.mark.parametrize(
    ("place", "made"),
    [
        (None, type(None)),
        (LetterPlace("jsonl"), FolderDestination),
        (LetterPlace("sqs", "https://h/1/q"), aws_destinations.QueueDestination),
        (LetterPlace("s3", "b"), aws_destinations.BucketDestination),
        (LetterPlace("kinesis", "s"), aws_destinations.StreamDestination),
    ],
)
def test_places_are_made_of_settings(tmp_path: Path, place: LetterPlace | None, made: type) -> None:
    settings = quick(tmp_path, "h", dead_letters=place)
    found = destination_of(settings, OutputStore(str(tmp_path)), VirtualClock(0), lambda: 0.5)
    assert type(found) is made


def test_a_folder_elsewhere_is_reached_at_the_start_or_told(tmp_path: Path) -> None:
    def made(target: str) -> Any:
        settings = quick(tmp_path, "h", dead_letters=LetterPlace("parquet", target))
        return destination_of(settings, OutputStore(str(tmp_path)), VirtualClock(0), lambda: 0.5)

    asyncio.run(made(str(tmp_path / "else")).store(LETTERS))
    assert files(tmp_path / "else") == ["h/a/1-0.parquet", "h/b/1-0.parquet"]
    with pytest.raises(OperatorError, match="cannot be reached"):
        made("nothing://x")
    with pytest.raises(OperatorError) as caught:
        made("s3://key:se%ZZcret@lake/x")  # which pyarrow repeats
    assert str(caught.value).startswith("dead_letters = parquet:s3://…@lake/x cannot be reached: ")
    assert "cret" not in f"{caught.value.told()}"


async def test_two_pipelines_on_one_stream_may_share_a_folder_elsewhere(tmp_path: Path) -> None:
    store = OutputStore(str(tmp_path))
    for pipeline in ("first", "second"):
        settings = quick(
            tmp_path, "h", pipeline=pipeline, dead_letters=LetterPlace("jsonl", str(tmp_path / "else"))
        )
        place = destination_of(settings, store, VirtualClock(0), lambda: 0.5)
        assert place is not None
        await place.store(LETTERS)
    for pipeline in ("first", "second"):
        assert len(read_letters(str(tmp_path / "else" / pipeline), pipeline)) == len(LETTERS)


async def test_an_object_store_takes_a_file_in_one_put(tmp_path: Path) -> None:
    store = OutputStore(str(tmp_path))
    store.local = False
    await FolderDestination(store, "", pipeline="p", kind="jsonl").store(LETTERS)
    assert files(tmp_path) == ["a/1-0.jsonl", "b/1-0.jsonl"]
