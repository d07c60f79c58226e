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
            meaning = f"{spec.help}{spec.choices}".replace("|", "\\|")
            lines.append(f"| `{spec.name}` | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"
