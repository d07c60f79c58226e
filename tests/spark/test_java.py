from __future__ import annotations

import os
from pathlib import Path

import pytest

from mldserver.errors import JavaError, NotThereYet
from mldserver.spark.java import java_command, judge, probe

OUTPUTS = {
    'openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6-Debian)': 17,
    'openjdk version "21" 2023-09-19': 21,
    'openjdk version "25-ea" 2025-09-16': 25,
    'openjdk version "11.0.22" 2024-01-16 LTS\nOpenJDK Runtime Environment Corretto-11.0.22.7.1': 11,
    'java version "1.8.0_392"\nJava(TM) SE Runtime Environment (build 1.8.0_392-b08)': 8,
    'java version "17.0.10" 2024-01-16 LTS\nJava(TM) SE Runtime Environment': 17,
    'Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "24.0.1" 2025-04-15': 24,
    'openjdk version "9"': 9,
    'java version "1"': 1,
    "The Java runtime is not installed. Get it from a website.": None,
    "": None,
}


@pytest.mark.parametrize(("output", "major"), OUTPUTS.items())
def test_the_version_is_read_from_every_vendors_output(output: str, major: int | None) -> None:
    if major is not None and major >= 17:
        assert judge("java", None, output).major == major
        return
    with pytest.raises(JavaError, match="says no version" if major is None else rf"is Java {major}\."):
        judge("java", None, output)


def test_a_java_that_is_new_enough_is_taken_with_its_version_line() -> None:
    java = judge("/j/bin/java", "/j", 'NOTE: hello\nopenjdk version "17.0.1" 2021-10-19\nmore')
    assert (java.major, java.version, java.home) == (17, 'openjdk version "17.0.1" 2021-10-19', "/j")


def test_a_java_that_is_too_old_is_refused_in_one_sentence() -> None:
    with pytest.raises(JavaError) as caught:
        judge("/j/bin/java", None, 'java version "1.8.0_392"')
    assert caught.value.what == "Spark needs Java 17 or later, but /j/bin/java is Java 8."
    assert "Install Java 17" in caught.value.advice


def test_a_program_without_a_version_is_quoted() -> None:
    with pytest.raises(JavaError, match="says no version: No Java runtime present"):
        judge("/usr/bin/java", None, "No Java runtime present,\n requesting install.")
    with pytest.raises(JavaError, match="says no version: nothing"):
        judge("/usr/bin/java", None, "")


def test_the_setting_comes_before_java_home_and_java_home_before_path() -> None:
    def which(name: str) -> str:
        return f"/usr/bin/{name}"

    assert java_command("/set", {"JAVA_HOME": "/env"}, which) == ("/set/bin/java", "/set")
    assert java_command(None, {"JAVA_HOME": "/env"}, which) == ("/env/bin/java", "/env")
    assert java_command(None, {"JAVA_HOME": ""}, which) == ("/usr/bin/java", None)


def test_no_java_anywhere_is_one_clear_error() -> None:
    with pytest.raises(JavaError, match="Spark needs Java, and none was found"):
        java_command(None, {}, lambda _: None)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    return tmp_path


def write_java(home: Path, script: str) -> None:
    java = home / "bin" / "java"
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)


async def test_a_working_java_is_probed(home: Path) -> None:
    write_java(home, "echo 'openjdk version \"21.0.2\"' >&2")
    java = await probe(str(home), {})
    assert (java.major, java.command) == (21, str(home / "bin" / "java"))


async def test_java_is_found_on_the_path_that_spark_will_have(home: Path) -> None:
    write_java(home, "echo 'openjdk version \"17\"'")
    java = await probe(None, {"PATH": f"{home / 'bin'}{os.pathsep}/nowhere"})
    assert (java.command, java.home) == (str(home / "bin" / "java"), None)


async def test_a_java_home_without_java_names_the_setting(home: Path) -> None:
    with pytest.raises(JavaError, match=r"bin/java \(from java_home\) cannot be run: No such file"):
        await probe(str(home), {})
    with pytest.raises(JavaError, match=r"\(from JAVA_HOME\) cannot be run"):
        await probe(None, {"JAVA_HOME": str(home)})


async def test_a_java_that_is_not_executable_says_so(home: Path) -> None:
    (home / "bin" / "java").write_text("not a program")
    with pytest.raises(JavaError, match="cannot be run: Permission denied"):
        await probe(str(home), {})


async def test_a_java_that_hangs_is_killed(home: Path) -> None:
    write_java(home, "exec sleep 600")
    with pytest.raises(NotThereYet, match=r"did not answer within 0\.05 seconds"):
        await probe(str(home), dict(os.environ), limit_seconds=0.05)
