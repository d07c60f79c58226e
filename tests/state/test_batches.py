"""How ``batches`` windows are numbered."""

from __future__ import annotations

import pytest

from mldserver.state.batches import batch_id, batch_number, behind
from mldserver.state.ledger import BatchProgress


def test_a_batchs_name_tells_its_number() -> None:
    assert batch_id(7) == "batch-000000000007"
    assert batch_number(batch_id(7)) == 7
    assert batch_number(batch_id(10**13)) == 10**13


@pytest.mark.parametrize(
    "other", ["2013-01-01T10-00-00Z", "ms+0000000000000000007", "batch-", "batch-7x", ""]
)
def test_other_names_have_no_number(other: str) -> None:
    assert batch_number(other) is None


def test_batches_go_on_behind_the_last_that_is_cut() -> None:
    stands = BatchProgress(4, 5, 100)
    assert behind(stands, [batch_id(3), "w"]) == stands
    assert behind(stands, [batch_id(4)]) == BatchProgress(5)
    assert behind(stands, [batch_id(9), batch_id(2)]) == BatchProgress(10)
    assert behind(BatchProgress(), []) == BatchProgress()
    assert behind(BatchProgress(), [batch_id(0)]) == BatchProgress(1)
