"""When workers are replaced."""

from __future__ import annotations

import pytest

from mldserver.workers.wire import BeatMessage as Beat
from mldserver.workers.worker import Cause, Limits, judge

LIMITS = Limits(worker_kill_after_ms=1000, worker_memory=100)


@pytest.mark.parametrize(
    ("beat", "silent", "cause"),
    [
        (None, 1000, None),
        (None, 1001, Cause.SILENT),
        (Beat(1000, 1000, 100), 0, None),
        (Beat(1001, 0, 0), 0, Cause.CALL),
        (Beat(0, 1001, 0), 0, Cause.BLOCKED),
        (Beat(0, 0, 101), 0, Cause.GROWN),
        (Beat(0, 0, 151), 0, Cause.MEMORY),
    ],
)
def test_what_a_worker_must_go_for(beat: Beat | None, silent: int, cause: Cause | None) -> None:
    assert judge(beat, silent, LIMITS) is cause


def test_without_limits_anything_goes() -> None:
    limits = Limits(None, None)
    assert judge(None, 10**9, limits) is None
    assert judge(Beat(10**9, 10**9, 10**12), 10**9, limits) is None
