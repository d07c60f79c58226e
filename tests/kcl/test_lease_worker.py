"""The worker's name and the leader's lock, over real sockets, processes and an emulated DynamoDB."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mldserver.base.aws import aws_client
from mldserver.kcl.lease_worker import SILENT_SECONDS, WATCH_SECONDS, LeaseWorker, host_worker
from mldserver.testing import VirtualClock
from tests.ledger.dynamodb_emulator import Emulator

Logged = list[dict[str, Any]]
KEY = {"key": {"S": "Leader"}}


def worker(name: str = "me", clock: VirtualClock | None = None, **changed: str) -> LeaseWorker:
    properties = {"applicationName": "app", "regionName": "eu-central-1", "workerIdentifier": name}
    return LeaseWorker(properties | changed, clock or VirtualClock())


def events(logged: Logged, name: str) -> Logged:
    return [event for event in logged if event["event"] == name]


def test_a_host_keeps_its_name_and_a_host_of_the_same_name_has_another(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1\n")
    two.write_text("2\n")
    assert host_worker(one) == host_worker(one) != host_worker(two)
    assert host_worker(one).startswith(f"{socket.gethostname()}-")
    (tmp_path / "empty").touch()  # as in some images
    assert host_worker(tmp_path / "empty") == host_worker(tmp_path / "none") == socket.gethostname()


linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")


@linux
def test_a_name_is_held_by_one_process_for_each_application() -> None:
    first = worker()
    assert first.claim()
    assert first.claim()
    assert not worker().claim()
    for other in (
        worker("you"),
        worker(applicationName="another"),
        worker(dynamoDBEndpoint="http://127.0.0.1:1"),
    ):
        assert other.claim()
        other.close()
    first.close()
    second = worker()
    assert second.claim()
    second.close()


@linux
def test_a_jvm_that_outlives_its_supervisor_keeps_the_name() -> None:
    first = worker()
    assert first.claim()
    with subprocess.Popen(["sleep", "100"], pass_fds=first.held) as jvm:
        first.close()
        assert not worker().claim()
        jvm.send_signal(signal.SIGKILL)
    second = worker()
    assert second.claim()
    second.close()


def test_a_name_that_cannot_be_held_for_another_reason_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(socket.socket, "bind", full)
    with pytest.raises(OSError, match="Too many"):
        worker().claim()


def test_elsewhere_the_name_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    first = worker()
    assert first.claim()
    assert worker().claim()
    assert first.held == ()


@pytest.fixture
def app() -> str:
    """The name of an application of this test's own: moto keeps its tables for all tests of a process."""
    return uuid.uuid4().hex


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "emulated")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "emulated")
    emulated = Emulator()
    with emulated.running():
        yield emulated


async def make_table(dynamodb: Any, name: str, key: str) -> None:
    await dynamodb.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )


def lock(owner: str, version: str = "1") -> dict[str, Any]:
    return KEY | {"ownerName": {"S": owner}, "recordVersionNumber": {"S": version}}


async def test_only_a_lock_of_the_workers_own_is_released(
    emulator: Emulator, app: str, logged: Logged
) -> None:
    table = f"{app}-CoordinatorState"
    ours = worker(applicationName=app, dynamoDBEndpoint=emulator.url)
    assert await ours.release_lead()  # before there is a table
    async with aws_client("dynamodb", region="eu-central-1", endpoint_url=emulator.url) as dynamodb:
        await make_table(dynamodb, table, "key")
        assert await ours.release_lead()  # while no worker leads
        left = []
        for owner in ("another", "me"):
            await dynamodb.put_item(TableName=table, Item=lock(owner))
            assert await ours.release_lead()
            left.append("Item" in await dynamodb.get_item(TableName=table, Key=KEY))
    assert left == [True, False]
    assert [event["event"] for event in logged] == ["kcl.lead_released"]


async def test_the_lock_of_the_next_jvm_is_not_released_by_a_late_request(
    emulator: Emulator, app: str
) -> None:
    table = f"{app}-CoordinatorState"
    ours = worker(applicationName=app, dynamoDBEndpoint=emulator.url)
    async with aws_client("dynamodb", region="eu-central-1", endpoint_url=emulator.url) as dynamodb:
        await make_table(dynamodb, table, "key")
        await dynamodb.put_item(TableName=table, Item=lock("me"))

        real = ours._read_lock

        async def then_renewed(client: Any) -> Any:
            found = await real(client)
            await client.put_item(TableName=table, Item=lock("me", "2"))
            return found

        ours._read_lock = then_renewed  # type: ignore[method-assign]
        assert await ours.release_lead()
        assert "Item" in await dynamodb.get_item(TableName=table, Key=KEY)


async def test_a_lock_that_cannot_be_released_is_logged_with_the_permission_it_takes(
    emulator: Emulator, logged: Logged
) -> None:
    broken = worker(dynamoDBEndpoint="http://127.0.0.1:1", coordinatorStateTableName="leads")
    assert not await broken.release_lead()
    (fault,) = events(logged, "kcl.fault")
    assert "could not be released" in fault["what"]
    assert "dynamodb:DeleteItem on the table leads" in fault["advice"]


async def let_it_watch(clock: VirtualClock, times: int = 1) -> None:
    """Return once the watcher has read the lock so many times, and sleeps again."""
    for _ in range(times):
        while not clock.sleepers:  # noqa: ASYNC110  # the clock counts sleepers, it has no event for them
            await asyncio.sleep(0.001)
        await clock.advance(WATCH_SECONDS)
    while not clock.sleepers:  # noqa: ASYNC110  # as above
        await asyncio.sleep(0.001)


async def test_a_leader_that_no_longer_renews_its_lock_is_logged_once(
    emulator: Emulator, app: str, logged: Logged
) -> None:
    clock, table = VirtualClock(), f"{app}-CoordinatorState"
    silent_reads = int(SILENT_SECONDS / WATCH_SECONDS)
    watching = asyncio.ensure_future(
        worker(clock=clock, applicationName=app, dynamoDBEndpoint=emulator.url).watch_leader()
    )
    await let_it_watch(clock, silent_reads + 2)  # before there is a table
    async with aws_client("dynamodb", region="eu-central-1", endpoint_url=emulator.url) as dynamodb:
        await make_table(dynamodb, table, "key")
        await let_it_watch(clock, silent_reads + 2)  # no worker leads yet
        for version in ("1", "2", "3"):  # renewed in time
            await dynamodb.put_item(TableName=table, Item=lock("dead", version))
            await let_it_watch(clock, silent_reads)
        assert events(logged, "kcl.no_leader") == []
        await let_it_watch(clock, 5)
        (report,) = events(logged, "kcl.no_leader")
        assert (report["level"], report["leader"], report["seconds"]) == ("warning", "dead", SILENT_SECONDS)
        await dynamodb.put_item(TableName=table, Item=lock("next"))
        await let_it_watch(clock, silent_reads + 1)
    watching.cancel()
    assert [event["leader"] for event in events(logged, "kcl.no_leader")] == ["dead", "next"]


async def test_a_lock_that_cannot_be_read_is_not_reported(emulator: Emulator, logged: Logged) -> None:
    clock = VirtualClock()
    watching = asyncio.ensure_future(
        worker(clock=clock, dynamoDBEndpoint="http://127.0.0.1:1").watch_leader()
    )
    await let_it_watch(clock, 5)
    watching.cancel()
    assert logged == []
