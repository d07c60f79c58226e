"""The admin endpoint of one server: its sockets, what it shows and steers, and what a server makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from support.certificates import Certificates
from support.raw_http import Answer, asked, status
from support.serving import quick, until

from mldserver.admin.addresses import address_file, steering_socket
from mldserver.admin.endpoint import AdminEndpoint
from mldserver.admin.http_client import NoAnswer
from mldserver.base.clock import SystemClock
from mldserver.base.listening import listen_unix
from mldserver.base.tls import client_context
from mldserver.cli.status import ServerOptions, SteeringOptions
from mldserver.config.kinds import TcpAddress, UnixAddress
from mldserver.config.settings import Settings
from mldserver.errors import ConfigError, NotThereYet, OperatorError
from mldserver.server import Server
from mldserver.status_document import Status
from mldserver.testing import LocalEngine

ANYWHERE = TcpAddress("127.0.0.1", 0)
Logged = list[dict[str, Any]]


class Clock(SystemClock):
    """A clock that does not wait for long."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.05))


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings(**{"handler": "departures", "out": folder, "admin": ANYWHERE} | changes)


async def nothing_to_do(act: str, argument: str, function: str) -> tuple[bool, str]:
    return act == "pause", f"{act} {argument} {function}".strip()


class Shown:
    """An endpoint that is served, and what it is asked."""

    def __init__(self, endpoint: AdminEndpoint) -> None:
        self.endpoint = endpoint

    async def ask(
        self, path: str, method: str = "GET", body: bytes = b"", tls: ssl.SSLContext | None = None
    ) -> Answer:
        assert self.endpoint.address is not None
        address = self.endpoint.address.replace("0.0.0.0", "127.0.0.1")
        return await asked(address, path, method, body, tls)

    async def steer(self, act: str, body: bytes = b"") -> Answer:
        return await asked(self.endpoint.steering_address, f"/act/{act}", "POST", body)

    async def status(self) -> Answer:
        """Its status, once there is one."""
        while (answer := await self.ask("/status")).code == 503:
            await Clock().sleep(1)
        return answer


@contextlib.asynccontextmanager
async def shown(
    given: Settings, collect: Callable[[], Status | None] = status, carry_out: Any = nothing_to_do
) -> AsyncIterator[Shown]:
    endpoint = AdminEndpoint(given, Clock())

    def document(wrong: str) -> Status | None:
        return status(ready=False, reasons=(wrong,), version="without parts") if wrong else collect()

    async with asyncio.timeout(800), endpoint.serving(document, carry_out):
        await endpoint.open_steering(given)
        yield Shown(endpoint)


def events(logged: Logged, name: str) -> Logged:
    return [event for event in logged if event["event"] == name]


async def test_it_shows_what_the_server_collects_and_passes_acts_to_it(
    tmp_path: Path, logged: Logged
) -> None:
    async with shown(settings(tmp_path), lambda: status(version="9")) as server:
        (listening,) = events(logged, "admin.listening")
        assert listening["address"] == server.endpoint.address
        assert (await server.status()).json["version"] == "9"
        answer = await server.steer("pause", b'{"argument": "shard 1"}')
        assert (answer.code, answer.json) == (200, {"done": True, "text": "pause shard 1"})
        assert (await server.steer("dance")).code == 409
        refused = await server.ask("/act/pause", "POST")
        assert (refused.code, server.endpoint.steering_address in refused.json["error"]) == (403, True)
    one, other = events(logged, "admin.act")
    told = {name: one[name] for name in ("level", "act", "argument", "who", "done", "text")}
    assert told == {
        "level": "info",
        "act": "pause",
        "argument": "shard 1",
        "who": f"user {os.getuid()}, process {os.getpid()}",
        "done": True,
        "text": "pause shard 1",
    }
    assert (other["level"], other["act"], other["done"]) == ("warning", "dance", False)


async def test_an_act_goes_on_when_its_client_has_gone(tmp_path: Path, logged: Logged) -> None:
    begun, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(act: str, argument: str, function: str) -> tuple[bool, str]:
        begun.set()
        await go_on.wait()
        done.set()
        return True, "at last"

    async with shown(settings(tmp_path), carry_out=slow) as server:
        client = asyncio.create_task(server.steer("reload"))
        await begun.wait()
        client.cancel()
        await asyncio.wait({client})
        assert (await server.ask("/livez")).code == 200
        go_on.set()
        await done.wait()
        await until(lambda: bool(events(logged, "admin.act")))
    (act,) = events(logged, "admin.act")
    assert (act["act"], act["text"]) == ("reload", "at last")


async def test_an_act_that_never_ends_ends_with_the_server(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def hang(act: str, argument: str, function: str) -> tuple[bool, str]:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with shown(settings(tmp_path), carry_out=hang) as server:
        client = asyncio.create_task(server.steer("reload"))
        await begun.wait()
    with pytest.raises(asyncio.IncompleteReadError):
        await client


async def test_what_goes_wrong_with_a_status_or_an_act_is_logged_and_the_server_lives(
    tmp_path: Path, logged: Logged
) -> None:
    bugs = ["a bug in a part", "a bug \ud800"]
    made: list[str] = []

    def collect() -> Status:
        if len(made) < 6:
            made.append(bugs[len(made) // 3])
        raise ValueError(made[-1])

    async def fail(act: str, argument: str, function: str) -> tuple[bool, str]:
        raise RuntimeError("no ledger")

    async with shown(settings(tmp_path), collect, fail) as server:
        answer = await server.steer("flush")
        assert (answer.code, answer.json["text"]) == (409, "It failed: RuntimeError: no ledger.")
        reasons = ["the status cannot be collected: ValueError: a bug \\ud800"]
        while (ready := await server.ask("/readyz")).json["reasons"] != reasons:
            await Clock().sleep(1)
        assert ready.code == 503
        assert (await server.status()).json["version"] == "without parts"
    failed = events(logged, "admin.failed")
    assert [event["level"] for event in failed] == ["error", "error"], "once for each reason"
    assert ["a bug" in event["exception"] for event in failed] == [True, True]


async def test_half_of_a_surrogate_pair_in_a_users_text_does_not_stop_the_documents(
    tmp_path: Path, logged: Logged
) -> None:
    poison = status(reasons=("poison \ud800",), failures={"Bad\udfff": 1}, ready=False)
    async with shown(settings(tmp_path), lambda: poison) as server:
        told = (await server.status()).json
    assert (told["reasons"], told["failures"]) == (["poison \\ud800"], {"Bad\\udfff": 1})
    assert not events(logged, "admin.failed")


async def test_a_secret_of_a_setting_is_in_nothing_that_it_shows(tmp_path: Path) -> None:
    secret = "tiger in the tank"
    conf = {"spark.hadoop.some.secret.key": secret}
    given = settings(tmp_path, spark_conf=conf, origins={"spark_conf": "test"})
    assert given.secrets() == {secret}
    poison = status(ready=False, reasons=(f"it prints {secret}",), host=secret)
    async with shown(given, lambda: poison) as server:
        await server.status()
        for path in ("/status", "/readyz", "/metrics", "/history"):
            assert secret.encode() not in (await server.ask(path)).body


# Its sockets and files


async def test_the_socket_for_steering_is_its_users_alone_and_goes_with_the_server(
    tmp_path: Path, logged: Logged
) -> None:
    given = settings(tmp_path)
    async with shown(given) as server:
        port = str(server.endpoint.address).rpartition(":")[2]
        path = steering_socket(given, int(port))
        assert path == tmp_path / f"_mldserver/admin-{port}.sock"
        assert server.endpoint.steering_address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert address_file(given).read_text() == f"unix:{path}\n"
    assert list((tmp_path / "_mldserver").iterdir()) == []


async def test_a_path_of_any_length_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLDSERVER_ADMIN", raising=False)
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    async with shown(settings(folder)) as server:
        await server.status()
        options = SteeringOptions(out=str(folder))
        client = options.steering_client()
        assert (await asyncio.to_thread(client.act, "pause", "s", seconds=600)).text == "pause s"
    async with shown(settings(folder)):
        pass  # the former server's socket is no obstacle


async def test_a_unix_socket_as_admin_shows_and_steers(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    (tmp_path / "_mldserver").mkdir()
    async with shown(settings(tmp_path, admin=UnixAddress(path))) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await server.status()).code == 200
        assert (await server.ask("/act/pause", "POST")).json == {"done": True, "text": "pause"}
        assert list((tmp_path / "_mldserver").iterdir()) == [tmp_path / "_mldserver/admin.address"]
    assert not path.exists()


async def test_a_unix_socket_of_another_server_stays(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    async with shown(settings(tmp_path, admin=UnixAddress(path))):
        path.unlink()
        another = listen_unix(path)
    assert path.exists()
    another.close()
    async with shown(settings(tmp_path, admin=UnixAddress(path))):
        path.unlink()


async def test_without_a_socket_for_steering_the_server_goes_on(tmp_path: Path, logged: Logged) -> None:
    (tmp_path / "_mldserver").write_text("a file")
    async with shown(settings(tmp_path)) as server:
        assert (await server.status()).code == 200
        refused = await server.ask("/act/pause", "POST")
        assert (refused.code, "admin.steering_unavailable" in refused.json["error"]) == (403, True)
    (unavailable,) = events(logged, "admin.steering_unavailable")
    assert "--admin unix:PATH" in unavailable["advice"]


async def test_commands_find_an_endpoint_at_any_address_by_the_output_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLDSERVER_ADMIN", raising=False)
    out = str(tmp_path / "out")
    here = ServerOptions(out=out)
    async with shown(settings(tmp_path / "out")) as one:
        for client in (here.client(), here.steering_client()):
            assert str(client.address) == one.endpoint.steering_address
        there = ServerOptions(out=out, admin=one.endpoint.address)
        assert str(there.client().address) == one.endpoint.address
        assert str(there.steering_client().address) == one.endpoint.steering_address
        with pytest.raises(NoAnswer, match=r"admin-9\.sock does not exist.*on its host"):
            ServerOptions(out=out, admin="127.0.0.1:9").steering_client()
        with pytest.raises(ConfigError, match=r"only shows the server.*on the server's host"):
            ServerOptions(admin="192.0.2.1:7071").steering_client()
        port = str(one.endpoint.address).rpartition(":")[2]
        with pytest.raises(ConfigError, match=r"^192.0.2.1:\d+ only shows the server.*socket on its host\."):
            ServerOptions(out=out, admin=f"192.0.2.1:{port}").steering_client()
        monkeypatch.setenv("MLDSERVER_ADMIN", "127.0.0.1:8")
        assert str(here.client().address) == "127.0.0.1:8"
        monkeypatch.delenv("MLDSERVER_ADMIN")
    assert str(here.client().address) == "127.0.0.1:7071", "it has stopped"


async def test_the_output_folder_of_each_function_leads_to_the_one_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    monkeypatch.delenv("MLDSERVER_ADMIN", raising=False)
    async with shown(settings(tmp_path / "out/a")) as one:
        for _ in range(2):  # a function may start again
            with structlog.contextvars.bound_contextvars(pipeline="b"):
                await one.endpoint.open_steering(settings(tmp_path / "out/b"))
        found = {
            str(ServerOptions(out=f"{tmp_path}/out/{name}", admin=admin).steering_client().address)
            for name in "ab"
            for admin in (None, one.endpoint.address)
        }
        port = str(one.endpoint.address).rpartition(":")[2]
        assert found == {f"unix:{tmp_path}/out/{name}/_mldserver/admin-{port}.sock" for name in "ab"}
        for address in found:
            body = b'{"argument": "s1", "function": "b"}'
            answer = await asked(address, "/act/pause", "POST", body)
            assert answer.json == {"done": True, "text": "pause s1 b"}
            await asked(address, "/act/pause", "POST", b"{}")
    pipelines = [event.get("pipeline") for event in events(logged, "admin.act")]
    assert pipelines == ["b", None, "b", None], "only a request says which function it is for"
    assert [list((tmp_path / f"out/{name}/_mldserver").iterdir()) for name in "ab"] == [[], []]


async def test_secrets_of_a_function_that_comes_later_are_hidden_too(tmp_path: Path) -> None:
    secret = "tiger in the tank"
    conf = {"spark.hadoop.some.secret.key": secret}
    later = settings(tmp_path / "b", spark_conf=conf, origins={"spark_conf": "test"})
    async with shown(settings(tmp_path / "a"), lambda: status(ready=False, reasons=(f"no {secret}",))) as one:
        await one.status()
        await one.endpoint.open_steering(later)
        await Clock().sleep(2)
        assert secret.encode() not in (await one.ask("/status")).body


async def test_from_outside_it_speaks_tls_with_certificates_that_may_be_read_again(
    tmp_path: Path, logged: Logged
) -> None:
    files = Certificates(tmp_path)
    given = settings(
        tmp_path, admin=TcpAddress("0.0.0.0", 0), tls_certificate=files.server, tls_client_ca=files.ca
    )
    async with shown(given) as server:
        tls = client_context(files.client, None, files.ca)
        assert (await server.ask("/livez", tls=tls)).code == 200
        assert (await asked(server.endpoint.steering_address, "/livez")).code == 200
        assert server.endpoint.tls is not None
        renewed = Certificates(tmp_path, "another")
        await server.endpoint.tls.read_again()
        assert events(logged, "tls.read")
        new = client_context(renewed.client, None, renewed.ca)
        assert (await server.ask("/livez", tls=new)).code == 200
        with pytest.raises(OSError, match="certificate verify failed"):
            await server.ask("/livez", tls=tls)


async def test_an_insecure_endpoint_needs_no_certificate_of_its_clients_nor_their_names(
    tmp_path: Path,
) -> None:
    files = Certificates(tmp_path)
    given = settings(
        tmp_path,
        admin=TcpAddress("0.0.0.0", 0),
        tls_certificate=files.server,
        tls_client_ca=files.ca,
        tls_names=("somebody",),
        insecure=True,
    )
    async with shown(given) as server:
        assert (await server.ask("/livez", tls=client_context(None, None, files.ca))).code == 200


# Where it cannot be


async def test_a_certificate_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("none")
    given = settings(tmp_path, admin=TcpAddress("0.0.0.0", 0), tls_certificate=bad, insecure=True)
    with pytest.raises(ConfigError, match="cannot be used"):
        async with shown(given):
            pass


async def test_the_default_address_may_be_out_of_reach_and_one_that_was_given_may_not(
    tmp_path: Path, logged: Logged
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = TcpAddress(*other.getsockname())
        async with shown(settings(tmp_path, admin=taken)) as server:
            assert server.endpoint.address is None
        assert f"cannot listen on {taken}" in events(logged, "admin.unavailable")[0]["what"]
        given = settings(tmp_path, admin=taken, origins={"admin": "command line --admin"})
        with pytest.raises(NotThereYet, match="Address already in use"):
            async with shown(given):
                pass
    elsewhere = settings(tmp_path, admin=TcpAddress("198.51.100.1", 80), insecure=True)
    async with shown(elsewhere) as server:
        assert server.endpoint.address is None
    assert "Cannot assign requested address" in events(logged, "admin.unavailable")[1]["what"]
    with pytest.raises(OperatorError, match="Cannot assign requested address"):
        async with shown(replace(elsewhere, origins={"admin": "command line --admin"})):
            pass


async def test_an_address_for_metrics_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = settings(tmp_path, metrics_listen=TcpAddress(*taken.getsockname()))
        with pytest.raises(NotThereYet, match="cannot listen on") as error:
            async with AdminEndpoint(given, Clock()).serving(status, nothing_to_do):
                pass
        assert "--metrics-listen" in error.value.advice


async def test_the_address_for_metrics_has_listeners_of_its_own(tmp_path: Path, logged: Logged) -> None:
    async with shown(settings(tmp_path, metrics_listen=ANYWHERE)) as one:
        await one.status()
        where = one.endpoint.metrics_address
        assert events(logged, "admin.listening")[0]["metrics"] == where
        assert b"mldserver_ready" in (await asked(where, "/metrics")).body
        assert (await asked(where, "/status")).code == 404


# With a whole server


async def test_a_server_is_shown_from_its_first_moment_to_its_last(tmp_path: Path, logged: Logged) -> None:
    (tmp_path / "shown_handler.py").write_text("def process_record(record): ...")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        given = quick(tmp_path / "out", "shown_handler", admin=ANYWHERE)
        endpoint = AdminEndpoint(given, Clock())
        server = Server(given, engine=LocalEngine(), seed=1, endpoint=endpoint)
        async with asyncio.timeout(800), asyncio.TaskGroup() as group:
            life = group.create_task(server.run())
            await server.ready()
            one = Shown(endpoint)
            assert (await one.status()).json["handler"] == "shown_handler"
            while not (await one.ask("/readyz")).json["ready"]:
                await Clock().sleep(1)
            assert "no act 'dance'" in (await one.steer("dance")).json["text"]
            server.stop("the test is over")
        assert life.result() == 0
    assert [event["event"] for event in logged][-1] == "server.stopped"
    assert not (tmp_path / "out/_mldserver/admin.address").exists()


async def test_sighup_reads_the_endpoints_certificates_again(tmp_path: Path, logged: Logged) -> None:
    files = Certificates(tmp_path)
    (tmp_path / "shown_handler.py").write_text("def process_record(record): ...")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        given = quick(tmp_path / "out", "shown_handler", admin="0.0.0.0:0")
        given = replace(given, tls_certificate=files.server, tls_client_ca=files.ca)
        server = Server(given, engine=LocalEngine(), seed=1, endpoint=AdminEndpoint(given, Clock()))
        async with asyncio.timeout(800), asyncio.TaskGroup() as group:
            group.create_task(server.run())
            await server.ready()
            server._hang_up()
            await until(lambda: bool(events(logged, "tls.read")))
            server.stop("the test is over")


async def test_a_server_whose_endpoint_cannot_be_ends_in_order(tmp_path: Path, logged: Logged) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        given = quick(tmp_path / "out", "none", admin=str(TcpAddress(*other.getsockname())))
        given = Settings(**{**vars(given), "origins": {"admin": "test"}})
        server = Server(given, engine=LocalEngine(), seed=1, endpoint=AdminEndpoint(given, Clock()))
        assert await server.run() == 1
    (failed,) = events(logged, "server.failed")
    assert "The admin endpoint cannot listen" in failed["what"]
