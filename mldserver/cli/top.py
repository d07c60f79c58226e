"""``mldserver top``: the status of a running server, again and again."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter
from rich.console import Console, Group, RenderableType
from rich.live import Live

from mldserver.admin.http_client import Client, NoAnswer
from mldserver.cli.render import as_bytes, format_time, plain_text, table
from mldserver.cli.status import FROM_SETTINGS, ServerOptions, fetch_status, read_ledger_instead, rows, text
from mldserver.errors import OperatorError
from mldserver.status_document import Status

_HELP = """
Show the status of a running server again and again: live in a terminal, one status after the other in a pipe. Ctrl-C ends it.

```
mldserver top
mldserver top --admin unix:/run/departures.admin --sort rows --shard shardId-00000000000
```

When no server answers, the command shows the ledger's contents, says so, and asks again.
"""

app = App(name="top", help=_HELP, help_format="markdown")

_SERVER_SECONDS: Final = 1.0
_LEDGER_SECONDS: Final = 5.0
"""Between two reads of a ledger: a table in DynamoDB bills each."""
_MIN_SHARDS: Final = 5
_COLUMNS: Final = "id state lag_ms durable_age_seconds records/s rows/s bytes/s"
_COUNTED: Final = ("records", "rows", "bytes")
_NO_RATES: Final = dict.fromkeys(f"{name}/s" for name in _COUNTED)

Order = Literal["lag", "records", "rows", "age", "shard"]
_SORT_KEYS: Final = {"lag": "lag_ms", "records": "records/s", "rows": "rows/s", "age": "durable_age_seconds"}


@dataclass(slots=True)
class Screen:
    """What `top` shows: the latest status of a server, or its ledger while no server answers. ``refresh`` renews it."""

    at: ServerOptions
    client: Client
    pipeline: str | None
    order: Order = "lag"
    part: str = ""
    """Show only shards whose id contains this text; ``*`` stands for any characters."""
    _previous: Status | None = None
    _rates: dict[str, dict[str, float]] = field(default_factory=dict)
    _shown: list[RenderableType] = field(default_factory=list)

    def refresh(self, height: int = sys.maxsize) -> float:
        """Ask the server, or else read the ledger; return the seconds until the next time.

        ``height`` is the terminal's, in lines; shards get one half. Raises OperatorError when the server refuses, and when
        neither a server nor a ledger has answered yet.
        """
        try:
            _, status = fetch_status(self.client, self.pipeline)
        except NoAnswer as error:
            try:
                _, self._shown = read_ledger_instead(self.at, error)
            except OperatorError as both:
                if not self._shown:
                    raise
                self._shown = [plain_text(str(both))]
            self._previous = None
            return _LEDGER_SECONDS
        if self._previous is None or status.taken_ms != self._previous.taken_ms:
            self._rates, self._previous = _rates(self._previous, status), status
        shards = [
            row | self._rates.get(row["id"], _NO_RATES)
            for row in rows(status.shards)
            if fnmatchcase(row["id"], f"*{self.part}*")
        ]
        shards.sort(key=lambda row: str(row["id"]))
        if self.order != "shard":
            shards.sort(key=lambda row: row[_SORT_KEYS[self.order]] or 0, reverse=True)
        max_shown = max(_MIN_SHARDS, height // 2)
        title = f"shards: {min(max_shown, len(shards))} of {len(status.shards)}"
        head = plain_text(f"{format_time(status.taken_ms)}   {'ready' if status.ready else 'NOT READY'}")
        self._shown = [
            head,
            "",
            # Shards are those of one function; with several, name it with --function.
            *((table(shards[:max_shown], _COLUMNS, title=title), "") if status.pipeline else ()),
            *text(status, shards=False),
        ]
        return _SERVER_SECONDS

    def __rich__(self) -> Group:
        return Group(*self._shown)


def _rates(before: Status | None, now: Status) -> dict[str, dict[str, float]]:
    """Return the records, rows and bytes per second of each shard between two statuses; empty if the server is another.

    A shard that left the server and came back counts from zero again: its rates are then 0.
    """
    if before is None or before.server_id != now.server_id or now.taken_ms <= before.taken_ms:
        return {}
    seconds = (now.taken_ms - before.taken_ms) / 1000
    before_by_id = {shard.id: shard for shard in before.shards}
    return {
        shard.id: {
            f"{name}/s": max(0, getattr(shard, name) - getattr(before_by_id[shard.id], name)) / seconds
            for name in _COUNTED
        }
        for shard in now.shards
        if shard.id in before_by_id
    }


@app.default
def top(
    *,
    sort: Annotated[
        Order, Parameter(help="The column by which shards are sorted; `age`: how long rows are not durable.")
    ] = "lag",
    shard: Annotated[
        str, Parameter(help="Only shards with this in their id; `*` stands for any characters.")
    ] = "",
    at: ServerOptions = FROM_SETTINGS,
) -> None:
    """Show a server's status again and again."""
    screen = Screen(at, at.client(), at.expected_pipeline(), sort, shard)
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        while True:
            wait = screen.refresh()
            sys.stdout.buffer.write(as_bytes(screen, ""))
            sys.stdout.flush()
            time.sleep(wait)
    wait = screen.refresh(console.height)
    with Live(screen, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.refresh()
            time.sleep(wait)
            wait = screen.refresh(console.height)
