"""The README's table of settings, from the one that the program uses."""

from __future__ import annotations

from itertools import groupby

from mldserver.config.settings import specs

__all__ = ["settings_table"]


def settings_table() -> str:
    """Return every setting as a Markdown table: TOML key, default, meaning, by section."""
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    for section, members in groupby(specs().values(), key=lambda spec: spec.section):
        lines.append(f"| **{section}** | | |")
        for spec in members:
            default = spec.shown_default.replace("`", "") or "(required)"
            lines.append(f"| `{spec.name}` | `{default}` | {_meaning(spec.help, spec.kind.allowed)} |")
    return "\n".join(lines) + "\n"


def _meaning(meaning: str, allowed: str) -> str:
    """Add the choices where the values are a few words."""
    choices = f" ({allowed})" if " | " in allowed and "(" not in allowed else ""
    return f"{meaning}{choices}".replace("|", "\\|")
