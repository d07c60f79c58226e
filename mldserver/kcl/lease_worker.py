"""This host's worker in the KCL: its name, which no other process here may use, and the leader's lock.

A daemon that starts under the name of its predecessor renews the predecessor's leases at once. Two live daemons under one
name would take each lease from each other, so the name is held: the supervisor and its JVM share a socket in Linux's
abstract namespace, and the kernel releases its name once both are dead.

The leader of an application assigns leases that have expired or have no owner. A JVM that is killed keeps the leader's
lock, which expires after two minutes: the KCL has no property for that. The supervisor, which knows of the death, releases
the lock instead. For the lock of another host it can only report that shards wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog
from botocore.exceptions import BotoCoreError, ClientError

from mldserver.base.aws import aws_client
from mldserver.base.clock import Clock

log = structlog.get_logger("mldserver")

LEADER_KEY: Final = {"key": {"S": "Leader"}}
RELEASE_SECONDS: Final = 10.0
"""The time limit of one attempt to release the lock. On a slow host importing AWS's client takes part of this."""
LOOK_SECONDS: Final = 15.0
"""Between two looks at the leader's lock. An owner renews a lease within this time (``failoverTimeMillis`` is 10 s)."""
SILENT_SECONDS: Final = 45.0
"""A leader renews its lock, and other workers try to get it, every 30 s. A lock unchanged for this long has no leader."""
MACHINE_ID: Final = Path("/etc/machine-id")
NAMED_SHARDS: Final = 20
"""The report of waiting shards names at most this many."""

Leases = dict[str, tuple[str | None, str | None]]
"""Owner and counter of each lease that has not ended."""


def host_worker(machine_id: Path = MACHINE_ID) -> str:
    """Return a name that this host keeps: the host's name, with a digest of the machine's id where it has one."""
    with contextlib.suppress(OSError):
        if text := machine_id.read_text("utf-8", "replace").strip():
            return f"{socket.gethostname()}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return socket.gethostname()


@dataclass(slots=True)
class LeaderWatch:
    """Looks at the leader's lock and the leases in, shards that wait for a leader out. Synchronous."""

    _lock: tuple[str, str] | None = None
    _since: float | None = None
    _leases: Leases = field(default_factory=dict)
    _reported: bool = False

    def silent(self, lock: tuple[str, str] | None, now: float) -> float:
        """Note the lock (owner and version, None when it is free). Return for how many seconds it has not changed."""
        if self._since is None or lock != self._lock:
            self._lock, self._since, self._reported, self._leases = lock, now, False, {}
        return now - self._since

    def waiting(self, leases: Leases, silent: float) -> list[str]:
        """Return the shards whose lease no worker renews, once they wait for a leader; only once for each lock."""
        former, self._leases = self._leases, leases
        idle = [
            shard
            for shard, (owner, counter) in sorted(leases.items())
            if owner is None or former.get(shard) == (owner, counter)
        ]
        if silent < SILENT_SECONDS or self._reported or not idle:
            return []
        self._reported = True
        return idle


class LeaseWorker:
    """The worker of one daemon's properties."""

    def __init__(self, properties: Mapping[str, str], clock: Clock) -> None:
        app = properties["applicationName"]
        self.name = properties["workerIdentifier"]
        self._lock_table = properties.get("coordinatorStateTableName", f"{app}-CoordinatorState")
        self._lease_table = properties.get("tableName", app)
        self._clock = clock
        self._where: dict[str, Any] = {
            "region": properties.get("dynamoDBRegionName", properties["regionName"]),
            "endpoint_url": properties.get("dynamoDBEndpoint"),
            "retries": {"total_max_attempts": 2},
        }
        self._held: socket.socket | None = None

    def claim(self) -> bool:
        """Hold the name until both this process and its JVM have ended; False while another process holds it.

        Only Linux knows how. Elsewhere the name is not held.
        """
        if self._held is not None or sys.platform != "linux":
            return True
        what = repr((self._where["region"], self._where["endpoint_url"], self._lock_table, self.name))
        holding = socket.socket(socket.AF_UNIX)
        try:
            holding.bind(f"\0mldserver-kcl-{hashlib.sha256(what.encode()).hexdigest()}")
        except OSError as error:
            holding.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._held = holding
        return True

    @property
    def held(self) -> tuple[int, ...]:
        """The file by which the name is held: the JVM must inherit it."""
        return () if self._held is None else (self._held.fileno(),)

    def close(self) -> None:
        """Release the name; a JVM that lives keeps it."""
        if self._held is not None:
            self._held.close()
            self._held = None

    async def release_lead(self) -> bool:
        """Delete the leader's lock if it is this worker's, whose JVM is dead. Return False when that failed, which is logged.

        The lock's version is a condition too: a request that arrives late does not delete the lock of the next JVM.
        """
        try:
            async with asyncio.timeout(RELEASE_SECONDS), aws_client("dynamodb", **self._where) as client:
                lock = await self._read_lock(client)
                if lock is None or lock[0] != self.name:
                    return True
                with contextlib.suppress(client.exceptions.ConditionalCheckFailedException):
                    await client.delete_item(
                        TableName=self._lock_table,
                        Key=LEADER_KEY,
                        ConditionExpression="ownerName = :worker AND recordVersionNumber = :version",
                        ExpressionAttributeValues={":worker": {"S": lock[0]}, ":version": {"S": lock[1]}},
                    )
                    log.info("kcl.lead_released", worker=self.name)
        except (BotoCoreError, ClientError, OSError) as error:
            log.warning(
                "kcl.fault",
                what=f"The leader's lock of worker {self.name} could not be released: {error or 'AWS did not answer'}.",
                did="If the daemon had the lock, the application has no leader until the lock expires, in two minutes.",
                advice="Look whether AWS answers, and allow the credentials of mldserver kcl dynamodb:GetItem and"
                f" dynamodb:DeleteItem on the table {self._lock_table}.",
            )
            return False
        return True

    async def watch_leader(self) -> None:
        """Log when shards wait because no worker leads the application. Runs until it is cancelled."""
        watch = LeaderWatch()
        failures = (BotoCoreError, ClientError, OSError)
        await self._clock.sleep(LOOK_SECONDS)
        # The daemon's own log reports faults of AWS.
        with contextlib.suppress(*failures):
            # One client for all looks: making one takes a fifth of a second.
            async with aws_client("dynamodb", **self._where) as client:
                while True:
                    with contextlib.suppress(*failures):
                        async with asyncio.timeout(RELEASE_SECONDS):
                            await self._look(watch, client)
                    await self._clock.sleep(LOOK_SECONDS)

    async def _look(self, watch: LeaderWatch, client: Any) -> None:
        lock = await self._read_lock(client)
        silent = watch.silent(lock, self._clock.steady_ms() / 1000)
        # Two looks at the leases must show the same.
        if silent < SILENT_SECONDS - LOOK_SECONDS:
            return
        if shards := watch.waiting(await self._read_leases(client), silent):
            gone = f"; {lock[0]} led it and has not renewed its lock" if lock else ""
            log.warning(
                "kcl.no_leader",
                shards=shards[:NAMED_SHARDS],
                count=len(shards),
                seconds=round(silent),
                what=f"{len(shards)} shards have no live owner and wait for a leader of the application"
                f" (for {silent:.0f} s{gone}).",
                did="The first worker that gets the lock assigns them. A lock expires after two minutes.",
                advice=f"If the host of {lock[0]} is up, start mldserver kcl there, which releases the lock."
                if lock
                else "Look whether a daemon's log shows why it does not get the lock.",
            )

    async def _read_lock(self, client: Any) -> tuple[str, str] | None:
        """Return owner and version of the leader's lock; None while it is free, or without a table."""
        try:
            found = await client.get_item(TableName=self._lock_table, Key=LEADER_KEY, ConsistentRead=True)
        except client.exceptions.ResourceNotFoundException:
            return None
        item = found.get("Item", {})
        owner, version = (item.get(name, {}).get("S") for name in ("ownerName", "recordVersionNumber"))
        return (owner, version) if owner is not None and version is not None else None

    async def _read_leases(self, client: Any) -> Leases:
        leases: Leases = {}
        try:
            async for page in client.get_paginator("scan").paginate(TableName=self._lease_table):
                for item in page["Items"]:
                    if item.get("checkpoint", {}).get("S") != "SHARD_END" and "leaseCounter" in item:
                        owner = item.get("leaseOwner", {}).get("S")
                        leases[item["leaseKey"]["S"]] = (owner, item["leaseCounter"].get("N"))
        except client.exceptions.ResourceNotFoundException:
            return {}
        return leases
