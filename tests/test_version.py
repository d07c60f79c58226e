"""The commit is known in a clone, in what is built out of one, and in what is built out of that."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from mldserver.version import commit_of

ROOT = Path(__file__).parents[1]


def git(folder: Path, *arguments: str) -> str:
    me = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *me, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def build(folder: Path, what: str) -> Path:
    code = f"from setuptools import build_meta; build_meta.build_{what}('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=True)
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As much of this project as can be built fast, committed."""
    folder = tmp_path / "clone"
    (folder / "mldserver").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    for name in ("__init__.py", "version.py", "build_hooks.py"):
        shutil.copy(ROOT / "mldserver" / name, folder / "mldserver" / name)
    (folder / ".gitignore").write_text("build/\ndist/\n*.egg-info/\n__pycache__/\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "It is there")
    return folder


def test_a_clone_tells_its_commit_and_whether_it_was_changed(clone: Path) -> None:
    commit = git(clone, "rev-parse", "HEAD")[:12]
    assert commit_of(clone / "mldserver") == commit
    (clone / "README.md").write_text("Changed.\n")
    assert commit_of(clone / "mldserver") == f"{commit}-dirty"


def test_a_folder_that_only_lies_in_a_clone_is_not_taken_for_it(clone: Path) -> None:
    within = clone / ".venv" / "site-packages" / "mldserver"
    within.mkdir(parents=True)
    assert commit_of(within) is None


def test_where_git_is_missing_nobody_knows(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit_of(clone / "mldserver") is None


def test_a_wheel_and_what_is_built_out_of_the_source_archive_tell_it(clone: Path, tmp_path: Path) -> None:
    commit = git(clone, "rev-parse", "HEAD")[:12]
    archive = build(clone, "sdist")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    archive.unlink()
    for source in (clone, tmp_path / archive.name.removesuffix(".tar.gz")):
        with zipfile.ZipFile(build(source, "wheel")) as wheel:
            wheel.extractall(tmp_path / "installed" / source.name)
        assert commit_of(tmp_path / "installed" / source.name / "mldserver") == commit


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
