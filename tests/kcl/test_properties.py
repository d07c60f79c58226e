from __future__ import annotations

from dataclasses import replace

import pytest

from mldserver.errors import ConfigError
from mldserver.kcl.properties import (
    DaemonSettings,
    daemon_properties,
    parse_pairs,
    shutdown_seconds,
    start_of,
)

pytestmark = pytest.mark.quick

BASE = DaemonSettings(
    stream="s", app="a", region="eu-central-1", executable="bridge 127.0.0.1:7070", worker="w"
)


def with_extra(**extra: str) -> dict[str, str]:
    return daemon_properties(replace(BASE, extra=extra))


def test_what_every_daemon_needs_is_there() -> None:
    assert daemon_properties(BASE) == {
        "executableName": "bridge 127.0.0.1:7070",
        "streamName": "s",
        "applicationName": "a",
        "regionName": "eu-central-1",
        "workerIdentifier": "w",
        "initialPositionInStream": "TRIM_HORIZON",
        "retrievalMode": "POLLING",
        "AWSCredentialsProvider": "DefaultCredentialsProvider",
        "callProcessRecordsEvenForEmptyRecordList": "true",
        "shutdownGraceMillis": "30000",
    }


def made(**changed: str) -> dict[str, str]:
    return daemon_properties(replace(BASE, **changed))  # type: ignore[arg-type]  # every field that is changed is text


def endpoints(properties: dict[str, str]) -> list[str | None]:
    names = ("kinesisEndpoint", "dynamoDBEndpoint", "cloudWatchClient.endpointOverride")
    return [properties.get(name) for name in names]


def test_one_endpoint_is_for_all_three_services_unless_a_service_has_its_own() -> None:
    assert endpoints(made()) == [None] * 3
    assert endpoints(made(endpoint_url="http://all:1")) == ["http://all:1"] * 3
    assert endpoints(made(endpoint_url="http://all:1", dynamodb_endpoint="http://dynamodb/")) == [
        "http://all:1",
        "http://dynamodb/",
        "http://all:1",
    ]
    named = {"kinesis_endpoint": "https://k", "cloudwatch_endpoint": "http://c"}
    assert endpoints(made(**named)) == ["https://k", None, "http://c"]


@pytest.mark.parametrize("url", ["", "localhost:4566", "ftp://x", "http://", "http://a b"])
def test_what_is_no_address_of_a_service_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no endpoint"):
        made(kinesis_endpoint=url or " ")


def test_a_time_is_the_other_property_of_the_initial_position() -> None:
    properties = made(position="1700000000")
    assert properties["initialPositionInStreamExtended"] == "1700000000"
    assert "initialPositionInStream" not in properties


def test_records_are_polled_unless_fan_out_is_chosen() -> None:
    assert made()["retrievalMode"] == "POLLING"
    assert made(retrieval="fan-out")["retrievalMode"] == "FANOUT"


@pytest.mark.parametrize(
    ("retrieval", "name"),
    [("fan-out", "maxRecords"), ("polling", "fanoutConfig.registerStreamConsumerRetries")],
)
def test_a_property_of_the_other_retrieval_is_refused(retrieval: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"would ignore {name}: it retrieves by {retrieval}"):
        daemon_properties(replace(BASE, retrieval=retrieval, extra={name: "5"}))


def test_a_further_property_comes_before_a_default() -> None:
    given = {"shutdownGraceMillis": "5000", "maxRecords": "500", "isGracefulLeaseHandoffEnabled": "false"}
    assert given.items() <= with_extra(**given).items()


def test_nested_properties_are_passed_on() -> None:
    properties = daemon_properties(
        replace(BASE, retrieval="fan-out", extra={"fanoutConfig.consumerName": "mine"})
    )
    assert properties["fanoutConfig.consumerName"] == "mine"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("failoverTimeMillis", "0", "ignores failoverTimeMillis = 0"),
        ("workerMetricsEMAAlpha", "0.0", "ignores"),
        ("cleanupLeasesUponShardCompletion", "False", "ignores cleanupLeasesUponShardCompletion = False"),
        ("failoverTimeMilis", "1", "Did you mean 'failoverTimeMillis'"),
        ("zzz", "1", "deploy/mld.properties"),
        ("streamName", "other", "Use --stream"),
        ("kinesisEndpoint", "http://x", "Use --kinesis-endpoint"),
        ("retrievalMode", "FANOUT", "Use --retrieval"),
        ("timeoutInSeconds", "10", "Leave it out"),
        ("maxRecords", "many", "'many' is not a whole number from 1 to 10000"),
        ("maxRecords", "10001", "from 1 to 10000"),
        ("failoverTimeMillis", "-1", "not a whole number from 1 on"),
        ("failoverTimeMillis", "10s", "not a whole number from 1 on"),
        ("failoverTimeMillis", str(2**31), "not a whole number from 1 on"),
        ("shutdownGraceMillis", "long", "not a whole number"),
        ("workerMetricsEMAAlpha", "half", "not a number above 0"),
        ("isGracefulLeaseHandoffEnabled", "yes", "not true or false"),
        ("metricsLevel", "LOUD", "not DETAILED, SUMMARY or NONE"),
        ("coordinatorStateBillingMode", "FREE", "not PAY_PER_REQUEST or PROVISIONED"),
        ("staleWorkerMetricsEntryCleanupDuration", "1 hour", "ISO 8601"),
        ("workerIdentifier", "", "not some text"),
        ("kinesisClient.endpointOverride", "", "not some text"),
    ],
)
def test_a_property_that_would_not_do_what_it_says_is_refused(name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_extra(**{name: value})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cleanupLeasesUponShardCompletion", "TRUE"),
        ("clientVersionConfig", "CLIENT_VERSION_CONFIG_3X"),
        ("failoverTimeMillis", "010"),
        ("gracefulLeaseHandoffTimeoutMillis", "0"),
        ("maxThroughputPerHostKBps", "0.5"),
        ("metricsLevel", "none"),
        ("staleWorkerMetricsEntryCleanupDuration", "PT15M"),
    ],
)
def test_a_value_that_the_daemon_can_read_is_passed_on_as_it_is(name: str, value: str) -> None:
    assert with_extra(**{name: value})[name] == value


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
