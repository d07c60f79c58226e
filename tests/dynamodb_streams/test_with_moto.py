"""A table that is written through moto's HTTP API ends in committed Spark windows, a restart in the middle included.

moto's stream has one shard that never ends, times in microseconds, and a change for a put that changes nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import aioboto3
import pyarrow.dataset as ds
import pytest
from support.serving import no_aws, quick, serving, until
from support.spark_classes import spark_cache

from mldserver.handler.inspection import load_spec
from mldserver.spark.client import make_engine
from mldserver.testing import LocalEngine
from tests.ledger.dynamodb_emulator import Emulator

HANDLER = "handlers.shop"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    no_aws(monkeypatch, tmp_path)
    for name in KEYS:
        monkeypatch.setenv(name, "emulated")
    emulator = Emulator()
    with emulator.running():
        yield emulator


class Shop:
    """Orders that are put, changed and cancelled through DynamoDB's API; what is left of them is known here."""

    def __init__(self, dynamodb: Any) -> None:
        self._dynamodb = dynamodb
        self._dice = random.Random(7)
        self._orders: dict[str, tuple[str, int]] = {}

    async def open(self) -> None:
        await self._dynamodb.create_table(
            TableName="orders",
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
            StreamSpecification={"StreamEnabled": True, "StreamViewType": "NEW_AND_OLD_IMAGES"},
        )

    async def trade(self, changes: int) -> None:
        for _ in range(changes):
            key = f"order-{self._dice.randrange(60)}"
            if key in self._orders and self._dice.random() < 0.3:
                del self._orders[key]
                await self._dynamodb.delete_item(TableName="orders", Key={"id": {"S": key}})
                continue
            if key not in self._orders or self._dice.random() < 0.8:  # else the same again
                self._orders[key] = (self._dice.choice(("pen", "ink", "pad")), self._dice.randrange(1, 5000))
            product, cents = self._orders[key]
            item = {"id": {"S": key}, "product": {"S": product}, "total": {"N": str(Decimal(cents) / 100)}}
            await self._dynamodb.put_item(TableName="orders", Item=item)

    def sums(self) -> dict[str, tuple[int, Decimal]]:
        """Return what is in the table: orders and revenue of each product."""
        orders, cents = Counter[str](), Counter[str]()
        for product, total in self._orders.values():
            orders[product] += 1
            cents[product] += total
        return {product: (count, Decimal(cents[product]) / 100) for product, count in orders.items()}


def published(out: Path) -> dict[str, tuple[int, Decimal]]:
    orders, revenue = Counter[str](), Counter[str]()
    table = ds.dataset([str(path) for path in out.glob("window=*/*.parquet")], format="parquet").to_table()
    for row in table.to_pylist():
        orders[row["product"]] += row["orders"]
        revenue[row["product"]] += row["revenue"]
    return {product: (count, revenue[product]) for product, count in orders.items() if count}


@pytest.mark.slow
async def test_inserts_updates_and_deletes_end_in_spark_windows_across_a_restart(
    tmp_path: Path, emulator: Emulator
) -> None:
    out, session = tmp_path / "out", aioboto3.Session("emulated", "emulated", region_name="us-east-1")
    settings = quick(
        out,
        HANDLER,
        source=f"dynamodb://orders?endpoint_url={emulator.url}&region=us-east-1",
        poll_seconds=0.1,
    )
    # moto's stream never ends. On a slow machine also what goes on looks quiet, and is shown in a next revision.
    hasty = replace(settings, idle_time_ms=1000, quiet_time_ms=2000)
    spec = load_spec(HANDLER)
    assert spec.schema is not None
    cache = spark_cache(tmp_path)
    spark = make_engine(
        HANDLER, spec.schema.ddl, master="local[1]", work_dir=tmp_path / "work", cache_dir=cache, quick=True
    )
    async with asyncio.timeout(800), session.client("dynamodb", endpoint_url=emulator.url) as dynamodb:
        shop = Shop(dynamodb)
        await shop.open()
        await shop.trade(40)
        # Nothing is computed before the restart: an engine that never comes.
        async with serving(settings, engine=LocalEngine(start_seconds=1e9)) as server:
            await until(lambda: server.status().rows_durable > 20)
            await shop.trade(20)
        await shop.trade(20)
        async with serving(hasty, engine=spark):
            await shop.trade(20)
            await until(lambda: out_is(out, shop.sums()))
    assert published(out) == shop.sums()


def out_is(out: Path, sums: dict[str, tuple[int, Decimal]]) -> bool:
    return bool(list(out.glob("window=*/*.parquet"))) and published(out) == sums
