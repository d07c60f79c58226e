from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

import mldserver
from mldserver.errors import InternalError, JavaError, OperatorError
from mldserver.kcl.launch import deploy_file, find_jars, find_java


def test_the_jars_of_the_daemon_are_found() -> None:
    jars = find_jars()
    assert any(jar.name.startswith("amazon-kinesis-client-multilang-3.") for jar in jars)
    assert list(jars) == sorted(jars)


@pytest.mark.parametrize("package", ["no_such_package", "mldserver"])
def test_missing_jars_name_what_to_install(package: str) -> None:
    with pytest.raises(OperatorError, match=r"pip install 'mldserver\[kcl\]'"):
        find_jars(package)


async def test_a_missing_java_is_told_for_the_daemon(tmp_path: Path) -> None:
    with pytest.raises(JavaError, match="The MultiLangDaemon needs Java"):
        await find_java(None, {"PATH": str(tmp_path)})


async def test_java_is_found_on_path(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.1\" 2023-10-17' >&2\n")
    java.chmod(0o755)
    found = await find_java(None, {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert (found.command, found.major) == (str(java), 21)


class Installed:
    """A file as the metadata of an installed distribution lists it."""

    def __init__(self, path: Path, parts: tuple[str, ...]) -> None:
        self._path = path
        self.parts = parts

    def locate(self) -> Path:
        return self._path


def test_a_deployed_file_is_found_where_it_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "bridge.c"
    installed.write_text("")
    listed = [
        Installed(tmp_path / "other", ("share", "mldserver", "other")),
        Installed(installed, ("..", "..", "share", "mldserver", "bridge.c")),
        Installed(tmp_path / "gone", ("share", "mldserver", "gone")),
    ]
    monkeypatch.setattr(importlib.metadata, "files", lambda name: listed)
    assert deploy_file("bridge.c") == installed
    with pytest.raises(InternalError, match="gone is missing"):
        deploy_file("gone")


def test_a_deployed_file_is_found_in_a_source_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "bridge.py").write_text("")
    monkeypatch.setattr(mldserver, "__file__", str(tmp_path / "mldserver" / "__init__.py"))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    assert deploy_file("bridge.py") == tmp_path / "deploy" / "bridge.py"
