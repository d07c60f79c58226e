"""The admin endpoint's process, for real: fed, asked, killed, stopped; and what its server makes of that."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
import socket
import ssl
import stat
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Certificates
from support.raw_http import Answer, asked, status
from support.serving import quick, until

from mldserver.admin import endpoint_process
from mldserver.admin.access import read_token
from mldserver.admin.endpoint_keeper import AdminEndpoint, token_file
from mldserver.base.clock import SystemClock
from mldserver.base.listening import listen_unix
from mldserver.base.threads import run_in_daemon_thread
from mldserver.base.tls import client_context
from mldserver.children.process import ChildProcess
from mldserver.cli.status import ServerOptions
from mldserver.config.kinds import Address, TcpAddress, UnixAddress
from mldserver.config.settings import Settings
from mldserver.errors import ConfigError, NotThereYet, OperatorError
from mldserver.server import Server
from mldserver.status_document import Status
from mldserver.testing import LocalEngine

ANYWHERE = TcpAddress("127.0.0.1", 0)
Logged = list[dict[str, Any]]


class Clock(SystemClock):
    """A clock that is set forward by hand, and does not wait for long."""

    ahead_ms = 0
    slept = 0

    def steady_ms(self) -> int:
        return super().steady_ms() + self.ahead_ms

    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.05))
        self.slept += 1


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings(**{"handler": "departures", "out": folder, "admin": ANYWHERE} | changes)


async def nothing_to_do(act: str, argument: str) -> tuple[bool, str]:
    return act == "pause", f"{act} {argument}".strip()


class Shown:
    """An endpoint that is served, and what it is asked."""

    def __init__(self, endpoint: AdminEndpoint, token: str, clock: Clock) -> None:
        self.endpoint, self.token, self.clock = endpoint, token, clock

    @property
    def pid(self) -> int | None:
        """Its process's id, while there is one."""
        return None if self.endpoint._child is None else self.endpoint._child.pid

    async def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes = b"",
        tls: ssl.SSLContext | None = None,
        **headers: str,
    ) -> Answer:
        assert self.endpoint.address is not None
        address = self.endpoint.address.replace("0.0.0.0", "127.0.0.1")
        return await asked(address, path, method, body, tls, **headers)

    async def steer(self, act: str, body: bytes = b"") -> Answer:
        return await self.ask(f"/act/{act}", "POST", body, Authorization=f"Bearer {self.token}")

    async def live(self, tls: ssl.SSLContext | None = None) -> None:
        """Return once it says that the server lives: where this process had no turn, it may think otherwise."""
        while (await self.ask("/livez", tls=tls)).code != 200:
            await self.clock.sleep(1)

    async def status(self) -> Answer:
        """Its status, once there is one."""
        while (answer := await self.ask("/status")).code == 503:
            await self.clock.sleep(1)
        return answer


@contextlib.asynccontextmanager
async def shown(
    given: Settings, tell: Callable[[], Status | None] = status, carry_out: Any = nothing_to_do
) -> AsyncIterator[Shown]:
    clock = Clock()
    endpoint = AdminEndpoint(given, clock)
    endpoint.make_token()

    def document(wrong: str) -> Status | None:
        return status(ready=False, reasons=(wrong,), version="without parts") if wrong else tell()

    async with asyncio.timeout(800), endpoint.serving(document, carry_out):
        made = token_file(given)
        yield Shown(endpoint, read_token(made) if made.exists() else "none", clock)


def events(logged: Logged, name: str) -> Logged:
    return [event for event in logged if event["event"] == name]


async def test_it_shows_each_second_what_the_server_tells_and_asks_it_to_act(
    tmp_path: Path, logged: Logged
) -> None:
    async with shown(settings(tmp_path), lambda: status(version="9")) as server:
        (listening,) = events(logged, "admin.listening")
        assert listening["address"] == server.endpoint.address
        assert listening["token_file"] == str(tmp_path / "_mldserver/admin.token")
        assert (await server.status()).json["version"] == "9"
        answer = await server.steer("pause", b'{"argument": "shard 1"}')
        assert (answer.code, answer.json) == (200, {"done": True, "text": "pause shard 1"})
        assert (await server.steer("dance")).code == 409
    one, other = events(logged, "admin.act")
    assert one["who"].startswith("token, 127.0.0.1 port ")
    told = {name: one[name] for name in ("level", "act", "argument", "done", "text")}
    assert told == {
        "level": "info",
        "act": "pause",
        "argument": "shard 1",
        "done": True,
        "text": "pause shard 1",
    }
    assert (other["level"], other["act"], other["done"]) == ("warning", "dance", False)


async def test_a_process_that_is_killed_has_a_successor_on_the_same_address_and_acts_go_on(
    tmp_path: Path, logged: Logged
) -> None:
    begun, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(act: str, argument: str) -> tuple[bool, str]:
        begun.set()
        await go_on.wait()
        done.set()
        return True, "at last"

    async with shown(settings(tmp_path), carry_out=slow) as server:
        await server.status()
        steering = asyncio.create_task(server.steer("reload"))
        await begun.wait()
        first, address = server.pid, server.endpoint.address
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await steering
        await server.status()  # it waits in the socket's queue for the next process
        assert server.pid not in {first, None}
        assert server.endpoint.address == address
        go_on.set()
        await done.wait()
    (lost,) = events(logged, "admin.lost")
    assert (lost["reason"], lost["delay_seconds"]) == ("killed by signal 9 (SIGKILL)", 0.0)
    (act,) = events(logged, "admin.act")
    assert (act["act"], act["text"]) == ("reload", "at last")


async def test_a_process_that_hangs_is_replaced_and_documents_do_not_pile_up(
    tmp_path: Path, logged: Logged
) -> None:
    made = 0

    def tell() -> Status:
        nonlocal made
        made += 1
        return status()

    async with shown(settings(tmp_path), tell) as server:
        await server.status()
        hanging = server.pid
        assert hanging is not None
        os.kill(hanging, signal.SIGSTOP)
        before, slept = made, server.clock.slept
        await until(lambda: server.clock.slept > slept + 10)
        assert made <= before + 1
        server.clock.ahead_ms = 31_000
        await until(lambda: server.pid not in {hanging, None})
        await server.status()
    assert events(logged, "admin.lost")


async def test_what_goes_wrong_with_a_status_or_an_act_is_told_and_the_server_lives(
    tmp_path: Path, logged: Logged
) -> None:
    bugs = ["a bug in a part", "a bug \ud800"]
    made: list[str] = []

    def tell() -> Status:
        if len(made) < 6:
            made.append(bugs[len(made) // 3])
            raise ValueError(made[-1])
        return status(loop_lag_seconds=float("nan"))  # which JSON does not have

    async def fail(act: str, argument: str) -> tuple[bool, str]:
        raise RuntimeError("no ledger")

    async with shown(settings(tmp_path), tell, fail) as server:
        await server.live()
        answer = await server.steer("flush")
        assert (answer.code, answer.json["text"]) == (409, "It failed: RuntimeError: no ledger.")
        await until(lambda: "loop_lag_seconds" in str(events(logged, "library.log")))
        await server.live()
        while (ready := await server.ask("/readyz")).json["reasons"] != [
            "the status cannot be made: ValueError: a bug \\ud800"
        ]:
            await server.clock.sleep(1)
        assert ready.code == 503
        assert (await server.status()).json["version"] == "without parts"
    assert not events(logged, "admin.lost")
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


async def test_a_fresh_process_is_never_long_in_coming(
    tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise OSError("no process to be had")

    monkeypatch.setattr(ChildProcess, "start", fail)
    async with shown(settings(tmp_path)):
        await until(lambda: len(events(logged, "admin.lost")) >= 7)
    lost = events(logged, "admin.lost")[:7]
    assert [event["delay_seconds"] for event in lost] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


async def test_its_process_gives_way_and_knows_no_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tiger")
    async with shown(settings(tmp_path)) as server:
        await server.status()
        process = Path(f"/proc/{server.pid}")
        assert b"tiger" not in (process / "environ").read_bytes()
        nice = int((process / "stat").read_text().rpartition(")")[2].split()[16])
        assert nice == os.nice(0) + 5 or nice == 19
        if (autogroup := process / "autogroup").exists() and "nice" in (group := autogroup.read_text()):
            assert group.endswith("nice 5\n")
        limits = (process / "limits").read_text()
        assert "Max data size             536870912" in limits
        assert "Max open files            512" in limits


async def test_a_unix_socket_is_for_its_user_alone_and_goes_with_the_server(
    tmp_path: Path, logged: Logged
) -> None:
    path = tmp_path / "admin.sock"
    async with shown(settings(tmp_path, admin=UnixAddress(path))) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        answer = await server.ask("/act/pause", "POST")
        assert answer.json == {"done": True, "text": "pause"}
        assert events(logged, "admin.listening")[0]["token_file"] == ""
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


def test_a_lower_limit_than_its_process_gives_itself_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    hard = {resource.RLIMIT_DATA: resource.RLIM_INFINITY, resource.RLIMIT_NOFILE: 256}
    limits: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, hard[kind]))
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    endpoint_process.limit(resource.RLIMIT_DATA, 512)
    endpoint_process.limit(resource.RLIMIT_NOFILE, 512)
    assert limits == {resource.RLIMIT_DATA: (512, 512), resource.RLIMIT_NOFILE: (256, 256)}


async def test_from_outside_it_speaks_tls_and_reads_certificates_again(
    tmp_path: Path, logged: Logged
) -> None:
    files = Certificates(tmp_path)
    given = settings(
        tmp_path, admin=TcpAddress("0.0.0.0", 0), tls_certificate=files.server, tls_client_ca=files.ca
    )
    async with shown(given) as server:
        tls = client_context(files.client, None, files.ca)
        await server.live(tls)
        files.server.write_text("no certificate")
        server.endpoint.renew()
        await until(lambda: bool(events(logged, "tls.refused")))
        await server.live(tls)
        renewed = Certificates(tmp_path, "another")
        server.endpoint.renew()
        await until(lambda: bool(events(logged, "tls.read")))
        await server.live(client_context(renewed.client, None, renewed.ca))
        with pytest.raises(OSError, match="certificate verify failed"):
            await server.ask("/livez", tls=tls)


async def test_it_answers_while_the_certificates_file_system_hangs(tmp_path: Path, logged: Logged) -> None:
    files = Certificates(tmp_path)
    given = settings(
        tmp_path, admin=TcpAddress("0.0.0.0", 0), tls_certificate=files.server, tls_client_ca=files.ca
    )
    tls = client_context(files.client, None, files.ca)
    async with shown(given) as server:
        await server.live(tls)
        files.server.unlink()
        os.mkfifo(files.server)  # whose reader waits for what is written, as its writer does for a reader
        server.endpoint.renew()
        with await run_in_daemon_thread(lambda: files.server.open("wb"), name="writer"):
            await server.live(tls)
            assert not [*events(logged, "tls.read"), *events(logged, "tls.refused")]


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
            server.endpoint.renew()
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


async def test_a_token_file_that_was_given_is_not_made(tmp_path: Path) -> None:
    given = settings(tmp_path, admin_token_file=tmp_path / "mine")
    with pytest.raises(OperatorError, match="No such file"):
        AdminEndpoint(given, Clock()).make_token()
    (tmp_path / "mine").touch(mode=0o600)
    (tmp_path / "mine").write_text("word")
    async with shown(given) as server:
        assert (await server.ask("/status")).code == 401
        assert (await server.steer("pause")).code == 200


@pytest.mark.parametrize("mode", [0o600, 0o660])
async def test_a_token_file_that_the_server_made_never_ends_a_start(
    mode: int, tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(tmp_path)
    file = token_file(given)
    file.parent.mkdir(parents=True)
    file.write_text("known\n")
    file.chmod(mode)
    AdminEndpoint(given, Clock()).make_token()
    assert (read_token(file) == "known") == (mode == 0o600)
    assert events(logged, "admin.token_unusable") == []
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    file.chmod(0o660)
    AdminEndpoint(given, Clock()).make_token()
    assert "Nobody can steer over loopback" in events(logged, "admin.token_unusable")[0]["did"]


@pytest.mark.parametrize("place", [UnixAddress(Path("admin")), TcpAddress("192.0.2.1", 7071)])
async def test_where_nobody_steers_by_a_token_none_is_made(place: Address, tmp_path: Path) -> None:
    given = settings(tmp_path, admin=place, insecure=True)
    AdminEndpoint(given, Clock()).make_token()
    assert not token_file(given).exists()


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
            one = Shown(endpoint, read_token(tmp_path / "out/_mldserver/admin.token"), Clock())
            assert (await one.status()).json["handler"] == "shown_handler"
            while not (await one.ask("/readyz")).json["ready"]:
                await one.clock.sleep(1)
            assert "no act 'dance'" in (await one.steer("dance")).json["text"]
            server.stop("the test is over")
        assert life.result() == 0
    assert [event["event"] for event in logged][-1] == "server.stopped"
    assert events(logged, "admin.lost") == []


async def test_a_server_whose_endpoint_cannot_be_ends_in_order(tmp_path: Path, logged: Logged) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        given = quick(tmp_path / "out", "none", admin=str(TcpAddress(*other.getsockname())))
        given = Settings(**{**vars(given), "origins": {"admin": "test"}})
        server = Server(given, engine=LocalEngine(), seed=1, endpoint=AdminEndpoint(given, Clock()))
        assert await server.run() == 1
    (failed,) = events(logged, "server.failed")
    assert "The admin endpoint cannot listen" in failed["what"]


async def test_in_real_life_the_endpoint_outlives_its_process_and_tells_of_a_server_that_hangs_and_ends_with_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "shown_handler.py").write_text("def process_record(record): ...")
    address = f"unix:{tmp_path}/admin.sock"
    options = {"--listen": "127.0.0.1:0", "--admin": address, "--workers": "inline", "--log-file": "log"}
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mldserver", "serve", "shown_handler", "--out", "out"),
        *itertools.chain.from_iterable(options.items()),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}"},
    )

    async def code(path: str) -> int:
        try:
            return (await asked(address, path)).code
        except (OSError, asyncio.IncompleteReadError):  # not yet, or not any more
            return 0

    async def comes(path: str, wanted: int) -> None:
        while await code(path) != wanted:
            await SystemClock().sleep(0.1)

    def endpoint() -> int:
        (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        return int(child)

    try:
        async with asyncio.timeout(800):
            await comes("/readyz", 200)
            first = endpoint()
            os.kill(first, signal.SIGKILL)
            await comes("/readyz", 200)
            second = endpoint()
            assert first != second
            server.send_signal(signal.SIGSTOP)
            await comes("/livez", 503)
            server.send_signal(signal.SIGCONT)
            await comes("/livez", 200)
            server.kill()
            await comes("/livez", 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        await server.wait()


async def test_the_address_for_metrics_serves_them_and_health_to_any_client_and_nothing_else(
    tmp_path: Path, logged: Logged
) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    given = settings(tmp_path, metrics_listen=ANYWHERE, admin_token_file=tmp_path / "token")
    async with shown(given) as one:
        await one.live()
        where = one.endpoint.metrics_address
        assert events(logged, "admin.listening")[0]["metrics"] == where
        while (metrics := await asked(where, "/metrics")).code == 503:
            await one.clock.sleep(1)
        assert b"mldserver_ready" in metrics.body
        assert (await asked(where, "/metrics", Host="departures.example:9464")).code == 200
        assert (await asked(where, "/healthz")).code == 200
        assert (await asked(where, "/readyz")).json.keys() == {"ready"}, (
            "why it is not ready is not for everybody"
        )
        for path in ("/", "/status", "/events", "/history", "/livez", "/act/pause"):
            assert (await asked(where, path, Authorization="Bearer secret")).code == 404
        assert (await asked(where, "/act/pause", "POST", Authorization="Bearer secret")).code == 404
        assert (await asked(where, "/metrics", "POST")).code == 405
        assert (await one.ask("/metrics")).code == 401


async def test_an_address_for_metrics_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = settings(tmp_path, metrics_listen=TcpAddress(*taken.getsockname()))
        with pytest.raises(NotThereYet, match="cannot listen on") as error:
            async with AdminEndpoint(given, Clock()).serving(status, nothing_to_do):
                pass
        assert "--metrics-listen" in error.value.advice


async def test_requests_that_are_refused_are_counted_in_the_log_once_a_minute(
    tmp_path: Path, logged: Logged
) -> None:
    async with shown(settings(tmp_path)) as one:
        await one.live()
        for _ in range(3):
            assert (await one.ask("/nothing")).code == 404
            assert (await one.ask("/status", Authorization="Bearer wrong")).code == 401
        while not events(logged, "admin.refused"):
            await one.clock.sleep(1)
        (refused,) = events(logged, "admin.refused")
        assert (refused["requests"], refused["statuses"], refused["path"]) == (1, {"404": 1}, "/nothing")
        assert refused["who"].startswith("127.0.0.1 port")


async def test_a_reader_that_is_only_asked_for_its_token_is_not_logged_as_refused(
    tmp_path: Path, logged: Logged
) -> None:
    file = tmp_path / "token"
    file.write_text("a" * 32)
    file.chmod(0o600)
    async with shown(settings(tmp_path, admin_token_file=file)) as one:
        await one.live()
        assert (await one.ask("/status")).code == 401  # as `mldserver top` does once a second
        assert (await one.ask("/nothing", Authorization=f"Bearer {'a' * 32}")).code == 404
        while not events(logged, "admin.refused"):
            await one.clock.sleep(1)
        assert events(logged, "admin.refused")[0]["statuses"] == {"404": 1}


async def test_commands_find_an_endpoint_at_any_address_by_the_output_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLDSERVER_ADMIN", raising=False)
    (tmp_path / "out").mkdir()
    given = settings(tmp_path / "out")
    here = ServerOptions(out=str(tmp_path / "out"))
    async with shown(given) as one:
        one.endpoint.make_files()
        assert one.endpoint.address is not None
        for client in (here.client(), here.client(steers=True)):
            assert str(client.address) == one.endpoint.address
        assert (
            str(ServerOptions(out=str(tmp_path / "out"), admin="127.0.0.1:9").client().address)
            == "127.0.0.1:9"
        )
        monkeypatch.setenv("MLDSERVER_ADMIN", "127.0.0.1:8")
        assert str(here.client().address) == "127.0.0.1:8"
        monkeypatch.delenv("MLDSERVER_ADMIN")
    assert str(here.client().address) == "127.0.0.1:7071", "it has stopped"
