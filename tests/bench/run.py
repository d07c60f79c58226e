"""Benchmarks: ``python tests/bench/run.py`` prints tables, and with ``--json`` one document beside them.

They assert results, never times. Each module says what it measures:

* ``windows.py``: from the last record to the published window, against the same Spark job over one ready file.
  And (``--only segments``) that job by the number of segments that its rows are in.
* ``small_windows.py``: how many windows of a second are published a second, in shared jobs and in a job for each.
* ``per_row.py``: merging and writing, against a heap of single records and pyarrow's bare write.
* ``checkpoints.py``: how far checkpoints lag while windows take an hour to close.
* ``retained.py``: what a day of one-second windows costs a start and a cycle.
* ``poison.py``: streams in which every record fails, against the same stream without a fault.
* ``streams.py``: the merge of DynamoDB's shards against a heap of single records, and how fast shards are read.
* ``state.py``: a count for each key, against the same handler without state, Bytewax, Quix Streams and a plain dict
  (``pip install '.[bench]'`` brings the two).
* ``sessions.py``: visits on keyed state and timers, against a row of each click and Spark's ``session_window`` over those rows.
* ``timers.py``: a million timers that are set and then due within one second, how late those of an idle server are, and what they take.
* ``functions.py``: memory and CPU of five functions in one server, against five servers.
* ``isolation.py``: batch latency and windows of a function beside others that raise, flood, sleep, kill and fill.
* ``queries.py``: queries of handlers and lookups, and windows beside as many queries as run at a time.
* ``admin_load.py``: what fifty clients of the admin endpoint cost the pipeline, and whether 2,000 requests leave anything.
* ``hot/``: CPU, latency and memory against amazon_kclpy, a raw uvloop echo and the bare decode, and what they must reach;
  and the matrix of that, each shape of batches at 1 to 2,000 connections (``--only matrix``: nothing else).
* ``catch_up.py``: what a catch-up over far more than the budgets holds at most.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests.parent), str(tests)]
    from bench.command import main

    sys.exit(main())
