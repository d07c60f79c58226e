"""The Java daemon's properties file, made from a few settings: which properties, and what they may be.

Names and Java types are those of KCL 3.1.3's ``MultiLangDaemonConfiguration`` and the beans it delegates to. Two traps
of its reader are caught here, since Java says nothing about them: an unknown name is skipped, and a value that equals
the Java type's default (0, false) counts as not given.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from mldserver.errors import ConfigError

SHUTDOWN_GRACE_MS: Final = 30_000
LARGEST_INT: Final = 2**31 - 1

RETRIEVAL: Final = {"polling": "POLLING", "fan-out": "FANOUT"}
"""What ``--retrieval`` takes, as the daemon names it. By itself it would register a consumer, which AWS bills."""


@dataclass(frozen=True, slots=True)
class PropertyKind:
    """What a property's value may be."""

    wants: str
    pattern: str
    largest: int = LARGEST_INT
    zero_counts: bool = True
    """False for a primitive Java type: there 0 (or false) is read as "not given", and the KCL's own default stays."""


_TEXT: Final = PropertyKind("some text", r"[^\0]+")
_NUMBER: Final = PropertyKind("a whole number", "[0-9]+")
_COUNT: Final = PropertyKind("a whole number from 1 on", "[0-9]+", zero_counts=False)
_RATIO: Final = PropertyKind("a number above 0", r"[0-9]+(\.[0-9]+)?", zero_counts=False)
_FLAG: Final = PropertyKind("true or false", "(?i:true|false)")
_BILLING: Final = PropertyKind("PAY_PER_REQUEST or PROVISIONED", "PAY_PER_REQUEST|PROVISIONED")

_OF_KIND: Final = {
    _COUNT: """
        coordinatorStateReadCapacity coordinatorStateWriteCapacity dampeningPercentage
        failoverTimeMillis idleTimeBetweenReadsInMillis inMemoryWorkerMetricsCaptureFrequencyMillis
        initialLeaseTableReadCapacity initialLeaseTableWriteCapacity leaseAssignmentIntervalMillis
        listShardsBackoffTimeInMillis maxLeaseRenewalThreads maxLeasesForWorker
        maxLeasesToStealAtOneTime maxListShardsRetryAttempts metricsBufferTimeMillis
        metricsMaxQueueSize millisBehindLatestThresholdForReducedTps
        noOfPersistedMetricsPerWorkerMetrics parentShardPollIntervalMillis
        reBalanceThresholdPercentage schedulerInitializationBackoffTimeMillis
        shardSyncIntervalMillis taskBackoffTimeMillis varianceBalancingFrequency
        workerMetricsReadCapacity workerMetricsReporterFreqInMillis workerMetricsWriteCapacity
    """,
    _NUMBER: """
        gracefulLeaseHandoffTimeoutMillis logWarningForTaskAfterMillis maxActiveThreads
        maxGetRecordsThreadPool retryGetRecordsInSeconds shutdownGraceMillis
    """,
    _FLAG: """
        allowThroughputOvershoot callProcessRecordsEvenForEmptyRecordList
        coordinatorStateDeletionProtectionEnabled coordinatorStatePointInTimeRecoveryEnabled
        disableWorkerMetrics enablePriorityLeaseAssignment ignoreUnexpectedChildShards
        isGracefulLeaseHandoffEnabled leaseTableDeletionProtectionEnabled leaseTablePitrEnabled
        skipShardSyncAtWorkerInitializationIfLeasesExist workerMetricsDeletionProtectionEnabled
        workerMetricsPointInTimeRecoveryEnabled
    """,
    _TEXT: """
        AWSCredentialsProvider AwsCredentialsProvider AWSCredentialsProviderCloudWatch
        AWSCredentialsProviderDynamoDB cloudWatchRegionName coordinatorStateTableName
        coordinatorStateTags dynamoDBRegionName metricsEnabledDimensions processingLanguage
        streamArn tableName workerIdentifier workerMetricsTableName workerMetricsTags
    """,
}

PROPERTIES: Final[dict[str, PropertyKind]] = {
    **{name: kind for kind, names in _OF_KIND.items() for name in names.split()},
    "cleanupLeasesUponShardCompletion": PropertyKind("true", "(?i:true|false)", zero_counts=False),
    "clientVersionConfig": PropertyKind(
        "CLIENT_VERSION_CONFIG_3X or CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X",
        "CLIENT_VERSION_CONFIG_(3X|COMPATIBLE_WITH_2X)",
    ),
    "coordinatorStateBillingMode": _BILLING,
    "maxRecords": PropertyKind(
        "a whole number from 1 to 10000 (AWS's limit)", "[0-9]+", largest=10_000, zero_counts=False
    ),
    "maxThroughputPerHostKBps": _RATIO,
    "metricsLevel": PropertyKind("DETAILED, SUMMARY or NONE", "(?i:DETAILED|SUMMARY|NONE)"),
    "staleWorkerMetricsEntryCleanupDuration": PropertyKind("an ISO 8601 duration such as PT1H", "PT?[0-9].*"),
    "workerMetricsBillingMode": _BILLING,
    "workerMetricsEMAAlpha": _RATIO,
}
"""What the daemon knows and ``mldserver kcl`` has no option for."""

OF_POLLING: Final = frozenset({
    *("idleTimeBetweenReadsInMillis", "maxGetRecordsThreadPool", "maxRecords"),
    *("millisBehindLatestThresholdForReducedTps", "retryGetRecordsInSeconds"),
})  # fmt: skip

NESTED: Final = ("cloudWatchClient", "dynamoDbClient", "fanoutConfig", "kinesisClient")
"""Beans with properties that follow after a dot, e.g. ``kinesisClient.endpointOverride``."""

OWN_OPTIONS: Final[dict[str, str]] = {
    "applicationName": "--app",
    "executableName": "--connect",
    "initialPositionInStream": "--initial-position",
    "initialPositionInStreamExtended": "--initial-position",
    "kinesisEndpoint": "--kinesis-endpoint",
    "retrievalMode": "--retrieval",
    "dynamoDBEndpoint": "--dynamodb-endpoint",
    "cloudWatchClient.endpointOverride": "--cloudwatch-endpoint",
    "regionName": "--region",
    "streamName": "--stream",
}
"""Properties that ``mldserver kcl`` has an option for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """One daemon's settings."""

    stream: str
    app: str
    """The KCL application's name: also the name of its lease table in DynamoDB."""
    region: str
    executable: str
    """The bridge's command line; the daemon splits it on spaces, without a shell."""
    worker: str
    """The worker's name in the lease table: unique among daemons that run, and kept when this one is restarted."""
    position: str = "TRIM_HORIZON"
    """Where a shard without a checkpoint starts, see ``start_of``."""
    retrieval: str = "polling"
    """A name of ``RETRIEVAL``."""
    endpoint_url: str | None = None
    """Of all three services, but those that are named themselves."""
    kinesis_endpoint: str | None = None
    dynamodb_endpoint: str | None = None
    cloudwatch_endpoint: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further properties; they come before the defaults made here."""


def daemon_properties(settings: DaemonSettings) -> dict[str, str]:
    """Return the daemon's properties, in the order in which they are written.

    Raises ConfigError for a property that the daemon does not know, would silently ignore, or must not be given.
    """
    for name, value in settings.extra.items():
        _check(name, value)
        if (name in OF_POLLING) if settings.retrieval == "fan-out" else name.startswith("fanoutConfig."):
            raise ConfigError(
                f"The daemon would ignore {name}: it retrieves by {settings.retrieval}.",
                advice="Leave the property out, or choose the other --retrieval.",
            )
    at_time = settings.position.isdigit()
    properties = {
        "executableName": settings.executable,
        "streamName": settings.stream,
        "applicationName": settings.app,
        "regionName": settings.region,
        # Under its old name a restarted daemon goes on with its leases, without waiting for them to expire.
        "workerIdentifier": settings.worker,
        "initialPositionInStreamExtended" if at_time else "initialPositionInStream": settings.position,
        "retrievalMode": RETRIEVAL[settings.retrieval],
        "kinesisEndpoint": _endpoint(settings.kinesis_endpoint or settings.endpoint_url),
        "dynamoDBEndpoint": _endpoint(settings.dynamodb_endpoint or settings.endpoint_url),
        "cloudWatchClient.endpointOverride": _endpoint(settings.cloudwatch_endpoint or settings.endpoint_url),
        "AWSCredentialsProvider": "DefaultCredentialsProvider",
        # An empty batch with no lag is the only proof that an idle shard is caught up.
        "callProcessRecordsEvenForEmptyRecordList": "true",
        # The KCL's default of 0 leaves no time for the last checkpoint at SIGTERM.
        "shutdownGraceMillis": str(SHUTDOWN_GRACE_MS),
    }
    return {name: value for name, value in properties.items() if value is not None} | dict(settings.extra)


def _endpoint(url: str | None) -> str | None:
    """Return an endpoint as it was given. Raises ConfigError unless it is a service's address."""
    if url is not None and not re.fullmatch(r"https?://[^\s/?#]+/?", url):
        raise ConfigError(
            f"{url!r} is no endpoint.", advice="Write http:// or https://, a host, and perhaps a port."
        )
    return url


def _check(name: str, value: str) -> None:
    if name in OWN_OPTIONS:
        raise ConfigError(f"The property {name} has a separate option.", advice=f"Use {OWN_OPTIONS[name]}.")
    if name == "workerId":
        raise ConfigError("workerId is another name of workerIdentifier.", advice="Use workerIdentifier.")
    if name == "timeoutInSeconds":
        raise ConfigError(
            "timeoutInSeconds halts the whole daemon whenever the server holds an answer back on purpose.",
            advice="Leave it out: leases are renewed meanwhile.",
        )
    kind = PROPERTIES.get(name)
    if kind is None and name.split(".", maxsplit=1)[0] not in {*NESTED, *PROPERTIES}:
        close = difflib.get_close_matches(name, PROPERTIES, n=1)
        raise ConfigError(
            f"The daemon (KCL 3.1.3) has no property {name!r}, and would skip it without a word.",
            advice=f"Did you mean {close[0]!r}?" if close else "See deploy/mld.properties.",
        )
    kind = kind or _TEXT
    if not kind.zero_counts and re.fullmatch(r"[0.]*0[0.]*|false", value.lower()):
        raise ConfigError(
            f"The daemon ignores {name} = {value}: what equals Java's default for the type counts as not given.",
            advice=f"Give {kind.wants}.",
        )
    if not re.fullmatch(kind.pattern, value) or (value.isdecimal() and int(value) > kind.largest):
        raise ConfigError(f"{name} = {value!r} is not {kind.wants}.", advice="Mend the option --property.")


def shutdown_seconds(properties: Mapping[str, str]) -> float:
    """Return how long the daemon takes at most to stop in order."""
    return int(properties["shutdownGraceMillis"]) / 1000


def start_of(text: str) -> str:
    """Return ``TRIM_HORIZON``, ``LATEST``, or a time as whole epoch seconds (all that the daemon takes).

    Times are ISO 8601; without an offset they are UTC. Raises ConfigError for anything else.
    """
    if text.upper() in {"TRIM_HORIZON", "LATEST"}:
        return text.upper()
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is no initial position.",
            advice="Write TRIM_HORIZON, LATEST, or a time such as 2026-11-21T10:00:00Z.",
        ) from error
    seconds = int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
    if seconds <= 0:
        raise ConfigError(
            f"{text!r} is not after 1970.", advice="Write TRIM_HORIZON to start at the oldest record."
        )
    return str(seconds)


def parse_pairs(texts: Iterable[str]) -> dict[str, str]:
    """Return ``key=value`` texts as a dictionary. Raises ConfigError for a text that is none."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--property {text!r} is not KEY=VALUE.", advice="For example maxRecords=5000.")
        pairs[name.strip()] = value.strip()
    return pairs
