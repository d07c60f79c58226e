"""Orders and revenue per product and hour, from the changes of a table: what ``mldserver demo --source dynamodb`` runs.

Shows hooks for the changes of a DynamoDB table. An order that is changed or cancelled takes back what it has given: summed up
over all hours, what is left are the orders that are in the table.
"""

from datetime import datetime
from decimal import Decimal

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # the name that everybody knows it by

from mldserver import Window, tumbling
from mldserver.dynamodb_streams import Change

schema = "product STRING, orders BIGINT, revenue DECIMAL(12,2), at TIMESTAMP"
windows = tumbling("1 hour", on="at", lateness="1 minute")

Row = tuple[str, int, Decimal, datetime]


def on_insert(change: Change) -> Row:
    """Count an order."""
    order = change.new or {}
    return order["product"], 1, order["total"], change.created_at


def on_delete(change: Change) -> Row:
    """Take a cancelled order back."""
    order = change.old or {}
    return order["product"], -1, -order["total"], change.created_at


def on_update(change: Change) -> list[Row]:
    """Take the order back as it was, and count it as it is."""
    return [on_delete(change), on_insert(change)]


def on_window(rows: DataFrame, window: Window) -> DataFrame:  # noqa: ARG001  # the hook is called with both
    """Sum each product up, once per closed hour."""
    return rows.groupBy("product").agg(F.sum("orders").alias("orders"), F.sum("revenue").alias("revenue"))
