"""What AWS and the network answer instead of a result: each kind leads to one verdict, and to one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError
from botocore.parsers import ResponseParserError

from mldserver.errors import LedgerError
from mldserver.ledger.dynamodb_table import ErrorMeaning, Table, judge, translate
from tests.ledger.dynamodb_fake import canceled, client_error, lost_answer

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (client_error("ThrottlingException", "Query"), ErrorMeaning.AGAIN),
        (client_error("ProvisionedThroughputExceededException", "Query"), ErrorMeaning.AGAIN),
        (client_error("", "Query", 502), ErrorMeaning.AGAIN),
        (client_error("ConditionalCheckFailedException", "PutItem"), ErrorMeaning.CONDITION),
        (client_error("ResourceNotFoundException", "Query"), ErrorMeaning.ABSENT),
        (client_error("ResourceInUseException", "CreateTable"), ErrorMeaning.EXISTS),
        (client_error("ValidationException", "Query"), ErrorMeaning.FATAL),
        (canceled("None", "TransactionConflict"), ErrorMeaning.AGAIN),
        (canceled("ThrottlingError", "TransactionConflict"), ErrorMeaning.AGAIN),
        (canceled("ConditionalCheckFailed", "TransactionConflict"), ErrorMeaning.CONDITION),
        (canceled("TransactionConflict", "ValidationError"), ErrorMeaning.FATAL),
        (canceled(), ErrorMeaning.FATAL),
        (lost_answer(), ErrorMeaning.AGAIN),
        (EndpointConnectionError(endpoint_url="x"), ErrorMeaning.AGAIN),
        (ResponseParserError("half an answer"), ErrorMeaning.AGAIN),
        (NoCredentialsError(), ErrorMeaning.FATAL),
    ],
)
def test_each_error_has_one_meaning(error: Exception, verdict: ErrorMeaning) -> None:
    assert judge(error) is verdict


@pytest.mark.parametrize(
    ("error", "what", "advice"),
    [
        (client_error("ResourceNotFoundException", "Query"), "no table t", "ledger create"),
        (client_error("ThrottlingException", "Query"), "out of reach", "tried again"),
        (client_error("AccessDeniedException", "Query"), "refused", "permissions"),
        (client_error("ValidationException", "Query"), "refused", ""),
        (NoCredentialsError(), "refused", "credentials"),
    ],
)
def test_each_error_is_told_with_what_to_do(error: Exception, what: str, advice: str) -> None:
    told = translate(error, "t", did="Nothing.")
    assert what in told.what
    assert advice in told.advice
    assert (told.did, told.where["table"]) == ("Nothing.", "t")


class Throttled:
    """A client, and the clock that counts the pauses between its refusals."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    async def put_item(self, **_: Any) -> None:
        raise client_error("ThrottlingException", "PutItem")

    async def batch_write_item(self, **request: Any) -> dict[str, Any]:
        return {"UnprocessedItems": request["RequestItems"]}

    def now_ms(self) -> int:
        return 0

    steady_ms = now_ms

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(round(seconds, 3))


@pytest.mark.parametrize("chance", [0.0, 1.0])
async def test_pauses_double_from_a_tenth_of_a_second_and_jitter_takes_away_up_to_half(chance: float) -> None:
    whole = [0.1, 0.2, 0.4, 0.8, 1.6]
    for refused in ("write", "delete_items"):
        client = Throttled()
        table = Table(
            client=client, name="t", partition="p", clock=client, jitter=lambda: chance, unique=lambda: "id"
        )
        with pytest.raises(LedgerError):
            await (table.write("meta", {}) if refused == "write" else table.delete_items(["log#1"]))
        assert client.pauses == [round(pause * (0.5 + chance / 2), 3) for pause in whole], refused
