"""What the coordinator asks of an engine: the thing that computes windows.

``spark/client.py`` runs Spark in a child process; ``mldserver.testing`` has a small engine for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from mldserver.engine_jobs import PublishJob, WindowJob, WindowResult
from mldserver.errors import LedgerError, OperatorError, SparkError

Deadline = float | Literal["by_size"] | None
"""Seconds of one job, or by what it has to do, or None, for ever: the setting ``window_deadline``."""

RETRIED_ERRORS: Final = (SparkError, LedgerError, OperatorError, OSError)
"""Errors after which a job is tried again. Any other error is a bug and ends the server."""

RETRY_SECONDS: Final = (1.0, 60.0)
"""The first wait between two tries of a job or a query, and the longest. Most errors pass within seconds (an executor that was
lost) or not at all; a halted window is tried again once a minute, which costs a cluster little."""

_AT_LEAST_SECONDS: Final = 15 * 60
_SECONDS_PER_BYTE: Final = 10 / 2**20
_SECONDS_PER_ROW: Final = 5 / 1000
"""Deadlines by size end jobs that hang, not slow jobs. Two slow cores took 12 s for 10 million rows of 60 MiB,
2.4 s for the smallest windows and 15 s for the one of most segments; Python functions on rows take five times as long,
and ten times that is allowed. A database takes 2,000 rows a second over one slow connection."""


def deadline_seconds(deadline: Deadline, jobs: Iterable[WindowJob | PublishJob]) -> float | None:
    """Return what ``jobs`` together may take: what the setting ``window_deadline`` allows the largest; None: for ever.

    Only small windows share a job. If that takes longer, each of them runs alone.
    """
    if deadline != "by_size":
        return deadline
    return max(
        _AT_LEAST_SECONDS
        + (job.bytes * _SECONDS_PER_BYTE if isinstance(job, WindowJob) else job.rows * _SECONDS_PER_ROW)
        for job in jobs
    )


def allowed_seconds(deadline: Deadline, size: int) -> float:
    """Return how long a window of ``size`` bytes may be worked on until a person should look: its deadline, else by size."""
    return _AT_LEAST_SECONDS + size * _SECONDS_PER_BYTE if deadline in {None, "by_size"} else float(deadline)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's facts, for the status of the server."""

    master: str = ""
    """Without its secrets."""
    version: str | None = None
    ui: str | None = None
    """Where its own page is, when it is served."""
    start_seconds: float | None = None
    """How long the latest start took."""
    jobs: int = 0
    """How many run."""
    jvm_resident_bytes: int | None = None
    """Memory of the JVM's process, heap and all else; None where there is none."""
    application: str | None = None
    """What Spark calls the session; None on Spark Connect."""


class EngineState(Protocol):
    """What the server shows of an engine, or of the driver that several engines share."""

    @property
    def is_ready(self) -> bool:
        """Whether a job would start at once; turns False when the engine dies, True again when it is back."""

    @property
    def trouble(self) -> str | None:
        """Why it is not ready, in words, where there is more to say than that it has not started yet."""

    def facts(self) -> EngineFacts:
        """Return what it knows of itself: once a second."""


class Engine(EngineState, Protocol):
    """Computes windows, for as long as the server lives."""

    ledger_id: str
    """Of the ledger that windows come from; set before ``run``."""

    async def run(self) -> None:
        """Live: start, stay ready, and start afresh when something dies. Returns only when cancelled or closed.

        Raises JavaError (or another OperatorError) when it can never start.
        """

    async def ready(self) -> None:
        """Return when a job would start at once (warmed up)."""

    async def compute(self, job: WindowJob) -> WindowResult:
        """Run one attempt. Waits while the engine is not ready.

        Raises WindowFailed when the job fails, DriverLost when the engine dies under it; the staging directory may
        then hold anything. Cancelling the call cancels the job.
        """

    @property
    def group_limit(self) -> int:
        """How many windows may share one job; 1 where the pipeline does not allow it."""

    async def compute_group(self, jobs: tuple[WindowJob, ...]) -> tuple[WindowResult, ...]:
        """Run attempts at several windows as one job; results in the order of ``jobs``.

        Each window's output is in its own ``staging``, as after ``compute``. Raises as ``compute`` does, for all of
        them together, and WindowFailed when ``on_window`` of one takes longer than a minute. The caller then runs each alone,
        so that one bad window cannot hold others.
        """

    def when_slow(self, call: Callable[[str], None]) -> None:
        """Call ``call`` with a window's id when its ``on_window`` takes longer than a minute and it runs alone.

        It may hang, so one more job may run meanwhile.
        """

    async def publish(self, job: PublishJob) -> None:
        """Write a committed output into the table (setting ``sink``), in place of what lower revisions wrote.

        Repeatable any number of times, by any server: a table that has the revision, or a later one, stays as it is.
        Readers of the table never see half a window. Waits while the engine is not ready. Raises WindowFailed when
        nothing was written, and DriverLost when the engine died and that is not known; cancelling the call cancels it.
        """

    def renew(self, code: dict[str, tuple[str, bytes]]) -> None:
        """Load the handler again, from ``code`` (``HandlerSpec.code``).

        Jobs that run by now end with the old one, later jobs wait for the new one.
        """

    async def close(self) -> None:
        """Stop what runs and leave nothing behind."""
