"""Letters as documents and files: what comes out is what went in, and damage is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from mldserver.deadletters.destinations import document, files, from_document, read_letters
from mldserver.errors import OperatorError
from mldserver.records import Sequence
from tests.ledger.samples import DIGITS_56, HUGE, letter

pytestmark = pytest.mark.quick

LETTERS = (
    letter(1, handler_version="7", parked_behind=HUGE),
    letter(2, partition_key=None, arrival_ms=None, data=b"", parked_behind=Sequence(5)),
)
TIMERS = tuple(letter(1, timer=timer, due_ms=7) for timer in ("alarm", "alarm/x"))


@pytest.mark.parametrize("given", [*LETTERS, *TIMERS])
def test_a_letter_comes_back_from_its_document(given: Any) -> None:
    assert from_document(orjson.loads(orjson.dumps(document(given, "p")))) == given


def test_the_id_names_pipeline_shard_and_record() -> None:
    assert document(LETTERS[0], "p")["id"] == f"p/a/{DIGITS_56 + 1}/1"


def test_the_id_of_a_timers_letter_names_the_timer() -> None:
    """After a crash, it may fire behind another record."""
    first, other = (document(each, "p")["id"] for each in TIMERS)
    assert (first, first != other) == ("p/a/7/alarm/ключ", True)
    assert document(replace(TIMERS[0], sequence=Sequence(3)), "p")["id"] == first
    odd = letter(1, timer="alarm", due_ms=7, partition_key="k\udfff")
    assert document(odd, "p")["id"].endswith("k\\udfff")


def test_a_document_of_an_earlier_version_is_a_letter_of_a_record() -> None:
    fields = document(LETTERS[0], "p")
    assert fields.pop("timer") is None
    assert fields.pop("due_ms") is None
    assert from_document(fields) == LETTERS[0]


def test_text_that_no_json_can_hold_is_escaped() -> None:
    odd = letter(1, error="E: \udc80", partition_key="k\udfff")
    assert from_document(orjson.loads(orjson.dumps(document(odd, "p")))).error == "E: \\udc80"


@pytest.mark.parametrize(
    "damage",
    [{"shard": 1}, {"attempts": True}, {"sequence": "x"}, {"data": "!"}, {"parked_behind": "7/x"}],
)
def test_a_damaged_document_is_no_letter(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        from_document(document(LETTERS[0], "p") | damage)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_are_read_back_from_a_folder(tmp_path: Path, kind: Any) -> None:
    others = (letter(3, shard_id="b/c"), letter(4, shard_id="b/c", timer="alarm", due_ms=7))
    for path, content in files((*LETTERS, *others), "p", kind):
        target = tmp_path / path
        target.parent.mkdir()
        target.write_bytes(content)
    (tmp_path / "notes.txt").write_text("no letters")
    assert read_letters(str(tmp_path), "p") == [*LETTERS, *others]
    assert {each.name for each in tmp_path.iterdir()} == {"a", "b_c", "notes.txt"}


def test_a_repeated_flush_writes_the_same_file() -> None:
    for letters in (LETTERS, LETTERS[:1]):
        assert [path for path, _ in files(letters, "p", "jsonl")] == [f"a/{DIGITS_56 + 1}-1.jsonl"]


def test_letters_of_timers_never_replace_a_file_of_a_flush_before() -> None:
    """The position stays, so that their sequence is the same."""
    later = letter(1, timer="alarm", due_ms=7, at_ms=457)
    groups = [[each] for each in (*TIMERS, later)]
    names = [path for group in groups for path, _ in files(group, "p", "jsonl")]
    assert len(set(names)) == 3
    assert [path for path, _ in files(TIMERS, "p", "jsonl")] == names[:1]


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"no")
    with pytest.raises(OperatorError, match="cannot be read as dead letters"):
        read_letters(str(tmp_path / "x.parquet"), "p")
    with pytest.raises(OperatorError, match="no files of dead letters"):
        read_letters(str(tmp_path / "*.jsonl"), "p")
