"""Kinesis and DynamoDB Streams consumers in one daemon: MultiLangDaemon in, exactly-once Spark windows out.

A handler imports what it needs from here::

    from mldserver import Record, Window, tumbling

The map of the package: ``protocol`` speaks with the MultiLangDaemon (bytes and states, no event loop); ``sources``
puts it on sockets; ``runtime`` runs handlers; ``coordinator`` merges shards, cuts windows and moves positions;
``state`` keeps the ledger; ``spark`` computes windows; ``observe`` writes and reads logs; ``testing`` is a daemon to
test against; ``config``, ``server`` and ``cli`` put it all together.
"""

from mldserver.coordinator.windows import Window, batches, tumbling
from mldserver.records import Batch, Record, Sequence, Shard
from mldserver.runtime.control import BatchResult, Discard, Fatal, Retry

__all__ = [
    "Batch",
    "BatchResult",
    "Discard",
    "Fatal",
    "Record",
    "Retry",
    "Sequence",
    "Shard",
    "Window",
    "__version__",
    "batches",
    "tumbling",
]

__version__ = "0.1.0"
