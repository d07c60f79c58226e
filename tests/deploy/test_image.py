"""The image: what it is built from is there, its probe tells a living server from others, and a real builder builds it."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import held_port

import mldserver

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
BUILDER = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]


def instructions(name: str) -> list[str]:
    """Return the Dockerfile's instructions of a kind, each in one line."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(rf"^{name}\s+(.*)$", text, re.MULTILINE)


def context(folder: Path) -> Path:
    """Copy what .dockerignore lets a builder see."""
    lines = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line[:1] != "#"]
    assert lines[0] == "*", "what is not named stays outside"
    kept = [line[1:] for line in lines if line.startswith("!")]
    left_out = [line.removeprefix("**/") for line in lines[1:] if not line.startswith("!")]
    for name in kept:
        copy = shutil.copy if (ROOT / name).is_file() else shutil.copytree
        ignore = {"ignore": shutil.ignore_patterns(*left_out)} if copy is shutil.copytree else {}
        copy(ROOT / name, folder / name, **ignore)
    return folder


def test_a_secret_or_the_history_never_comes_into_the_image() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line[:1] == "!"}
    assert kept == {"LICENSE", "README.md", "pyproject.toml", "deploy", "handlers", "mldserver"}


def test_what_the_builder_sees_is_enough_to_build_the_package_and_the_bridge(tmp_path: Path) -> None:
    folder = context(tmp_path)
    code = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=True)
    assert len(list(folder.glob("mldserver-*.whl"))) == 1
    if shutil.which("cc") is None:
        pytest.skip("the bridge needs a C compiler")
    (compiled,) = (
        step for run in instructions("RUN") for step in run.split("&&") if step.strip().startswith("cc ")
    )
    command = [word.replace("/opt/mldserver/bin", ".") for word in shlex.split(compiled)]
    subprocess.run(command, cwd=folder, check=True)
    assert (
        subprocess.run(["./mldserver-bridge"], cwd=folder, stderr=subprocess.DEVNULL, check=False).returncode
        == 2
    )


class Answers(http.server.BaseHTTPRequestHandler):
    """Says what it is told to."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/livez" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield server.server_port
        server.shutdown()
        serving.join()


def probe(port: int) -> int:
    """Run the image's HEALTHCHECK as it is written, on another port."""
    (check,) = instructions("HEALTHCHECK")
    program, *arguments = json.loads(check.partition(" CMD ")[2])
    assert (program, "'127.0.0.1', 7071" in arguments[-1]) == ("python3", True)
    arguments[-1] = arguments[-1].replace("7071", str(port))
    return subprocess.run([sys.executable, *arguments], stderr=subprocess.DEVNULL, check=False).returncode


def test_a_server_that_lives_is_healthy_and_one_whose_loop_stands_still_or_that_is_not_there_is_not(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_port() as nobodys:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobodys}")  # such as a cluster gives every container
        assert probe(port) == 0
        monkeypatch.setattr(Answers, "status", 503)
        assert probe(port) == 1
        assert probe(nobodys) == 1


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(BUILDER), reason=f"not installed: {', '.join(BUILDER)} (Debian has it)")
@pytest.mark.skipif(os.getuid() != 0, reason="debootstrap needs root")
def test_a_builder_builds_the_image_from_debian_and_it_runs(tmp_path: Path) -> None:
    """Debian's own packages stand in for the base image, which only a registry has."""
    stored = (
        "--root",
        str(tmp_path / "root"),
        "--runroot",
        str(tmp_path / "run"),
        "--storage-driver",
        "overlay",
    )

    def buildah(*command: str | Path) -> str:
        done = subprocess.run(
            ["buildah", *stored, *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-5000:]
        return done.stdout.strip()

    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", tmp_path / "debian"], check=True)
    try:
        base = buildah("from", "scratch").splitlines()[-1]
        buildah("add", "--quiet", base, tmp_path / "debian", "/")
        buildah("commit", "--quiet", "--format", "docker", base, "docker.io/library/debian:12-slim")
        trusted: list[str] = []
        if certificates := os.environ.get("PIP_CERT"):  # a mirror's
            (tmp_path / "pip.conf").write_text("[global]\ncert = /mnt/trusted.crt\n")
            for path, inside in (
                (certificates, "/mnt/trusted.crt"),
                (tmp_path / "pip.conf", "/etc/pip.conf"),
            ):
                trusted += ["--volume", f"{path}:{inside}:ro"]
        options = ["--pull-never", "--isolation", "chroot", "--format", "docker", *trusted]
        buildah("build", *options, "--file", "deploy/Dockerfile", "--tag", "mldserver", ".")
        container = buildah("from", "--pull-never", "mldserver").splitlines()[-1]
        run = ("run", "--isolation", "chroot", container, "--")
        assert buildah(*run, "id", "--user") == "1000"
        assert mldserver.__version__ in buildah(*run, "mldserver", "--version")
        assert "it can be run" in buildah(*run, "mldserver", "check", "handlers.departures")
        assert "17." in buildah(*run, "java", "-version")
    finally:
        # Nothing stays mounted, or pytest could not delete the folder.
        for end in (["buildah", *stored, "rm", "--all"], ["umount", str(tmp_path / "root" / "overlay")]):
            subprocess.run(end, check=False, capture_output=True)
        shutil.rmtree(tmp_path)
