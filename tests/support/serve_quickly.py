"""``mldserver serve`` with shorter constants, which no option sets: ``python -P serve_quickly.py CONSTANTS HANDLER --option value …``.

``CONSTANTS`` is JSON (``Settings.constants``). Every option has a value; an option that is repeated is a list.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mldserver.cli.serve import run_server
from mldserver.config.resolve import resolve
from mldserver.config.settings import specs


def main(constants: str, handler: str, *options: str) -> int:
    """Serve; return the exit code."""
    names = {spec.option: spec.name for spec in specs().values()}
    given: dict[str, Any] = {"handler": handler}
    for option, value in zip(options[::2], options[1::2], strict=True):
        name = names[option]
        given[name] = [*given.get(name, ()), value] if specs()[name].kind.many else value
    settings = resolve(given, environ=os.environ, folder=Path.cwd())
    return run_server(replace(settings, constants=json.loads(constants)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
