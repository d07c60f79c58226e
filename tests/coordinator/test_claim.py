"""An output folder is one pipeline's, on one ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from mldserver.assembly import claim_output
from mldserver.config import resolve
from mldserver.coordinator.claim import claim
from mldserver.coordinator.layout import OWNER
from mldserver.coordinator.store import OutputStore
from mldserver.errors import OperatorError


@pytest.fixture
def store(tmp_path: Path) -> OutputStore:
    return OutputStore(str(tmp_path / "out"))


def test_the_first_pipeline_owns_the_folder_and_others_are_refused(store: OutputStore) -> None:
    claim(store, pipeline="a", ledger="dynamodb://one")
    claim(store, pipeline="a", ledger="dynamodb://one")
    for pipeline, ledger in (("b", "dynamodb://one"), ("a", "dynamodb://two"), ("a", None)):
        with pytest.raises(OperatorError, match="belongs to pipeline a on the ledger dynamodb://one"):
            claim(store, pipeline=pipeline, ledger=ledger)


def test_with_the_ledger_inside_the_folder_nothing_is_written(store: OutputStore) -> None:
    claim(store, pipeline="a", ledger=None)
    assert not store.exists(OWNER)


def test_a_file_that_a_crash_cut_off_is_written_again(store: OutputStore) -> None:
    store.put(OWNER, b"")
    claim(store, pipeline="a", ledger="x")
    assert b'"pipeline": "a"' in store.get(OWNER)


@pytest.mark.parametrize("damage", [b"{", b"[]"])
def test_what_nobody_understands_is_refused(store: OutputStore, damage: bytes) -> None:
    store.put(OWNER, damage)
    with pytest.raises(
        OperatorError, match="belongs to something unknown; this is pipeline a on the ledger x"
    ) as told:
        claim(store, pipeline="a", ledger="x")
    assert OWNER in told.value.advice


@pytest.mark.parametrize(
    ("ledger", "named"),
    [
        ("sqlite:l.sqlite", f"sqlite:{Path.cwd() / 'l.sqlite'}"),
        ("dynamodb://table?region=here", "dynamodb://table"),
    ],
)
def test_a_ledger_elsewhere_is_named_as_every_server_names_it(
    store: OutputStore, ledger: str, named: str
) -> None:
    values = {"handler": "h", "out": store.uri(), "ledger": ledger}
    claim_output(resolve(values, environ={}, folder=Path("/nowhere")), store)
    assert f'"ledger": "{named}"'.encode() in store.get(OWNER)


def test_a_ledger_in_its_usual_place_needs_no_name(store: OutputStore) -> None:
    claim_output(resolve({"handler": "h", "out": store.uri()}, environ={}, folder=Path("/nowhere")), store)
    assert not store.exists(OWNER)
