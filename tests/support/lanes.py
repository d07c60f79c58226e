"""Which tests run when, told by folder and file: what is quick, and how much and how long a test of a lane may do."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

__all__ = [
    "EXAMPLES",
    "LONGEST",
    "NOT_QUICK",
    "PROCESSES",
    "QUICK",
    "SERVICES",
    "TESTS",
    "allowed_seconds",
    "dealt",
    "is_quick",
    "needs_services",
    "seeds",
]

TESTS: Final = Path(__file__).parents[1]

QUICK: Final = (
    "admin/test_access.py",
    "admin/test_history.py",
    "base",
    "children",
    "config",
    "coordinator",
    "deadletters",
    "docs",
    "handler",
    "jobs",
    "kcl/test_digest.py",
    "kcl/test_java_log.py",
    "kcl/test_properties.py",
    "observe",
    "output",
    "protocol",
    "runtime",
    "sources",
    "dynamodb_streams/test_beginning.py",
    "dynamodb_streams/test_merge.py",
    "dynamodb_streams/test_positions.py",
    "dynamodb_streams/test_reader.py",
    "dynamodb_streams/test_shard_tree.py",
    "dynamodb_streams/test_sharing.py",
    "dynamodb_streams/test_streams_api.py",
    "ledger",
    "test_change.py",
    "test_errors.py",
    "test_records.py",
)
"""Rooms of cores and codecs."""

NOT_QUICK: Final = (
    # Whole streams, months, and every order of events.
    "coordinator/test_any_order.py",
    "coordinator/test_batches.py",
    "coordinator/test_bounded.py",
    "coordinator/test_clocks.py",
    "coordinator/test_coordinator_bounds.py",
    "coordinator/test_exactly_once.py",
    "coordinator/test_future.py",
    "coordinator/test_leases_at_random.py",
    "coordinator/test_machine.py",
    "coordinator/test_month.py",
    "coordinator/test_on_dynamodb.py",
    "coordinator/test_powercut.py",
    "output/test_publish.py",
    "coordinator/test_reopened.py",
    # AWS's APIs over HTTP.
    "deadletters/test_aws.py",
    # Spark, and a whole server.
    "docs/test_for_real.py",
    # AWS's clients, and processes.
    "base/test_aws.py",
    "base/test_kill_points.py",
    "handler/kclpy/test_kclpy_samples.py",
    "handler/kclpy/test_kclpy_story.py",
    "handler/kclpy/test_kclpy_workers.py",
    "observe/test_logging.py",
    "protocol/test_against_fake_mld.py",
    "protocol/test_connection_fuzz.py",
    "runtime/test_behaviour.py",
    "runtime/test_behaviour_changes.py",
    "runtime/test_behaviour_harm.py",
    "runtime/test_behaviour_life.py",
    "runtime/test_lanes.py",
    "runtime/test_trial.py",
    # Sockets.
    "sources/test_mld.py",
    "sources/test_on_uvloop.py",
    # Both ledgers, one contract.
    "ledger/test_contract.py",
    "ledger/test_contract_late.py",
    "ledger/test_contract_letters.py",
    "ledger/test_contract_servers.py",
    "ledger/test_contract_shapes.py",
    "ledger/test_contract_windows.py",
    "ledger/test_dynamodb.py",
    "ledger/test_dynamodb_create.py",
    "ledger/test_dynamodb_machine.py",
    "ledger/test_dynamodb_month.py",
    "ledger/test_dynamodb_snapshot.py",
    "ledger/test_letter_rules.py",
    "ledger/test_news.py",
    "ledger/test_operations.py",
    "ledger/test_store_crash.py",
    "ledger/test_store_machine.py",
    "ledger/test_store_processes.py",
)
"""What is in those rooms and takes longer."""

SERVICES: Final = (
    "admin/test_page.py",
    "admin/test_page_behaviour.py",
    "cluster",
    "sinks/test_postgres.py",
    "spark/test_with_connect.py",
)
"""What starts a Spark cluster, a Spark Connect server, PostgreSQL or a browser: a lane of its own beside the day's. A single
test of another file is marked."""

ALLOWED_SECONDS: Final = {"quick": 2.0, "day": 60.0, "long": 1800.0}
"""How long one test may take in a lane, on two slow cores, before the run's summary names it."""
JVM_SECONDS: Final = 180.0
"""The same, by day, for a test marked ``slow``."""

EXAMPLES: Final = {"quick": 20, "day": 100, "long": 500}
"""How many examples Hypothesis draws for a property that does not say it."""

PROCESSES: Final = {"quick": 2, "day": 3, "long": 2}
"""How many processes share a lane, on two processors: by day one of them often waits for Java. Each may hold a Spark, of about 1 GiB."""

LONGEST: Final = (
    # They wait for the daemon's JVM most of the time.
    (
        "java",
        "dynamodb_streams/test_with_moto.py",
        "workers/test_hurt.py",
        "workers/test_reload.py",
        "cluster/test_kills.py",
        "cluster/test_user_code.py",
    ),
    # One Spark session serves all that need only that.
    (
        "spark",
        "sinks",
        "cli/test_demo.py",
        "coordinator/test_bounded.py",
        "coordinator/test_month.py",
        "admin/test_acts.py",
    ),
    (
        "crash",
        "dynamodb_streams/test_kills.py",
        "simulation",
        "docs/test_for_real.py",
        "test_object_store.py",
        "cluster",
        "typing",
    ),
)
"""What the processes of a lane begin with, each with one of these: at the end, none is left alone with a long test."""


def seeds(count: int) -> list[Any]:
    """Return so many seeds to play a test with, the second half for the long lane."""
    return [pytest.param(n, marks=pytest.mark.long) if 2 * n >= count else n for n in range(count)]


@cache
def is_quick(path: Path) -> bool:
    """Tell whether a test file is in the quick lane."""
    return _within(path, QUICK) is not None and _within(path, NOT_QUICK) is None


@cache
def needs_services(path: Path) -> bool:
    """Tell whether a test file is in the lane of services."""
    return _within(path, SERVICES) is not None


def allowed_seconds(lane: str, keywords: Container[str]) -> float:
    """Return how long a test with these marks may take in a lane."""
    if lane == "day" and "quick" in keywords:
        return ALLOWED_SECONDS["quick"] * EXAMPLES["day"] / EXAMPLES["quick"]
    return JVM_SECONDS if lane == "day" and "slow" in keywords else ALLOWED_SECONDS[lane]


def dealt(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """Return a lane's tests in the order in which xdist hands them out: to each process one run of them, equally many."""
    begin: list[list[tuple[int, pytest.Item]]] = [[] for _ in range(processes)]
    rest: list[pytest.Item] = []
    for item in items:
        group, place = _longest(item.path)
        if place is None:
            rest.append(item)
        else:
            begin[group % processes].append((place, item))
    ordered: list[pytest.Item] = []
    for number, longest in enumerate(begin):
        run = (len(items) - len(ordered)) // (processes - number)
        short = max(0, run - len(longest))
        ordered += [item for _, item in sorted(longest, key=lambda each: each[0])] + rest[:short]
        del rest[:short]
    return ordered + rest


@cache
def _longest(path: Path) -> tuple[int, int | None]:
    """Return with which group of ``LONGEST`` a file runs, and where in it; None: with none."""
    for group, names in enumerate(LONGEST):
        if (place := _within(path, names)) is not None:
            return group, place
    return 0, None


def _within(path: Path, names: Iterable[str]) -> int | None:
    """Return which of these files and folders a test file is in."""
    place = path.relative_to(TESTS).as_posix()
    return next((at for at, name in enumerate(names) if f"{place}/".startswith(f"{name}/")), None)
