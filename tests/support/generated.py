"""The pages that are generated from the program. ``PYTHONPATH=tests python3 -m support.generated`` writes them again."""

from __future__ import annotations

from typing import Final

from conformance import comparison as conformance
from support import reference
from support.pages import DOCS

from mldserver.admin.metrics import METRICS
from mldserver.config.settings import Spec, specs
from mldserver.consumer import core as consumption
from mldserver.observe import log_events
from mldserver.observe.log_events import Event
from mldserver.protocol import states
from mldserver.protocol.states import TABLE, Input, State, Transition

COMMAND: Final = "PYTHONPATH=tests python3 -m support.generated"

_SETTINGS: Final = """\
# Settings

Every setting, its default, and what it does. `mldserver serve --help` shows the common settings, `--help-all` all.

The command line (`--line-limit`) overrides the environment (`MLDSERVER_LINE_LIMIT`), which overrides `mldserver.toml`
(`line_limit`) in the working directory, which overrides the default. Unknown keys are errors. Sizes are written `256 MiB`
or in bytes; durations `10 minutes`, `500 ms`, or in seconds.

```toml
# mldserver.toml
handler = "handlers.departures"
line_limit = "64 MiB"
flush_interval = "2 s"
```

## Several functions

A server runs several functions if the file has a table `[functions.NAME]` for each, with its handler. NAME is the pipeline's name:
a letter, then letters, digits and `_`.

```toml
# mldserver.toml
out = "/srv/mldserver"
log_level = "warning"

[functions.departures]
handler = "handlers.departures"
listen = ":7070"

[functions.orders]
handler = "shop.orders:Orders"
listen = ":7080"
on_failure = "skip"
settings = { threshold = 20 }
```

A function can also be a file `functions.d/NAME.toml` next to `mldserver.toml`, with the keys of one table. Next to a
settings file with another name, such as `orders.toml`, the folder is `orders.functions.d`.

* **Scope**: The tables below show the scope of each setting. A setting of scope *function* may stand in a function's table. A setting
  of scope *server* has one value for all functions, and stands at the top level.
* **Precedence**: The function's table overrides the command line, which overrides variables, which override the top level. Values
  outside the table are thus defaults for all functions. `handler`, `pipeline` and `rename_from` cannot be defaults. A `source` in
  the table also replaces a `stream` outside it, and the reverse.
* **Folders**: `out` outside the tables is the folder of the functions' folders: `/srv/mldserver/orders` above. `out` in a table is the
  function's own folder.
* **From one function to several**: Move `handler` into a table with the pipeline's name, and `out` with it if it was set. The function
  then keeps its ledger and its folder.
* **Shares**: `buffer_bytes`, `state_bytes` and `segment_disk_bytes` outside the tables are limits of the whole server. Functions without
  a limit of their own get equal parts, and also equal parts of the default number of `workers`.
* **Constants**: `settings` in a table is another name of `handler_settings`.
* **Secrets**: `${VARIABLE}` in a text of a function's table stands for the value of that environment variable.

The server does not start if two functions listen at one address or have one folder or ledger file, or if three functions read one
DynamoDB stream.

`mldserver serve handlers.departures shop.orders:Orders` runs several functions without a file. Each has the name of the last part of
its handler. The second listens 10 ports above the first, the third 20 ports.

Commands take `--function NAME` where the settings have several functions. On the command line of a tool, `--out` is the folder of that
one function, and options override its table.
"""


def settings_page() -> str:
    """Return every setting as Markdown: a table for each section."""
    sections: dict[str, list[Spec]] = {}
    for spec in specs().values():
        sections.setdefault(spec.section, []).append(spec)
    page = [_SETTINGS]
    for section, members in sections.items():
        page += [f"## {section}\n", "| setting | default | scope | what it does |", "|---|---|---|---|"]
        for spec in members:
            default = spec.shown_default.replace("`", "") or "(required)"
            meaning = spec.help.replace("|", "\\|")
            scope = "server" if spec.server else "function"
            page.append(f"| `{spec.name}` | `{default}` | {scope} | {meaning} |")
        page.append("")
    return "\n".join(page)


_EVENTS: Final = """\
# Events

The log: how to read it, what its levels mean, and every event.

Log lines are JSON on standard output (pretty on a terminal), or in `log_file`, which is opened again on SIGHUP or SIGUSR1. Names and
fields of events are stable. `mldserver logs` renders a log and follows it, across rotation:

```sh
mldserver logs -f mldserver.log --shard shardId-000000000003 --level warning
mldserver logs mldserver.log --event 'batch.*' --since '10 minutes'
```
"""


def events_page() -> str:
    """Return the log's contract and every event as Markdown: a table for each subject."""
    subjects: dict[str, list[tuple[str, Event]]] = {}
    for name, spec in log_events.EVENTS.items():
        subjects.setdefault(name.partition(".")[0], []).append((name, spec))
    _, _, contract = (log_events.__doc__ or "").replace("``", "`").partition("\n\n")
    page = [_EVENTS, contract]
    for subject, members in subjects.items():
        page += [f"## {subject}\n", "| event | level | meaning | fields |", "|---|---|---|---|"]
        for name, spec in members:
            fields = ", ".join(f"`{field}`" for field in spec.fields)
            meaning = spec.meaning.replace("``", "`").replace("|", "\\|")
            page.append(f"| `{name}` | {spec.levels.replace('|', ' or ')} | {meaning} | {fields} |")
        page.append("")
    return "\n".join(page)


_PROTOCOL: Final = """\
# The protocol

What the MultiLangDaemon and the server say to each other: messages, states, and the rules behind them.

Each message is a line of JSON. One connection is one shard. The daemon asks, and the server answers each request with one
status. Before that it may ask for checkpoints, one at a time.

From the daemon:

```json
{"action": "initialize", "shardId": "shardId-000000000000", "sequenceNumber": "TRIM_HORIZON", "subSequenceNumber": 0}
{"action": "processRecords", "records": [{"data": "e30=", "partitionKey": "a", "sequenceNumber": "7", "subSequenceNumber": 0, "approximateArrivalTimestamp": 1357000000000}], "millisBehindLatest": 0}
{"action": "checkpoint", "sequenceNumber": "7", "subSequenceNumber": 0, "error": null}
{"action": "shutdownRequested"}
{"action": "leaseLost"}
{"action": "shardEnded"}
```

From the server:

```json
{"action": "status", "responseFor": "initialize"}
{"action": "checkpoint", "sequenceNumber": "7", "subSequenceNumber": 0}
```

KCL 1.x says `shutdown` with the reason `ZOMBIE`, `TERMINATE` or `REQUESTED` in place of the last three.
"""

_DIAGRAM: Final = """\
## The states of a connection

An arrow is labelled with what happens, a slash, and what is done. The names are those of `State`, `Input` and `Action` in
`mldserver/protocol/states.py`.
"""


def protocol_page() -> str:
    """Return messages, state diagram and rules as Markdown."""
    _, _, rules = (states.__doc__ or "").replace("``", "`").partition("\n\n")
    title, _, rest = rules.partition("\n")
    rows = {state: dict(TABLE[state]) for state in State if TABLE[state]}
    everywhere = set.intersection(*(set(row.items()) for row in rows.values()))
    drawn = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(rows))}"]
    for state, row in rows.items():
        drawn += _arrows(
            str(state), {key: value for key, value in row.items() if (key, value) not in everywhere}
        )
    drawn += [f"    {State.CLOSED} --> [*]", "```", "", f"Every state but `{State.CLOSED}` leads to:", ""]
    drawn += [arrow.replace(" --> ", "* ").strip() for arrow in _arrows("", dict(sorted(everywhere)))]
    rules_of_states = ["", f"## {title}", "", rest.partition("\n")[2]]
    return "\n".join([_PROTOCOL, _DIAGRAM, *drawn, *rules_of_states, *_consumption()])


_CONSUMPTION: Final = """\
## A shard's consumption

What the server does with a shard's batches, whatever source they come from. The names are those of `Phase`, `Work`, `Signal` and
`Order` in `mldserver/consumer/core.py`.
"""


def _consumption() -> list[str]:
    """Return the rules and the two tables of a shard's consumption as Markdown."""
    _, _, rules = (consumption.__doc__ or "").replace("``", "`").partition("\n\n")
    page = [_CONSUMPTION, rules.partition("\n")[2].partition("\n")[2]]
    for kind, rows in (("phase", consumption.PHASES), ("work", consumption.WORK)):
        page += [f"| {kind} | signal | next | orders |", "|---|---|---|---|"]
        for state, row in rows.items():
            ways: dict[consumption.Move, list[str]] = {}
            for signal, move in row.items():
                ways.setdefault(move, []).append(f"`{signal}`")
            page += [
                f"| `{state}` | {', '.join(signals)} | `{move.to}` | {', '.join(each.name.lower() for each in move.orders)} |"
                for move, signals in ways.items()
            ]
        page.append("")
    return page


def _arrows(state: str, row: dict[Input, Transition]) -> list[str]:
    """Return an arrow for each way that leads out of a state; what happens on one way shares it."""
    ways: dict[Transition, list[str]] = {}
    for happened, transition in row.items():
        ways.setdefault(transition, []).append(str(happened))
    return [
        f"    {state} --> {to}: {', '.join(happened)} / {', '.join(each.name.lower() for each in actions)}"
        for (to, actions), happened in ways.items()
    ]


def monitoring_page() -> str:
    """Return the page with its table of metrics made anew; the rest of it is written by hand."""
    before, _, rest = (DOCS / "monitoring.md").read_text("utf-8").partition("| metric |")
    table = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        table.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return f"{before}{chr(10).join(table)}\n\n{rest.partition(chr(10) * 2)[2]}"


PAGES: Final = {
    "settings.md": settings_page,
    "events.md": events_page,
    "protocol.md": protocol_page,
    "monitoring.md": monitoring_page,
    "conformance.md": conformance.page,
    "api.md": reference.page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), "utf-8")
