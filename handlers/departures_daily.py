"""Departures and mean delay per carrier and day: what ``mldserver demo`` runs.

Shows how one handler is made of another: the hooks are those of ``handlers.departures``, only the windows differ.
"""

from handlers.departures import on_window, process_record, schema
from mldserver import tumbling

__all__ = ["on_window", "process_record", "schema", "windows"]

windows = tumbling("1 day", on="scheduled", lateness="10 minutes")
