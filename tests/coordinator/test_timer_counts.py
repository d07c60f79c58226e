"""What the status knows of timers."""

from mldserver.coordinator.timer_counts import TimerCounts
from mldserver.runtime.interface import TimerReport


def test_stores_that_another_server_has_do_not_keep_a_version_from_being_loaded() -> None:
    counts = TimerCounts()
    counts.count("here", TimerReport(pending=1, callbacks=("alarm",)))
    counts.count("gone", TimerReport(pending=2, callbacks=("removed",)))
    assert counts.callbacks(["here", "unknown"]) == {"alarm"}
    assert counts.latest(["gone"]) == [], "it is forgotten"


def test_a_store_that_comes_back_has_what_was_read_of_it() -> None:
    counts = TimerCounts()
    counts.count("s", TimerReport(pending=1, callbacks=("alarm",)))
    counts.loaded("s", 7, ("other",))
    (report,) = counts.latest(["s"])
    assert (report.pending, report.callbacks) == (7, ("other",))
