"""The messages of the MultiLangDaemon protocol, as frozen values.

Sources: the MultiLangDaemon's message classes (KCL 1.x, 2.x, 3.1.3) and captures of what KCL 3.1.3 really sends.
"""

from __future__ import annotations

import enum

import msgspec

Line = bytes | bytearray
"""A line without its end. One that came in pieces is what they were collected in: a copy would cost more than all else."""


class Version(enum.IntEnum):
    """The wire form of records and checkpoints, fixed by the keys of ``initialize``."""

    V1 = 1
    """KCL < 1.7.1: no sub-sequences, no arrival times, checkpoints under the key ``checkpoint``."""
    V2 = 2
    """KCL >= 1.7.1, KCL 2 and KCL 3."""


class ShutdownReason(enum.StrEnum):
    """Why KCL 1.x says ``shutdown``."""

    TERMINATE = "TERMINATE"
    """The shard has ended: its end must be checkpointed."""
    ZOMBIE = "ZOMBIE"
    """The lease is lost: nothing may be checkpointed."""
    REQUESTED = "REQUESTED"
    """The daemon is stopping: one last chance to checkpoint."""


class Initialize(msgspec.Struct, frozen=True):
    """The first message: which shard this connection is, and where the daemon will start."""

    shard_id: str
    version: Version
    sequence_number: str | None = None
    """Digits, ``TRIM_HORIZON``, ``LATEST``, ``AT_TIMESTAMP``, ``SHARD_END`` or None (always None in V1)."""
    sub_sequence_number: int | None = None


class ProcessRecords(msgspec.Struct, frozen=True):
    """A batch. Its line is passed on as it came: only the handler's runtime decodes it."""

    line: Line


class CheckpointReply(msgspec.Struct, frozen=True):
    """The daemon's answer to a checkpoint: it echoes what was asked, not what was stored."""

    sequence_number: str | None
    sub_sequence_number: int | None
    error: str | None
    """None, or the simple class name of the Java exception."""


class LeaseLost(msgspec.Struct, frozen=True):
    """Another worker owns the shard now (KCL 2 and later)."""


class ShardEnded(msgspec.Struct, frozen=True):
    """The shard is closed and read to its end: checkpoint it (KCL 2 and later)."""


class ShutdownRequested(msgspec.Struct, frozen=True):
    """The daemon is stopping, or hands the lease over: one last chance to checkpoint (KCL >= 1.7.6)."""


class Shutdown(msgspec.Struct, frozen=True):
    """The ending of KCL 1.x, in its three meanings."""

    reason: ShutdownReason


RequestMessage = Initialize | ProcessRecords | LeaseLost | ShardEnded | ShutdownRequested | Shutdown
"""What the daemon asks: each is answered by exactly one status."""

PeerMessage = RequestMessage | CheckpointReply
"""What the daemon can send."""


class CheckpointRequest(msgspec.Struct, frozen=True):
    """Our request to checkpoint; a sequence number of None means everything delivered so far."""

    sequence_number: str | None
    sub_sequence_number: int | None
    version: Version
