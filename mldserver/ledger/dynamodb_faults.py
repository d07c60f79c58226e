"""What AWS and the network answer instead of a result: what to do about it, in the words of the ledger. Pure."""

from __future__ import annotations

import enum
from typing import Any, Final

from botocore.exceptions import ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NotConnectedError
from botocore.parsers import ResponseParserError

from mldserver.errors import LedgerError, LedgerUnusable


class Verdict(enum.Enum):
    """What an error means for the request that met it."""

    AGAIN = enum.auto()
    """Throttled, out of reach, answer lost, or another transaction held an item: the same request may be sent again."""
    CONDITION = enum.auto()
    """A condition does not hold: nothing of the request was written (or an earlier sending of it was)."""
    ABSENT = enum.auto()
    """There is no such table."""
    EXISTS = enum.auto()
    """The table is there already, or is being made."""
    FATAL = enum.auto()
    """Sending it again would not help."""


_AGAIN: Final = frozenset(
    [
        *("InternalServerError", "ServiceUnavailable", "RequestTimeout", "RequestTimeoutException"),
        *("ProvisionedThroughputExceeded", "ProvisionedThroughputExceededException"),
        *("LimitExceededException", "RequestLimitExceeded"),
        *("ThrottledException", "Throttling", "ThrottlingError", "ThrottlingException"),
        *("TransactionConflict", "TransactionConflictException", "TransactionInProgressException"),
    ]
)
"""Codes of errors, and of a cancelled transaction's reasons, that pass (DynamoDB: "Error handling")."""

_VERDICTS: Final = {
    "ConditionalCheckFailed": Verdict.CONDITION,
    "ConditionalCheckFailedException": Verdict.CONDITION,
    "ResourceNotFoundException": Verdict.ABSENT,
    "ResourceInUseException": Verdict.EXISTS,
} | dict.fromkeys(_AGAIN, Verdict.AGAIN)

_WIRE: Final = (HTTPClientError, NotConnectedError, ResponseParserError)
"""No connection, or none any more, or half an answer."""

_SERVER_FAULT: Final = 500
"""HTTP: from here on it is the server's fault, whatever the code."""

_ADVICE: Final = {
    "AccessDeniedException": "Give this server's role the permissions that mldserver/ledger/dynamodb.py lists.",
    "ExpiredTokenException": "Renew the AWS credentials.",
    "UnrecognizedClientException": "Check the AWS credentials and the region.",
    "NoCredentialsError": "Give the server AWS credentials (environment, profile, or the role of its host).",
    "NoRegionError": "Set the AWS region.",
}


def judge(error: Exception) -> Verdict:
    """Return what an error of a call means."""
    if not isinstance(error, ClientError):
        return Verdict.AGAIN if isinstance(error, _WIRE) else Verdict.FATAL
    answer: dict[str, Any] = error.response.get("ResponseMetadata", {})
    if int(answer.get("HTTPStatusCode", 0)) >= _SERVER_FAULT:
        return Verdict.AGAIN
    reasons = {reason.get("Code", "None") for reason in error.response.get("CancellationReasons", ())}
    codes = reasons - {"None"} or {_code(error)}
    verdicts = {_VERDICTS.get(code, Verdict.FATAL) for code in codes}
    # One condition that does not hold decides, whatever else was in the way.
    return Verdict.CONDITION if Verdict.CONDITION in verdicts else max(verdicts, key=lambda v: v.value)


def _code(error: Exception) -> str:
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return type(error).__name__


def translate(error: Exception, table: str, *, did: str) -> LedgerError:
    """Return the ledger's own error for one that a call ended with."""
    verdict = judge(error)
    if verdict is Verdict.ABSENT:
        return LedgerError(
            f"There is no ledger: DynamoDB has no table {table}.",
            did=did,
            advice="Create it with `mldserver ledger create`, or check its name and the region.",
            table=table,
        )
    code, again = _code(error), verdict is Verdict.AGAIN
    what = f"DynamoDB is out of reach: {error}." if again else f"DynamoDB refused: {error}."
    lasts = "It is tried again by itself; look at AWS and the network when it lasts."
    unset = code in {"NoCredentialsError", "NoRegionError"}
    return (LedgerUnusable if unset else LedgerError)(
        what, did=did, advice=lasts if again else _ADVICE.get(code, ""), table=table, aws=code
    )
