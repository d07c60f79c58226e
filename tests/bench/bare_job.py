"""The handler of the windows that are measured, and the floor beside them: the same job as one writes it without a server.

A window with the id BARE comes to the seconds that the bare job takes over its one file: on the engine's own session, which
is as warm as the server's jobs find it, but without anything that the server adds to a job. Its hook waits until it is told
to begin (``go``), so that the session has rested as long as for a server's job.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from handlers import departures
from mldserver import Window
from mldserver.spark.window_job import columns_ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["BARE", "go", "on_window", "process_record", "schema", "windows"]

BARE: Final = "bare"

schema, windows, process_record = departures.schema, departures.windows, departures.process_record


def go(ready: Path) -> Path:
    """Return the path of the file that lets the bare job over ``ready`` begin; it takes it away."""
    return ready.with_suffix(".go")


def on_window(rows: DataFrame, window: Window) -> DataFrame:
    """Do what ``handlers.departures`` does; of the bare window return its seconds."""
    if window.id != BARE:
        return departures.on_window(rows, window)
    spark, (uri,) = rows.sparkSession, rows.inputFiles()
    ready = Path(uri.removeprefix("file:"))
    out = ready.with_suffix(".bare")
    while not go(ready).exists():
        time.sleep(0.005)
    began = time.perf_counter()
    flights = spark.read.schema(columns_ddl(schema)).parquet(uri)
    departures.on_window(flights, window).write.parquet(str(out))
    seconds = time.perf_counter() - began
    shutil.rmtree(out)
    go(ready).unlink()
    return spark.createDataFrame([(seconds,)], "seconds DOUBLE")
