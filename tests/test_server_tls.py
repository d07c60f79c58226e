"""A whole server behind TLS: settings, certificates and signals as an operator gives them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Certificates
from support.serving import KEEP_EVERYTHING, quick, serving, until

from mldserver.base.tls import ServerTLS, client_context
from mldserver.config.settings import Settings
from mldserver.server import Server


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def settings(tmp_path: Path, files: Certificates, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (tmp_path / "kept_behind_tls.py").write_text(KEEP_EVERYTHING)
    monkeypatch.syspath_prepend(tmp_path)
    return replace(
        quick(tmp_path / "out", "kept_behind_tls"),
        tls_certificate=files.server,
        tls_client_ca=files.ca,
        tls_names=("client",),
        allow_shards=("shardId-1",),
    )


async def answer(address: str, context: ssl.SSLContext, shard: str = "shardId-1") -> dict[str, Any] | None:
    """What the server says to a daemon's first message; None: nothing, or it was refused before."""
    host, _, port = address.rpartition(":")
    message = {"action": "initialize", "shardId": shard, "sequenceNumber": "LATEST", "subSequenceNumber": 0}
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(json.dumps(message).encode() + b"\n")
        line = await reader.readline()
        writer.close()
    except OSError:
        return None
    return json.loads(line) if line else None


async def test_a_server_takes_the_shards_and_the_names_that_its_settings_allow(
    settings: Settings, files: Certificates
) -> None:
    ours = files.both()[1]
    async with serving(settings) as server:
        address = await server.listening()
        assert await answer(address, ours) == {"action": "status", "responseFor": "initialize"}
        assert await answer(address, ours, "shardId-2") is None
        assert await answer(address, files.both("stranger")[1]) is None


async def test_sighup_reads_certificates_again_and_a_bad_one_leaves_the_former(
    settings: Settings, files: Certificates, logged: list[dict[str, Any]]
) -> None:
    former = files.both()[1]

    async def hung_up(event: str) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: any(entry["event"] == event for entry in logged))

    async with serving(settings) as server:
        address = await server.listening()
        files.server.write_text("damaged")
        await hung_up("tls.refused")
        assert await answer(address, former)
        renewed = Certificates(files.folder, "next authority")
        await hung_up("tls.read")
        assert await answer(address, former) is None
        assert await answer(address, client_context(renewed.client, None, renewed.ca))


async def test_while_the_certificates_file_system_hangs_shards_are_served_and_one_reading_waits(
    settings: Settings, files: Certificates, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    former = files.both()[1]
    readings: list[ssl.SSLContext] = []
    mounted = threading.Event()

    def hangs(self: ServerTLS) -> ssl.SSLContext:
        readings.append(self.context)
        mounted.wait()  # nobody mends it while it is waited for
        return self.context

    async with serving(settings) as server:
        address = await server.listening()
        monkeypatch.setattr(ServerTLS, "_read", hangs)
        try:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
                await until(lambda: bool(readings))
                assert await answer(address, former)
            assert len(readings) == 1
        finally:
            mounted.set()
        await until(lambda: sum(entry["event"] == "tls.read" for entry in logged) == 2)
        assert len(readings) == 2, "what came while the first one hung is one reading more"


async def test_a_server_stops_while_the_certificates_file_system_hangs(
    settings: Settings, files: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, mounted = threading.Event(), threading.Event()

    def hangs(self: ServerTLS) -> ssl.SSLContext:
        hung.set()
        mounted.wait()  # nobody mends it while it is waited for
        return self.context

    try:
        async with serving(settings) as server:
            await server.listening()
            monkeypatch.setattr(ServerTLS, "_read", hangs)
            os.kill(os.getpid(), signal.SIGHUP)
            await until(hung.is_set)
    finally:
        mounted.set()


async def test_a_server_whose_certificate_cannot_be_used_does_not_start(
    settings: Settings, files: Certificates, logged: list[dict[str, Any]]
) -> None:
    files.server.write_text("damaged")
    assert await Server(settings).run() == 2
    (failed,) = [entry for entry in logged if entry["event"] == "server.failed"]
    assert f"The certificate {files.server} cannot be used" in failed["what"]
