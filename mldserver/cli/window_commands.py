"""``mldserver windows``: shows the windows of a ledger, and decides about those whose job keeps failing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Annotated, Any

from cyclopts import App, Parameter

from mldserver.cli.ledger_tool import HERE, Where, at_ledger, settings_at, state_at
from mldserver.cli.render import AsJson, answer, details, parts, table, write_json, write_text
from mldserver.errors import OperatorError
from mldserver.ledger.contract import Decision, LedgerState, WindowEntry, WindowState

_HELP = """
Show the windows of a pipeline, and decide about windows whose job keeps failing. Running servers are not interrupted.

```
mldserver windows list --out out/departures
mldserver windows list --out out/departures --state set_aside --json | jq -r '.[].window'
mldserver windows show 2013-01-01T10-00-00Z --out out/departures
mldserver windows retry 2013-01-01T10-00-00Z --out out/departures
mldserver windows retry --published 2013-01-01T10-00-00Z --out out/departures
mldserver windows skip 2013-01-01T10-00-00Z --out out/departures
```

A window is *open* while rows arrive, *cut* when its rows are fixed, *committed* when its output counts, *published*
when readers see it, and *set aside* when its job kept failing (`window_on_failure = dead_letter`, or `set-aside`).
A *halted* window keeps failing too, and later windows wait: `retry` runs it at once; after `set-aside` or `skip` the other
windows continue. `retry --published` computes published windows again. The server reacts within its `flush_interval`.

Exit codes: 0 done, 2 the window or the ledger does not exist, or the ledger cannot be read.
"""

app = App(name="windows", help=_HELP, help_format="markdown")


Windows = Annotated[
    str, Parameter(help="Ids, as `windows list` shows them: `2013-01-01T10-00-00Z`, `batch-000000000007`.")
]


@app.command(name="list")
def list_windows(
    *,
    state: Annotated[list[WindowState] | None, Parameter(negative=())] = None,
    retained: Annotated[bool, Parameter(name="--all", negative=())] = False,
    where: Where = HERE,
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
        state_at(where).windows.values(),
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
    rows = [_row(entry) for entry in chosen]
    columns = "window state halted revision attempts segments rows rows_waiting owner error"
    answer(as_json, rows, table(rows, columns), text)


@app.command(name="show")
def show_window(window: Windows, /, *, where: Where = HERE, as_json: AsJson = False) -> None:
    """Show everything that the ledger stores about a window."""
    entry = _entry(state_at(where), window)
    segments, waiting = (
        [dataclasses.asdict(segment) | {"kind": str(segment.kind)} for segment in some]
        for some in (entry.segments, entry.pending)
    )
    more = {"staging": entry.staging, "files": list(entry.files), "segments": segments, "waiting": waiting}
    document = {**_row(entry), **more}
    columns = "path kind revision rows bytes"
    answer(as_json, document, *parts(document, segments=columns, waiting=columns))


@app.command(name="retry")
def retry_windows(
    *windows: Windows,
    published: Annotated[bool, Parameter(negative=())] = False,
    where: Where = HERE,
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
        _decide(windows, "recompute", "retried", text, where, as_json)
        return
    _decide(windows, "retry", "retried", "is tried again: a server that runs computes it.", where, as_json)


@app.command(name="set-aside")
def set_windows_aside(*windows: Windows, where: Where = HERE, as_json: AsJson = False) -> None:
    """Set halted windows aside, with their rows, so that later windows continue; `retry` runs them later."""
    text = "is set aside with its rows: the windows behind it go on."
    _decide(windows, "set_aside", "set_aside", text, where, as_json)


@app.command(name="skip")
def skip_windows(*windows: Windows, where: Where = HERE, as_json: AsJson = False) -> None:
    """Skip windows that are halted or were set aside: they count as published, without new output, for good.

    Their segments are deleted after `retention`, including waiting late rows; later rows go to the late
    dataset. What an earlier revision has published stays.
    """
    text = "is skipped: it counts as published, without new output, and {rows:,} rows are given up."
    _decide(windows, "skip", "skipped", text, where, as_json)


def _decide(
    windows: tuple[str, ...],
    decision: Decision,
    name: str,
    text: str,
    where: Where,
    as_json: bool,  # noqa: FBT001  # the command's own flag
) -> None:
    if not windows:
        raise OperatorError("No window was named.", advice="`mldserver windows list` shows them.")
    with at_ledger(settings_at(where)) as (ledger, held, runner):
        # All are looked at before one is changed: a slip in the second name must not leave half of it done.
        # Look up published windows that are not retained only if the operator names them.
        held.windows.update({entry.window_id: entry for entry in runner.run(ledger.find(windows))})
        for window in windows:
            entry = _entry(held, window)
            if decision == "recompute" and (why := _why_not_again(entry)):
                raise OperatorError(
                    f"Window {window} cannot be computed again: {why}.", did="Nothing was changed."
                )
            if decision not in (*_choices(entry), "recompute"):
                raise _refused(window, f"it is {_state_text(entry)}", _choices(entry))
        for window in dict.fromkeys(windows):
            entry = held.windows[window]
            rows = sum(s.rows for s in (*entry.segments, *entry.pending) if s.revision in {0, entry.revision})
            if not runner.run(ledger.decide(window, decision)):
                raise _refused(window, "somebody else was faster", ())
            if not as_json:
                write_text(details({window: text.format(rows=rows)}))
    if as_json:
        write_json({name: list(dict.fromkeys(windows))})


def _choices(entry: WindowEntry) -> tuple[Decision, ...]:
    if entry.state is WindowState.SET_ASIDE:
        return "retry", "skip"
    if not entry.is_halted:
        return ()
    return ("retry",) if entry.state is WindowState.COMMITTED else ("retry", "set_aside", "skip")


def _why_not_again(entry: WindowEntry) -> str:
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


def _refused(window: str, why: str, choices: tuple[Decision, ...]) -> OperatorError:
    others = ", ".join(f"`{choice.replace('_', '-')}`" for choice in choices)
    there = "`mldserver windows list` shows which are halted or set aside."
    return OperatorError(
        f"Nothing of the kind can be done with window {window}: {why}.",
        advice=f"What can be done is {others}." if others else there,
    )


def _entry(held: LedgerState, window: str) -> WindowEntry:
    if (entry := held.windows.get(window)) is None:
        raise OperatorError(
            f"The ledger has no window {window}.",
            advice="`mldserver windows list --all` shows those it has; published ones are forgotten in time.",
        )
    return entry


def _state_text(entry: WindowEntry) -> str:
    more = ", halted" if entry.is_halted else ", skipped" if entry.is_skipped else ""
    return entry.state.replace("_", " ") + more


def _row(entry: WindowEntry) -> dict[str, Any]:
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
