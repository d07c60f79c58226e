"""The Java daemon's properties file, made from a few settings: pure text in, text out.

Names and Java types are those of KCL 3.1.3's ``MultiLangDaemonConfiguration`` and the beans it delegates to. Two traps
of its reader are caught here, since Java says nothing about them: an unknown name is skipped, and a value that equals
the Java type's default (0, false) counts as not given.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from mldserver.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["DaemonSettings", "as_text", "daemon_properties", "parse_pairs", "shutdown_seconds", "start_of"]

SHUTDOWN_GRACE_MS: Final = 30_000

NEVER_ZERO: Final = frozenset({
    "failoverTimeMillis",
    "idleTimeBetweenReadsInMillis",
    "inMemoryWorkerMetricsCaptureFrequencyMillis",
    "initialLeaseTableReadCapacity",
    "initialLeaseTableWriteCapacity",
    "leaseAssignmentIntervalMillis",
    "listShardsBackoffTimeInMillis",
    "maxLeaseRenewalThreads",
    "maxLeasesForWorker",
    "maxLeasesToStealAtOneTime",
    "maxListShardsRetryAttempts",
    "maxRecords",
    "maxThroughputPerHostKBps",
    "metricsBufferTimeMillis",
    "metricsMaxQueueSize",
    "millisBehindLatestThresholdForReducedTps",
    "noOfPersistedMetricsPerWorkerMetrics",
    "parentShardPollIntervalMillis",
    "reBalanceThresholdPercentage",
    "dampeningPercentage",
    "schedulerInitializationBackoffTimeMillis",
    "shardSyncIntervalMillis",
    "taskBackoffTimeMillis",
    "varianceBalancingFrequency",
    "workerMetricsEMAAlpha",
    "workerMetricsReporterFreqInMillis",
})  # fmt: skip
"""Numbers of a primitive Java type: 0 is read as "not given", and the KCL's own default stays."""

NEVER_FALSE: Final = frozenset({"cleanupLeasesUponShardCompletion"})
"""Booleans of the primitive Java type that the KCL sets to true: false is read as "not given"."""

OTHERS: Final = frozenset({
    "AWSCredentialsProvider",
    "AwsCredentialsProvider",
    "AWSCredentialsProviderCloudWatch",
    "AWSCredentialsProviderDynamoDB",
    "allowThroughputOvershoot",
    "applicationName",
    "callProcessRecordsEvenForEmptyRecordList",
    "clientVersionConfig",
    "cloudWatchRegionName",
    "coordinatorStateBillingMode",
    "coordinatorStateTableName",
    "disableWorkerMetrics",
    "dynamoDBEndpoint",
    "dynamoDBRegionName",
    "enablePriorityLeaseAssignment",
    "executableName",
    "gracefulLeaseHandoffTimeoutMillis",
    "ignoreUnexpectedChildShards",
    "initialPositionInStream",
    "initialPositionInStreamExtended",
    "isGracefulLeaseHandoffEnabled",
    "kinesisEndpoint",
    "leaseTableDeletionProtectionEnabled",
    "leaseTablePitrEnabled",
    "logWarningForTaskAfterMillis",
    "maxActiveThreads",
    "maxGetRecordsThreadPool",
    "metricsEnabledDimensions",
    "metricsLevel",
    "processingLanguage",
    "regionName",
    "retrievalMode",
    "retryGetRecordsInSeconds",
    "shutdownGraceMillis",
    "skipShardSyncAtWorkerInitializationIfLeasesExist",
    "staleWorkerMetricsEntryCleanupDuration",
    "streamArn",
    "streamName",
    "tableName",
    "timeoutInSeconds",
    "workerId",
    "workerIdentifier",
    "workerMetricsBillingMode",
    "workerMetricsTableName",
})  # fmt: skip

NESTED: Final = ("cloudWatchClient", "dynamoDbClient", "fanoutConfig", "kinesisClient")
"""Beans whose own properties follow after a dot, e.g. ``kinesisClient.endpointOverride``."""

OWN_OPTIONS: Final[dict[str, str]] = {
    "applicationName": "--app",
    "executableName": "--connect",
    "initialPositionInStream": "--initial-position",
    "initialPositionInStreamExtended": "--initial-position",
    "kinesisEndpoint": "--endpoint-url",
    "dynamoDBEndpoint": "--dynamodb-endpoint",
    "cloudWatchClient.endpointOverride": "--cloudwatch-endpoint",
    "regionName": "--region",
    "streamName": "--stream",
}
"""Properties that ``mldserver kcl`` has an option for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """What one daemon is told."""

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
    endpoint_url: str | None = None
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
    at_time = settings.position.isdigit()
    made = {
        "executableName": settings.executable,
        "streamName": settings.stream,
        "applicationName": settings.app,
        "regionName": settings.region,
        # Under its old name a restarted daemon goes on with its leases, without waiting for them to expire.
        "workerIdentifier": settings.worker,
        "initialPositionInStreamExtended" if at_time else "initialPositionInStream": settings.position,
        "kinesisEndpoint": settings.endpoint_url,
        "dynamoDBEndpoint": settings.dynamodb_endpoint,
        "cloudWatchClient.endpointOverride": settings.cloudwatch_endpoint,
        "AWSCredentialsProvider": "DefaultCredentialsProvider",
        # An empty batch with no lag is the only proof that an idle shard is caught up.
        "callProcessRecordsEvenForEmptyRecordList": "true",
        # The KCL's default of 0 leaves no time for the last checkpoint at SIGTERM.
        "shutdownGraceMillis": str(SHUTDOWN_GRACE_MS),
    }
    return {name: value for name, value in made.items() if value is not None} | dict(settings.extra)


def _check(name: str, value: str) -> None:
    if name in OWN_OPTIONS:
        raise ConfigError(
            f"The property {name} has an option of its own.", advice=f"Use {OWN_OPTIONS[name]}."
        )
    if name == "timeoutInSeconds":
        raise ConfigError(
            "timeoutInSeconds halts the whole daemon whenever the server holds an answer back on purpose.",
            advice="Leave it out: leases are renewed meanwhile.",
        )
    known = NEVER_ZERO | NEVER_FALSE | OTHERS
    if name not in known and name.split(".", maxsplit=1)[0] not in {*NESTED, *known}:
        close = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"The daemon (KCL 3.1.3) has no property {name!r}, and would skip it without a word.",
            advice=f"Did you mean {close[0]!r}?" if close else "See deploy/mld.properties.",
        )
    if (name in NEVER_ZERO and _is_zero(value)) or (name in NEVER_FALSE and value.strip().lower() == "false"):
        raise ConfigError(
            f"The daemon ignores {name} = {value}: what equals Java's default for the type counts as not given.",
            advice="Use 1 for as little as possible." if name in NEVER_ZERO else "It cannot be switched off.",
        )


def _is_zero(value: str) -> bool:
    try:
        return float(value) == 0
    except ValueError:
        return False


def shutdown_seconds(properties: Mapping[str, str]) -> float:
    """Return how long the daemon takes at most to stop in order. Raises ConfigError when that is no number."""
    given = properties["shutdownGraceMillis"]
    if not given.isdecimal():
        raise ConfigError(
            f"shutdownGraceMillis = {given!r} is no number.", advice="Give milliseconds, e.g. 30000."
        )
    return int(given) / 1000


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


def as_text(properties: Mapping[str, str]) -> str:
    """Return the text of a Java properties file: ASCII, with escapes where ``java.util.Properties`` needs them."""
    return "".join(f"{_escaped(name, ' =:')} = {_escaped(value)}\n" for name, value in properties.items())


def _escaped(text: str, special: str = "") -> str:
    written = []
    for index, char in enumerate(text):
        if char == "\\" or char in special or (index == 0 and char in " #!"):
            written.append(f"\\{char}")
        elif " " <= char <= "~":
            written.append(char)
        else:
            units = char.encode("utf-16-be")
            written.extend(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    return "".join(written)
