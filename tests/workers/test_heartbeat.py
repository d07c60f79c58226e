"""What a worker tells of itself twice a second."""

from __future__ import annotations

import pytest

from mldserver.workers import worker_reports
from mldserver.workers.worker_reports import Heartbeat


def test_a_worker_without_descriptors_beats_on_with_the_size_that_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beating = Heartbeat.__new__(Heartbeat)
    beating._resident = 0
    assert beating._resident_bytes() > 0
    monkeypatch.setattr(worker_reports, "resident_bytes", lambda _: None)
    assert beating._resident_bytes() == beating._resident > 0
