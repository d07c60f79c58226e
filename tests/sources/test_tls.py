"""The listener behind TLS, on both event loops: who gets in, who does not, and what that costs the others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import uvloop
from support.certificates import Certificates

from mldserver.base.clock import SystemClock
from mldserver.base.tls import ServerTLS, client_context, refusal_by_server
from mldserver.config.kinds import TcpAddress, UnixAddress
from tests.sources.house import QUICK, serving

if TYPE_CHECKING:
    from tests.sources.house import Daemon, House

pytestmark = pytest.mark.quick


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def on(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a story on one of the loops."""
    run: Callable[[Coroutine[Any, Any, None]], None] = request.param
    return run


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def told(logged: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [entry for entry in logged if entry["event"] == event]


async def is_turned_away(house: House, client: ssl.SSLContext | None) -> None:
    """A daemon that comes with this gets no answer to ``initialize``."""
    house.client = client
    with contextlib.suppress(OSError, AssertionError):
        stranger = await house.connect()
        await stranger.initialize()
        raise RuntimeError("it was let in")
    await house.empty()
    assert house.runtime.calls == []


async def streams_in_clear(house: House) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = house.address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


def test_a_daemon_with_a_certificate_of_ours_is_served_and_named(
    on: Any, files: Certificates, logged: list[dict[str, Any]]
) -> None:
    async def story() -> None:
        async with serving(tls=files.both()) as house:
            daemon = await house.connect()
            await daemon.initialize()
            await daemon.process(*range(1, 201))
            await daemon.checkpointed()
            await daemon.answered("processRecords")
            await daemon.send({"action": "leaseLost"})
            await daemon.answered("leaseLost")
            await daemon.sees_the_end()
            await daemon.close()
            await house.empty()
            house.listener.stop_accepting()

    on(story())
    assert told(logged, "connection.closed")[0]["reason"] == "finished"
    assert told(logged, "tls.failed") == []


@pytest.mark.parametrize(
    ("show", "why"),
    [
        ("stranger", "the client's certificate is refused: unable to get local issuer certificate"),
        ("expired", "the client's certificate is refused: certificate has expired"),
        ("", "the client showed no certificate"),
    ],
)
def test_without_a_certificate_of_ours_no_shard_is_named_and_the_log_says_once_why(
    on: Any, files: Certificates, logged: list[dict[str, Any]], show: str, why: str
) -> None:
    files.write("expired", days=-1)
    tls, stranger = files.both(show)
    ours = files.both()[1]

    async def story() -> None:
        async with serving(tls=(tls, None)) as house:
            await is_turned_away(house, stranger)
            await is_turned_away(house, stranger)
            house.client = ours
            await (await house.connect()).initialize()

    on(story())
    (failed,) = told(logged, "tls.failed")
    assert (failed["level"], failed["times"]) == ("warning", 1)
    assert failed["what"] == f"The handshake failed: {why}."


def hears(address: str, context: ssl.SSLContext) -> str:
    """Return the alert by which a client is turned away, in words."""
    host, port = address.rsplit(":", 1)
    plain = socket.create_connection((host, int(port)), timeout=20)
    with plain, pytest.raises(ssl.SSLError) as raised:
        _speak(context.wrap_socket(plain, server_hostname=host))
    return refusal_by_server(raised.value)


def _speak(secure: ssl.SSLSocket) -> None:
    with secure:
        with contextlib.suppress(BrokenPipeError):
            secure.sendall(b"{}\n")
        secure.recv(1)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("show", "words"),
    [
        ("stranger", "the server does not know the authority of the certificate that was shown"),
        ("expired", "the server says that the certificate that was shown has expired"),
        (
            "",
            "the server wants a certificate, (and none was shown|or has no cipher in common with this client)",
        ),
    ],
)
def test_a_client_is_told_by_an_alert_why_it_is_turned_away(
    on: Any, files: Certificates, show: str, words: str, newest: ssl.TLSVersion
) -> None:
    files.write("expired", days=-1)
    tls, stranger = files.both(show)
    stranger.maximum_version = newest
    alerts: list[str] = []

    async def story() -> None:
        async with serving(tls=(tls, None)) as house:
            alerts.append(await asyncio.to_thread(hears, house.address, stranger))
            await house.empty()

    on(story())
    (alert,) = alerts
    assert re.fullmatch(words, alert)


def refuses(address: str, context: ssl.SSLContext) -> None:
    """As the bridge does: unlike asyncio's clients it says why it leaves."""
    host, port = address.rsplit(":", 1)
    plain = socket.create_connection((host, int(port)))
    with plain, pytest.raises(ssl.SSLCertVerificationError):
        context.wrap_socket(plain, server_hostname=host)


def test_a_client_that_does_not_know_our_authority_is_named(
    on: Any, files: Certificates, logged: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other", "other authority")

    async def story() -> None:
        async with serving(tls=(files.both()[0], None)) as house:
            await asyncio.to_thread(refuses, house.address, client_context(files.client, None, other.ca))
            await house.empty()

    on(story())
    (failed,) = told(logged, "tls.failed")
    assert "the client does not know the authority of this server's certificate" in failed["what"]


def test_a_certificate_with_another_name_than_those_allowed_names_no_shard(
    on: Any, files: Certificates, logged: list[dict[str, Any]]
) -> None:
    files.write("intruder")
    tls, intruder = files.both("intruder", names=["client"])

    async def story() -> None:
        async with serving(tls=(tls, None)) as house:
            for _ in range(3):
                await is_turned_away(house, intruder)
            house.client = files.both()[1]
            await (await house.connect()).initialize()

    on(story())
    # Once a minute for each host and reason.
    (failed,) = told(logged, "connection.failed")
    assert (failed["level"], failed["error"]) == ("warning", "PeerError")
    assert failed["what"] == "Its certificate is for intruder, 127.0.0.1, and tls_names allows none of that."
    assert failed["peer"].endswith(" (intruder)")


def test_clear_text_is_not_understood_behind_tls(
    on: Any, files: Certificates, logged: list[dict[str, Any]]
) -> None:
    async def story() -> None:
        async with serving(tls=files.both()) as house:
            await is_turned_away(house, None)

    on(story())
    (failed,) = told(logged, "tls.failed")
    assert failed["what"] == "The handshake failed: the peer does not speak TLS."


def test_a_handshake_that_never_ends_gives_its_slot_back_in_time(on: Any, files: Certificates) -> None:
    async def story() -> None:
        async with serving(tls=files.both(), connection_limit=1, initialize_timeout_seconds=0.2) as house:
            reader, writer = await streams_in_clear(house)
            writer.write(b"\x16\x03\x01")  # the beginning of a handshake
            await house.holds_connections(1)
            house.listener._limits = QUICK  # whoever comes later takes as long as this machine does
            await (await house.connect()).initialize()
            with contextlib.suppress(OSError):
                assert await reader.read() == b"" or not reader.at_eof()
            writer.close()

    on(story())


def test_a_hundred_handshakes_begin_in_a_second_at_most(on: Any, files: Certificates) -> None:
    class Watched(SystemClock):
        pauses: ClassVar[list[float]] = []

        async def sleep(self, seconds: float) -> None:
            self.pauses.append(seconds)
            await super().sleep(seconds)

    async def story(tls: tuple[Any, Any], pauses: int) -> None:
        Watched.pauses.clear()
        async with serving(tls=tls, clock=Watched()) as house:
            for shard in ("shardId-1", "shardId-2", "shardId-3"):
                await (await house.connect()).initialize(shard)
        assert Watched.pauses.count(0.01) == pauses

    on(story(files.both(), 3))
    on(story((None, None), 0))


def test_a_stop_does_not_wait_for_handshakes(on: Any, files: Certificates) -> None:
    async def story() -> None:
        async with serving(tls=files.both()) as house:
            reader, writer = await streams_in_clear(house)
            await house.holds_connections(1)
            await house.listener.drain()
            await house.running
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()

    on(story())


def test_whoever_only_looks_whether_there_is_a_server_is_no_warning(
    on: Any, files: Certificates, logged: list[dict[str, Any]]
) -> None:
    async def story() -> None:
        async with serving(tls=files.both()) as house:
            _, writer = await streams_in_clear(house)
            await house.holds_connections(1)
            writer.close()
            await house.empty()

    on(story())
    assert [entry["level"] for entry in logged if entry["event"] != "server.listening"] == ["debug"]


def test_certificates_that_are_read_again_count_for_the_next_connection(on: Any, files: Certificates) -> None:
    tls, former = files.both()

    async def story() -> None:
        async with serving(tls=(tls, former)) as house:
            daemon = await house.connect()
            await daemon.initialize()
            renewed = Certificates(files.folder, "next authority")
            await tls.read_again()
            house.client = client_context(renewed.client, None, renewed.ca)
            await (await house.connect()).initialize("shardId-1")
            await daemon.process(1)
            await daemon.checkpointed()
            await daemon.answered("processRecords")

    on(story())


def test_on_a_unix_socket_nothing_is_encrypted(tmp_path: Path, on: Any, files: Certificates) -> None:
    async def story() -> None:
        async with serving(UnixAddress(tmp_path / "s"), tls=(files.both()[0], None)) as house:
            await (await house.connect()).initialize()
            assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600

    on(story())


# Who names a shard: the whole table

LISTENERS = ("clear text", "TLS", "TLS for some names", "TLS for anyone")
CREDENTIALS = ("clear text", "no certificate", "ours", "another name", "another authority", "over")
NAMES_A_SHARD = {
    ("a Unix socket", "clear text"),
    ("clear text", "clear text"),
    *(("TLS", credential) for credential in ("ours", "another name")),
    ("TLS for some names", "ours"),
    # Only on loopback, or where the settings say `insecure`: the server alone proves who it is.
    *(("TLS for anyone", credential) for credential in CREDENTIALS if credential != "clear text"),
}


@pytest.mark.parametrize(
    ("listener", "credential"),
    # A certificate is nothing to a Unix socket: the file's mode says who may come.
    [("a Unix socket", "clear text"), *itertools.product(LISTENERS, CREDENTIALS)],
)
async def test_who_may_name_a_shard(tmp_path: Path, listener: str, credential: str) -> None:
    files = Certificates(tmp_path)
    files.write("intruder")
    files.write("former", days=-1)
    shown = {"ours": "client", "another name": "intruder", "another authority": "stranger", "over": "former"}
    client = None if credential == "clear text" else files.both(shown.get(credential, ""))[1]
    server = {
        "TLS": ServerTLS(files.server, client_ca=files.ca),
        "TLS for some names": ServerTLS(files.server, client_ca=files.ca, names=["client"]),
        "TLS for anyone": ServerTLS(files.server),
    }.get(listener)
    address = UnixAddress(tmp_path / "s") if listener == "a Unix socket" else TcpAddress("127.0.0.1", 0)
    async with serving(address, tls=(server, client)) as house:
        with contextlib.suppress(OSError, AssertionError):
            await (await house.connect()).initialize()
        named = [call[0] for call in house.runtime.calls] == ["open"]
    assert named is ((listener, credential) in NAMES_A_SHARD)


# Shards


@pytest.mark.parametrize(
    ("shard", "let_in"), [("shardId-7", True), ("other-1", True), ("shardId-70", False), ("x", False)]
)
def test_only_shards_that_are_allowed_are_taken(
    on: Any, logged: list[dict[str, Any]], shard: str, let_in: bool
) -> None:
    async def opens(daemon: Daemon) -> bool:
        message = {"action": "initialize", "shardId": shard, "sequenceNumber": "TRIM_HORIZON"}
        await daemon.send(message | {"subSequenceNumber": 0})
        return bool(await daemon.reader.readline())

    async def story() -> None:
        async with serving(allow_shards=["shardId-?", "other-*"]) as house:
            assert await opens(await house.connect()) is let_in
            assert [call[0] for call in house.runtime.calls] == ["open"] * let_in

    on(story())
    refused = told(logged, "connection.failed")
    assert [(entry["error"], entry["shard"]) for entry in refused] == [("PeerError", shard)] * (not let_in)
