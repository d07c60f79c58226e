"""Two coordinators on a ledger in DynamoDB. Simulated worlds show what answers that are lost do to them (tests/simulation)."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator.pipeline import Pipeline

from mldserver.errors import OperatorError
from mldserver.ledger.dynamodb import DynamoLedger
from tests.ledger.dynamodb_fake import FakeDynamo


class OnDynamo(Pipeline):
    """A pipeline whose ledger is a table."""

    def __init__(self, out: Path, dynamo: FakeDynamo, server_id: str) -> None:
        super().__init__(out, server_id=server_id)
        self.dynamo = dynamo
        self.place = "dynamodb://table/test"

    def make_ledger(self) -> DynamoLedger:
        return DynamoLedger(
            "table", pipeline="test", server_id=self.server_id, clock=self.clock, session=self.dynamo
        )

    async def close_ledger(self) -> None:
        await self.ledger.close()


async def test_two_hosts_with_a_local_folder_each_are_refused(tmp_path: Path) -> None:
    """Each would compute windows from the rows that it has itself, and miss the other's."""
    dynamo = FakeDynamo()
    one, other = (OnDynamo(tmp_path / name, dynamo, name) for name in ("one", "other"))
    async with one.life():
        with pytest.raises(OperatorError, match=r"belongs to another output folder than .*/other"):
            async with other.life():
                pass
    async with OnDynamo(tmp_path / "one", dynamo, "other").life():
        pass
