"""The changes of a DynamoDB table: read from its stream, in order, and decoded."""

from mldserver.dynamodb_streams.change import Change, NotAChange

__all__ = ["Change", "NotAChange"]
