"""Commands in a folder of the test's own, and nothing set by the environment but that handlers run in the server's own
process: one for workers costs a second of the processor. A server has as long to answer as the test, and fakes are quick."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mldserver.admin.http_client import Client
from mldserver.dynamodb_streams import direct_source, stream_listing
from mldserver.testing import playground, simulation


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("MLDSERVER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLDSERVER_WORKERS", "inline")
    monkeypatch.setenv("MLDSERVER_ADMIN", "none")
    monkeypatch.setattr(playground, "_SETTLE_MS", 400)
    monkeypatch.setattr(direct_source, "AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(stream_listing, "_CHILD_SECONDS", (0.01, 0.05))
    monkeypatch.setattr(simulation, "_RESTART_SECONDS", 0.05)
    monkeypatch.setattr(simulation, "_LEASE_BACK_SECONDS", 0.05)
    monkeypatch.setitem(Client.__init__.__kwdefaults__, "seconds", 600.0)  # type: ignore[index]  # it has some
