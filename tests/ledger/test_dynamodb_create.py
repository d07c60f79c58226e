"""``mldserver ledger create``: the table comes into being on request, and then a server may open its ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mldserver.cli.ledger import create_ledger
from mldserver.cli.ledger_tool import LedgerOptions
from mldserver.errors import OperatorError
from tests.ledger.dynamodb_emulator import refusal

if TYPE_CHECKING:
    from tests.ledger.dynamodb_emulator import Emulator


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "emulated")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "emulated")


def test_the_table_is_created_once_and_named(emulator: Emulator, capsys: pytest.CaptureFixture[str]) -> None:
    where = LedgerOptions(ledger=f"dynamodb://by-command?region=eu-central-1&endpoint_url={emulator.url}")
    create_ledger(where=where)
    create_ledger(where=where)
    assert capsys.readouterr().out.split("\n")[:2] == ["The table by-command is there."] * 2
    assert [name for name, _ in emulator.calls] == ["CreateTable", "DescribeTable"] * 2


def test_what_aws_refuses_is_the_operators_to_mend(emulator: Emulator) -> None:
    emulator.before = lambda *_: refusal("AccessDeniedException")
    where = LedgerOptions(ledger=f"dynamodb://by-command?region=eu-central-1&endpoint_url={emulator.url}")
    with pytest.raises(OperatorError, match="AccessDenied"):
        create_ledger(where=where)


def test_a_ledger_in_a_file_needs_no_table() -> None:
    with pytest.raises(OperatorError, match="needs no table"):
        create_ledger(where=LedgerOptions(ledger="sqlite"))
