"""``mldserver demo``: real departures, or the changes of a shop's table, through the server; the windows are shown and checked."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from mldserver.cli import working_directory
from mldserver.config.settings import Settings
from mldserver.jobs.engine import Engine

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console
    from rich.table import Table

    from mldserver.testing import shop
    from mldserver.testing.simulation import Simulation

_HELP = """
Play real departures, or a shop's orders, through the server and show the windows. Ends by itself.

27,004 flights that left New York in January 2013 go as records of three shards through a fake MultiLangDaemon, over
TCP, into the server; the handler `handlers.departures_daily` turns them into rows, and Spark counts flights and averages
delays, once per closed day.

With `--source dynamodb` orders are placed, changed and cancelled in a fake table of DynamoDB, whose stream the server reads
directly while one of its shards splits. The handler `handlers.shop` turns the changes into rows, and Spark sums up orders and
revenue, once per closed hour. The sum of all hours must equal the contents of the table.

```
mldserver demo
mldserver demo --out departures
mldserver demo --source dynamodb
```
"""

SHARDS: Final = 3
ORDERS: Final = 3000
_OPENS_MS: Final = 8 * 3_600_000
_DAY_MS: Final = 86_400_000

Source = Literal["mld", "dynamodb"]

app = App(name="demo", help=_HELP, help_format="markdown")


@app.default
def demo(
    *,
    source: Annotated[
        Source,
        Parameter(help="mld: departures through the MultiLangDaemon. dynamodb: the stream of a table."),
    ] = "mld",
    out: Annotated[
        str | None, Parameter(help="Local folder for the output; new or empty. [default: a temporary one]")
    ] = None,
) -> int:
    """Run the demonstration and return the exit code."""
    from rich.console import Console  # noqa: PLC0415  # `--help` must not wait for it

    # The stream is named: what handlers print meanwhile goes to the log, by way of another ``sys.stdout``.
    return play(Console(file=sys.stdout, highlight=False), out, source=source)


def play(
    console: Console, out: str | Path | None, *, source: Source = "mld", engine: Engine | None = None
) -> int:
    """Play; ``engine`` takes Spark's place (tests). Raises OperatorError."""
    import pyarrow.dataset as ds  # noqa: PLC0415  # `--help` must not wait for the server's imports
    import uvloop  # noqa: PLC0415  # see above

    from mldserver.observe.logging import logging_to  # noqa: PLC0415  # see above
    from mldserver.testing import playground  # noqa: PLC0415  # see above
    from mldserver.testing.simulation import ProgressLines  # noqa: PLC0415  # see above

    began = time.monotonic()
    show: Departures | ShopDemo = ShopDemo() if source == "dynamodb" else Departures()
    folder = playground.fresh_folder(out, "demo")
    settings = playground.play_settings(show.handler, folder, environ=os.environ, folder=working_directory())
    console.print(show.intro, soft_wrap=True)
    with logging_to(settings):
        run: Simulation | shop.Shop = show.prepared(settings, engine or playground.quick_spark(settings))
        report = uvloop.run(run.run(ProgressLines(console.file)))
    if not report.ok:
        for text in (*playground.logged_failures(settings.log_file), *report.violations, *report.exits):
            console.print(text, markup=False)
        console.print(f"The demonstration failed; its log is {folder / '_server.log'}")
        return report.exit_code
    rows = ds.dataset(folder, format="parquet").to_table()  # what any reader of the folder sees
    console.print(windows_table(show, rows))
    text, right = show.counted(rows)
    console.print(f"{text}; {time.monotonic() - began:.1f} s in all", soft_wrap=True)
    console.print(f"Parquet: {folder}{os.sep}window=…{os.sep}*.parquet", soft_wrap=True)
    console.print(f"Log:     mldserver logs {folder / '_server.log'}", soft_wrap=True)
    return 0 if right else 1


class Departures:
    """January 2013 at New York's airports, through a fake MultiLangDaemon."""

    handler: Final = "handlers.departures_daily"

    def __init__(self) -> None:
        from mldserver.testing import playground  # noqa: PLC0415  # see above

        self._lines = playground.read_lines(None)
        self.rows = len(self._lines)
        self.intro = (
            f"{self.rows:,} departures from New York, January 2013 → {SHARDS} shards → fake MultiLangDaemon → TCP → "
            f"{self.handler} → Spark → Parquet"
        )

    def prepared(self, settings: Settings, engine: Engine | None) -> Simulation:
        """Return the run."""
        from mldserver.testing.simulation import Simulation, build_stream  # noqa: PLC0415  # see above

        start_ms = time.time_ns() // 1_000_000 - self.rows
        stream = build_stream(self._lines, shards=SHARDS, seed=1, start_ms=start_ms)
        return Simulation(settings, stream, engine=engine)

    def counted(self, rows: pa.Table) -> tuple[str, bool]:
        """Return what the windows come to, as text, and whether that is right."""
        counted = sum(row["flights"] for row in rows.to_pylist())
        return f"{counted:,} of {self.rows:,} flights in {rows.num_rows} rows", counted == self.rows

    @staticmethod
    def line(start: datetime, carriers: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a window as a row of the table."""
        delays = [(row["mean_delay"], row["carrier"]) for row in carriers]
        known = [delay for delay in delays if delay[0] is not None]
        ends = ["every flight was cancelled"] * 2
        if known:
            ends = [f"{name} {minutes:+.1f} min" for minutes, name in (max(known), min(known))]
        flights = sum(row["flights"] for row in carriers)
        row = {"day (UTC)": f"{start:%Y-%m-%d}", "flights": flights, "carriers": len(carriers)}
        return row | dict(zip(("most delayed, on average", "least delayed"), ends, strict=True))


class ShopDemo:
    """A day of a shop, through the stream of its table."""

    handler: Final = "handlers.shop"

    def __init__(self) -> None:
        from mldserver.testing.shop import script  # noqa: PLC0415  # see above

        yesterday_ms = (time.time_ns() // 1_000_000 // _DAY_MS - 1) * _DAY_MS
        self._steps = script(ORDERS, start_ms=yesterday_ms + _OPENS_MS)
        self.rows = sum(step.rows for step in self._steps)
        deeds = Counter(step.deed for step in self._steps)
        self.intro = (
            f"{', '.join(f'{count:,} {deed}' for deed, count in deeds.items())}: a day's orders → a table's stream, "
            f"2 shards → {self.handler} → Spark → Parquet"
        )

    def prepared(self, settings: Settings, engine: Engine | None) -> shop.Shop:
        """Return the run."""
        from mldserver.testing import shop  # noqa: PLC0415  # see above

        self._run = shop.Shop(settings, self._steps, engine=engine)
        return self._run

    def counted(self, rows: pa.Table) -> tuple[str, bool]:
        """Return what the windows come to, as text, and whether that is right."""
        windows = rows.to_pylist()
        orders = sum(row["orders"] for row in windows)
        revenue = sum((row["revenue"] for row in windows), Decimal())
        left, worth = self._run.left()
        text = f"{orders:,} orders of {revenue:,} in the windows, {left:,} of {worth:,} in the table"
        return text, (orders, revenue) == (left, worth)

    @staticmethod
    def line(start: datetime, products: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a window as a row of the table."""
        orders, revenue = (sum(row[name] for row in products) for name in ("orders", "revenue"))
        best = max(products, key=lambda row: row["revenue"])
        row = {"hour (UTC)": f"{start:%Y-%m-%d %H:%M}", "orders": orders, "revenue": f"{revenue:,}"}
        return row | {"best seller": f"{best['product']} {best['revenue']:,}"}


def windows_table(show: Departures | ShopDemo, rows: pa.Table) -> Table:
    """Return a row for each window, the earliest first."""
    from mldserver.cli.render import table  # noqa: PLC0415  # `--help` must not wait for it

    windows: dict[datetime, list[dict[str, Any]]] = {}
    for row in rows.to_pylist():
        windows.setdefault(row["window_start"], []).append(row)
    lines = [show.line(start, of_window) for start, of_window in sorted(windows.items())]
    return table(lines, title="One line a window, read from the committed Parquet")
