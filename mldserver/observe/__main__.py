"""Writes the page of log events, from the registry that the program uses: ``python -m mldserver.observe > mldserver/docs/events.md``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from mldserver.observe import log_events

if TYPE_CHECKING:
    from mldserver.observe.log_events import Event

_INTRODUCTION: Final = """\
# Events

The log: how to read it, what its levels mean, and every event.

Log lines are JSON on standard output (pretty on a terminal), or in `log_file`, which is opened again on SIGHUP. Names and
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
    page = [_INTRODUCTION, contract]
    for subject, members in subjects.items():
        page += [f"## {subject}\n", "| event | level | meaning | fields |", "|---|---|---|---|"]
        for name, spec in members:
            fields = ", ".join(f"`{field}`" for field in spec.fields)
            meaning = spec.meaning.replace("``", "`").replace("|", "\\|")
            page.append(f"| `{name}` | {spec.levels.replace('|', ' or ')} | {meaning} | {fields} |")
        page.append("")
    return "\n".join(page)


if __name__ == "__main__":
    sys.stdout.write(events_page())
