"""``mldserver logs``: shows and follows a log, across rotation."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from mldserver.base.lines import LineSplitter
from mldserver.cli import ReaderGone
from mldserver.config.settings import Level  # cyclopts reads the annotations
from mldserver.errors import ConfigError, OperatorError
from mldserver.observe.log_lines import FileFollower, Selection, as_text, harmless, parse_event
from mldserver.windows import duration_ms

_HELP = """
Show a server's log, and follow it.

```
mldserver logs mldserver.log -n 50
mldserver logs -f mldserver.log --level warning
mldserver logs -f mldserver.log --shard shardId-000000000003 --event 'batch.*' --event 'checkpoint.*'
mldserver logs mldserver.log --since '10 minutes' --json | jq .seconds
journalctl -u mldserver -o cat | mldserver logs -
```

Lines that are not log events are shown unchanged, unless a filter is given.
"""

app = App(name="logs", help=_HELP, help_format="markdown")

_POLL_SECONDS: Final = 0.25
_CHUNK: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class LineView:
    """Which lines are shown, and in which form."""

    selection: Selection
    raw: bool
    """Lines as they are in the log."""
    terminal: bool
    colours: bool

    def shown(self, line: bytes) -> bytes | None:
        """Return what to show of a log line, without its end; None: nothing."""
        event = parse_event(line)
        if not self.selection.wants(event):
            return None
        if self.raw or event is None:
            return harmless(line.decode("utf-8", "backslashreplace")).encode() if self.terminal else line
        return as_text(event, colours=self.colours).encode("utf-8", "backslashreplace")


def since_time(text: str, now: datetime, *, option: str = "--since", ahead: bool = False) -> datetime:
    """Parse an option such as ``--since``: an ISO 8601 time (UTC without a zone), or a duration before ``now`` (``ahead``: after it).

    Raises ConfigError if it is neither.
    """
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        try:
            duration = timedelta(milliseconds=duration_ms(text))
            return now + duration if ahead else now - duration
        except (ValueError, OverflowError) as error:
            raise ConfigError(
                f"{option} {text!r} is neither a time nor a duration.",
                advice="Write for example '2026-11-21T10:00' or '10 minutes'.",
            ) from error
    return when if when.tzinfo else when.replace(tzinfo=UTC)


@app.default
def logs(
    file: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative=())] = False,
    shard: str | None = None,
    level: Level | None = None,
    event: Annotated[list[str] | None, Parameter(negative=())] = None,
    since: str | None = None,
    lines: Annotated[int | None, Parameter(name=("--lines", "-n"), validator=Number(gte=0))] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Show a log.

    Parameters
    ----------
    file
        The log file; `-` reads standard input.
    follow
        Follow the log as it grows, across rotation, until interrupted.
    shard
        Only this shard's events; `*` stands for any characters.
    level
        Only events of this level and above.
    event
        Only events of this name, e.g. `window.*`; may be repeated.
    since
        Only events from this time on: `2026-11-21T10:00` (UTC) or `10 minutes` (ago).
    lines
        Begin with the last N lines.
    json
        Show the lines as they are in the log, for other programs.
    """
    terminal = sys.stdout.isatty()
    view = LineView(
        Selection(shard, level, tuple(event or ()), since_time(since, datetime.now(UTC)) if since else None),
        raw=json,
        terminal=terminal,
        colours=terminal and not os.environ.get("NO_COLOR"),
    )
    with contextlib.suppress(ReaderGone):
        if file == "-":
            _print_lines(view, _standard_input_lines(), lines)
        else:
            show_file(Path(file), view, last=lines, follow=follow)


def _print_lines(view: LineView, lines: Iterable[bytes], last: int | None = None) -> None:
    """Print each log line that ``view`` selects as soon as it comes. With ``last``: at the end, print that many last lines."""
    out = sys.stdout.buffer
    shown = (text for line in lines if (text := view.shown(line)) is not None)
    for line in shown if last is None else deque(shown, maxlen=min(last, sys.maxsize)):
        out.write(line + b"\n")
        if last is None:
            out.flush()
    out.flush()


def _standard_input_lines() -> Iterator[bytes]:
    """Yield lines as they come. Raises OperatorError if standard input is closed or cannot be read."""
    if sys.stdin is None:
        raise OperatorError("Standard input is closed.", advice="Name a log file, or pipe a log in.")
    splitter = LineSplitter()
    while True:
        try:
            data = os.read(sys.stdin.fileno(), _CHUNK)
        except OSError as error:
            raise OperatorError(
                f"Standard input cannot be read: {error.strerror}.",
                advice="Name a log file, or pipe a log in.",
            ) from error
        yield from splitter.feed(data) if data else splitter.finish()
        if not data:
            return


def show_file(
    path: Path, view: LineView, *, last: int | None, follow: bool, wait: Callable[[float], None] = time.sleep
) -> None:
    """Show a file from its ``last`` lines on. With ``follow``, show new lines too, reading again after each ``wait``.

    Raises ConfigError if the file does not exist; with ``follow`` the file may appear later.
    """
    follower = FileFollower(path)
    if not follow:
        _print_lines(view, _all_lines(follower), last)
        return
    try:
        _print_lines(view, follower.read(), last)
        while True:
            wait(_POLL_SECONDS)
            _print_lines(view, follower.read())
    finally:
        _print_lines(view, follower.finish())


def _all_lines(follower: FileFollower) -> Iterator[bytes]:
    """Yield a file's lines, an unfinished last one too. Raises ConfigError if the file does not exist."""
    yield from follower.read()
    if not follower.opened:
        raise ConfigError(f"There is no file {follower.path}.", advice="Name the server's log_file.")
    yield from follower.finish()
