"""Kinesis and DynamoDB Streams consumers in one daemon: MultiLangDaemon in, exactly-once Spark windows out.

A handler imports what it needs from here::

    from mldserver import Record, Window, tumbling

The map of the package, from the ground up: ``protocol`` speaks with the MultiLangDaemon (bytes and states, no event
loop); ``handler`` finds and checks the user's code; ``runtime`` runs it, ``workers`` in processes of its own; ``ledger``
keeps what counts; ``output`` is the folder of segments and windows; ``jobs`` takes windows through an engine, ``spark``
is that engine; ``coordinator`` merges shards, cuts windows and moves positions; ``sources`` are sockets to daemons;
``deadletters`` are kept elsewhere and come back; ``config``, ``observe``, ``kcl``, ``server`` and ``cli`` put it all
together; ``testing`` is a daemon to test against.
"""

from mldserver.handler.context import Context
from mldserver.handler.queries import Lookup, Rows, RowStream
from mldserver.handler.timers import Timer, Timers, timer
from mldserver.records import Batch, BatchResult, Discard, Fatal, Record, Retry, Sequence, Shard
from mldserver.windows import Window, batches, sliding, tumbling

__all__ = [
    "Batch",
    "BatchResult",
    "Context",
    "Discard",
    "Fatal",
    "Lookup",
    "Record",
    "Retry",
    "RowStream",
    "Rows",
    "Sequence",
    "Shard",
    "Timer",
    "Timers",
    "Window",
    "__version__",
    "batches",
    "sliding",
    "timer",
    "tumbling",
]

__version__ = "0.1.0"
