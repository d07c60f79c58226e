"""Writes the page of settings, from the table that the program uses: ``python -m mldserver.config > mldserver/docs/settings.md``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from mldserver.config.settings import specs

if TYPE_CHECKING:
    from mldserver.config.settings import Spec

_INTRODUCTION: Final = """\
# Settings

Every setting, its default, and what it does. `mldserver serve --help` shows those of the first days, `--help-all` all.

The command line (`--line-limit`) counts before the environment (`MLDSERVER_LINE_LIMIT`), that before `mldserver.toml`
(`line_limit`) in the working directory, that before the default. Unknown keys are errors. Sizes are written `256 MiB` or in
bytes; durations `10 minutes`, `500 ms`, or in seconds.

```toml
# mldserver.toml
handler = "handlers.departures"
line_limit = "64 MiB"
flush_interval = "2 s"
```
"""


def settings_page() -> str:
    """Return every setting as Markdown: a table for each section."""
    sections: dict[str, list[Spec]] = {}
    for spec in specs().values():
        sections.setdefault(spec.section, []).append(spec)
    page = [_INTRODUCTION]
    for section, members in sections.items():
        page += [f"## {section}\n", "| setting | default | what it does |", "|---|---|---|"]
        for spec in members:
            default = spec.shown_default.replace("`", "") or "(required)"
            meaning = spec.help.replace("|", "\\|")
            page.append(f"| `{spec.name}` | `{default}` | {meaning} |")
        page.append("")
    return "\n".join(page)


if __name__ == "__main__":
    sys.stdout.write(settings_page())
