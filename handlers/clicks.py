"""Page views per page and minute, with user names from a lookup that each shard loads once.

Shows a class with a life cycle: it is made once per shard, ``initialize`` loads what it needs, and whole batches are
taken at once. ``process_records`` returns one item a record, in order: a row, a list of rows, or None.

A record is JSON such as ``{"page": "/home", "user": 7, "at": "2013-01-01T10:15:00Z", "kind": "view"}``.
"""

import json
from pathlib import Path

from mldserver import Batch, Shard, tumbling

NAMES = Path("users.json")
"""An optional file in the working directory: user numbers to names."""


class Clicks:
    """One shard's clicks."""

    schema = "page STRING NOT NULL, user STRING COMMENT 'unknown users are null', at TIMESTAMP NOT NULL"
    windows = tumbling("1 minute", on="at", lateness="30 seconds", disorder="5 seconds")

    def __init__(self) -> None:
        """Start without names."""
        self.names: dict[str, str] = {}
        self.views = 0

    def initialize(self, shard: Shard) -> None:
        """Load the names; an error here is retried until it succeeds."""
        if NAMES.exists():
            self.names = json.loads(NAMES.read_text())
        print(f"{shard.id}: {len(self.names)} names")  # noqa: T201  # handlers may print: it goes to the log

    def process_records(self, batch: Batch) -> list[dict[str, str | None] | None]:
        """Make a row of each view; other kinds of clicks want none."""
        rows: list[dict[str, str | None] | None] = []
        for record in batch:
            click = record.json()
            if click["kind"] == "view":
                rows.append(
                    {"page": click["page"], "user": self.names.get(str(click["user"])), "at": click["at"]}
                )
            else:
                rows.append(None)
        self.views += len(rows) - rows.count(None)
        return rows

    def shard_ended(self, shard: Shard) -> None:
        """Say how much there was, once the shard is read to its end."""
        print(f"{shard.id}: {self.views} views")  # noqa: T201  # see above
