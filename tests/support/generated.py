"""The pages that are generated from the program. ``PYTHONPATH=tests python3 -m support.generated`` writes them again."""

from __future__ import annotations

from typing import Final

from conformance import comparison as conformance
from support import reference
from support.pages import DOCS

from mldserver.admin.metrics import METRICS
from mldserver.config.settings import Spec, specs
from mldserver.consumer import core as consumption
from mldserver.functions.lifecycle import CELLS, DONE, NO_OP, Shown
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

A server with [several functions](functions.md#settings) has a table of settings for each. The scope of a setting says whether it may stand
there.
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


_DOES: Final = {DONE: "●", NO_OP: "○"}


def functions_page() -> str:
    """Return the page with its tables of states and commands made anew; the rest of it is written by hand."""
    page = (DOCS / "functions.md").read_text("utf-8")
    states = [f"| {state} | {meaning} |" for state, meaning in reference.member_docs(Shown).items()]
    page = _with_table(page, "| state | meaning |", "|---|---|", states)
    commands = [
        f"| {command} | {' | '.join(_DOES.get(cell) or _advice(cell) for cell in cells.values())} |"
        for command, cells in CELLS.items()
    ]
    head = f"| command | {' | '.join(Shown)} |"
    return _with_table(page, head, "|---" * (1 + len(Shown)) + "|", commands)


def _advice(cell: str) -> str:
    """Return a refusal's advice without the commands that it names."""
    return cell.partition(": `")[0].removesuffix(" Then deploy it.").rstrip(".").lower()


def _with_table(page: str, head: str, line: str, rows: list[str]) -> str:
    """Return a page with the rows of a table made anew; the first word of the head finds it."""
    start = page.index(head.partition(" |")[0])
    rest = page[start:].partition("\n\n")[2]
    table = "\n".join([head, line, *rows])
    return f"{page[:start]}{table}\n\n{rest}"


PAGES: Final = {
    "functions.md": functions_page,
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
