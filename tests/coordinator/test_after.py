"""A function whose windows come after those of another, in one server that lags and dies: each join is complete."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from coordinator.pipeline import Crash, Daemon, Faults, Pipeline, named

from mldserver.config.settings import WindowSettings
from mldserver.engine_jobs import FunctionView
from mldserver.errors import OperatorError, WindowFailed
from mldserver.jobs.predecessors import Predecessors, check
from mldserver.jobs.published import PublishedWindows
from mldserver.ledger.contract import WindowEntry, WindowState
from mldserver.output.store import OutputStore
from mldserver.testing import LocalEngine, VirtualClock
from mldserver.windows import TimeWindows, time_window_id

pytestmark = pytest.mark.quick

SIZE_MS = 10_000
PAYMENTS = [(n, 1100 * n) for n in range(1, 60)]
ORDERS = [(n, 900 * n) for n in range(1, 50)]


@dataclass
class House:
    """Two functions: the windows of ``orders`` hold the payments up to their end, as it finds them."""

    root: Path
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(1_000_000))
    faults: Faults = field(default_factory=Faults)
    published: dict[str, PublishedWindows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        common: dict[str, Any] = {"spec": TimeWindows(SIZE_MS), "clock": self.clock}
        self.payments = Pipeline(self.root / "payments", **common)
        self.orders = Pipeline(self.root / "orders", engine=lambda: LocalEngine(self.join), **common)
        self.payments.faults = self.orders.faults = self.faults
        self.orders.predecessors = Predecessors(names=("payments",), published=self.published)

    def join(self, rows: pa.Table, window: Any) -> pa.Table:
        """Count the payments that are published in windows up to the end of this one: of files, as Spark would."""
        (view,) = self.orders.engine.jobs[-1].views
        end_ms = int(window.end.timestamp() * 1000)
        count = 0
        for folder in view.paths:
            for file in Path(folder).glob("*.parquet"):
                found = pq.ParquetFile(file).read(["_time"])["_time"].to_pylist()
                count += sum(time_ms < end_ms for time_ms in found)
        return rows.append_column("payments", pa.array([count] * len(rows)))

    @contextlib.asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        async with self.payments.life(), self.orders.life():
            self.run_payments()
            yield
        self.published.clear()

    def run_payments(self) -> None:
        store = OutputStore(str(self.payments.out))
        self.published["payments"] = PublishedWindows(
            shape=FunctionView("payments", (), size_ms=SIZE_MS),
            has_view=True,
            ledger=self.payments.ledger,
            store=store,
            clock=self.clock,
            until_ms=self.payments.coordinator.published_until_ms,
        )

    def counted(self) -> dict[int, set[int]]:
        """By the end of each published window of orders: what it found."""
        found: dict[int, set[int]] = {}
        for row in self.orders.rows("window=*/*.parquet"):
            found.setdefault(round(row["window_end"].timestamp() * 1000), set()).add(row["payments"])
        return found


def expected(end_ms: int) -> int:
    return sum(ms < end_ms and number % Daemon({}).bad != 0 for number, ms in PAYMENTS)


EXPECTED = {end_ms: {expected(end_ms)} for end_ms in range(SIZE_MS, 50_001, SIZE_MS)}


async def live(house: House, payments: Daemon, orders: Daemon, *, lags: str = "") -> bool:
    """Run until both streams are read and published, or the server dies; True when it got to the end."""
    done = False

    async def read(name: str, pipeline: Pipeline, daemon: Daemon) -> None:
        await house.clock.sleep(60 if name == lags else 0)
        await daemon.consume(pipeline)
        await pipeline.coordinator.over()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(read("payments", house.payments, payments))
            group.create_task(read("orders", house.orders, orders))
        for pipeline in (house.payments, house.orders):
            assert pipeline.runner is not None
            await pipeline.runner.idle()

    try:
        async with asyncio.timeout(800), house.life():
            await house.clock.drive(work(), step=1)
            done = True
    except* Crash:
        pass
    return done


def daemons() -> tuple[Daemon, Daemon]:
    return Daemon({"p": PAYMENTS}), Daemon({"o": ORDERS})


@pytest.mark.parametrize("lags", ["", "payments", "orders"])
async def test_windows_join_all_windows_of_the_other_function_up_to_their_end_whichever_lags(
    tmp_path: Path, lags: str, logged: list[dict[str, Any]]
) -> None:
    house = House(tmp_path)
    assert await live(house, *daemons(), lags=lags)
    found = house.counted()
    assert found == EXPECTED
    waited = {event["window"] for event in named(logged, "window.waiting")}
    if lags == "payments":
        assert waited >= {time_window_id(0), time_window_id(SIZE_MS)}


async def test_wherever_the_server_dies_each_window_joins_once_and_completely(
    tmp_path: Path, long: bool
) -> None:
    step = 1 if long else 29
    place, died = 1 - step, True
    while died:
        place += step
        house, (payments, orders) = House(tmp_path / str(place)), daemons()
        house.faults.at = place
        died = not await live(house, payments, orders, lags=("payments", "orders")[place % 2])
        if died:
            house = House(tmp_path / str(place), clock=house.clock)
            assert await live(house, payments, orders)
        assert house.counted() == EXPECTED, place
        orders.assert_exactly_once(house.orders)
        payments.assert_exactly_once(house.payments)
    assert place > 60


async def test_windows_wait_for_a_function_that_does_not_run_and_say_so(tmp_path: Path) -> None:
    house = House(tmp_path)
    async with house.orders.life():
        runner = house.orders.runner
        assert runner is not None
        session = await house.orders.open("o")
        await house.orders.give(session, [(1, 1000), (2, 25_000)])
        await house.clock.advance(30)
        assert (house.orders.published(), runner.trouble) == ({}, None)
        await house.clock.advance(60)
        assert (
            runner.trouble
            == f"window {time_window_id(0)} waits for the function payments, which does not run"
        )
        async with house.payments.life():
            house.run_payments()
            other = await house.payments.open("p")
            await house.payments.give(other, [(1, 1000), (2, 25_000)])
            await house.clock.advance(10)
            assert house.counted() == {10_000: {1}}
            assert runner.trouble is None


async def test_windows_are_published_up_to_the_watermark_or_the_first_that_is_not(tmp_path: Path) -> None:
    house = House(tmp_path)
    async with house.life():
        session = await house.payments.open("p")
        await house.payments.give(session, [(1, 1000), (2, 5000)])
        await house.clock.advance(3)
        until = house.payments.coordinator.published_until_ms
        assert until() == 5000
        await house.payments.give(session, [(3, 45_000)])
        await house.clock.advance(5)
        assert until() == 45_000


async def test_a_window_that_was_set_aside_is_not_waited_for(tmp_path: Path) -> None:
    house, failing = House(tmp_path), LocalEngine()
    failing.fail = lambda _: WindowFailed("never")
    house.payments.make_engine = lambda: failing
    house.payments.policy = WindowSettings(window_attempts=2, window_on_failure="dead_letter")
    async with house.life():
        session = await house.payments.open("p")
        await house.payments.give(session, [(1, 1000), (2, 45_000)])
        await house.payments.cycle()
        until = house.payments.coordinator.published_until_ms
        assert until() == 9999
        await house.clock.advance(20)
        assert house.payments.state().windows[time_window_id(0)].state is WindowState.SET_ASIDE
        assert until() >= 45_000


async def test_a_handler_without_windows_of_time_has_published_nothing(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, without_rows=True)
    async with pipeline.life() as coordinator:
        assert coordinator.published_until_ms() == float("-inf")


def test_windows_that_are_committed_wait_for_nothing() -> None:
    first = Predecessors(names=("payments",), published={})
    entry = WindowEntry("w", state=WindowState.CUT, end_ms=10)
    assert first.missing(entry) == "payments"
    assert Predecessors(names=(), published={}).missing(entry) is None


async def test_a_manifest_that_cannot_be_read_is_an_error_that_is_retried() -> None:
    class Broken:
        async def view(self, *, fresh: bool) -> None:
            raise ValueError("a manifest of format 9")

    first = Predecessors(names=("payments",), published={"payments": Broken()})  # type: ignore[dict-item]  # a stand-in
    with pytest.raises(
        OperatorError, match="A published window of payments cannot be found: a manifest of format 9"
    ):
        await first.views()


@dataclass
class Other:
    after: tuple[str, ...]


@pytest.mark.parametrize(
    ("after", "others", "what"),
    [
        (("payments",), {}, None),
        (("payments",), {"payments": ("clicks",)}, None),
        (("nobody",), {}, "this server has no function nobody"),
        (("orders",), {}, "would wait for each other"),
        (
            ("payments",),
            {"payments": ("orders",)},
            "The functions orders and payments would wait for each other",
        ),
        (("payments",), {"payments": ("clicks",), "clicks": ("orders",)}, "would wait for each other"),
        (("payments",), {"payments": ("clicks",), "clicks": ("payments",)}, None),
    ],
)
def test_names_that_are_missing_or_in_a_circle_are_refused(
    after: tuple[str, ...], others: dict[str, tuple[str, ...]], what: str | None
) -> None:
    published: Any = {name: Other(theirs) for name, theirs in others.items()}
    functions = frozenset({"orders", "payments", "clicks"})
    if what is None:
        check("orders", after, functions, published)
        return
    with pytest.raises(OperatorError, match=what):
        check("orders", after, functions, published)
