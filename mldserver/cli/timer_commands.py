"""``mldserver timers``: shows the durable timers of a pipeline, and cancels timers in a running server."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Group, Parameter, validators
from rich.console import RenderableType

from mldserver.cli.ledger_tool import FROM_SETTINGS, LedgerOptions, ledger_settings, open_ledger
from mldserver.cli.logs import since_time
from mldserver.cli.render import AsJson, print_result, table
from mldserver.cli.state import VALUE_LENGTH, stored_entries
from mldserver.cli.status import SteeringOptions
from mldserver.cli.steer import steer
from mldserver.errors import ConfigError
from mldserver.windows import counted

_HELP = """
Show the timers that a handler has set (`ctx.timers`), or cancel timers in a running server.

```
mldserver timers list departures
mldserver timers list departures --key UA-1545
mldserver timers list departures --due-before '10 minutes' --json | jq -r '.timers[].key'
mldserver timers cancel departures --timer alarm --key UA-1545
```

`list` reads the ledger and its state files; servers may run. It shows the timers of the last flush: a running server may have set,
fired and cancelled others since, for up to `flush_interval`. `cancel` uses the server's Unix socket: run it on the server's host as
the server's user or root. It cancels timers in the stores that the server has open, and names the other stores.

Exit codes: 0 done; 1 no server answers; 2 the ledger cannot be read, or the server refuses, and reports why.
"""

app = App(name="timers", help=_HELP, help_format="markdown")
_SERVER_FROM_SETTINGS: Final = SteeringOptions()


@Parameter(name="*", group=Group("Which timers"))
@dataclass(frozen=True, slots=True)
class TimerConditions:
    """Chooses timers; those that meet every condition."""

    key: str | None = None
    """Only of this partition key. For changes that are read directly from DynamoDB Streams: the item's key as JSON."""
    timer: str | None = None
    """Only of this callback; with `CALLBACK/NAME`, only the timer of this name."""
    due_before: str | None = None
    """Only those due before an ISO 8601 time (UTC unless it says), or within a duration such as `2 hours`."""

    def due_before_ms(self) -> int | None:
        """Return ``due_before`` as ms since the epoch; None: any time. Raises ConfigError if it is not a time."""
        if self.due_before is None:
            return None
        when = since_time(self.due_before, datetime.now(UTC), option="--due-before", ahead=True)
        return round(when.timestamp() * 1000)


_ALL: Final = TimerConditions()


@app.command(name="list")
def list_timers(
    name: str | None = None,
    /,
    *,
    which: TimerConditions = _ALL,
    limit: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 100,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """List pending timers, those that are due first.

    Parameters
    ----------
    name
        The pipeline's name, as `--pipeline`.
    limit
        How many timers to show at most.
    """
    from mldserver.assembly import store_of  # noqa: PLC0415  # the whole server: `--help` must not wait for it
    from mldserver.runtime.state_values import decode_timer  # noqa: PLC0415  # see above

    settings = ledger_settings(where if name is None else dataclasses.replace(where, pipeline=name))
    before_ms = which.due_before_ms()
    with open_ledger(settings) as (_, state, _):
        rows = [
            row
            for row in stored_entries(state, store_of(settings), which.key)
            if row["timer"] is not None
            and (which.timer is None or which.timer in {row["timer"], row["timer"].partition("/")[0]})
            and (before_ms is None or row["expires_ms"] < before_ms)
        ]
    rows.sort(key=lambda row: (row["expires_ms"], row["key"], row["timer"]))
    timers = []
    for row in rows[:limit]:  # decode what is shown only: a store may have millions of timers
        _, attempt, payload = decode_timer(row["value"])
        due = {"due_ms": row["expires_ms"], "key": row["key"], "timer": row["timer"], "attempt": attempt}
        timers.append({**due, "store": row["store"], "payload": msgspec.to_builtins(payload)})
    stores = len({row["store"] for row in rows})
    document = {"pipeline": settings.pipeline, "pending": len(rows), "stores": stores, "timers": timers}
    text = f"{counted(len(rows), 'timer')} in {counted(stores, 'store')}"
    text += f" ({len(rows) - limit:,} not shown)" if len(rows) > limit else ""
    shown: list[dict[str, Any]] = [
        row | {"payload": json.dumps(row["payload"])[:VALUE_LENGTH]} for row in timers
    ]
    lines: list[RenderableType] = [table(shown), ""] if shown else []
    print_result(as_json, document, *lines, text)


@app.command(name="cancel")
def cancel_timers(
    name: str | None = None,
    /,
    *,
    which: TimerConditions = _ALL,
    everything: Annotated[bool, Parameter(name="--all", negative=(), help="All timers.")] = False,
    at: SteeringOptions = _SERVER_FROM_SETTINGS,
    as_json: AsJson = False,
) -> int:
    """Cancel pending timers of a running server: they are removed, and their callbacks are not called.

    Parameters
    ----------
    name
        The pipeline's name, as `--pipeline`.
    """
    if everything != (which == _ALL):
        raise ConfigError(
            "It is not clear which timers to cancel.",
            advice="Give conditions (--key, --timer, --due-before) or --all.",
        )
    chosen = {"key": which.key, "timer_id": which.timer, "due_before_ms": which.due_before_ms()}
    at = at if name is None else dataclasses.replace(at, pipeline=name)
    return steer(at, "cancel-timers", json.dumps(chosen), as_json=as_json)
