"""The coordinator's view of the ledger."""

from __future__ import annotations

import pytest

from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.ledger.contract import LedgerState, ShardState
from mldserver.output.layout import writer_tag

pytestmark = [pytest.mark.quick, pytest.mark.core]


def test_a_servers_files_are_marked_with_its_id_and_the_ledgers() -> None:
    view = LedgerView("one", LedgerState(ledger_id="0123abcd"))
    assert view.tag == writer_tag("0123abcd", "one")


def test_shards_that_another_server_reads_are_owned_elsewhere() -> None:
    shards = {
        "mine": ShardState("mine", 1, owner="one"),
        "theirs": ShardState("theirs", 1, owner="two"),
        "nobody's": ShardState("nobody's", 1),
        "ended": ShardState("ended", 1, owner="two", ended_ms=5),
    }
    assert LedgerView("one", LedgerState(shards=shards)).owned_elsewhere() == {"theirs"}
