"""``mldserver top``: a running server's status, live in a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal

from cyclopts import App, Parameter
from rich.console import RenderableType

from mldserver.admin.document import Shard, Status, Totals
from mldserver.admin.http_client import Client, NoAnswer
from mldserver.cli import status
from mldserver.cli.ledger_tool import details, moment, plain
from mldserver.cli.status import HERE, Rates, ServerOptions
from mldserver.errors import OperatorError

_HELP = """
Show a running server's status live, in a terminal.

```
mldserver top
mldserver top --admin unix:/run/departures.admin --sort rows --shard shardId-00000000000
```

Keys: `q` quits, `s` sorts by the next column, `r` the other way round, `/` types a part of a shard's id (Enter keeps it,
Escape shows all). When no server answers, it shows what the ledger holds, says so, and goes on asking.
"""

app = App(name="top", help=_HELP, help_format="markdown")

_LOOK_SECONDS: Final = 1.0
_LEDGER_SECONDS: Final = 5.0
"""A ledger may be a table that is paid for by what is read."""
_LEAST_SHARDS: Final = 5
_SEEN_SHARDS: Final = 3
"""At least; where fewer would be seen, they come first."""
_AROUND_SHARDS: Final = 6
"""Lines of the head, of the table's title and columns, and between them."""
_WIDE: Final = 80
"""Columns of a terminal that has room for all of a shard's."""
_NOTHING: Final = Rates()
_NO_LETTERS: Final = re.compile(r"\x1b[\[O][\d;]*.")
"""Arrows and the like, which begin with what alone is Escape."""

Order = Literal["lag", "records", "rows", "age", "shard"]


_ORDERS: Final[dict[Order, tuple[str, Callable[[Shard, Rates], float | str]]]] = {
    # What is not told is the least.
    "lag": ("lag", lambda shard, _: -(-1 if shard.lag_ms is None else shard.lag_ms)),
    "records": ("records/s", lambda _, rates: -rates.records),
    "rows": ("rows/s", lambda _, rates: -rates.rows),
    "age": ("not durable", lambda shard, _: -(shard.durable_age_seconds or 0)),
    "shard": ("shard", lambda shard, _: shard.id),
}
"""Of each order: the column's title, and by what shards are sorted."""


@dataclass(frozen=True, slots=True)
class ShardsView:
    """What is shown of the shards, and in which order."""

    order: Order = "lag"
    reverse: bool = False
    part: str = ""
    """Of the ids that are shown; ``*`` stands for any characters."""
    typing: bool = False

    def pressed(self, key: str) -> ShardsView:
        """Return what is shown after a key."""
        if self.typing and key.isprintable():
            return replace(self, part=self.part + key)
        orders = list(_ORDERS)
        changes: dict[str, dict[str, Any]] = {
            "\x1b": {"part": "", "typing": False},
            "\n": {"typing": False},
            "\r": {"typing": False},
            "\x7f": {"part": self.part[:-1]},
            "/": {"part": "", "typing": True},
            "s": {"order": orders[(orders.index(self.order) + 1) % len(orders)]},
            "r": {"reverse": not self.reverse},
        }
        return replace(self, **changes.get(key, {}))

    def of(self, shards: tuple[Shard, ...], rates: dict[str, Rates]) -> list[Shard]:
        """Return the shards that are shown, in order."""
        _, key = _ORDERS[self.order]
        chosen = [shard for shard in shards if fnmatchcase(shard.id, f"*{self.part}*")]
        chosen.sort(key=lambda shard: shard.id)
        chosen.sort(key=lambda shard: key(shard, rates.get(shard.id, _NOTHING)), reverse=self.reverse)
        return chosen

    def __str__(self) -> str:
        cursor = "_" if self.typing else ""
        way = ", the other way round" if self.reverse else ""
        part = self.part or ("" if self.typing else "all")
        return f"q quit   s sort: {_ORDERS[self.order][0]}{way}   r reverse   / shards: {part}{cursor}"


@dataclass(slots=True)
class Screen:
    """What was seen last, and how it is shown."""

    at: ServerOptions
    client: Client
    pipeline: str | None
    _status: Status | None = None
    _rates: dict[str, Rates] = field(default_factory=dict)
    _total: Rates = _NOTHING
    _instead: list[RenderableType] = field(default_factory=list)
    """What is shown without a server."""

    def look(self) -> float:
        """Ask the server, or else the ledger; return after how many seconds to look again.

        Raises OperatorError when the server refuses, and when there has been nothing to show yet.
        """
        try:
            _, seen = status.ask(self.client, self.pipeline)
        except NoAnswer as error:
            known = self._status is not None or bool(self._instead)
            self._status = None
            try:
                _, self._instead = status.instead(self.at, error)
            except OperatorError as both:
                if not known:
                    raise
                self._instead = [plain(str(both))]
            return _LEDGER_SECONDS
        if self._status is None or seen.taken_ms != self._status.taken_ms:
            self._rates, self._total = _rates(self._status, seen)
        self._status, self._instead = seen, []
        return _LOOK_SECONDS

    def shown(self, view: ShardsView, height: int, width: int = 200) -> list[RenderableType]:
        """Return what fits on a screen of the given lines and columns; the rest is cut at the end.

        If space is short, shards come before parts that are shown once.
        """
        if (now := self._status) is None:
            return [plain(str(view)), "", *self._instead]
        total = self._total
        each_second = f"{total.records:,.0f} records, {total.rows:,.0f} rows, {status.size(total.bytes)}"
        facts = [*status.facts(now), ("each second", each_second)]
        chosen = view.of(now.shards, self._rates)
        names = max(len(name) for name, _ in facts) + 2
        lines = sum(max(1, -(-len(text) // max(1, width - names))) for _, text in facts)
        is_small = lines + _AROUND_SHARDS + _SEEN_SHARDS > height
        room = max(_LEAST_SHARDS, (height - (0 if is_small else lines) - _AROUND_SHARDS) * 2 // 3)
        cut = f"the first {room} of {len(chosen)}" if len(chosen) > room else f"{len(chosen)}"
        title = f"shards: {cut}" + (f", of {len(now.shards)} in all" if len(now.shards) > len(chosen) else "")
        grid = status.shards(chosen[:room], title, rates=self._rates, narrow=width < _WIDE)
        head = plain(f"{moment(now.taken_ms)}   {view}")
        tables = status.tables(now, grid)
        ahead = 2 if is_small and grid.row_count else 0
        return [head, *tables[:ahead], "", details(facts), *tables[ahead:]]


def _rates(before: Status | None, now: Status) -> tuple[dict[str, Rates], Rates]:
    """Return what each shard, and all, had in a second between two documents of one server; without a first: nothing."""
    if before is None or before.server_id != now.server_id or now.taken_ms <= before.taken_ms:
        return {}, _NOTHING
    seconds = (now.taken_ms - before.taken_ms) / 1000

    def between(old: Shard | Totals, new: Shard | Totals) -> Rates:
        # A shard that came back counts from nothing.
        counts = (new.records - old.records, new.rows - old.rows, new.bytes - old.bytes)
        return Rates(*(max(0, count) / seconds for count in counts))

    old = {shard.id: shard for shard in before.shards}
    rates = {shard.id: between(old[shard.id], shard) for shard in now.shards if shard.id in old}
    return rates, between(before.totals, now.totals)


@dataclass(slots=True)
class Keys:
    """What is typed in the terminal, key by key; nothing where standard input is none."""

    _inputs: list[int] = field(default_factory=lambda: [0] if os.isatty(0) else [])

    @contextlib.contextmanager
    def read_singly(self) -> Iterator[None]:
        """Make the terminal deliver each key at once, without echo, until the context ends."""
        if not self._inputs:
            yield
            return
        former = termios.tcgetattr(0)
        tty.setcbreak(0)
        try:
            yield
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, former)

    def within(self, seconds: float) -> str:
        """Return what is typed within a time, as soon as there is something."""
        ready, _, _ = select.select(self._inputs, [], [], max(0.0, seconds))
        if not ready:
            return ""
        data = os.read(0, 1024)
        if not data:  # the terminal is gone
            self._inputs = []
        return _NO_LETTERS.sub("", data.decode("utf-8", "ignore"))


@app.default
def top(
    *,
    sort: Annotated[Order, Parameter(help="By which column shards are sorted; `age`: not durable.")] = "lag",
    shard: Annotated[
        str, Parameter(help="Only shards with this in their id; `*` stands for any characters.")
    ] = "",
    at: ServerOptions = HERE,
) -> None:
    """Show a server's status, live."""
    if not sys.stdout.isatty():
        raise OperatorError(
            "Standard output is not a terminal.",
            advice="`mldserver status` shows the same once, with --json for programs.",
        )
    from rich.console import Console, Group  # noqa: PLC0415  # `--help` must not wait for it
    from rich.live import Live  # noqa: PLC0415  # see above

    console = Console(file=sys.stdout, highlight=False)
    screen, keys, view = Screen(at, at.client(), at.meant_pipeline()), Keys(), ShardsView(sort, part=shard)
    due = time.monotonic() + screen.look()
    with keys.read_singly(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*screen.shown(view, console.height, console.width)), refresh=True)
            for key in keys.within(due - time.monotonic()):
                if key == "q" and not view.typing:
                    return
                view = view.pressed(key)
            if time.monotonic() >= due:
                due = time.monotonic() + screen.look()
