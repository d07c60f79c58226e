from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.errors import ConfigError
from mldserver.kcl.properties import (
    DaemonSettings,
    as_text,
    daemon_properties,
    parse_pairs,
    shutdown_seconds,
    start_of,
)

BASE = DaemonSettings(
    stream="s", app="a", region="eu-central-1", executable="bridge 127.0.0.1:7070", worker="w"
)


def with_extra(**extra: str) -> dict[str, str]:
    return daemon_properties(
        DaemonSettings(stream="s", app="a", region="r", executable="bridge", worker="w", extra=extra)
    )


def test_what_every_daemon_needs_is_there() -> None:
    assert daemon_properties(BASE) == {
        "executableName": "bridge 127.0.0.1:7070",
        "streamName": "s",
        "applicationName": "a",
        "regionName": "eu-central-1",
        "workerIdentifier": "w",
        "initialPositionInStream": "TRIM_HORIZON",
        "AWSCredentialsProvider": "DefaultCredentialsProvider",
        "callProcessRecordsEvenForEmptyRecordList": "true",
        "shutdownGraceMillis": "30000",
    }


def test_endpoints_go_to_the_client_that_each_is_for() -> None:
    made = daemon_properties(
        DaemonSettings(
            stream="s",
            app="a",
            region="r",
            executable="bridge",
            worker="w",
            position="1700000000",
            endpoint_url="http://kinesis",
            dynamodb_endpoint="http://dynamodb",
            cloudwatch_endpoint="http://cloudwatch",
        )
    )
    assert made["kinesisEndpoint"] == "http://kinesis"
    assert made["dynamoDBEndpoint"] == "http://dynamodb"
    assert made["cloudWatchClient.endpointOverride"] == "http://cloudwatch"
    assert made["initialPositionInStreamExtended"] == "1700000000"
    assert "initialPositionInStream" not in made


def test_a_further_property_comes_before_a_default() -> None:
    made = with_extra(shutdownGraceMillis="5000", maxRecords="500", isGracefulLeaseHandoffEnabled="false")
    assert made["shutdownGraceMillis"] == "5000"
    assert made["maxRecords"] == "500"
    assert made["isGracefulLeaseHandoffEnabled"] == "false"


def test_nested_properties_are_passed_on() -> None:
    made = daemon_properties(
        DaemonSettings(
            stream="s",
            app="a",
            region="r",
            executable="b",
            worker="w",
            extra={"fanoutConfig.consumerName": "mine"},
        )
    )
    assert made["fanoutConfig.consumerName"] == "mine"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("failoverTimeMillis", "0", "ignores failoverTimeMillis = 0"),
        ("workerMetricsEMAAlpha", "0.0", "ignores"),
        ("cleanupLeasesUponShardCompletion", "False", "cannot be switched off"),
        ("failoverTimeMilis", "1", "Did you mean 'failoverTimeMillis'"),
        ("zzz", "1", "deploy/mld.properties"),
        ("streamName", "other", "Use --stream"),
        ("timeoutInSeconds", "10", "Leave it out"),
    ],
)
def test_a_property_that_would_not_do_what_it_says_is_refused(name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_extra(**{name: value})
    assert says in str(caught.value)


def test_a_number_that_is_none_is_left_to_the_daemon_to_refuse() -> None:
    assert with_extra(maxRecords="many")["maxRecords"] == "many"


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("trim_horizon", "TRIM_HORIZON"),
        ("LATEST", "LATEST"),
        ("2023-11-14T22:13:20Z", "1700000000"),
        ("2023-11-14T22:13:20", "1700000000"),
        ("2023-11-14T23:13:20.9+01:00", "1700000000"),
    ],
)
def test_an_initial_position_is_a_word_or_whole_seconds(text: str, position: str) -> None:
    assert start_of(text) == position


@pytest.mark.parametrize("text", ["", "yesterday", "1969-12-31T23:00:00Z"])
def test_any_other_initial_position_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        start_of(text)


def test_pairs_are_split_at_the_first_equals_sign() -> None:
    assert parse_pairs(["a=1", " b = x=y "]) == {"a": "1", "b": "x=y"}


@pytest.mark.parametrize("text", ["a", "=1", ""])
def test_a_pair_without_a_name_or_an_equals_sign_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_pairs([text])


def test_the_grace_is_told_in_seconds() -> None:
    assert shutdown_seconds({"shutdownGraceMillis": "1500"}) == 1.5
    with pytest.raises(ConfigError):
        shutdown_seconds({"shutdownGraceMillis": "long"})


def test_java_reads_special_characters_through_escapes() -> None:
    assert as_text({"a b": " C:\\x", "k": "ü😀\n", "e": ""}) == (
        "a\\ b = \\ C:\\\\x\nk = \\u00fc\\ud83d\\ude00\\u000a\ne = \n"
    )


def read_as_java(text: str) -> dict[str, str]:
    """Read a properties file by the rules of java.util.Properties, as far as written files use them."""

    def plain(escaped: str) -> str:
        out, at = "", 0
        while at < len(escaped):
            if escaped[at] != "\\":
                out, at = out + escaped[at], at + 1
            elif escaped[at + 1] == "u":
                out, at = out + chr(int(escaped[at + 2 : at + 6], 16)), at + 6
            else:
                out, at = out + escaped[at + 1], at + 2
        return out.encode("utf-16", "surrogatepass").decode("utf-16")

    found = {}
    for line in text.splitlines():
        assert line.isascii()
        end = next(
            i
            for i, c in enumerate(line)
            if c in " =:" and (len(line[:i]) - len(line[:i].rstrip("\\"))) % 2 == 0
        )
        found[plain(line[:end])] = plain(line[end:].removeprefix(" = "))
    return found


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_what_is_written_is_what_java_reads(properties: dict[str, str]) -> None:
    assert read_as_java(as_text(properties)) == properties
