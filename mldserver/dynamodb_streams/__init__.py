"""The changes of a DynamoDB table: read from its stream, in order, and decoded."""

from typing import TYPE_CHECKING, Any

from mldserver.change import Change, NotAChange

if TYPE_CHECKING:
    from mldserver.dynamodb_streams.stream import Stream

__all__ = ["Change", "NotAChange", "Stream"]


def __getattr__(name: str) -> Any:
    """Import ``Stream``, and AWS's library with it, when it is first named: handlers take changes without."""
    if name == "Stream":
        from mldserver.dynamodb_streams.stream import Stream  # noqa: PLC0415  # see above

        return Stream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
