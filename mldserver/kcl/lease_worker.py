"""This host's worker in the KCL: its name, which no other process here may use, and the leader's lock.

A daemon that starts under the name of its predecessor renews the predecessor's leases at once. Two live daemons under one
name would take each lease from each other, so the name is held: the supervisor and its JVM share a socket in Linux's
abstract namespace, and the kernel releases its name once both are dead.

The leader of an application assigns leases that have expired or have no owner. A JVM that is killed keeps the leader's
lock, which expires after two minutes: the KCL has no property for that. The supervisor, which knows of the death, releases
the lock instead. For the lock of another host it can only report that the application has no leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import socket
import sys
from collections.abc import Mapping
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
WATCH_SECONDS: Final = 15.0
"""Between two reads of the leader's lock."""
SILENT_SECONDS: Final = 45.0
"""A leader renews its lock every 30 s (KCL 3). If the lock is unchanged for this long, its owner is dead."""
MACHINE_ID: Final = Path("/etc/machine-id")


def host_worker(machine_id: Path = MACHINE_ID) -> str:
    """Return a name that this host keeps: the host's name, with a digest of the machine's id where it has one."""
    with contextlib.suppress(OSError):
        if text := machine_id.read_text("utf-8", "replace").strip():
            return f"{socket.gethostname()}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return socket.gethostname()


class LeaseWorker:
    """The worker of one daemon's properties."""

    def __init__(self, properties: Mapping[str, str], clock: Clock) -> None:
        app = properties["applicationName"]
        self.name = properties["workerIdentifier"]
        self._lock_table = properties.get("coordinatorStateTableName", f"{app}-CoordinatorState")
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
        """Log once for each leader's lock that its owner no longer renews. Runs until it is cancelled."""
        aws_faults = (BotoCoreError, ClientError, OSError)  # the daemon's own log reports these
        lock, since_ms, is_reported = None, self._clock.steady_ms(), False
        await self._clock.sleep(WATCH_SECONDS)
        with contextlib.suppress(*aws_faults):
            # One client for all reads: making one takes a fifth of a second.
            async with aws_client("dynamodb", **self._where) as client:
                while True:
                    with contextlib.suppress(*aws_faults):
                        async with asyncio.timeout(RELEASE_SECONDS):
                            latest = await self._read_lock(client)
                        now_ms = self._clock.steady_ms()
                        if latest != lock:
                            lock, since_ms, is_reported = latest, now_ms, False
                        silent_seconds = (now_ms - since_ms) / 1000
                        if lock is not None and silent_seconds >= SILENT_SECONDS and not is_reported:
                            is_reported = True
                            self._report_no_leader(lock[0], silent_seconds)
                    await self._clock.sleep(WATCH_SECONDS)

    def _report_no_leader(self, leader: str, silent_seconds: float) -> None:
        log.warning(
            "kcl.no_leader",
            leader=leader,
            seconds=round(silent_seconds),
            what=f"Worker {leader} leads the application and has not renewed its lock for {silent_seconds:.0f} s. Shards"
            " without a live owner wait for the next leader.",
            did="The first worker that gets the lock assigns them. The lock expires after two minutes.",
            advice=f"If the host of {leader} is up, start mldserver kcl there: it releases the lock.",
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
