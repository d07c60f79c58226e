"""Where a ledger lies, as settings name it."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from mldserver.config.kinds import Kind

__all__ = ["DynamoPlace", "LedgerPlace", "SqlitePlace", "ledger"]

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
_OPTIONS = frozenset({"region", "endpoint_url"})


class SqlitePlace(NamedTuple):
    """A file in the output folder: servers of one host share it."""

    def __str__(self) -> str:
        """Return ``sqlite``."""
        return "sqlite"


class DynamoPlace(NamedTuple):
    """A table in DynamoDB: servers of many hosts share it."""

    table: str
    region: str | None = None
    endpoint_url: str | None = None

    def __str__(self) -> str:
        """Return ``dynamodb://TABLE?…``."""
        given = {"region": self.region, "endpoint_url": self.endpoint_url}
        query = urlencode({key: value for key, value in given.items() if value is not None}, safe=":/")
        return f"dynamodb://{self.table}" + (f"?{query}" if query else "")


LedgerPlace = SqlitePlace | DynamoPlace


def ledger() -> Kind[LedgerPlace]:
    """``sqlite``, or ``dynamodb://TABLE`` with ``region`` and ``endpoint_url`` as query."""

    def parse(raw: object) -> LedgerPlace:
        if not isinstance(raw, str):
            raise ValueError("it is not text")  # noqa: TRY004  # kinds promise ValueError, whatever is wrong
        given = raw.strip()
        if given.lower() == "sqlite":
            return SqlitePlace()
        found = urlsplit(given)
        if found.scheme != "dynamodb":
            raise ValueError("it is neither sqlite nor dynamodb://…")
        # Not ``hostname``, which is lower case; DynamoDB's names (3 to 255 of these characters) are not.
        if not _TABLE.fullmatch(found.netloc) or found.path not in {"", "/"}:
            raise ValueError("it names no table of DynamoDB")
        options = dict(parse_qsl(found.query, keep_blank_values=True))
        if not options.keys() <= _OPTIONS or not all(options.values()):
            raise ValueError(f"only {' and '.join(sorted(_OPTIONS))} may follow the table")
        return DynamoPlace(found.netloc, options.get("region"), options.get("endpoint_url"))

    return Kind("sqlite, or dynamodb://TABLE?region=REGION", parse, metavar="LEDGER")
