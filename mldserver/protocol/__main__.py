"""``python -m mldserver.protocol > mldserver/docs/protocol.md`` writes the page of the protocol, from its table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from mldserver.protocol import states
from mldserver.protocol.states import TABLE, State

if TYPE_CHECKING:
    from mldserver.protocol.states import Input, Transition

_INTRODUCTION: Final = """\
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
    return "\n".join([_INTRODUCTION, _DIAGRAM, *drawn, "", f"## {title}", "", rest.partition("\n")[2]])


def _arrows(state: str, row: dict[Input, Transition]) -> list[str]:
    """Return an arrow for each way that leads out of a state; what happens on one way shares it."""
    ways: dict[Transition, list[str]] = {}
    for happened, transition in row.items():
        ways.setdefault(transition, []).append(str(happened))
    return [
        f"    {state} --> {to}: {', '.join(happened)} / {', '.join(each.name.lower() for each in actions)}"
        for (to, actions), happened in ways.items()
    ]


if __name__ == "__main__":
    sys.stdout.write(protocol_page())
