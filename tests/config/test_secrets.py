"""A canary stands in every setting that takes it: as a password in a URL, as a secret option, as a secret pair."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from mldserver.config.resolve import resolve
from mldserver.config.settings import specs
from mldserver.errors import ConfigError

pytestmark = pytest.mark.quick

CANARY = "canary/in-a-coal-mine"
PLACES = [
    text.format(CANARY)
    for text in (
        "https://user:{}@host/path",
        "https://host/path?x=1&password={}",
        "s3://KEY:{}@bucket/prefix?region=eu-central-1",
        "s3://bucket/prefix?secret_key={}",
        "jsonl:s3://KEY:{}@bucket/prefix",
        "sqs:https://user:{}@queue/1/name",
        "dynamodb://table?region=eu-central-1&endpoint_url=http://user:{}@host:1",
        "jdbc:postgresql://user:{}@host/db",
        "jdbc:postgresql://host/db?user=me&password={}",
        "jdbc:sqlserver://host;user=me;password={}",
        "jdbc:oracle:thin:me/{}@host:1521",
        "sc://host:1/;token={}",
        "fs.secret.key={}",
        "url=https://user:{}@host",
    )
]


@pytest.mark.parametrize("text", PLACES)
def test_no_setting_is_shown_with_its_secret(text: str) -> None:
    for name in specs():
        shown_without_secret(name, text)


def shown_without_secret(name: str, text: str) -> None:
    given = {"handler": "handlers.departures", name: text}
    try:
        settings = resolve(given, environ={"HOME": "/nowhere"}, folder=Path(__file__).parent)
    except ConfigError as refusal:
        shown = f"{refusal} {refusal.told()}"
    else:
        shown = settings.given()[name]
        assert CANARY in settings.secrets()
    assert CANARY not in shown
    assert "coal-mine" not in shown


def test_the_canary_was_taken_by_those_that_hold_urls() -> None:
    taken = set()
    for name, text in product(specs(), PLACES):
        try:
            resolve(
                {"handler": "a.b", "sink": "delta:/t", name: text}
                | ({"sink_table": "t"} if text.startswith("jdbc:") else {}),
                environ={"HOME": "/x"},
                folder=Path(),
            )
        except ConfigError:
            continue
        taken.add(name)
    assert taken >= {"out", "ledger", "sink", "sink_options", "dead_letters", "source", "endpoint_url"} | {
        "spark_master",
        "spark_conf",
    }


def test_a_password_that_is_the_pipelines_name_does_not_hide_the_name() -> None:
    given = {
        "handler": "a.b",
        "pipeline": "departures",
        "sink": "delta:/t",
        "sink_options": {"password": "departures", "other_password": "open sesame"},
    }
    settings = resolve(given, environ={"HOME": "/nowhere"}, folder=Path(__file__).parent)
    assert settings.secrets() == {"open sesame"}
