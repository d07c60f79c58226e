"""``mldserver windows``: shows the windows of a ledger, and runs those again that were set aside."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from mldserver.cli.looking import AsJson, Where, add, at_ledger, details, moment, table, tell, tell_json
from mldserver.errors import OperatorError
from mldserver.state.ledger import WindowState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mldserver.state.ledger import Ledger, LedgerState, Segment, WindowEntry

__all__ = ["app", "list_windows", "retry_windows", "show_window"]

_HELP = """
Show the windows of a pipeline, and run those again that were set aside. Servers that run are not disturbed.

```
mldserver windows list --out out/departures
mldserver windows list --out out/departures --state set_aside --json | jq -r '.[].window'
mldserver windows show 2013-01-01T10-00-00Z --out out/departures
mldserver windows retry 2013-01-01T10-00-00Z --out out/departures
```

A window is *open* while rows come, *cut* when its rows are fixed, *committed* when its output counts, *published*
when readers see it, and *set aside* when its job kept failing (`window_on_failure = dead_letter`).

Exit codes: 0 done, 2 there is no such window or ledger, or it cannot be read.
"""

app = App(name="windows", help=_HELP, help_format="markdown")

_NOWHERE: Final = Where()


@app.command(name="list")
def list_windows(
    *,
    state: Annotated[list[WindowState] | None, Parameter(negative=())] = None,
    retained: Annotated[bool, Parameter(name="--all", negative=())] = False,
    where: Where = _NOWHERE,
    as_json: AsJson = False,
) -> int:
    """List windows, oldest first: those that are not published, and counts of the others.

    Parameters
    ----------
    state
        Only windows in this state; may be repeated.
    retained
        Published windows too, as far as their segments are kept for late rows.
    """

    async def look(_ledger: Ledger, held: LedgerState) -> None:
        entries = sorted(held.windows.values(), key=_age)
        published = WindowState.PUBLISHED
        if state:
            chosen = [entry for entry in entries if entry.state in state]
        else:
            chosen = [entry for entry in entries if retained or as_json or entry.state is not published]
        if as_json:
            tell_json([_summary(entry) for entry in chosen])
            return
        tell(_listed(chosen), _counted(entries, shown=len(chosen)))

    at_ledger(where, look)
    return 0


@app.command(name="show")
def show_window(window: str, /, *, where: Where = _NOWHERE, as_json: AsJson = False) -> int:
    """Show all that the ledger knows of a window.

    Parameters
    ----------
    window
        The window's id, e.g. `2013-01-01T10-00-00Z` or `batch-000000000007`.
    """

    async def look(_ledger: Ledger, held: LedgerState) -> None:
        entry = _entry(held, window)
        if as_json:
            tell_json(_everything(entry))
            return
        tell(details(_facts(entry)))
        for title, segments in (("segments", entry.segments), ("waiting for the next", entry.pending)):
            if segments:
                tell("", _segments(title, segments))
        if entry.error is not None:
            tell("", details([("error", entry.error)]))

    at_ledger(where, look)
    return 0


@app.command(name="retry")
def retry_windows(*windows: str, where: Where = _NOWHERE, as_json: AsJson = False) -> int:
    """Run windows again that were set aside. A server that runs, or the next that starts, takes them.

    Parameters
    ----------
    windows
        Ids of windows, as `windows list --state set_aside` shows them.
    """
    if not windows:
        raise OperatorError("No window was named.", advice="`mldserver windows list` shows them.")

    async def work(ledger: Ledger, held: LedgerState) -> None:
        # All are looked at before one is changed: a slip in the second name must not leave half of it done.
        for window in windows:
            entry = _entry(held, window)
            if entry.state is not WindowState.SET_ASIDE:
                raise _not_set_aside(window, f"it is {_said(entry.state)}")
        again = []
        for window in dict.fromkeys(windows):
            if not await ledger.retry(window):
                raise _not_set_aside(window, "somebody else was faster")
            again.append(window)
            if not as_json:
                tell(details([(window, "is cut again: a server that runs computes it.")]))
        if as_json:
            tell_json({"retried": again})

    at_ledger(where, work)
    return 0


def _entry(held: LedgerState, window: str) -> WindowEntry:
    if (entry := held.windows.get(window)) is None:
        raise OperatorError(
            f"The ledger has no window {window}.",
            advice="`mldserver windows list --all` shows those it has; published ones are forgotten in time.",
        )
    return entry


def _not_set_aside(window: str, why: str) -> OperatorError:
    return OperatorError(
        f"Window {window} is not set aside: {why}.", advice="`mldserver windows list` shows which are."
    )


def _age(entry: WindowEntry) -> tuple[bool, int, str]:
    return entry.start_ms is None, entry.start_ms or 0, entry.window_id


def _said(state: WindowState) -> str:
    return state.replace("_", " ")


def _summary(entry: WindowEntry) -> dict[str, Any]:
    segments = (*entry.segments, *entry.pending)
    return {
        "window": entry.window_id,
        "state": str(entry.state),
        "revision": entry.revision,
        "attempts": entry.attempt,
        "owner": entry.owner,
        "start_ms": entry.start_ms,
        "end_ms": entry.end_ms,
        "segments": len(segments),
        "rows": sum(each.rows for each in segments),
        "bytes": sum(each.bytes for each in segments),
        "rows_waiting": sum(each.rows for each in entry.pending),
        "rows_out": entry.rows_out,
        "retained": entry.retained,
        "published_ms": entry.published_ms,
        "error": entry.error,
    }


def _everything(entry: WindowEntry) -> dict[str, Any]:
    return {
        **_summary(entry),
        "staging": entry.staging,
        "files": list(entry.files),
        "segments": [_segment(each) for each in entry.segments],
        "waiting": [_segment(each) for each in entry.pending],
    }


def _segment(segment: Segment) -> dict[str, Any]:
    return dataclasses.asdict(segment) | {"kind": str(segment.kind)}


def _listed(entries: Iterable[WindowEntry]) -> Any:
    made = table(
        "", "window", "state", ">revision", ">attempts", ">segments", ">rows", ">late", "owner", "error"
    )
    for entry in entries:
        told = _summary(entry)
        add(
            made,
            entry.window_id,
            _said(entry.state),
            str(entry.revision),
            str(entry.attempt),
            str(told["segments"]),
            f"{told['rows']:,}",
            f"{told['rows_waiting']:,}",
            entry.owner or "-",
            ((entry.error or "").splitlines() or [""])[0],
        )
    return made


def _counted(entries: list[WindowEntry], *, shown: int) -> str:
    counts = Counter(entry.state for entry in entries)
    told = ", ".join(f"{counts[state]:,} {_said(state)}" for state in WindowState if counts[state])
    hidden = len(entries) - shown
    return (told or "no windows") + (f" ({hidden:,} not shown)" if hidden else "")


def _facts(entry: WindowEntry) -> list[tuple[str, str]]:
    told = _summary(entry)
    facts = [
        ("window", entry.window_id),
        ("state", _said(entry.state)),
        ("start, end", f"{moment(entry.start_ms)}, {moment(entry.end_ms)}"),
        ("revision", f"{entry.revision}, after {entry.attempt} attempts"),
        ("rows", f"{told['rows']:,} in {told['segments']} segments of {told['bytes']:,} bytes"),
        ("owner", entry.owner or "-"),
        ("late rows", "lead to a next revision" if entry.retained else "go to the late dataset"),
        ("published", moment(entry.published_ms)),
    ]
    if entry.published_ms is not None or entry.staging is not None:
        facts.append(("output", f"{entry.rows_out:,} rows in {len(entry.files)} files"))
    return facts + ([("staging", entry.staging)] if entry.staging is not None else [])


def _segments(title: str, segments: Iterable[Segment]) -> Any:
    made = table(title, "path", "kind", ">revision", ">rows", ">bytes")
    for each in segments:
        add(made, each.path, str(each.kind), str(each.revision), f"{each.rows:,}", f"{each.bytes:,}")
    return made
