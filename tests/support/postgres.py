"""PostgreSQL as Debian packages it: a server on loopback in a folder of its own, which dies with the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from support.processes import held_port

JAR: Final = Path("/usr/share/java/postgresql.jar")
"""PostgreSQL's JDBC driver."""

_HBA: Final = """\
host all postgres 127.0.0.1/32 trust
host all all 127.0.0.1/32 scram-sha-256
"""
_END: Final = "-- no more rows --"


def binaries() -> Path | None:
    """Return the folder of the newest server's programs; None: there is none."""
    return max(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), default=None
    )


def require() -> Path:
    """Return the folder of the server's programs; without it skip the test, which CI may not."""
    lacks = [
        name
        for name, there in (
            ("postgresql", binaries() is not None),
            ("libpostgresql-jdbc-java", JAR.exists()),
            ("setpriv", shutil.which("setpriv") is not None),
        )
        if not there
    ]
    if lacks:
        said = f"Debian's {' and '.join(lacks)} is not installed: apt-get install {' '.join(lacks)}"
        assert os.environ.get("CI") != "true", said
        pytest.skip(said)
    found = binaries()
    assert found is not None
    return found


class Postgres:
    """One server and its database ``postgres``, whose superuser of that name needs no password."""

    def __init__(self, folder: Path, programs: Path, port: int) -> None:
        """Make the database; ``folder`` is the server's own."""
        self.port = port
        self.url = f"jdbc:postgresql://127.0.0.1:{port}/postgres"
        self._data = folder / "data"
        self._programs = programs
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        self._run(
            "initdb", "--pgdata", str(self._data), "--username=postgres", "--no-sync", "--no-locale", "-EUTF8"
        )
        (self._data / "pg_hba.conf").write_text(_HBA)

    def start(self) -> None:
        """Start the server, and return when it takes connections."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "shared_buffers": "16MB",
            "max_connections": 40,
            "log_min_messages": "fatal",
            "timezone": "UTC",
        }
        options = [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", "-D", str(self._data), *options), stdout=log, stderr=log
            )
        until = time.monotonic() + 60
        while subprocess.run(
            [self._programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)], check=False
        ).returncode:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server. SIGINT: in good order, and its connections; SIGQUIT: as a crash; SIGKILL: as a worse one."""
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait(60)
        self._process = None
        until = time.monotonic() + 60
        # The processes of its connections notice by themselves, and the next server waits for none.
        while how == signal.SIGKILL and self._shared_memory_is_used():
            assert time.monotonic() < until
            time.sleep(0.05)

    def _shared_memory_is_used(self) -> bool:
        own = str(self._data).encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == self._data or own in (entry / "cmdline").read_bytes():
                    return True
        return False

    @contextlib.contextmanager
    def session(self) -> Iterator[DriverSession]:
        """Open a session of the superuser's, which lasts as long as the block."""
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-d", "postgres"]
        with subprocess.Popen(
            [self._programs / "psql", "-AtqX", *where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as psql:
            try:
                yield DriverSession(psql)
            finally:
                psql.kill()

    def _run(self, *command: str) -> None:
        done = subprocess.run(self._command(*command), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def _command(self, name: str, *arguments: str) -> list[str]:
        """Return the command line: as ``postgres`` where root may not, and no longer than this process lives."""
        own = ["setpriv", "--pdeathsig=QUIT"]
        if os.geteuid() == 0:
            own += ["--reuid=postgres", "--regid=postgres", "--init-groups"]
        return [*own, str(self._programs / name), *arguments]


class DriverSession:
    """A psql that waits for what is asked."""

    def __init__(self, psql: subprocess.Popen[str]) -> None:
        """Hold psql."""
        self._psql = psql

    def ask(self, sql: str) -> list[str]:
        """Run statements; return the lines of their rows, values parted by ``|``. Errors fail the test."""
        assert self._psql.stdin is not None
        assert self._psql.stdout is not None
        self._psql.stdin.write(f"{sql};\n\\echo {_END}\n")
        self._psql.stdin.flush()
        lines: list[str] = []
        for line in self._psql.stdout:
            if line.strip() == _END:
                break
            lines.append(line.removesuffix("\n"))
        else:
            raise AssertionError(f"psql has ended: {lines}")
        assert not [line for line in lines if line.startswith(("ERROR:", "FATAL:"))], lines
        return lines


@contextlib.contextmanager
def serving() -> Iterator[Postgres]:
    """Run a server."""
    programs = require()
    # Not in pytest's folders, which only their owner may enter.
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    server = None
    try:
        with held_port() as port:
            server = Postgres(folder, programs, port)
            server.start()
            yield server
    finally:
        if server is not None:
            server.stop(signal.SIGQUIT)
        shutil.rmtree(folder)
