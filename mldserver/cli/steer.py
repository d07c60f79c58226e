"""``mldserver pause``, ``resume``, ``flush``, ``drain-shard``, ``log-level`` and ``reload``: steer a running server."""

from __future__ import annotations

import inspect
from typing import Annotated, Final

from cyclopts import App, Parameter

from mldserver.admin.http_client import ActResult
from mldserver.cli.render import AsJson, plain_text, print_result
from mldserver.cli.status import SteeringOptions, fetch_status
from mldserver.config.settings import Level
from mldserver.errors import EXIT_CLEAN, EXIT_OPERATOR, OperatorError

_FROM_SETTINGS: Final = SteeringOptions()
_ACT_SECONDS: Final = 900.0
"""A reload waits for the handler to load, which may take minutes, and for batches in flight."""

_HELP = """
{what}

```
{example}
```

{more}The server logs the request and the client (`admin.act`). The command uses the server's Unix socket: run it on the server's host
(ssh, kubectl exec) as the server's user or root, with the server's settings, or --out. `mldserver help monitoring` has the details.

Exit codes: 0 done; 1 no server answers; 2 the server refuses, and reports why.
"""

_POSITIONAL: Final = inspect.Parameter.POSITIONAL_ONLY
_ONE_SHARD: Final = inspect.Parameter(
    "shard",
    _POSITIONAL,
    annotation=Annotated[str, Parameter(help="The shard's id, as `mldserver status` lists it.")],
)
_ALL_OR_ONE: Final = _ONE_SHARD.replace(default="")
_LEVEL: Final = inspect.Parameter(
    "level", _POSITIONAL, annotation=Annotated[Level, Parameter(help="The lowest level that is logged.")]
)


def steer(at: SteeringOptions, act: str, argument: str, *, as_json: bool) -> int:
    """Send a request to a running server, print the result, and return the exit code. Raises OperatorError if it is refused."""
    result = ask(at, act, argument)
    if not (result.done or as_json):
        raise OperatorError(result.text)
    print_result(as_json, {"done": result.done, "text": result.text}, plain_text(result.text))
    return EXIT_CLEAN if result.done else EXIT_OPERATOR


def ask(at: SteeringOptions, act: str, argument: str) -> ActResult:
    """Send a request to a running server, and return the result. Raises NoAnswer and Refused."""
    client, pipeline = at.steering_client(), at.expected_pipeline()
    _, status = fetch_status(client, pipeline)  # raises for the server of another pipeline
    function = pipeline if pipeline and len(status.functions) > 1 else ""
    return client.act(act, argument, seconds=_ACT_SECONDS, function=function)


def _steering_command(name: str, what: str, example: str, more: str = "", *takes: inspect.Parameter) -> App:
    """Return the command ``name``, which sends a request of this name to a running server and prints the result.

    ``what``, ``example`` and ``more`` are parts of its help; ``takes`` is its argument, if it has one.
    """

    def act(*argument: str, at: SteeringOptions = _FROM_SETTINGS, as_json: AsJson = False) -> int:
        return steer(at, name, "".join(argument), as_json=as_json)

    # cyclopts reads the signature: replace `*argument` by the argument that this command takes.
    signature = inspect.signature(act, eval_str=True)
    options = [option for option in signature.parameters.values() if option.kind is option.KEYWORD_ONLY]
    act.__signature__ = signature.replace(parameters=[*takes, *options])  # type: ignore[attr-defined]  # functions may carry one (PEP 362)
    text = _HELP.format(what=what, example=example, more=more and f"{more}\n\n")
    app = App(name=name, help=text, help_format="markdown")
    app.default(act)
    return app


pause_app = _steering_command(
    "pause",
    "Pause a running server's answers to all shards, or to one, from their next batch on: their daemons wait and keep their "
    "leases, and no record is delivered again.",
    "mldserver pause --out out/departures\nmldserver pause shardId-000000000003 --out out/departures",
    "Without a shard the pause is kept in the ledger: every server of the pipeline follows it, and a restart keeps it. "
    "`mldserver resume` ends the pause.",
    _ALL_OR_ONE,
)
resume_app = _steering_command(
    "resume",
    "Resume all shards that were paused or drained, or a single shard.",
    "mldserver resume --out out/departures\nmldserver resume shardId-000000000003 --out out/departures",
    "",
    _ALL_OR_ONE,
)
flush_app = _steering_command(
    "flush", "Make all rows durable now that a server has in memory.", "mldserver flush --out out/departures"
)
drain_shard_app = _steering_command(
    "drain-shard",
    "Make all rows of a shard durable, checkpoint the shard, and hold its answer: its daemon may then be killed, or its lease "
    "moved, and no record is delivered again.",
    "mldserver drain-shard shardId-000000000003 --out out/departures",
    "`mldserver resume SHARD` continues. (`mldserver drain` is a different command: it drains a whole pipeline.)",
    _ONE_SHARD,
)
log_level_app = _steering_command(
    "log-level",
    "Set the lowest level that a running server and its workers log, until the server is restarted.",
    "mldserver log-level debug --out out/departures",
    "",
    _LEVEL,
)
reload_app = _steering_command(
    "reload",
    "Load the handler's new code in a running server, without losing a connection or a row.",
    "mldserver reload --out out/departures",
    "New workers load the code and check it as `mldserver check` does; then they take over all shards at once. Code that does not "
    "load, or has another schema or other windows, is refused, and the old code stays in use.",
)
