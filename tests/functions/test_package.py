"""Packages of functions: equal functions give equal bytes, no secret is in them, and a changed package is refused."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.config.resolve import resolve
from mldserver.errors import ConfigError, OperatorError
from mldserver.functions.package import (
    Package,
    differences,
    own_settings,
    read_package,
    toml,
    without_secrets,
)
from mldserver.versions.archive import archive, unarchived

pytestmark = pytest.mark.quick

SECRETS = {
    "sink": "jdbc:postgresql://writer:hunter2hunter2@db.example/x",
    "source": "dynamodb:orders",
    "dead_letters": "parquet:s3://AKIAKEY:topsecretkey@bucket/letters?region=eu",
    "sink_options": {"user": "writer", "password": "correct-horse", "url": "https://u:battery-staple@h/"},
    "handler_settings": {"threshold": "20", "api.token": "0123456789abcdef", "api-token": "fedcba9876543210"},
}
HIDDEN = [
    "hunter2hunter2",
    "topsecretkey",
    "AKIAKEY",
    "correct-horse",
    "battery-staple",
    "0123456789abcdef",
    "fedcba9876543210",
]
PACKAGE = Package(
    name="departures",
    handler="handlers.departures",
    version="sha256:abc",
    schema="carrier STRING",
    windows="tumbling, 1 h of at",
    settings=without_secrets("departures", SECRETS),
    code={"handlers/__init__.py": b"", "handlers/departures.py": b"x = 1\n"},
)


def test_a_package_that_was_read_is_packed_to_the_same_bytes() -> None:
    data = PACKAGE.packed()
    assert read_package(data, "It") == PACKAGE
    assert read_package(data, "It").packed() == data


def test_the_order_of_settings_and_files_does_not_matter() -> None:
    turned = dict(reversed(SECRETS.items()))
    other = replace(
        PACKAGE,
        settings=without_secrets("departures", turned),
        code=dict(reversed(PACKAGE.code.items())),
    )
    assert other.packed() == PACKAGE.packed()


def test_no_secret_is_in_a_package_and_each_one_has_its_own_variable() -> None:
    assert {secret for secret in HIDDEN if secret in str(SECRETS)} == set(HIDDEN)
    files = unarchived(PACKAGE.packed(), "It")
    for secret in HIDDEN:
        assert not any(secret.encode() in data for data in files.values()), secret
    assert PACKAGE.settings["sink"] == "${DEPARTURES_SINK}"
    assert PACKAGE.settings["source"] == "dynamodb:orders"
    assert PACKAGE.settings["handler_settings"] == {
        "threshold": "20",
        "api-token": "${DEPARTURES_HANDLER_SETTINGS_API_TOKEN}",
        "api.token": "${DEPARTURES_HANDLER_SETTINGS_API_TOKEN_2}",
    }
    assert PACKAGE.variables() == [
        "DEPARTURES_DEAD_LETTERS",
        "DEPARTURES_HANDLER_SETTINGS_API_TOKEN",
        "DEPARTURES_HANDLER_SETTINGS_API_TOKEN_2",
        "DEPARTURES_SINK",
        "DEPARTURES_SINK_OPTIONS_PASSWORD",
        "DEPARTURES_SINK_OPTIONS_URL",
    ]


def test_the_settings_file_of_a_package_holds_the_handler_and_the_settings() -> None:
    assert tomllib.loads(PACKAGE.settings_file()) == {"handler": "handlers.departures", **PACKAGE.settings}


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(TEXTS, TEXTS | st.dictionaries(TEXTS, TEXTS, max_size=3), max_size=4))
def test_any_texts_come_back_from_toml(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml(table)) == table


def changed(**files: bytes) -> bytes:
    found = unarchived(PACKAGE.packed(), "It")
    return archive(found | {name.replace("__", "/").replace("_", "."): data for name, data in files.items()})


def _with_table(table: bytes) -> bytes:
    class Other(Package):
        def files(self) -> dict[str, bytes]:
            return {"function.toml": table}

    fields = {name: getattr(PACKAGE, name) for name in Package.__dataclass_fields__}
    return Other(**fields).packed()


REFUSED = {
    "no archive": (b"x", "is not a zip archive"),
    "an archive of something else": (archive({"a.py": b""}), "It is not a package: it has no manifest.json"),
    "a manifest that is a list": (changed(manifest_json=b"[]"), "is not a package"),
    "a manifest that is no JSON": (changed(manifest_json=b"{"), "is not a package"),
    "a newer format": (
        changed(manifest_json=json.dumps({"format": 2, "files": {}}).encode()),
        "has the format 2; this version reads format 1. Update mldserver",
    ),
    "another setting": (changed(function_toml=b"name = 'x'"), "was changed after its export: function.toml"),
    "one more file": (changed(more=b""), "was changed after its export: more"),
    "a table with less": (_with_table(b"name = 'x'"), "has no function.toml that can be read: 'handler'"),
    "a table that is no TOML": (_with_table(b"name = "), "has no function.toml that can be read"),
    "settings that are numbers": (
        _with_table(
            toml({"name": "a", "handler": "b", "version": "", "schema": "", "windows": ""}).encode()
            + b"settings.a = 1"
        ),
        "holds what a package of format 1 does not have",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_package_or_was_changed_is_refused_with_a_sentence(case: str) -> None:
    data, sentence = REFUSED[case]
    with pytest.raises(OperatorError, match=re.escape(sentence)):
        read_package(data, "It")


def test_the_difference_of_two_packages_is_a_diff_of_their_files() -> None:
    assert differences(PACKAGE, PACKAGE) == []
    other = replace(PACKAGE, settings={"late": "separate"}, code={"handlers/departures.py": b"x = 2\n"})
    lines = differences(PACKAGE, other)
    assert "--- deployed/code/handlers/departures.py" in lines
    assert "+++ package/code/handlers/departures.py" in lines
    assert {"-x = 1", "+x = 2", '+late = "separate"', '-sink = "${DEPARTURES_SINK}"'} <= set(lines)


def test_the_own_settings_of_a_function_are_those_of_its_table_without_places(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text(
        """
        flush_interval = "7 s"
        [functions.trips]
        handler = "handlers.trips"
        out = "elsewhere"
        listen = ":7080"
        retention = "2 days"
        failure_rules = { KeyError = "skip" }
        settings = { threshold = 20 }
        """
    )
    settings = resolve({}, environ={"MLDSERVER_LATE": "separate"}, folder=tmp_path)
    assert own_settings(settings) == {
        "listen": "127.0.0.1:7080",
        "retention": "2 days",
        "failure_rules": "KeyError=skip",
        "handler_settings": {"threshold": "20"},
    }


def test_the_own_settings_of_an_only_function_are_all_that_were_given_and_are_not_the_servers(
    tmp_path: Path,
) -> None:
    given = {
        "handler": "handlers.trips",
        "out": "x",
        "grace": "3 s",
        "sink_options": ["a=b"],
        "sink": "delta:/t",
    }
    settings = resolve(given, environ={"MLDSERVER_LATE": "separate"}, folder=tmp_path)
    assert own_settings(settings) == {"sink_options": {"a": "b"}, "sink": "delta:/t", "late": "separate"}


def test_a_server_that_reads_the_settings_of_a_package_exports_them_as_they_were(tmp_path: Path) -> None:
    given = {
        "handler": "handlers.trips",
        "from": "2026-01-01T00:00:00Z",
        "sink": "jdbc:postgresql://writer:hunter2hunter2@db.example/x",
        "sink_table": "trips",
        "sink_options": {"user": "writer", "password": 'it\'s "quoted" \\ $ {x}'},
        "handler_settings": {"threshold": "20", "a.b": "c"},
        "failure_rules": ["KeyError=skip", "ValueError=retry:7"],
        "window_deadline": "by-size",
        "max_age": "none",
        "workers": "inline",
        "allow_shards": "a*, b*",
    }
    first = resolve(given, environ={}, folder=tmp_path)
    own = without_secrets("trips", own_settings(first))
    package = replace(PACKAGE, name="trips", handler="handlers.trips", settings=own)
    (tmp_path / "functions.d").mkdir()
    (tmp_path / "functions.d" / "trips.toml").write_text(package.settings_file())
    with pytest.raises(ConfigError, match=r"needs the environment variable TRIPS_SINK\w*, which is not set"):
        resolve({}, environ={}, folder=tmp_path)
    environ = {
        "TRIPS_SINK": str(given["sink"]),
        "TRIPS_SINK_OPTIONS_PASSWORD": first.sink_options["password"],
    }
    assert package.variables() == sorted(environ)
    second = resolve({}, environ=environ, folder=tmp_path)
    assert own_settings(second) == own_settings(first)
    again = replace(package, settings=without_secrets("trips", own_settings(second)))
    assert again.packed() == package.packed()
    assert second == replace(first, out=second.out)
