"""Both bridges, held to one contract over real pipes and sockets. Waits are for events, never for time to pass."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from support.certificates import Certificates
from support.processes import held_port

from mldserver.base.tls import ServerTLS
from mldserver.config.kinds import TcpAddress, UnixAddress
from mldserver.errors import ConfigError
from mldserver.kcl import launch as bridge
from mldserver.kcl.launch import Files, deploy_file, private_files
from tests.sources.house import serving

LIMIT = 120
"""Seconds after which a test gives up; nothing here takes longer than the bridge's linger of 2 s."""

MIB = 1024 * 1024

KINDS = ("c", "python", "c over TLS", "python over TLS")

INITIALIZE = {
    "action": "initialize",
    "shardId": "shardId-1",
    "sequenceNumber": "LATEST",
    "subSequenceNumber": 0,
}


@pytest.fixture(scope="module")
def files() -> Iterator[Files]:
    with private_files() as files:
        yield files


@cache
def program(name: str, files: Files) -> tuple[str, ...]:
    """The command of the bridge in C, or in Python; "over TLS": one that speaks it."""
    language, _, tls = name.partition(" ")
    made = bridge.scripted(files) if language == "python" else bridge.compiled(files, tls=bool(tls))
    if made is None:
        pytest.skip("no C compiler here, or no headers of OpenSSL")
    return made


@pytest.fixture(scope="module", params=["c", "python"])
def command(request: pytest.FixtureRequest, files: Files) -> tuple[str, ...]:
    return program(request.param, files)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


def lingering(*by_day: str) -> pytest.MarkDecorator:
    """Run a test that waits for a bridge's linger with these kinds of bridges by day, with the others in the long lane."""
    kinds = [pytest.param(kind, marks=() if kind in by_day else pytest.mark.long) for kind in KINDS]
    return pytest.mark.parametrize("bridged", kinds, indirect=True)


class Bridged:
    """A bridge between a pipe pair (the daemon's side) and an accepted connection (the server's side)."""

    def __init__(
        self,
        command: tuple[str, ...],
        listener: socket.socket,
        address: str,
        *shown: Path,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [*command, address, *shown], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        listener.settimeout(LIMIT)
        self.server, _ = listener.accept()
        self.server.settimeout(LIMIT)
        if tls is not None:
            self.server = tls.wrap_socket(self.server, server_side=True)

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def read(self) -> bytes:
        """Read what has come to stdout, b"" at its end."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], LIMIT)[0]
        return os.read(self.process.stdout.fileno(), MIB)

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def exit_code(self) -> int:
        return self.process.wait(LIMIT)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()


@pytest.fixture(params=KINDS)
def bridged(request: pytest.FixtureRequest, files: Files, certificates: Certificates) -> Iterator[Bridged]:
    command, encrypted = program(request.param, files), "TLS" in request.param
    shown = (certificates.ca, certificates.client, certificates.client) if encrypted else ()
    tls = certificates.both()[0].context if encrypted else None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Bridged(command, listener, f"127.0.0.1:{listener.getsockname()[1]}", *shown, tls=tls)
    yield made
    made.process.kill()
    made.process.wait()
    made.server.close()
    for pipe in (made.process.stdin, made.process.stdout, made.process.stderr):
        with contextlib.suppress(BrokenPipeError):
            pipe and pipe.close()


def read_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(MIB)
        assert piece
        data += piece
    return data


def send_and_read(connection: socket.socket, data: bytes, size: int) -> int:
    """Do both at once, in one thread (a TLS connection of Python 3.11 does not bear two), and return what was read."""
    connection.setblocking(False)
    left, got = memoryview(data), 0
    while left or got < size:
        assert any(select.select([connection], [connection] if left else [], [], LIMIT))
        with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
            left = left[connection.send(left) :] if left else left
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
            piece = len(connection.recv(MIB))
            assert piece
            got += piece
    return got


def test_bytes_go_both_ways_unchanged(bridged: Bridged) -> None:
    bridged.write(b'{"action":"initialize"}\n\x00\xff')
    assert read_exactly(bridged.server, 26) == b'{"action":"initialize"}\n\x00\xff'
    bridged.server.sendall(b"\nstatus\n")
    assert bridged.read() == b"\nstatus\n"


def test_the_end_of_stdin_is_a_half_close_and_late_replies_still_arrive(bridged: Bridged) -> None:
    bridged.write(b"last")
    bridged.close_stdin()
    assert read_exactly(bridged.server, 4) == b"last"
    assert bridged.server.recv(1) == b""
    bridged.server.sendall(b"late reply")
    bridged.server.close()
    assert bridged.read() == b"late reply"
    assert bridged.read() == b""
    assert bridged.exit_code() == 0


@lingering("c over TLS", "python over TLS")
def test_after_the_end_of_stdin_a_silent_server_is_not_waited_for(bridged: Bridged) -> None:
    bridged.close_stdin()
    assert bridged.exit_code() == 0
    assert bridged.read() == b""


@lingering("c", "python")
def test_after_the_end_of_stdin_a_server_that_does_not_read_is_not_waited_for(bridged: Bridged) -> None:
    assert bridged.process.stdin is not None
    pipe = bridged.process.stdin.fileno()
    os.set_blocking(pipe, False)
    # Fill every buffer on the way, until the pipe takes no more.
    with contextlib.suppress(BlockingIOError):
        while select.select([], [pipe], [], 0.5)[1]:
            os.write(pipe, b"x" * MIB)
    bridged.close_stdin()
    assert bridged.exit_code() == 0


def test_when_the_server_closes_the_bridge_exits_and_stdout_ends(bridged: Bridged) -> None:
    bridged.server.sendall(b"bye")
    bridged.server.close()
    assert bridged.read() == b"bye"
    assert bridged.read() == b""
    assert bridged.exit_code() == 0


def test_a_half_close_by_the_server_ends_the_bridge_too(bridged: Bridged) -> None:
    bridged.server.shutdown(socket.SHUT_WR)
    assert bridged.exit_code() == 0


def test_a_reset_ends_the_bridge_with_an_error(bridged: Bridged) -> None:
    bridged.write(b"x")
    assert read_exactly(bridged.server, 1) == b"x"
    # A linger of zero makes the close a reset.
    bridged.server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    bridged.server.close()
    assert bridged.exit_code() == 1
    errors = bridged.errors()
    assert errors.startswith("mldserver bridge: 127.0.0.1:")
    assert errors.count("\n") == 1


def keepalive_seconds(connection: socket.socket) -> float | None:
    """Return when the peer of a loopback connection sends its next keepalive probe; None: it never does."""
    own, peer = (f"0100007F:{name[1]:04X}" for name in (connection.getsockname(), connection.getpeername()))
    lines = Path("/proc/net/tcp").read_text("ascii").splitlines()
    (timer,) = (words[5] for words in map(str.split, lines) if words[1:3] == [peer, own])
    active, ticks = timer.split(":")
    return int(ticks, 16) / os.sysconf("SC_CLK_TCK") if active == "02" else None


@pytest.mark.skipif(sys.platform != "linux", reason="timers are read from /proc")
def test_a_server_whose_host_vanished_is_asked_for_after_half_a_minute_of_silence(bridged: Bridged) -> None:
    bridged.server.sendall(b"x")  # and with it the word that all has come
    assert bridged.read() == b"x"
    seconds = keepalive_seconds(bridged.server)
    assert seconds is not None
    assert seconds <= 31


def test_when_nobody_reads_stdout_the_bridge_exits(bridged: Bridged) -> None:
    assert bridged.process.stdout is not None
    bridged.process.stdout.close()
    bridged.server.sendall(b"x")
    assert bridged.exit_code() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_group_do_not_cut_the_conversation_off(
    bridged: Bridged, number: signal.Signals
) -> None:
    bridged.write(b"a")
    assert read_exactly(bridged.server, 1) == b"a"
    bridged.process.send_signal(number)
    bridged.write(b"b")
    assert read_exactly(bridged.server, 1) == b"b"
    bridged.server.sendall(b"c")
    assert bridged.read() == b"c"
    assert bridged.process.poll() is None


def private_kib(process: int) -> int:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text("ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_line_of_100_mib_passes_without_growing_memory(
    bridged: Bridged, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["bridged"]
    assert bridged.process.stdin is not None
    size = 100 * MIB
    writer = threading.Thread(target=bridged.write, args=(b"x" * size,))
    writer.start()
    before, peak, passed = private_kib(bridged.process.pid), 0, 0
    while passed < size:
        piece = len(bridged.server.recv(MIB))
        assert piece
        if passed // (10 * MIB) != (passed + piece) // (10 * MIB):
            peak = max(peak, private_kib(bridged.process.pid))
        passed += piece
    writer.join()
    assert peak - before < 1024
    # About 0.1 MiB a shard in C, 2.7 in Python; over TLS 1.1 and 6.7.
    assert peak < (10 if name == "python over TLS" else 4) * 1024


def test_both_directions_flow_when_both_are_full(bridged: Bridged) -> None:
    size = 4 * MIB
    with ThreadPoolExecutor(2) as threads:
        up = threads.submit(bridged.write, b"u" * size)
        server = threads.submit(send_and_read, bridged.server, b"d" * size, size)
        got = 0
        while got < size:
            got += len(bridged.read())
        assert server.result(LIMIT) == size
        up.result(LIMIT)


def test_it_joins_unix_sockets_too(command: tuple[str, ...], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        path = tmp_path / "s"
        listener.bind(str(path))
        listener.listen()
        made = Bridged(command, listener, f"unix:{path}")
    made.server.sendall(b"hello")
    made.server.close()
    out, _ = made.process.communicate(timeout=LIMIT)
    assert out == b"hello"


# TLS


@pytest.fixture(params=["c over TLS", "python over TLS"])
def encrypted(request: pytest.FixtureRequest, files: Files) -> tuple[str, ...]:
    return program(request.param, files)


def test_each_bridge_shows_its_certificate(encrypted: tuple[str, ...], certificates: Certificates) -> None:
    shown = (certificates.ca, certificates.client, certificates.client)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        made = Bridged(encrypted, listener, address, *shown, tls=certificates.both()[0].context)
    assert isinstance(made.server, ssl.SSLSocket)
    assert made.server.getpeercert()["subject"] == ((("commonName", "client"),),)
    made.server.close()
    made.process.communicate(timeout=LIMIT)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(
    encrypted: tuple[str, ...], tmp_path: Path
) -> None:
    """Without a terminal OpenSSL would ask stdin, where the daemon's lines come."""
    files = Certificates(tmp_path)
    shown = (files.ca, files.write("client", password=b"hush"), files.client)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Bridged(encrypted, listener, f"127.0.0.1:{listener.getsockname()[1]}", *shown)
        _, told = made.process.communicate(b"a wrong one\n", timeout=LIMIT)
        made.server.close()
    assert made.process.returncode == 1
    assert len(told.splitlines()) == 1, told
    assert b"pass phrase" not in told


async def test_a_shard_goes_over_it_to_a_listener_of_ours(
    encrypted: tuple[str, ...], certificates: Certificates
) -> None:
    shown = [str(certificates.ca), str(certificates.client), str(certificates.client)]
    async with asyncio.timeout(LIMIT), serving(tls=(certificates.both()[0], None)) as house:
        process = await asyncio.create_subprocess_exec(
            *encrypted, house.address, *shown, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        for message in (INITIALIZE, {"action": "leaseLost"}):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            answer = json.loads(await process.stdout.readline())
            assert answer == {"action": "status", "responseFor": message["action"]}
        assert await process.stdout.read() == b""
        assert await process.wait() == 0
        await house.empty()


@pytest.mark.parametrize(
    ("server", "host", "why"),
    [
        ("stranger", "127.0.0.1", "unable to get local issuer certificate"),
        ("server", "localhost", "mismatch"),
        ("clear text", "127.0.0.1", "wrong version number|record layer failure|packet length"),
    ],
)
def test_a_bridge_says_nothing_to_a_server_that_is_not_the_right_one(
    encrypted: tuple[str, ...], certificates: Certificates, server: str, host: str, why: str
) -> None:
    """The server waits for a first byte behind the handshake; there is none."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as beside:
        address = f"{host}:{listener.getsockname()[1]}"
        done = beside.submit(
            run, encrypted, address, *[str(certificates.ca), *[str(certificates.client)] * 2]
        )
        listener.settimeout(LIMIT)
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            if server == "clear text":
                connection.sendall(b"this is no handshake\n")
                assert b"status" not in connection.recv(MIB)
            else:
                context = ServerTLS(certificates.folder / f"{server}.pem").context
                assert context.wrap_socket(connection, server_side=True).recv(1) == b""
    assert done.result().returncode == 1
    assert re.search(why, done.result().stderr)
    assert done.result().stderr.startswith(f"mldserver bridge: {address}: ")


@pytest.mark.parametrize("name", ["c", "python", "c over TLS", "python over TLS"])
def test_a_secret_is_shown_before_the_daemons_first_line(
    name: str, files: Files, certificates: Certificates, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("  correct-horse-battery\r\n")
    encrypted = "TLS" in name
    shown = (certificates.ca, certificates.client, certificates.client) if encrypted else ()
    tls = certificates.both()[0].context if encrypted else None
    wanted = b"mldserver-secret correct-horse-battery\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        made = Bridged(program(name, files), listener, address, *shown, secret, tls=tls)
    with made.process:
        assert read_exactly(made.server, len(wanted)) == wanted
        made.write(b'{"action":"initialize"}\n')
        assert read_exactly(made.server, 24) == b'{"action":"initialize"}\n'
        made.close_stdin()
        made.server.close()
        command = Path(f"/proc/{made.process.pid}/cmdline")
        assert not command.exists() or b"correct-horse" not in command.read_bytes()
    secret.unlink()
    done = run(program(name, files), address, *map(str, shown), str(secret))
    assert (done.returncode, done.stderr) == (1, f"mldserver bridge: {secret}: No such file or directory\n")


@pytest.mark.parametrize(
    ("show", "why"), [("stranger", "tlsv1 alert unknown ca"), ("expired", "alert certificate expired")]
)
async def test_a_bridge_that_the_server_turns_away_ends_with_a_sentence(
    encrypted: tuple[str, ...], certificates: Certificates, show: str, why: str
) -> None:
    certificates.write("expired", days=-1)
    mine = str(certificates.folder / f"{show}.pem")
    async with asyncio.timeout(LIMIT), serving(tls=(certificates.both()[0], None)) as house:
        process = await asyncio.create_subprocess_exec(
            *encrypted,
            house.address,
            *(str(certificates.ca), mine, mine),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
        out, told = await process.communicate()
        await house.empty()
    assert (process.returncode, out) == (1, b"")
    assert re.fullmatch(
        f"mldserver bridge: {house.address}: the server refuses this client: .*{why}\n", told.decode()
    ), told


def test_a_bridge_without_openssl_speaks_no_clear_text_where_tls_was_asked_for(
    files: Files, certificates: Certificates
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = run(program("c", files), address, *[str(certificates.ca)] * 3)
    assert (done.returncode, done.stderr) == (2, f"mldserver bridge: {address}: built without OpenSSL\n")


def test_a_file_that_is_no_certificate_is_told(encrypted: tuple[str, ...], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = run(encrypted, address, *[str(tmp_path / "none.pem")] * 3)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No such file" in done.stderr


def test_the_command_names_authority_certificate_and_key(
    files: Files, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "compiled", lambda files, tls: ("/a/bridge",) if tls else None)
    shown = (certificates.ca, certificates.client, certificates.client)
    program = bridge.bridge_program(files, tls=True)
    line = bridge.bridge_command(program, TcpAddress("10.0.0.1", 7070), shown)
    assert line.split() == ["/a/bridge", "10.0.0.1:7070", *map(str, shown)]
    with pytest.raises(ConfigError, match="has a space in it"):
        bridge.bridge_command(program, TcpAddress("10.0.0.1", 7070), [Path("/a b")])


def run(command: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize("unix", [False, True])
def test_without_a_server_it_exits_with_one_clear_line(
    command: tuple[str, ...], unix: bool, tmp_path: Path
) -> None:
    with held_port() as nobodys:
        address = f"unix:{tmp_path}/none" if unix else f"127.0.0.1:{nobodys}"
        done = run(command, address)
    reason = "No such file or directory" if unix else "Connection refused"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"mldserver bridge: {address}: {reason}\n")


@pytest.mark.parametrize("arguments", [(), ("7070",), ("host:",), ("a:1", "b:2", "c:3"), (":7070",)])
def test_a_bad_address_is_told_apart(command: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    done = run(command, *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_an_ipv6_address_stands_in_brackets(command: tuple[str, ...]) -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with listener:
        made = Bridged(command, listener, f"[::1]:{listener.getsockname()[1]}")
    made.server.close()
    assert made.process.communicate(timeout=LIMIT)[0] == b""


def test_the_compiled_bridge_is_taken_where_it_can_be_made(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = TcpAddress("127.0.0.1", 7070)
    monkeypatch.setattr(bridge, "compiled", lambda files, tls: ("/a/bridge",))
    assert bridge.bridge_command(bridge.bridge_program(files), address) == "/a/bridge 127.0.0.1:7070"
    monkeypatch.setattr(bridge, "compiled", lambda files, tls: None)
    python, options, script, target = bridge.bridge_command(bridge.bridge_program(files), address).split()
    assert (python, options, target) == (sys.executable, "-ISE", "127.0.0.1:7070")
    assert Path(script).read_bytes() == deploy_file("bridge.py").read_bytes()


def test_a_bridge_that_was_compiled_before_is_taken_where_it_runs(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mldserver-bridge"
    monkeypatch.setenv("PATH", str(tmp_path))
    for code, taken in ((bridge.USAGE_EXIT, (str(program),)), (127, None)):
        program.write_text(f"#!/bin/sh\nexit {code}\n")
        program.chmod(0o755)
        assert bridge.compiled(files) == taken
    program.write_text(f"#!/bin/sh\nexit {bridge.USAGE_EXIT}\n")
    assert bridge.compiled(files, tls=True) is None, "it may know nothing of TLS"


def test_without_a_working_compiler_nothing_is_compiled(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bridge.compiled(files) is None
    broken.unlink()
    assert bridge.compiled(files) is None


def test_what_does_not_run_here_is_not_taken(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "cc"
    odd.write_text('#!/bin/sh\necho "no program" > "$3"\n')
    odd.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setattr(bridge, "COMPILERS", ("cc",))
    assert bridge.compiled(files) is None


class Kernel:
    """What Linux makes of files in memory: ``noexec`` is its ``vm.memfd_noexec``, None before Linux 6.3."""

    def __init__(self, noexec: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self._noexec = noexec
        self._create = os.memfd_create
        self._sealed: set[int] = set()
        self.modes: list[int] = []
        monkeypatch.setattr(os, "memfd_create", self.create)
        monkeypatch.setattr(os, "fchmod", self.change_mode)

    def create(self, name: str, flags: int) -> int:
        never, executable = bool(flags & 0x8), bool(flags & 0x10)
        if (never or executable) and self._noexec is None:
            raise OSError(errno.EINVAL, "Invalid argument")
        if executable and self._noexec == 2:
            raise PermissionError(errno.EACCES, "Permission denied")
        descriptor = self._create(name, os.MFD_CLOEXEC)
        (self._sealed.add if never or (self._noexec and not executable) else self._sealed.discard)(descriptor)
        return descriptor

    def change_mode(self, descriptor: int, mode: int) -> None:
        if descriptor in self._sealed and mode & 0o111:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        self.modes.append(mode)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux's")
@pytest.mark.parametrize("noexec", [None, 0, 1, 2])
def test_files_that_are_only_read_are_had_whatever_the_host_lets_be_executed(
    noexec: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(noexec, monkeypatch)
    with private_files() as files:
        assert Path(files.add("text", b"text")).read_bytes() == b"text"
    assert kernel.modes == [0o600]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux's")
@pytest.mark.parametrize("noexec", [None, 0, 1, 2])
def test_the_bridge_is_the_interpreters_where_nothing_in_memory_may_be_executed(
    noexec: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "cc"
    script.write_text(f"#!/bin/sh\nprintf '#!/bin/sh\\nexit {bridge.USAGE_EXIT}\\n' > \"$3\"\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setattr(bridge, "COMPILERS", ("cc",))
    kernel = Kernel(noexec, monkeypatch)
    with private_files() as files:
        command = [*bridge.bridge_program(files), "127.0.0.1:7070"]
        assert (command[0] == sys.executable) == (noexec == 2)
        # Without an address it says how it is used.
        assert subprocess.run(command[:-1], capture_output=True, check=False).returncode == bridge.USAGE_EXIT
    assert kernel.modes == [0o600 if noexec == 2 else 0o700]


def test_a_compiler_leaves_nothing_in_the_temporary_folder(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if bridge.compiled(files) is None:
        pytest.skip("no C compiler here")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/exe").exists(), reason="Linux's")
def test_a_python_with_a_space_in_its_path_gets_a_name_without(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/a b/python")
    command = bridge.scripted(files)
    assert subprocess.run(command, capture_output=True, check=False).returncode == bridge.USAGE_EXIT
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ConfigError, match="Install a C compiler"):
        bridge.scripted(files)


def test_an_address_with_a_space_is_refused() -> None:
    with pytest.raises(ConfigError):
        bridge.bridge_command(["/a/bridge"], UnixAddress(Path("/a b")))
