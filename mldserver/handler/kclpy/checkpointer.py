"""The ``checkpointer`` that processors hold, and the error it raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldserver.handler.kclpy.progress import CheckpointRefused

if TYPE_CHECKING:
    from mldserver.handler.kclpy.progress import Progress

__all__ = ["CheckpointError", "Checkpointer"]


class CheckpointError(Exception):
    """A checkpoint was refused; ``value`` is the simple name of Java's exception, e.g. ``ShutdownException``."""

    __module__ = "amazon_kclpy.checkpoint_error"

    def __init__(self, value: str) -> None:
        """Name Java's exception."""
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return repr(self.value)


class Checkpointer:
    """Notes how far a processor is done with its shard's records.

    A checkpoint is durable with the server's next flush, and reaches the daemon behind that; so it never waits, and
    never meets a throttled lease table.
    """

    def __init__(self, progress: Progress, error: type[Exception]) -> None:
        """``error`` is what the processor catches: ``CheckpointError``, of amazon_kclpy or of the stand-in for it."""
        self._progress = progress
        self._error = error

    def checkpoint(
        self, sequence_number: str | int | None = None, sub_sequence_number: int | None = None
    ) -> None:
        """Note that every record up to a sequence is done; without one: every record delivered so far.

        Raises CheckpointError: ``IllegalArgumentException`` for what was not delivered, lies before the last checkpoint,
        or is no sequence number; ``ShutdownException`` once the lease, or the connection, is gone.
        """
        try:
            self._progress.checkpoint(sequence_number, sub_sequence_number)
        except CheckpointRefused as refused:
            raise self._error(str(refused)) from None
