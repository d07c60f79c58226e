"""What of the daemon's log is shown; the lines are those of KCL 3.1.3."""

from __future__ import annotations

import pytest

from mldserver.kcl.log_filter import LONGEST_LINE, FilteredEvent, LogEvent, LogFilter

pytestmark = pytest.mark.quick

KCL = "software.amazon.kinesis."
SHARD = "shardId-000000000000"
WORKS = "Initialization complete. Starting worker loop."
NOT_ASSIGNED = "Not able to assign all expiredOrUnAssignedLeases"
TRACE = "java.io.IOException: x\n\tat a.B.c(B.java:1)\n\t... 3 more"


def error(logger: str, text: str, level: str = "error") -> LogEvent:
    return LogEvent(level, KCL + logger, text)


def shown(lines: list[FilteredEvent]) -> list[FilteredEvent]:
    return [line for line in lines if line.level != "debug"]


def told(event: LogEvent) -> dict[str, str]:
    (line,) = shown(LogFilter().filter(event, 0))
    assert (line.level, line.event) == (event.level, "kcl.fault")
    return line.fields


def test_what_java_wrote_is_there_once_whatever_is_shown() -> None:
    log_filter, event = LogFilter(), error("Any", TRACE)
    fields = {"logger": KCL + "Any", "text": TRACE}
    assert log_filter.filter(event, 0) == [FilteredEvent("error", "kcl.log", fields)]
    assert log_filter.filter(event, 0) == [FilteredEvent("debug", "kcl.log", fields)]


def test_the_kcls_own_bookkeeping_is_not_shown() -> None:
    assert (
        shown(LogFilter().filter(LogEvent("info", KCL + "x.LeaseAssignmentManager", "Total Leases"), 0)) == []
    )
    assert (
        shown(LogFilter().filter(LogEvent("debug", KCL + "lifecycle.ShutdownTask", "Something else"), 0))
        == []
    )
    assert (
        shown(LogFilter().filter(error("Scheduler.LeaseAssignmentManager", NOT_ASSIGNED, "warning"), 0)) == []
    )


PROCESSOR = "multilang.MultiLangShardRecordProcessor"
FAILED = "Encountered an error while trying to process records\n"
SAYS_NOTHING = f"{FAILED}java.lang.RuntimeException: Child process failed to process records"
ENDED = f"Failed to get status message for processRecords action for shard {SHARD}"


def test_what_a_shards_processor_says_is_a_fault_unless_it_only_repeats_one() -> None:
    says_nothing = error(PROCESSOR, SAYS_NOTHING)
    said = "The daemon failed to process records: java.lang.RuntimeException: Child process failed to process records."
    assert told(says_nothing)["what"] == said
    log_filter = LogFilter()
    log_filter.filter(error("multilang.MultiLangProtocol", ENDED), 0)
    assert shown(log_filter.filter(says_nothing, 600)) == []
    # Another shard's, of which nothing was told.
    assert len(shown(log_filter.filter(says_nothing, 600))) == 1


def test_a_shards_own_fault_is_not_taken_for_the_echo_of_another_fault() -> None:
    log_filter = LogFilter()
    log_filter.filter(error("Any", "java.lang.OutOfMemoryError"), 0)
    log_filter.filter(error("multilang.MultiLangProtocol", ENDED), 0)
    (line,) = shown(log_filter.filter(error(PROCESSOR, f"{FAILED}{TRACE}"), 0))
    assert line.fields["what"] == "The daemon failed to process records: java.io.IOException: x."


def test_a_fault_of_a_daemon_that_is_gone_hides_nothing_of_the_next() -> None:
    log_filter = LogFilter()
    log_filter.filter(error("multilang.MultiLangProtocol", ENDED), 0)
    log_filter.filter(LogEvent("info", KCL + "coordinator.Scheduler", WORKS), 0)
    assert len(shown(log_filter.filter(error(PROCESSOR, SAYS_NOTHING), 0))) == 1


def test_what_the_bridge_says_comes_once() -> None:
    said = "mldserver bridge: [::1]:7070: Connection refused"
    log_filter = LogFilter()
    drained = error(
        "multilang.DrainChildSTDERRTask", f"Received error line from subprocess [{said}] for shard {SHARD}"
    )
    lines = log_filter.filter(drained, 0) + log_filter.filter(LogEvent("warning", "jvm", said), 0)
    (line,) = shown(lines)
    assert "[::1]:7070: Connection refused" in line.fields["what"]
    assert line.fields["shard"] == SHARD


def test_leases_and_shards_are_events() -> None:
    gained = (
        f"Created new shardConsumer for : ShardInfo(streamIdentifierSerOpt=Optional.empty, shardId={SHARD}, "
        "concurrencyToken=2b19cb06, parentShardIds=[], checkpoint={SequenceNumber: TRIM_HORIZON,SubsequenceNumber: 0})"
    )
    left = (
        f"Invoking shutdown() for shard {SHARD} with childShards null, concurrencyToken x. Shutdown reason: "
    )
    log_filter = LogFilter()
    assert shown(log_filter.filter(LogEvent("info", KCL + "coordinator.Scheduler", gained), 0)) == [
        FilteredEvent("info", "kcl.lease_gained", {"shard": SHARD, "position": "TRIM_HORIZON"})
    ]
    task = KCL + "lifecycle.ShutdownTask"
    assert shown(log_filter.filter(LogEvent("debug", task, f"{left}LEASE_LOST"), 0)) == [
        FilteredEvent("info", "kcl.lease_lost", {"shard": SHARD})
    ]
    assert shown(log_filter.filter(LogEvent("debug", task, f"{left}SHARD_END"), 0)) == [
        FilteredEvent("info", "kcl.shard_ended", {"shard": SHARD})
    ]
    assert shown(log_filter.filter(LogEvent("debug", task, f"{left}REQUESTED"), 0)) == []
    (line,) = shown(log_filter.filter(LogEvent("info", KCL + "coordinator.Scheduler", WORKS), 0))
    assert line.fields["text"] == WORKS


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            (
                f"Failed to get status message for processRecords action for shard {SHARD}\n"
                "java.util.concurrent.ExecutionException: java.lang.RuntimeException: Reached end of STDIN of child"
            ),
            (
                f"The connection of shard {SHARD} to the server ended while the daemon waited for its answer to "
                "processRecords."
            ),
        ),
        (
            'Failed\njava.io.IOException: Cannot run program "/b/ridge": error=13, Permission denied',
            "The daemon cannot start the bridge /b/ridge: error=13, Permission denied.",
        ),
        ("Failed\njava.lang.OutOfMemoryError: Java heap space", "The daemon's JVM is out of memory."),
        (
            "Failed\nSdkClientException: Unable to load credentials from any of the providers in the chain",
            "The daemon finds no AWS credentials any more.",
        ),
        (
            "The security token included in the request is expired (Service: DynamoDb)",
            "AWS refuses the daemon's credentials: they are expired or wrong.",
        ),
        (
            "Failed\nUser: arn:x is not authorized to perform: kinesis:ListShards on resource: arn",
            "AWS does not allow the daemon kinesis:ListShards.",
        ),
        (
            "ResourceNotFoundException: Stream orders under account 1 not found.",
            "There is no stream orders in this account and region.",
        ),
        ("ProvisionedThroughputExceededException: Rate exceeded", "AWS throttles the daemon."),
        (
            (
                f"{SHARD}: [SubscriptionLifetime] - (FanOutRecordsPublisher#errorOccurred) @ 2026-11-22T05:17:13Z id: "
                f"{SHARD}-1 -- CompletionException/KinesisException: Service returned HTTP status code 500. Last "
                "successful request details -- request id - NONE\nstack"
            ),
            (
                f"The fan-out subscription of shard {SHARD} failed: CompletionException/KinesisException: Service "
                "returned HTTP status code 500."
            ),
        ),
        (
            "Failed\njava.net.UnknownHostException: kinesis.nowhere.amazonaws.com",
            "AWS, or the endpoint that stands in for it, is out of reach: kinesis.nowhere.amazonaws.com.",
        ),
        (
            "Unable to execute HTTP request: Connection refused: /127.0.0.1:1",
            "AWS, or the endpoint that stands in for it, is out of reach: Connection refused: /127.0.0.1:1.",
        ),
    ],
)
def test_a_known_fault_is_a_sentence_with_advice(text: str, what: str) -> None:
    fields = told(error("Any", text))
    assert fields["what"] == what
    assert fields["advice"]
    assert fields["text"] == text.splitlines()[0]


def test_a_template_is_shown_once_a_minute_with_the_number_of_those_between() -> None:
    log_filter = LogFilter()

    def take(number: int, now: float) -> list[FilteredEvent]:
        return shown(log_filter.filter(error("Any", f"attempt {number} on shardId-{number:012}"), now))

    assert [line.fields["text"] for line in take(1, 0)] == ["attempt 1 on shardId-000000000001"]
    assert [take(number, 59) for number in (2, 3)] == [[], []]
    (again,) = take(4, 60)
    assert again.fields == {"logger": KCL + "Any", "text": "attempt 4 on shardId-000000000004", "repeated": 2}
    (again,) = take(5, 180)
    assert "repeated" not in again.fields


def test_other_templates_do_not_wait() -> None:
    log_filter = LogFilter()
    assert len(shown(log_filter.filter(error("A", "one"), 0) + log_filter.filter(error("B", "one"), 0))) == 2
    assert len(shown(log_filter.filter(error("A", "two"), 0))) == 1


def test_an_empty_warning_is_one() -> None:
    assert shown(LogFilter().filter(error("A", ""), 0))[0].fields["text"] == ""


def test_long_lines_are_cut() -> None:
    (line,) = shown(LogFilter().filter(error("A", "a" * 9000), 0))
    assert line.fields["text"] == "a" * LONGEST_LINE + " … cut"


def ended(shard: str) -> LogEvent:
    text = f"Invoking shutdown() for shard {shard} with childShards: [], concurrencyToken: x. Shutdown reason: SHARD_END"
    return LogEvent("debug", KCL + "lifecycle.ShutdownTask", text)


def test_the_number_of_shards_that_are_remembered_is_bounded_and_the_latest_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mldserver.kcl.log_filter.MOST_LET_GO", 2)
    log_filter = LogFilter()
    told = [
        line.fields["shard"]
        for shard in ("a", "b", "a", "c", "a", "c", "b")
        for line in shown(log_filter.filter(ended(shard), 0))
    ]
    assert told == ["a", "b", "c", "b"]


def test_a_shard_that_is_let_go_of_again_and_again_is_told_once_until_it_is_gained_again() -> None:
    log_filter = LogFilter()
    ends = ended(SHARD)
    gained = LogEvent(
        "info",
        KCL + "coordinator.Scheduler",
        f"Created new shardConsumer for : ShardInfo(streamIdentifierSerOpt=Optional.empty, shardId={SHARD}, concurrencyToken=x, "
        "parentShardIds=[], checkpoint={SequenceNumber: TRIM_HORIZON,SubsequenceNumber: 0})",
    )
    shown_events = [
        line.event
        for event in (ends, ends, ends, gained, ends, ends)
        for line in shown(log_filter.filter(event, 0))
    ]
    assert shown_events == ["kcl.shard_ended", "kcl.lease_gained", "kcl.shard_ended"]
