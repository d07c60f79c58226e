"""Create AWS clients outside the event loop, and classify which of their errors are temporary.

To import aioboto3 and to read the models of a service takes most of a second, in which the loop must go on: a server
has connections by then. Both happen in a thread; what is left for the loop is small.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, Final

from mldserver.base.threads import run_in_daemon_thread
from mldserver.errors import ConfigError

_ANY_REGION: Final = "us-east-1"

RETRYABLE: Final = frozenset(
    [
        *("InternalServerError", "ServiceUnavailable", "RequestTimeout", "RequestTimeoutException"),
        *("ProvisionedThroughputExceeded", "ProvisionedThroughputExceededException"),
        *("LimitExceededException", "RequestLimitExceeded"),
        *("ThrottledException", "Throttling", "ThrottlingError", "ThrottlingException"),
    ]
)
"""Codes of errors after which the same request may be sent again (DynamoDB: "Error handling")."""

_SERVER_FAULT: Final = 500
"""HTTP: from here on it is the server's fault, whatever the code."""


@contextlib.asynccontextmanager
async def aws_client(
    service: str,
    *,
    region: str | None = None,
    endpoint_url: str | None = None,
    session: Any = None,
    **config: Any,
) -> AsyncIterator[Any]:
    """Make an aioboto3 client of a service, closed at the end of the context. Raises what aioboto3 raises.

    Credentials, and a region that is not given, come from where boto3 finds them. ``session``: in place of aioboto3's
    own, for tests; ``config``: as ``botocore.config.Config`` takes it.
    """
    if session is None:
        session = await run_in_daemon_thread(partial(_session, service), name="mldserver-aws")
    from aiobotocore.config import AioConfig  # noqa: PLC0415  # callers with a session have imported it

    made = session.client(service, region_name=region, endpoint_url=endpoint_url, config=AioConfig(**config))
    async with made as client:
        yield client


def error_code(error: Exception) -> str:
    """Return AWS's code for an error, or the class's name where it is none of AWS's."""
    from botocore.exceptions import ClientError  # noqa: PLC0415  # callers with such an error have imported it

    return (
        str(error.response.get("Error", {}).get("Code", ""))
        if isinstance(error, ClientError)
        else type(error).__name__
    )


def is_retryable(error: Exception) -> bool:
    """Return whether an error is temporary, so that the same request may be sent again: throttling, network, incomplete, 5xx."""
    from botocore.exceptions import ClientError, HTTPClientError  # noqa: PLC0415  # as above
    from botocore.exceptions import ConnectionError as NotConnectedError  # noqa: PLC0415  # as above
    from botocore.parsers import ResponseParserError  # noqa: PLC0415  # as above

    if not isinstance(error, ClientError):
        return isinstance(error, HTTPClientError | NotConnectedError | ResponseParserError)
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return status >= _SERVER_FAULT or error_code(error) in RETRYABLE


def date_of(answer: Mapping[str, Any]) -> str | None:
    """Return the ``Date`` of a response: AWS's time of day. None: an emulator sends none."""
    date: str | None = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return date


async def require_aws(stream: str, *, region: str | None) -> None:
    """Raise ConfigError when a stream is named and AWS cannot be asked about it: no region, or no credentials.

    Both are looked for where boto3 finds them, the instance's own metadata included. That they can be had, not that AWS
    takes them.
    """
    missing = await run_in_daemon_thread(partial(_missing, region), name="mldserver-aws")
    if missing:
        raise ConfigError(
            f"The stream {stream} is named, but {missing}.",
            advice="Give the region with --region, and credentials by the environment, a profile or the host's role.",
        )


def _missing(region: str | None) -> str:
    """Return what an AWS client would lack, as the end of a sentence: region or credentials; empty if both exist. Blocking."""
    import botocore.session  # noqa: PLC0415  # as below
    from botocore.exceptions import BotoCoreError, PartialCredentialsError, ProfileNotFound  # noqa: PLC0415  # as below

    session = botocore.session.Session()
    try:
        if not (region or session.get_config_variable("region")):
            return "no AWS region was given"
        return "" if session.get_credentials() else "there are no AWS credentials"
    except (PartialCredentialsError, ProfileNotFound) as error:
        return f"AWS's settings are wrong: {error}".rstrip(".")
    except BotoCoreError:
        return ""  # a service that gives credentials does not answer yet


def _session(service: str) -> Any:
    """Return an aioboto3 session whose loader has read all that a client of ``service`` is made of. Blocking."""
    import aioboto3  # noqa: PLC0415  # most servers never need it
    import aiobotocore.session  # noqa: PLC0415  # as above
    import botocore.session  # noqa: PLC0415  # as above

    if service == "s3":
        import aioboto3.s3.inject  # noqa: PLC0415  # what it adds to such a client, and would import for the first one

    # This client is never used: making it fills the loader's cache with all files that such a client needs.
    reader = botocore.session.Session()
    reader.create_client(
        service,
        region_name=_ANY_REGION,
        aws_access_key_id="none",
        aws_secret_access_key="none",  # noqa: S106  # so that none are looked for
    ).close()
    core = aiobotocore.session.get_session()
    core.register_component("data_loader", reader.get_component("data_loader"))
    return aioboto3.Session(botocore_session=core)
