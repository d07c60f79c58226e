from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from mldserver.admin.gather import Readiness
from mldserver.assembly import Parts


@dataclass
class World:
    """The parts as readiness sees them, under the test's control."""

    spark: bool = True
    spark_trouble: str | None = None
    halted: tuple[str, ...] = ()
    flush_failing: str = ""
    stuck: bool = False
    held_by: str | None = "shard-7"
    held_by_server: str | None = None
    unread_shards: int = 0
    trouble: str | None = None
    version: str | None = None
    timers: str = ""
    lookups: str | None = None
    late_rows: str | None = None
    waits: str | None = None
    listening: bool = True
    overdue: tuple[str, float, float | None] | None = None
    readiness: Readiness = field(default_factory=Readiness)

    def look(self) -> str | None:
        status = SimpleNamespace(
            windows_halted=self.halted,
            flush_failing=self.flush_failing,
            stuck=self.stuck,
            unread_shards=self.unread_shards,
            held_by=self.held_by,
            held_by_server=self.held_by_server,
            reason="behind",
        )
        parts = SimpleNamespace(
            coordinator=SimpleNamespace(status=lambda: status),
            source=SimpleNamespace(waits_for=None if self.listening else "no address is listened on"),
            runtime=SimpleNamespace(trouble=self.trouble),
            queries=SimpleNamespace(trouble=self.lookups),
            swap=SimpleNamespace(trouble=self.version),
            firing=SimpleNamespace(trouble=self.timers) if self.timers else None,
            engine=SimpleNamespace(is_ready=self.spark, trouble=self.spark_trouble),
            runner=SimpleNamespace(
                overdue=lambda: self.overdue,
                side_tables=SimpleNamespace(trouble=self.late_rows),
                trouble=self.waits,
            ),
        )
        return self.readiness.update(cast("Parts", parts))


def told(change: str | None) -> str:
    assert change is not None
    return change or "ready"


def test_a_server_that_starts_alarms_nobody_and_says_once_that_it_is_ready() -> None:
    world = World(spark=False, listening=False)
    assert world.look() is None
    world.listening = True
    assert world.look() is None
    world.spark = True
    assert told(world.look()) == "ready"
    assert world.readiness.green.is_set()
    assert world.look() is None


@pytest.mark.parametrize("green_before", [False, True])
def test_what_is_broken_is_told_once_until_it_is_green_again(green_before: bool) -> None:
    world = World(spark=green_before)
    world.look()
    world.trouble = "no worker process has loaded the handler for 30 s"
    assert told(world.look()) == world.trouble
    world.trouble = "no worker process has loaded the handler for 31 s"
    assert world.look() is None
    assert not world.readiness.green.is_set()
    world.spark, world.trouble = True, None
    assert told(world.look()) == "ready"
    world.flush_failing = "No space left on device."
    assert told(world.look()) == "rows cannot be made durable: No space left on device"


def test_late_rows_that_cannot_be_written_are_a_fault() -> None:
    world = World(late_rows="late rows cannot be written into delta:/late: no quota")
    assert told(world.look()) == world.late_rows


def test_windows_that_wait_for_a_function_that_does_not_run_are_a_fault() -> None:
    world = World(waits="window w waits for the function payments, which does not run")
    assert told(world.look()) == world.waits


def test_what_breaks_while_spark_is_away_is_told_too() -> None:
    world = World()
    world.look()
    world.spark = False
    assert "Spark is not running" in told(world.look())
    assert world.look() is None
    world.halted = ("2013-01-01T10-00-00Z",)
    assert told(world.look()) == "window 2013-01-01T10-00-00Z keeps failing and every other waits for it"
    assert world.look() is None
    world.halted = ()
    assert world.look() is None, "Spark is still away, which was told"
    world.halted = ("2013-01-01T10-00-00Z",)
    assert world.look() is None
    world.halted, world.spark = (), True
    assert told(world.look()) == "ready"


def test_what_spark_waits_for_is_told_in_its_words_also_while_it_starts() -> None:
    world = World(spark=False)
    assert world.look() is None
    world.spark_trouble = "The cluster has given it no executors for 20 s"
    assert told(world.look()) == (
        "Spark computes no window. The cluster has given it no executors for 20 s: windows wait for it, rows go on being stored"
    )
    assert world.look() is None
    world.spark, world.spark_trouble = True, None
    assert told(world.look()) == "ready"


def test_a_watermark_that_stands_still_is_told_with_the_shard_that_holds_it() -> None:
    world = World()
    world.look()
    world.stuck = True
    assert told(world.look()) == "shard shard-7 stands still (behind), and windows that are due wait for it"
    assert not world.readiness.green.is_set()
    world.stuck = False
    assert told(world.look()) == "ready"
    world.stuck, world.held_by_server = True, "right"
    assert "shard shard-7 at server right stands still" in told(world.look())
    world.stuck = False
    world.look()
    world.stuck, world.held_by = True, None
    assert "the watermark at server right stands still" in told(world.look())


def test_a_server_whose_daemon_is_dead_is_not_ready() -> None:
    world = World()
    world.look()
    world.unread_shards = 4
    assert told(world.look()) == (
        "no shard is connected, and 4 have not ended: start the daemon, or see what it logs"
    )
    assert not world.readiness.green.is_set()
    world.unread_shards = 0
    assert told(world.look()) == "ready"


def test_a_window_that_is_worked_on_for_too_long_is_named() -> None:
    world = World()
    world.look()
    world.overdue = ("w-1", 960.0, None)
    assert told(world.look()) == (
        "window w-1 has been worked on for 16 minutes: see its latest window.slow or window.failed"
    )
    assert not world.readiness.green.is_set()
    world.overdue = None
    assert told(world.look()) == "ready"
    world.overdue = ("w-1", 130.0, 3.2)
    assert told(world.look()) == (
        "window w-1 has been worked on for 2 minutes, and such windows take 3 s: see its latest window.slow or window.failed"
    )


def test_a_deployed_version_that_does_not_run_here_is_told_until_it_does() -> None:
    world = World()
    world.look()
    world.version = "the deployed version 5f0c does not run here"
    assert told(world.look()) == world.version
    assert not world.readiness.green.is_set()
    world.version = None
    assert told(world.look()) == "ready"


def test_timers_that_cannot_be_fired_are_told_until_they_can() -> None:
    world = World(spark=True)
    assert told(world.look()) == "ready"
    world.timers = "timers of the store a cannot be fired: no"
    assert told(world.look()) == world.timers
    world.timers = ""
    assert told(world.look()) == "ready"


def test_a_lookup_that_is_too_old_is_told_until_it_is_fresh() -> None:
    world = World()
    world.look()
    world.lookups = "the lookup tiers has not been computed for too long"
    assert told(world.look()) == world.lookups
    world.lookups = None
    assert told(world.look()) == "ready"
