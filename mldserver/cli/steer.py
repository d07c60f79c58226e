"""``mldserver pause``, ``resume``, ``flush``, ``drain-shard``, ``log-level`` and ``reload``: steer a running server."""

from __future__ import annotations

from typing import Annotated, Final

from cyclopts import App, Parameter

from mldserver.admin.http_client import NoAnswer
from mldserver.cli.ledger_tool import AsJson, plain, tell, tell_json
from mldserver.cli.status import HERE, At, ask
from mldserver.config.settings import Level  # noqa: TC001  # cyclopts reads the annotations
from mldserver.errors import EXIT_CLEAN, EXIT_OPERATOR, OperatorError

_ACT_SECONDS: Final = 900.0
"""A reload loads the handler, which may take its time, and waits for what is in hand."""

_HELP = """
{what}

```
{example}
```

{more}The server logs who asked for it (`admin.act`). On loopback it needs the token that the server has made beside its
ledger: run it as the server's user, with the server's settings, or --out. `mldserver help monitoring` tells more.

Exit codes: 0 done; 1 no server answers; 2 the server refuses, and says why.
"""

Shard = Annotated[str, Parameter(help="Its id, as `mldserver status` lists it.")]


def _app(name: str, what: str, example: str, more: str = "") -> App:
    text = _HELP.format(what=what, example=example, more=more and f"{more}\n\n")
    return App(name=name, help=text, help_format="markdown")


def _act(name: str, argument: str, at: At, *, as_json: bool) -> int:
    """Let the server act, and tell what became of it."""
    client = at.client(steers=True)
    ask(client, at.meant_pipeline())  # another pipeline's is left alone
    if (silence := client.silence()) is not None:
        raise NoAnswer(f"The server at {client.address} cannot act: {silence.rstrip('.')}.")
    answer = client.act(name, argument, seconds=_ACT_SECONDS)
    if as_json:
        tell_json({"done": answer.done, "text": answer.text})
    elif answer.done:
        tell(plain(answer.text))
    else:
        raise OperatorError(answer.text)
    return EXIT_CLEAN if answer.done else EXIT_OPERATOR


pause_app = _app(
    "pause",
    "Let a running server hold the answers of all shards, or of one, from their next batch on: their daemons wait and keep their "
    "leases, and nothing is delivered again.",
    "mldserver pause --out out/departures\nmldserver pause shardId-000000000003 --out out/departures",
    "`mldserver resume` lets them go on.",
)


@pause_app.default
def pause(shard: Shard = "", /, *, at: At = HERE, as_json: AsJson = False) -> int:
    """Pause a server, or one shard."""
    return _act("pause", shard, at, as_json=as_json)


resume_app = _app(
    "resume",
    "Let all shards go on that were paused or drained, or one of them.",
    "mldserver resume --out out/departures\nmldserver resume shardId-000000000003 --out out/departures",
)


@resume_app.default
def resume(shard: Shard = "", /, *, at: At = HERE, as_json: AsJson = False) -> int:
    """Resume a server, or one shard."""
    return _act("resume", shard, at, as_json=as_json)


flush_app = _app(
    "flush", "Make all rows durable that a server has in memory, now.", "mldserver flush --out out/departures"
)


@flush_app.default
def flush(*, at: At = HERE, as_json: AsJson = False) -> int:
    """Flush a server's rows."""
    return _act("flush", "", at, as_json=as_json)


drain_shard_app = _app(
    "drain-shard",
    "Make all durable that a shard gave, have it checkpointed, and hold its answer: its daemon may be killed then, or the lease "
    "moved, and no record is delivered again.",
    "mldserver drain-shard shardId-000000000003 --out out/departures",
    "`mldserver resume SHARD` lets it go on. (`mldserver drain` is another thing: it ends a whole pipeline.)",
)


@drain_shard_app.default
def drain_shard(shard: Shard, /, *, at: At = HERE, as_json: AsJson = False) -> int:
    """Drain one shard."""
    return _act("drain-shard", shard, at, as_json=as_json)


log_level_app = _app(
    "log-level",
    "Set how much a running server and its workers log, until it is started again.",
    "mldserver log-level debug --out out/departures",
)


@log_level_app.default
def log_level(
    level: Annotated[Level, Parameter(help="What is below it is not logged.")],
    /,
    *,
    at: At = HERE,
    as_json: AsJson = False,
) -> int:
    """Set the level of the log."""
    return _act("log-level", level, at, as_json=as_json)


reload_app = _app(
    "reload",
    "Let a running server go on with the handler's new code, without losing a connection or a row.",
    "mldserver reload --out out/departures",
    "New workers load the code and check it as `mldserver check` does; then they take all shards over at once. Code that does not "
    "load, or has another schema or other windows, is refused, and the old one goes on.",
)


@reload_app.default
def reload(*, at: At = HERE, as_json: AsJson = False) -> int:
    """Reload the handler."""
    return _act("reload", "", at, as_json=as_json)
