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
    """Run a demonstration and print its windows; return the exit code. 1: the windows do not hold what was played.

    ``out``: a new or empty folder; None: a temporary one. ``engine`` replaces Spark in tests. Raises OperatorError.
    """
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
        run: Simulation | shop.Shop = show.prepare(settings, engine or playground.quick_spark(settings))
        report = uvloop.run(run.run(ProgressLines(console.file)))
    if not report.ok:
        for text in (*playground.logged_failures(settings.log_file), *report.violations, *report.exits):
            console.print(text, markup=False)
        console.print(f"The demonstration failed; its log is {folder / '_server.log'}")
        return report.exit_code
    rows = ds.dataset(folder, format="parquet").to_table()  # what any reader of the folder sees
    console.print(windows_table(show, rows))
    text, is_right = show.check_result(rows)
    console.print(f"{text}; {time.monotonic() - began:.1f} s in all", soft_wrap=True)
    console.print(f"Parquet: {folder}{os.sep}window=…{os.sep}*.parquet", soft_wrap=True)
    console.print(f"Log:     mldserver logs {folder / '_server.log'}", soft_wrap=True)
    return 0 if is_right else 1


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

    def prepare(self, settings: Settings, engine: Engine | None) -> Simulation:
        """Return the run."""
        from mldserver.testing.simulation import Simulation, build_stream  # noqa: PLC0415  # see above

        start_ms = time.time_ns() // 1_000_000 - self.rows
        stream = build_stream(self._lines, shards=SHARDS, seed=1, start_ms=start_ms)
        return Simulation(settings, stream, engine=engine)

    def check_result(self, rows: pa.Table) -> tuple[str, bool]:
        """Return in words how many flights the published windows counted, and whether every played flight is among them."""
        flights = sum(row["flights"] for row in rows.to_pylist())
        return f"{flights:,} of {self.rows:,} flights in {rows.num_rows} rows", flights == self.rows

    @staticmethod
    def window_row(start: datetime, carriers: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the table's row for one day's window. ``carriers``: the window's rows, one for each carrier."""
        delays = [(row["mean_delay"], row["carrier"]) for row in carriers if row["mean_delay"] is not None]
        most = least = "every flight was cancelled"
        if delays:
            most, least = (f"{carrier} {minutes:+.1f} min" for minutes, carrier in (max(delays), min(delays)))
        return {
            "day (UTC)": f"{start:%Y-%m-%d}",
            "flights": sum(row["flights"] for row in carriers),
            "carriers": len(carriers),
            "most delayed, on average": most,
            "least delayed": least,
        }


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

    def prepare(self, settings: Settings, engine: Engine | None) -> shop.Shop:
        """Return the run."""
        from mldserver.testing import shop  # noqa: PLC0415  # see above

        self._run = shop.Shop(settings, self._steps, engine=engine)
        return self._run

    def check_result(self, rows: pa.Table) -> tuple[str, bool]:
        """Return orders and revenue of the published windows and of the fake table as text, and whether they are equal."""
        windows = rows.to_pylist()
        orders = sum(row["orders"] for row in windows)
        revenue = sum((row["revenue"] for row in windows), Decimal())
        table_orders, table_revenue = self._run.left()
        text = f"{orders:,} orders of {revenue:,} in the windows, {table_orders:,} of {table_revenue:,} in the table"
        return text, (orders, revenue) == (table_orders, table_revenue)

    @staticmethod
    def window_row(start: datetime, products: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the table's row for one hour's window. ``products``: the window's rows, one for each product."""
        orders, revenue = (sum(row[name] for row in products) for name in ("orders", "revenue"))
        best = max(products, key=lambda row: row["revenue"])
        row = {"hour (UTC)": f"{start:%Y-%m-%d %H:%M}", "orders": orders, "revenue": f"{revenue:,}"}
        return row | {"best seller": f"{best['product']} {best['revenue']:,}"}


def windows_table(show: Departures | ShopDemo, rows: pa.Table) -> Table:
    """Return the published rows as a table to print: a line for each window, the earliest first."""
    from mldserver.cli.render import table  # noqa: PLC0415  # `--help` must not wait for it

    windows: dict[datetime, list[dict[str, Any]]] = {}
    for row in rows.to_pylist():
        windows.setdefault(row["window_start"], []).append(row)
    lines = [show.window_row(start, of_window) for start, of_window in sorted(windows.items())]
    return table(lines, title="One line a window, read from the committed Parquet")
