"""``mldserver state``: shows the keyed state of a pipeline, as its last flush stored it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter, validators
from rich.console import RenderableType

from mldserver.cli.ledger_tool import FROM_SETTINGS, LedgerOptions, ledger_settings, open_ledger
from mldserver.cli.render import AsJson, details, format_size, print_result, table
from mldserver.errors import OperatorError
from mldserver.windows import counted

if TYPE_CHECKING:
    from mldserver.ledger.contract import LedgerState
    from mldserver.output.store import OutputStore

_HELP = """
Show the state that a handler keeps for its keys (`ctx.state`). The command reads the ledger and its state files; servers may run.

```
mldserver state show departures
mldserver state show --out /srv/departures --key UA-1545
mldserver state show departures --limit 1000 --json | jq -r '.entries[] | "\\(.key) \\(.value)"'
```

The state is that of the last flush: a running server may have newer values in memory, for up to `flush_interval`.

Exit codes: 0 done, 2 the key has no state, or the ledger does not exist or cannot be read.
"""

app = App(name="state", help=_HELP, help_format="markdown")

VALUE_LENGTH = 200
"""A table shows so many characters of a value; JSON shows all."""


@app.command(name="show")
def show_state(
    name: str | None = None,
    /,
    *,
    key: str | None = None,
    limit: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 20,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """Show the state of one key, or of the keys with the largest states. Deleted and expired states are left out.

    Parameters
    ----------
    name
        The pipeline's name, as `--pipeline`.
    key
        A partition key. For changes that are read directly from DynamoDB Streams: the item's key as JSON.
    limit
        How many keys to show at most.
    """
    from mldserver.assembly import store_of  # noqa: PLC0415  # the whole server: `--help` must not wait for it
    from mldserver.runtime.state_values import decode_state  # noqa: PLC0415  # see above

    settings = ledger_settings(where if name is None else dataclasses.replace(where, pipeline=name))
    with open_ledger(settings) as (_, state, _):
        rows = [row for row in stored_entries(state, store_of(settings), key) if row.pop("timer") is None]
    if key is not None and not rows:
        raise OperatorError(
            f"The key {key!r} has no state in the pipeline {settings.pipeline}.",
            advice="`mldserver state show` without --key shows keys that have one. A state that was just written is stored "
            "with the next flush.",
        )
    rows.sort(key=lambda row: (-row["bytes"], row["key"]))
    # Decode what is shown only: a store may have millions of keys.
    entries = [row | {"value": msgspec.to_builtins(decode_state(row["value"]))} for row in rows[:limit]]
    files = [file for file in state.state_files.values() if file.needed]
    stores = len({row["store"] for row in rows})
    file_bytes = sum(file.bytes for file in files)
    document = {
        "pipeline": settings.pipeline,
        "keys": len(rows),
        "stores": stores,
        "files": len(files),
        "file_bytes": file_bytes,
        "entries": entries,
    }
    if key is not None:
        print_result(as_json, document, details(entries[0] | {"value": json.dumps(entries[0]["value"])}))
        return
    text = f"{counted(len(rows), 'key')} in {counted(stores, 'store')}; {counted(len(files), 'file')}, {format_size(file_bytes)}"
    if not state.stores:
        text = f"The pipeline {settings.pipeline} has no keyed state: no handler that takes `ctx` has opened a shard."
    elif len(rows) > limit:
        text += f" ({counted(len(rows) - limit, 'key')} not shown)"
    shown = [row | {"value": json.dumps(row["value"])[:VALUE_LENGTH]} for row in entries]
    lines: list[RenderableType] = [table(shown, "key store bytes expires_ms value"), ""] if shown else []
    print_result(as_json, document, *lines, text)


def stored_entries(state: LedgerState, store: OutputStore, key: str | None) -> Iterator[dict[str, Any]]:
    """Yield the present entries of all stores, or of one key: states (``timer`` is None) and timers, with encoded values.

    Raises OSError for a missing file.
    """
    from mldserver.coordinator.core import state_files  # noqa: PLC0415  # `--help` must not wait for Arrow
    from mldserver.coordinator.store_files import all_expired_ms  # noqa: PLC0415  # see above
    from mldserver.stores import key_bytes  # noqa: PLC0415  # see above

    files = [file for file in state.state_files.values() if file.needed]
    tables = {}
    for file in files:
        with store.parquet(file.path) as content:
            tables[file.path] = content.read()
    expired = all_expired_ms(state)
    wanted = None if key is None else key_bytes(key)
    for store_id in sorted({store_id for file in files for store_id in file.needed}):
        entries = state_files.entries(
            [(tables[file.path], file) for file in files if store_id in file.needed],
            state.stores[store_id],
            expired_ms=expired.get(store_id),
        )
        for entry in entries.to_pylist():
            if wanted in {None, entry["key"]}:
                yield {
                    "key": str(entry["key"], "utf-8", "surrogatepass"),
                    "timer": entry["timer"],
                    "store": store_id,
                    "bytes": len(entry["value"]),
                    "expires_ms": entry["expires_ms"],
                    "value": entry["value"],
                }
