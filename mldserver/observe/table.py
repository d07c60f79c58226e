"""The README's table of log events, from the registry."""

from __future__ import annotations

from mldserver.observe.events import EVENTS

__all__ = ["events_table"]


def events_table() -> str:
    """Return every event as a Markdown table: name, level, meaning, own fields."""
    lines = ["| event | level | meaning | fields |", "|---|---|---|---|"]
    for name, spec in EVENTS.items():
        fields = ", ".join(f"`{field}`" for field in spec.fields)
        meaning = spec.meaning.replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{name}` | {spec.levels.replace('|', ' or ')} | {meaning} | {fields} |")
    return "\n".join(lines) + "\n"
