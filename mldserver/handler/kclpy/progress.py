"""How far one record processor has checkpointed, and the ``checkpointer`` that it holds. A synchronous core.

The rules are those of the KCL's checkpointer (KCL 3.1.3, ShardRecordProcessorCheckpointer): a checkpoint lies between
the last one and the last record delivered, else it is an IllegalArgumentException. Two things differ, since a call that
failed is made again here. A checkpoint that names no record covers the present call, not all that was ever delivered;
and one that names a record behind the present call (the processor remembers it from the call that failed) counts up to
the present call's end. So nothing that failed counts as done because of what happened to stand beside it.
"""

from __future__ import annotations

from mldserver.records import Sequence

_REMIND_MS = 10 * 60_000
_MAX_DIGITS = 129  # AWS limit


class CheckpointRefused(Exception):
    """A checkpoint that the KCL would refuse; its argument is the simple name of Java's exception."""


class Progress:
    """What one processor was given, and what of it is checkpointed."""

    __slots__ = ("_floor", "_reach", "closed", "delivered", "end_checkpointed", "position")

    def __init__(self, start: str | None = None, start_sub: int = 0) -> None:
        """``start``, ``start_sub``: where the daemon starts; digits bound the first checkpoint, sentinels do not."""
        self.delivered: Sequence | None = None
        """The last record that the processor was given."""
        self.position: Sequence | None = None
        """The last record checkpointed; None before the first checkpoint."""
        self.end_checkpointed = False
        """Whether a checkpoint covered everything delivered since ``ending``."""
        self.closed = False
        """The lease is gone, or the connection: nothing can be checkpointed any more."""
        self._floor = Sequence(int(start), start_sub) if start is not None and start.isdigit() else None
        self._reach: Sequence | None = None

    def deliver(self, last: Sequence | None) -> None:
        """Begin a call with records up to ``last``, perhaps again; None: a call without records."""
        self._reach = self.delivered if last is None else last
        if last is not None and (self.delivered is None or last > self.delivered):
            self.delivered = last

    def settle(self) -> None:
        """End a batch, or begin a hook: everything delivered may be checkpointed."""
        self._reach = self.delivered
        self.end_checkpointed = False

    def checkpoint(self, number: object = None, sub: object = None) -> None:
        """Note a checkpoint at a record's sequence number (text or integer), or, for None, at the present call's last.

        Without ``sub`` it is the number's first user record, as the KCL has it. Raises CheckpointRefused.
        """
        if self.closed:
            raise CheckpointRefused("ShutdownException")
        wanted = self._reach
        if number is not None:
            wanted = _sequence(number, sub)
            floor = self._floor if self.position is None else self.position
            if wanted is None or (floor is not None and wanted < floor):
                raise CheckpointRefused("IllegalArgumentException")
            if wanted != floor and (self.delivered is None or wanted > self.delivered):
                raise CheckpointRefused("IllegalArgumentException")
        self.end_checkpointed |= wanted == self.delivered
        if wanted is not None and self._reach is not None:
            wanted = min(wanted, self._reach)
            self.position = wanted if self.position is None else max(wanted, self.position)


def _sequence(number: object, sub: object) -> Sequence | None:
    """Return what a processor wrote as a sequence; None when it is none."""
    text = str(number)
    if isinstance(number, bool) or not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        return None
    if sub is None:
        return Sequence(int(text))
    if isinstance(sub, bool) or not isinstance(sub, int) or sub < 0:
        return None
    return Sequence(int(text), sub)


class Overdue:
    """Notices a processor that takes records and never checkpoints them."""

    __slots__ = ("_position", "_since_ms", "_told_ms")

    def __init__(self) -> None:
        """Start with nothing owed."""
        self._position: Sequence | None = None
        self._since_ms: int | None = None
        self._told_ms = 0

    def look(self, progress: Progress, now_ms: int) -> int | None:
        """Return for how long (ms) nothing was checkpointed though there was something to, if it is time to say so.

        It is time every ten minutes.
        """
        if progress.delivered == progress.position or progress.position != self._position:
            self._position, self._since_ms = progress.position, None
        if progress.delivered == progress.position:
            return None
        if self._since_ms is None:
            self._since_ms = self._told_ms = now_ms
        if now_ms - self._told_ms < _REMIND_MS:
            return None
        self._told_ms = now_ms
        return now_ms - self._since_ms


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
