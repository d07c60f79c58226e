"""``mldserver windows``: shows the windows of a ledger, and decides about those whose job keeps failing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Annotated, Any

from cyclopts import App, Parameter

from mldserver.base.uris import redacted
from mldserver.cli.ledger_tool import FROM_SETTINGS, LedgerOptions, ledger_settings, open_ledger, read_ledger
from mldserver.cli.render import (
    AsJson,
    details,
    facts_and_tables,
    print_result,
    table,
    write_json,
    write_text,
)
from mldserver.cli.replay import replay_windows
from mldserver.config.resolve import sink_of
from mldserver.errors import MldserverError, OperatorError
from mldserver.ledger.contract import Decision, LedgerState, WindowEntry, WindowState
from mldserver.sinks import find

_HELP = """
Show the windows of a pipeline, and decide about windows whose job keeps failing. Running servers are not interrupted.

```
mldserver windows list --out out/departures
mldserver windows list --out out/departures --state set_aside --json | jq -r '.[].window'
mldserver windows show 2013-01-01T10-00-00Z --out out/departures
mldserver windows retry 2013-01-01T10-00-00Z --out out/departures
mldserver windows retry --published 2013-01-01T10-00-00Z --out out/departures
mldserver windows skip 2013-01-01T10-00-00Z --out out/departures
mldserver windows replay --handler mypackage.new --since '2 days' --to /tmp/new --out out/departures
```

A window is *open* while rows arrive, *cut* when its rows are fixed, *committed* when its output counts, *published*
when readers see it, and *set aside* when its job kept failing (`window_on_failure = dead_letter`, or `set-aside`).
A *halted* window keeps failing too, and later windows wait: `retry` runs it at once; after `set-aside` or `skip` the other
windows continue. `retry --published` computes published windows again, `replay` into another folder, to compare.
The server reacts within its `flush_interval`.

Exit codes: 0 done, 2 the window or the ledger does not exist, or the ledger cannot be read.
"""

app = App(name="windows", help=_HELP, help_format="markdown")
app.command(replay_windows, name="replay")


Windows = Annotated[
    str, Parameter(help="Ids, as `windows list` shows them: `2013-01-01T10-00-00Z`, `batch-000000000007`.")
]


@app.command(name="list")
def list_windows(
    *,
    state: Annotated[list[WindowState] | None, Parameter(negative=())] = None,
    retained: Annotated[bool, Parameter(name="--all", negative=())] = False,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """List the windows that are not published, oldest first, and counts of the others.

    Parameters
    ----------
    state
        Only windows in this state; may be repeated.
    retained
        Also published windows whose segments are kept for late rows.
    """
    entries = sorted(
        read_ledger(where).windows.values(),
        key=lambda entry: (entry.start_ms is None, entry.start_ms or 0, entry.window_id),
    )
    published = WindowState.PUBLISHED
    if state:
        chosen = [entry for entry in entries if entry.state in state]
    else:
        chosen = [entry for entry in entries if retained or as_json or entry.state is not published]
    counts = Counter(entry.state for entry in entries)
    text = ", ".join(f"{counts[kind]:,} {kind.replace('_', ' ')}" for kind in WindowState if counts[kind])
    if halted := sum(entry.is_halted for entry in entries):
        text += f"; {halted:,} halted"
    hidden = len(entries) - len(chosen)
    text = (text or "no windows") + (f" ({hidden:,} not shown)" if hidden else "")
    versions, note = _table_versions(where)
    rows = [_window_row(entry) | {"table_version": versions.get(entry.window_id)} for entry in chosen]
    columns = "window state halted revision attempts segments rows rows_waiting owner error"
    columns += " table_version" * bool(versions)
    print_result(as_json, rows, table(rows, columns), text, *filter(None, [note]))


@app.command(name="show")
def show_window(window: Windows, /, *, where: LedgerOptions = FROM_SETTINGS, as_json: AsJson = False) -> None:
    """Show everything that the ledger stores about a window, and what Spark did for it, if a server that runs here knows."""
    entry = _find_window(read_ledger(where), window)
    segments, waiting = (
        [dataclasses.asdict(segment) | {"kind": str(segment.kind)} for segment in some]
        for some in (entry.segments, entry.pending)
    )
    document = _window_row(entry) | {
        "table_version": _table_versions(where)[0].get(window),
        "staging": entry.staging,
        **_spark_work(where, window),
        "files": list(entry.files),
        "segments": segments,
        "waiting": waiting,
    }
    columns = "path kind revision rows bytes"
    print_result(as_json, document, *facts_and_tables(document, segments=columns, waiting=columns))


@app.command(name="retry")
def retry_windows(
    *windows: Windows,
    published: Annotated[bool, Parameter(negative=())] = False,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """Run windows at once that are halted or were set aside. A running server runs them, or the next server that starts.

    Parameters
    ----------
    published
        Compute published windows again instead, as their next revisions: they replace the output that is there, or fill
        a new table. Possible while their segments are kept (`retention`).
    """
    if published:
        text = "is computed again: a server that runs publishes its next revision."
        _apply_decision(windows, "recompute", "retried", text, where, as_json)
        return
    _apply_decision(
        windows, "retry", "retried", "is tried again: a server that runs computes it.", where, as_json
    )


@app.command(name="set-aside")
def set_windows_aside(
    *windows: Windows, where: LedgerOptions = FROM_SETTINGS, as_json: AsJson = False
) -> None:
    """Set halted windows aside, with their rows, so that later windows continue; `retry` runs them later."""
    text = "is set aside with its rows: the windows behind it go on."
    _apply_decision(windows, "set_aside", "set_aside", text, where, as_json)


@app.command(name="skip")
def skip_windows(*windows: Windows, where: LedgerOptions = FROM_SETTINGS, as_json: AsJson = False) -> None:
    """Skip windows that are halted or were set aside: they count as published, without new output, for good.

    Their segments are deleted after `retention`, including waiting late rows; later rows go to the late
    dataset. What an earlier revision has published stays.
    """
    text = "is skipped: it counts as published, without new output, and {rows:,} rows are given up."
    _apply_decision(windows, "skip", "skipped", text, where, as_json)


def _apply_decision(
    windows: tuple[str, ...],
    decision: Decision,
    name: str,
    text: str,
    where: LedgerOptions,
    as_json: bool,  # noqa: FBT001  # the command's own flag
) -> None:
    """Store an operator's decision about windows in the ledger, where servers find it, and print ``text`` for each window.

    ``name`` is the key of the JSON result. Raises OperatorError if a window is unknown or its state does not allow it.
    """
    if not windows:
        raise OperatorError("No window was named.", advice="`mldserver windows list` shows them.")
    with open_ledger(ledger_settings(where)) as (ledger, state, runner):
        # The state lacks published windows that are not retained: look up those that the operator names.
        state.windows.update({entry.window_id: entry for entry in runner.run(ledger.find(windows))})
        # Check all windows before one is changed, so that an error in the second name changes nothing.
        for window in windows:
            entry = _find_window(state, window)
            if decision == "recompute" and (why := _why_not_recomputable(entry)):
                raise OperatorError(
                    f"Window {window} cannot be computed again: {why}.", did="Nothing was changed."
                )
            if decision not in (*_possible_decisions(entry), "recompute"):
                raise _impossible(window, f"it is {_state_text(entry)}", _possible_decisions(entry))
        for window in dict.fromkeys(windows):
            entry = state.windows[window]
            rows = sum(s.rows for s in (*entry.segments, *entry.pending) if s.revision in {0, entry.revision})
            if not runner.run(ledger.decide(window, decision)):
                raise _impossible(window, "somebody else was faster", ())
            if not as_json:
                write_text(details({window: text.format(rows=rows)}))
    if as_json:
        write_json({name: list(dict.fromkeys(windows))})


def _possible_decisions(entry: WindowEntry) -> tuple[Decision, ...]:
    """Return what an operator may decide about a window in its present state, except ``recompute``."""
    if entry.state is WindowState.SET_ASIDE:
        return "retry", "skip"
    if not entry.is_halted:
        return ()
    return ("retry",) if entry.state is WindowState.COMMITTED else ("retry", "set_aside", "skip")


def _why_not_recomputable(entry: WindowEntry) -> str:
    """Return why a published window cannot be computed again; empty if it can."""
    if entry.can_be_recomputed:
        return ""
    if entry.state is not WindowState.PUBLISHED:
        return f"it is {_state_text(entry)}, not published"
    if entry.is_skipped:
        return "it was skipped, and stays as it is"
    return (
        "its segments are deleted. They are kept for `retention` and within `retention_bytes`, with `late = recompute`, "
        "and until the handler's rows change"
    )


def _impossible(window: str, why: str, choices: tuple[Decision, ...]) -> OperatorError:
    """Return the error for a decision that a window's state does not allow. ``choices``: the decisions that it allows."""
    others = ", ".join(f"`{choice.replace('_', '-')}`" for choice in choices)
    hint = "`mldserver windows list` shows which are halted or set aside."
    return OperatorError(
        f"Nothing of the kind can be done with window {window}: {why}.",
        advice=f"What can be done is {others}." if others else hint,
    )


def _table_versions(where: LedgerOptions) -> tuple[dict[str, str], str]:
    """Return the version of the sink's table for each window, as far as the table has them; and why it cannot be read."""
    sink = sink_of(ledger_settings(where))
    versions = None if sink is None else getattr(find(sink.format), "versions", None)
    if versions is None:
        return {}, ""
    try:
        return versions(sink), ""
    except Exception as error:  # noqa: BLE001  # the table's library raises errors of its own; the ledger's windows are shown all the same
        return {}, f"The table {sink} cannot be read: {redacted(str(error))}"


def _spark_work(where: LedgerOptions, window: str) -> dict[str, Any]:
    """Return the Spark application, the jobs and the stages of a window, as the server shows them; nothing if none answers."""
    from mldserver.cli.status import ServerOptions, fetch_status  # noqa: PLC0415  # only this command asks a server

    of_ledger = {each.name: getattr(where, each.name) for each in dataclasses.fields(where)}
    server = ServerOptions(**of_ledger)
    try:
        _, status = fetch_status(server.client(), server.expected_pipeline())
    except MldserverError:
        return {}
    row = next((row for row in reversed(status.windows.latest) if row.id == window and row.spark_jobs), None)
    if row is None:
        return {}
    spark = status.spark
    return {
        "spark_application": spark and spark.application,
        "spark_ui": spark and spark.ui,
        "spark_jobs": list(row.spark_jobs),
        "spark_stages": [f"{number}: {seconds:.3f} s" for number, seconds in row.stage_seconds.items()],
    }


def _find_window(state: LedgerState, window: str) -> WindowEntry:
    if (entry := state.windows.get(window)) is None:
        raise OperatorError(
            f"The ledger has no window {window}.",
            advice="`mldserver windows list --all` shows those it has; published ones are forgotten in time.",
        )
    return entry


def _state_text(entry: WindowEntry) -> str:
    more = ", halted" if entry.is_halted else ", skipped" if entry.is_skipped else ""
    return entry.state.replace("_", " ") + more


def _window_row(entry: WindowEntry) -> dict[str, Any]:
    segments = (*entry.segments, *entry.pending)
    return {
        "window": entry.window_id,
        "state": str(entry.state),
        "halted": entry.is_halted,
        "skipped": entry.is_skipped,
        "revision": entry.revision,
        "attempts": entry.attempt,
        "owner": entry.owner,
        "start_ms": entry.start_ms,
        "end_ms": entry.end_ms,
        "segments": len(segments),
        "rows": sum(segment.rows for segment in segments),
        "bytes": sum(segment.bytes for segment in segments),
        "rows_waiting": sum(segment.rows for segment in entry.pending),
        "rows_out": entry.rows_out,
        "retained": entry.retained,
        "published_ms": entry.published_ms,
        "error": entry.error,
    }
