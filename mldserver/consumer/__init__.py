"""The consumption of one shard, the same for every source: a state machine (``core.py``) and its shell (``shard.py``)."""
