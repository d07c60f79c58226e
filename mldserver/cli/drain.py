"""``mldserver drain``: the servers of a pipeline stop, and everything they have is published."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cyclopts import App

from mldserver.cli.ledger_tool import at_ledger
from mldserver.cli.serve import Config, Handler, takes_settings
from mldserver.cli.stdio import working_directory
from mldserver.config import resolve

if TYPE_CHECKING:
    from mldserver.ledger.contract import LedgerState
    from mldserver.ledger.operations import Ledger

_HELP = """
Drain a pipeline: its servers take nothing more in, close and publish every open window, and exit with code 0.

```
mldserver drain handlers.departures --out out/departures
```

Give it the settings of the servers, and the handler as they run it. It waits until all others have left, on whatever host,
and closes and publishes what they leave; what stays are the positions. After it the pipeline can be started with another
window size, schema or name: `mldserver help operations` has the procedure for each change.

Windows that are open are closed before their time: rows that come for them later are late. A signal ends the drain by
force, without loss; the next one goes on, and a start without any change just serves again.

Exit codes: 0 everything is published; 2 there is no such ledger; else as for `mldserver serve`.
"""

app = App(name="drain", help=_HELP, help_format="markdown", usage="Usage: mldserver drain HANDLER [OPTIONS]")


def drain(handler: Handler = None, /, *, config: Config = None, **given: object) -> int:
    """Drain the pipeline and return the exit code. ``given`` are raw settings by name.

    Raises OperatorError when there is no ledger to drain: none is made.
    """
    settings = resolve(
        {"handler": handler, **given}, environ=os.environ, folder=working_directory(), config=config
    )

    async def can_be_read(_ledger: Ledger, _held: LedgerState) -> None:
        """Then it can be drained."""

    at_ledger(settings, can_be_read)
    from mldserver.cli.run_server import live  # noqa: PLC0415  # `--help` and wrong settings must not wait for its imports

    return live(settings, drain=True)


takes_settings(app, drain)
