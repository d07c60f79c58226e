"""Where settings may say that the ledger lies, and what is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mldserver.assembly import ledger_of
from mldserver.config import DynamoPlace, Settings, SqlitePlace
from mldserver.config.places import ledger
from mldserver.state.sqlite import SqliteLedger
from mldserver.testing import VirtualClock

if TYPE_CHECKING:
    from pathlib import Path

    from mldserver.config import LedgerPlace


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("sqlite", SqlitePlace()),
        (" SQLite ", SqlitePlace()),
        ("dynamodb://My_Table-1.x", DynamoPlace("My_Table-1.x")),
        ("dynamodb://Ledger/?region=eu-central-1", DynamoPlace("Ledger", "eu-central-1")),
        (
            "dynamodb://Ledger?region=r&endpoint_url=http://127.0.0.1:8000",
            DynamoPlace("Ledger", "r", "http://127.0.0.1:8000"),
        ),
    ],
)
def test_a_place_is_read_and_shown_so_that_it_is_read_again(text: str, place: LedgerPlace) -> None:
    kind = ledger()
    assert kind.parse(text) == place
    assert kind.parse(kind.show(place)) == place


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (5, "not text"),
        ("postgres://x", "neither sqlite nor dynamodb"),
        ("dynamodb://", "no table"),
        ("dynamodb://ab", "no table"),
        ("dynamodb://table/path", "no table"),
        ("dynamodb://table?zone=x", "only endpoint_url and region"),
        ("dynamodb://table?region=", "only endpoint_url and region"),
    ],
)
def test_what_is_no_place_is_refused_with_a_reason(raw: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ledger().parse(raw)


async def test_a_ledger_in_a_file_is_known_under_the_servers_name(tmp_path: Path) -> None:
    made = ledger_of(Settings(handler="h", out=tmp_path), server_id="me", clock=VirtualClock())
    assert isinstance(made, SqliteLedger)
    assert made.server_id == "me"
    await made.close()
