"""The server as users start it, with Spark: killed at the steps of a window's life, and Spark killed under it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow as pa
import pytest
from crash.lives import Life, Plan
from crash.spark_life import SparkLife
from crash.stories import Story, told
from crash.world import RECORDS, Death, Toll, World, play_all
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from support.postgres import JAR, serving
from support.spark_classes import QUICK as QUICK_SPARK
from support.spark_classes import spark_cache

pytestmark = pytest.mark.slow

STEPS: Final = (
    "attempt.begun",
    "attempt.computed",
    "attempt.staged",
    "window.committed",
    "window.renamed",
    "window.visible",
    "window.published",
    "window.cleaned",
    "revision.exchanged",
    "revision.cut",
)
"""Where the server dies: the steps that a real job, and a real output, lie between."""
FEW: Final = 1
"""How many of these steps a day's run draws; the long lane takes all. With the small engine it is all of them every day."""
INSTANTS: Final = 5
"""How often the server dies at some instant in the long lane, with Spark starting, idle or at work."""
SPARK_KILLS: Final = 3
"""How often in each story of the long lane the driver is killed, and how often the JVM alone, at most. In a day's run one
of the two is drawn, and killed once."""
EXTRA: Final = 3
"""How many stories are played beyond that, at most, until both were killed."""
A_LIFE: Final = 2
"""How often Spark is killed in one life of a server: a third JVM that cannot start would end the server, rightly."""
OF_SIDE_TABLES: Final = ("late.staged", "late.moved", "late.published")
OF_A_TABLE: Final = ("attempt.staged", "window.committed", "sink.writing", "window.published")
"""The same, where the output goes into a table."""
QUICK: Final = {
    "spark_conf": QUICK_SPARK,
    "workers": "inline",  # lives with the small engine have worker processes
}


class SparkWorld(World):
    """A world in which Spark dies too, while it works on windows."""

    def __init__(self, *args: Any, dice: random.Random, spark_ahead: list[str], **options: Any) -> None:
        super().__init__(*args, life=self._made, **options)
        self.spark_ahead = spark_ahead
        self.spark_died: Counter[str] = Counter()
        self._spark_dice = dice
        self._now: SparkLife | None = None

    def _made(self, plan: Plan, step: str | None) -> Life:
        self._now = SparkLife(plan, step)
        return self._now

    async def play(self) -> None:
        async with asyncio.TaskGroup() as group:
            killing = group.create_task(self._kill_spark())
            await super().play()
            killing.cancel()

    async def _kill_spark(self) -> None:
        """Kill Spark some moments after a job began, again and again; a server that is armed has its own turn."""
        killed: Counter[SparkLife] = Counter()
        while self.spark_ahead:
            await asyncio.sleep(self._spark_dice.random() * 0.3)
            life = self._now
            if life is None or life.armed or killed[life] >= A_LIFE or not life.computes:
                continue
            what = self.spark_ahead[0]
            if life.kill_spark(jvm=what == "jvm"):
                del self.spark_ahead[0]
                self.spark_died[what] += 1
                killed[life] += 1
                await asyncio.sleep(1)


def killed(worlds: list[SparkWorld]) -> Counter[str]:
    """Return how often the driver, and how often the JVM alone, was killed."""
    return sum((world.spark_died for world in worlds), Counter())


async def test_a_server_with_spark_killed_again_and_again_loses_and_doubles_nothing(
    tmp_path: Path, seed: int, long: bool
) -> None:
    dice = random.Random(seed)
    steps = STEPS if long else tuple(dice.sample(STEPS, FEW))
    deaths = [Death(step, dice.randint(1, 2)) for step in steps]
    deaths += [Death(after_seconds=5 + dice.random() * 10) for _ in range(INSTANTS * long)]
    dice.shuffle(deaths)
    toll = Toll.of(deaths)
    victims = {"driver", "jvm"} if long else {dice.choice(("driver", "jvm"))}
    # In the long lane another JVM makes an archive a minute after a start: many lives gain by it, a day's few do not.
    cache = tmp_path / "cache" if long else spark_cache(tmp_path)
    began = time.monotonic()
    worlds: list[SparkWorld] = []

    async def play(folder: Path, story: Story, toll: Toll, kills: int) -> None:
        world = SparkWorld(
            folder,
            story,
            toll,
            kills=kills,
            dice=random.Random(story.seed),
            spark_ahead=sorted(victims) * (SPARK_KILLS if long else 1),
            settings={**QUICK, "cache_dir": cache, "retry_seconds": (0.05, 0.5)},
            patience_seconds=300,
        )
        worlds.append(world)
        await world.play()

    at_once = 2 if long else 1
    stories = await play_all(
        tmp_path, toll, seed, at_once=at_once, play=play, kind_for=lambda _toll, _usual: "recompute"
    )
    for number in range(EXTRA):
        if killed(worlds).keys() >= victims:
            break
        # Spark was idle whenever its turn came: here no server dies before it.
        folder = tmp_path / f"extra-{number}"
        folder.mkdir()
        story = told(seed * 1000 + 900 + number, kind="recompute", records=RECORDS)
        await play(folder, story, Toll.of(()), 0)
        stories += 1
    spark = killed(worlds)
    seconds = time.monotonic() - began
    print(
        f"{toll.died.total()} kills of servers, {dict(spark)} of Spark in {stories} stories, {seconds:.0f} s"
    )
    assert [step for step in steps if not toll.died[step]] == []
    assert toll.died.total() >= len(deaths)
    assert spark.keys() >= victims


@pytest.mark.long
async def test_a_server_that_publishes_into_postgresql_dies_at_each_step_and_the_table_is_exact(
    tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    toll = Toll.of([Death(step, dice.randint(1, 2)) for step in OF_A_TABLE])
    options = f"{QUICK['spark_conf']};spark.jars={JAR}"
    with serving() as server:

        def tables() -> Iterator[tuple[str, pa.Table]]:
            with server.session() as session:
                assert session.ask("SELECT count(*) FROM events__windows WHERE stage <> 'none'") == ["0"]
                names = session.ask("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
                assert names == ["events", "events__owner", "events__windows"]
                for line in session.ask("SELECT row_to_json(events) FROM events"):
                    row = orjson.loads(line)
                    for name in ("at", "_arrival"):
                        row[name] = datetime.fromisoformat(row[name])
                    del row["_revision"]
                    yield row.pop("_window"), pa.Table.from_pylist([row])

        async def play(folder: Path, story: Story, toll: Toll, kills: int) -> None:
            with server.session() as session:
                session.ask("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
            settings = {
                **QUICK,
                "spark_conf": options,
                "sink": server.url,
                "sink_table": "events",
                "sink_options": "driver=org.postgresql.Driver;user=postgres",
                "cache_dir": tmp_path / "cache",
                "retry_seconds": (0.05, 0.5),
            }
            world = World(
                folder,
                story,
                toll,
                kills=kills,
                life=SparkLife,
                settings=settings,
                patience_seconds=300,
                tables=tables,
            )
            await world.play()

        await play_all(tmp_path, toll, seed, at_once=1, play=play, kind_for=lambda _toll, _usual: "table")
    # Where a story ended before its step came, kills at any moment come before the next try.
    assert toll.died.keys() - {""} == {*OF_A_TABLE}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
@pytest.mark.parametrize(("of", "steps"), [("table", OF_A_TABLE), ("side_tables", OF_SIDE_TABLES)])
async def test_a_server_that_publishes_into_a_lake_dies_at_each_step_and_the_table_is_exact(
    tmp_path: Path, seed: int, kind: str, of: str, steps: tuple[str, ...]
) -> None:
    dice = random.Random(seed)
    toll = Toll.of([Death(step, dice.randint(1, 2)) for step in steps])

    async def play(folder: Path, story: Story, toll: Toll, kills: int) -> None:
        options = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/lake",
        }

        def tables() -> Iterator[tuple[str, pa.Table]]:
            for name in ("events",) if of == "table" else ("events", "letters"):
                if kind == "delta":
                    found = DeltaTable(folder / name).to_pyarrow_table().drop_columns("_day")
                else:
                    found = load_catalog("lake", **options).load_table(f"air.{name}").scan().to_arrow()
                for row in found.drop_columns("_revision").to_pylist():
                    yield row.pop("_window"), pa.Table.from_pylist([row])

        place = f"delta:{folder}/" if kind == "delta" else "iceberg:lake.air."
        places = {"sink": "events"} if of == "table" else {"late_sink": "events", "dead_letters": "letters"}
        settings: dict[str, Any] = {
            **QUICK,
            **{setting: place + name for setting, name in places.items()},
            "cache_dir": tmp_path / "cache",
            "retry_seconds": (0.05, 0.5),
        }
        if kind == "iceberg":
            settings["sink_options"] = ";".join(f"{name}={value}" for name, value in options.items())
        world = World(
            folder,
            story,
            toll,
            kills=kills,
            life=SparkLife,
            settings=settings,
            patience_seconds=300,
            tables=tables,
        )
        await world.play()

    await play_all(tmp_path, toll, seed, at_once=1, play=play, kind_for=lambda _toll, _usual: of)
    assert toll.died.keys() - {""} == {*steps}
