"""AWS's clients: what it takes long to make them of is read beside the event loop."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from botocore.loaders import JSONFileLoader
from support.serving import KEEP_EVERYTHING, no_aws, quick

from mldserver import assembly
from mldserver.base.aws import aws_client, require_aws
from mldserver.config.locations import DynamoPlace
from mldserver.errors import ConfigError
from mldserver.testing import LocalEngine, VirtualClock

BESIDE = "mldserver-aws"
NOWHERE = "http://127.0.0.1:1"


class Imports:
    """Notes on which thread modules are imported anew, and finds none of them itself."""

    def __init__(self) -> None:
        self.threads: dict[str, str] = {}

    def find_spec(self, name: str, *_: Any) -> None:
        self.threads[name] = threading.current_thread().name


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Imports:
    """Notes imports from now on; aioboto3 was never imported before."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "aioboto3"]:
        monkeypatch.delitem(sys.modules, name)
    noted = Imports()
    monkeypatch.setattr(sys, "meta_path", [noted, *sys.meta_path])
    return noted


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any, they would be looked for in the network."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.mark.parametrize("service", ["dynamodb", "kinesis", "s3", "sqs"])
async def test_nothing_that_a_client_is_made_of_is_read_on_the_event_loops_thread(
    service: str, imports: Imports, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, str] = {}
    load = JSONFileLoader.load_file

    def noted(self: JSONFileLoader, path: str) -> Any:
        read[path] = threading.current_thread().name
        return load(self, path)

    monkeypatch.setattr(JSONFileLoader, "load_file", noted)
    async with aws_client(service, region="eu-central-1", endpoint_url=NOWHERE) as client:
        assert client.meta.endpoint_url == NOWHERE
        assert client.meta.region_name == "eu-central-1"
    assert imports.threads["aioboto3"] == BESIDE
    assert {n for n, t in imports.threads.items() if t != BESIDE} == set()
    assert set(read.values()) == {BESIDE}
    assert [path for path in read if f"/{service}/" in path], "the service's own model is among them"


async def test_what_a_ledger_in_a_table_imports_is_imported_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keeps_all.py").write_text(KEEP_EVERYTHING)
    monkeypatch.syspath_prepend(str(tmp_path))
    threads = []
    make = assembly.ledger_of

    def noted(*args: Any, **named: Any) -> Any:
        threads.append(threading.current_thread().name)
        return make(*args, **named)

    monkeypatch.setattr(assembly, "ledger_of", noted)
    settings = quick(tmp_path / "out", "keeps_all", ledger=DynamoPlace("table", "eu-central-1", NOWHERE))
    around = assembly.Dependencies(
        engine=LocalEngine(),
        kinesis=None,
        source=None,
        clock=VirtualClock(),
        rng=lambda: 0.5,
        unique=lambda: "unique",
    )
    parts = await assembly.assemble(settings, around, step=lambda _: None)
    await parts.runtime.close()
    assert type(parts.ledger).__name__ == "DynamoLedger"
    assert threads == ["mldserver-ledger"]


async def test_a_stream_that_is_named_needs_a_region_and_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_aws(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="stream s is named, but no AWS region was given"):
        await require_aws("s", region=None)
    with pytest.raises(ConfigError, match="there are no AWS credentials"):
        await require_aws("s", region="eu-central-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "half")
    with pytest.raises(ConfigError, match="AWS's settings are wrong: Partial credentials"):
        await require_aws("s", region="eu-central-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "whole")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    await require_aws("s", region=None)
    monkeypatch.setenv("AWS_PROFILE", "nobody's")
    with pytest.raises(ConfigError, match="AWS's settings are wrong: The config profile"):
        await require_aws("s", region=None)


async def test_credentials_that_are_somebody_elses_to_give_may_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_aws(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", NOWHERE)
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0)
    await require_aws("s", region="eu-central-1")
