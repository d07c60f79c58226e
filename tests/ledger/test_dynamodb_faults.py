"""What AWS and the network answer instead of a result: each kind leads to one verdict, and to one sentence."""

from __future__ import annotations

import pytest
from botocore.exceptions import EndpointConnectionError, NoCredentialsError
from botocore.parsers import ResponseParserError

from mldserver.ledger.dynamodb_faults import Verdict, judge, translate
from tests.ledger.dynamodb_fake import canceled, client_error, lost_answer


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (client_error("ThrottlingException", "Query"), Verdict.AGAIN),
        (client_error("ProvisionedThroughputExceededException", "Query"), Verdict.AGAIN),
        (client_error("", "Query", 502), Verdict.AGAIN),
        (client_error("ConditionalCheckFailedException", "PutItem"), Verdict.CONDITION),
        (client_error("ResourceNotFoundException", "Query"), Verdict.ABSENT),
        (client_error("ResourceInUseException", "CreateTable"), Verdict.EXISTS),
        (client_error("ValidationException", "Query"), Verdict.FATAL),
        (canceled("None", "TransactionConflict"), Verdict.AGAIN),
        (canceled("ThrottlingError", "TransactionConflict"), Verdict.AGAIN),
        (canceled("ConditionalCheckFailed", "TransactionConflict"), Verdict.CONDITION),
        (canceled("TransactionConflict", "ValidationError"), Verdict.FATAL),
        (canceled(), Verdict.FATAL),
        (lost_answer(), Verdict.AGAIN),
        (EndpointConnectionError(endpoint_url="x"), Verdict.AGAIN),
        (ResponseParserError("half an answer"), Verdict.AGAIN),
        (NoCredentialsError(), Verdict.FATAL),
    ],
)
def test_each_error_has_one_meaning(error: Exception, verdict: Verdict) -> None:
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
