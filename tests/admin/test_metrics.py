"""Metrics as Prometheus reads them: names, formats, bounds; and what stands beside them in ``deploy/``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.pages import ROOT, examples
from support.statuses import function, server

from mldserver.admin.metrics import METRICS, MOST_SHARDS, OPENMETRICS, TEXT, content_type, exposed
from mldserver.status_document import (
    SECONDS,
    Budget,
    DeadLetters,
    Histogram,
    KeyedStateSection,
    Peer,
    ShardRow,
    Spark,
    Status,
    TimersSection,
    WatermarkSection,
    Windows,
    WorkerRow,
)

DEPLOY: Final = ROOT / "deploy"


def status(*shards: ShardRow) -> Status:
    """A document in which nothing is left out."""
    return Status(
        taken_ms=1_800_000_060_000,
        pipeline="departures",
        handler="handlers.departures",
        version="1.0",
        host="box",
        pid=7,
        server_id="box:7",
        started_ms=1_800_000_000_000,
        ready=True,
        batch_seconds=Histogram(counts=(3, 2, *[0] * (len(SECONDS) - 2), 1), sum_seconds=70.5),
        failures={"ValueError": 2},
        connections={"idle": 3},
        shards=shards
        or (
            ShardRow(
                id="a", state="connected", lag_ms=1500, durable_age_seconds=2.5, checkpoint_age_seconds=1.0
            ),
        ),
        watermark=WatermarkSection(at_ms=1_800_000_000_000, held_by="a", reason="behind"),
        windows=Windows(open=2, waiting=1, halted=("w",), seconds=Histogram(sum_seconds=0.0)),
        workers=(WorkerRow(number=0, pid=8, resident_bytes=1 << 20, restarts=2),),
        spark=Spark(ready=True, start_seconds=12.5, jobs=1, jvm_resident_bytes=1 << 30),
        dead_letters=DeadLetters(waiting=4),
        servers=(Peer(id="box:7", this=True),),
        state=KeyedStateSection(
            keys=5, files=2, file_bytes=700, snapshots=1, snapshot_seconds=0.25, compactions=3
        ),
        timers=TimersSection(
            set=9, fired=4, lateness=Histogram(sum_seconds=1.5), pending=5, held=1, held_seconds=61.5
        ),
        budgets={"buffer": Budget(used_bytes=1, limit_bytes=2)},
    )


def series(
    document: Status, function: str = "departures"
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Read the text format back: each series' value by name and labels, of the server and of one function.

    The label of the function is left out.
    """
    found = {}
    for family in parse_text(exposed(document, TEXT).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("function", function) == function:
                found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def test_every_metric_is_exposed_and_none_else() -> None:
    families = parse_text(exposed(status(), TEXT).decode())
    shown = {family.name + "_total" * (family.type == "counter"): family for family in families}
    assert shown.keys() == METRICS.keys()
    assert {name: family.documentation for name, family in shown.items()} == {
        name: metric.help for name, metric in METRICS.items()
    }


def test_both_formats_say_the_same() -> None:
    plain = {
        (sample.name, *sample.labels.items()): sample.value
        for family in parse_text(exposed(status(), TEXT).decode())
        for sample in family.samples
    }
    opened = {
        (sample.name, *sample.labels.items()): sample.value
        for family in parse_openmetrics(exposed(status(), OPENMETRICS).decode())
        for sample in family.samples
    }
    assert plain == opened


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", TEXT),
        ("text/html, */*;q=0.1", TEXT),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", OPENMETRICS),
    ],
)
def test_a_client_gets_openmetrics_when_it_asks_for_that(accept: str, kind: str) -> None:
    assert content_type(accept) == kind


def test_times_are_in_seconds_and_histograms_add_up() -> None:
    seen = series(status())
    assert seen["mldserver_shard_lag_seconds", (("shard", "a"),)] == 1.5
    assert seen["mldserver_watermark_lag_seconds", ()] == 60
    assert seen["mldserver_watermark_timestamp_seconds", ()] == seen["mldserver_start_time_seconds", ()]
    buckets = [value for (name, _), value in seen.items() if name == "mldserver_batch_seconds_bucket"]
    assert buckets == [3, *[5] * (len(SECONDS) - 1), 6]
    assert seen["mldserver_batch_seconds_count", ()] == 6
    bounds = {dict(labels)["le"] for (name, labels) in seen if name == "mldserver_window_seconds_bucket"}
    assert {"60.0", "600.0", "3600.0"} < bounds, "windows may take an hour"
    assert seen["mldserver_spark_jvm_resident_memory_bytes", ()] == 1 << 30
    assert seen["mldserver_batch_seconds_sum", ()] == 70.5


def test_what_is_not_known_is_no_series() -> None:
    bare = Status(
        taken_ms=0,
        pipeline="",
        handler="",
        version="",
        host="",
        pid=1,
        server_id="",
        started_ms=0,
        ready=False,
    )
    names = {name for name, _ in series(bare, "")}
    assert not {name for name in names if name.startswith(("mldserver_spark_r", "mldserver_watermark_lag"))}
    assert series(bare, "")["mldserver_ready", ()] == 0


def test_each_series_of_a_function_names_it_and_those_of_the_server_are_there_once() -> None:
    gone = function("arrivals", lifecycle="undeployed", ready=False)
    document = server(
        msgspec.structs.replace(function("departures"), paused=True), gone, spark=Spark(ready=True)
    )
    seen = [sample for family in parse_text(exposed(document, TEXT).decode()) for sample in family.samples]
    of_server = [sample.name for sample in seen if "function" not in sample.labels]
    assert len(of_server) == len(set(of_server))
    assert {"mldserver_resident_memory_bytes", "mldserver_spark_ready", "mldserver_spark_lost_total"} < {
        *of_server
    }
    assert all(METRICS[name].of_server for name in of_server)
    paused = {sample.labels["function"]: sample.value for sample in seen if sample.name == "mldserver_paused"}
    assert paused == {"departures": 1, "arrivals": 0}
    (ready,) = (sample for sample in seen if sample.name == "mldserver_ready")
    assert (ready.labels, ready.value) == ({"function": "departures"}, 1), "nobody wants the other"
    states = [sample.labels for sample in seen if sample.name == "mldserver_function_state"]
    assert [tuple(sorted(labels.values())) for labels in states] == [
        ("departures", "deployed"),
        ("arrivals", "undeployed"),
    ]
    promtool("check", "metrics", text=exposed(document, TEXT).decode())


def test_shards_beyond_the_limit_are_one_series_that_shows_the_worst() -> None:
    shards = [
        ShardRow(id=f"shard-{number:04}", state="connected", lag_ms=number * 1000)
        for number in range(MOST_SHARDS + 50)
    ]
    seen = series(status(*shards, ShardRow(id="other", state="connected", lag_ms=7)))
    lags = {dict(labels)["shard"]: value for (name, labels), value in seen.items() if "shard_lag" in name}
    assert len(lags) == MOST_SHARDS + 1
    assert lags["other"] == MOST_SHARDS + 49
    assert seen["mldserver_shards", (("state", "connected"),)] == MOST_SHARDS + 51


@pytest.mark.parametrize("shard_id", ['"}\n# HELP x', "\\", "\u2028ä", "a,b=c"])
def test_a_shard_may_be_called_anything(shard_id: str) -> None:
    seen = series(status(ShardRow(id=shard_id, state="connected", lag_ms=0)))
    assert seen["mldserver_shard_lag_seconds", (("shard", shard_id),)] == 0


def test_promtool_finds_nothing_wrong_with_the_metrics() -> None:
    assert promtool("check", "metrics", text=exposed(status(), TEXT).decode()) == ""


@pytest.mark.parametrize(("ci", "ends"), [("true", AssertionError), ("", pytest.skip.Exception)])
def test_without_promtool_its_tests_are_skipped_but_fail_in_ci(
    ci: str, ends: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ends, match="needs promtool"):
        promtool("--version")


# What stands beside them.

_NAME = re.compile(r"\bmldserver_\w+")
_PART = re.compile(r"_(bucket|count|sum)$")


def named(text: str) -> set[str]:
    """The metrics that a text names, histograms without their suffixes."""
    found = set(_NAME.findall(text))
    return {name if name in METRICS else _PART.sub("", name) for name in found}


def alerts() -> set[str]:
    return set(re.findall(r"- alert: (\w+)", (DEPLOY / "prometheus-alerts.yml").read_text("utf-8")))


def expressions() -> list[str]:
    """What the dashboard asks Prometheus for."""
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text("utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


@pytest.mark.parametrize(
    "file", ["prometheus-alerts.yml", "prometheus-alerts-test.yml", "grafana-dashboard.json"]
)
def test_what_is_deployed_names_metrics_that_there_are(file: str) -> None:
    found = named((DEPLOY / file).read_text("utf-8"))
    assert len(found) > 5
    assert found - METRICS.keys() == set()


def test_each_alert_is_tested_as_it_fires_and_as_it_does_not() -> None:
    text = (DEPLOY / "prometheus-alerts-test.yml").read_text("utf-8")
    assert len(alerts()) == 14
    assert set(re.findall(r"alertname: (\w+), exp_alerts: \[\]", text)) == alerts()
    assert set(re.findall(r"alertname: (\w+)\n +exp_alerts:\n +- exp_labels", text)) == alerts()


def promtool(*arguments: str, cwd: Path = DEPLOY, text: str = "") -> str:
    """What it says of what is right. Without it skip the test, which CI may not."""
    if shutil.which("promtool") is None:
        said = "needs promtool, of Debian's package `prometheus`"
        assert os.environ.get("CI") != "true", said
        pytest.skip(said)
    told = subprocess.run(
        ["promtool", *arguments], cwd=cwd, input=text, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout + told.stderr


def test_prometheus_takes_the_configuration_on_the_page(tmp_path: Path) -> None:
    (shown,) = (one.text for one in examples() if one.page == "monitoring.md" and one.language == "yaml")
    (tmp_path / "prometheus.yml").write_text(shown, "utf-8")
    promtool("check", "config", "prometheus.yml", cwd=tmp_path)


def test_promtool_runs_the_alerts_and_their_test() -> None:
    promtool("check", "rules", "prometheus-alerts.yml", cwd=DEPLOY)
    promtool("test", "rules", "prometheus-alerts-test.yml", cwd=DEPLOY)


def test_the_test_of_the_alerts_misses_each_that_does_not_fire(tmp_path: Path) -> None:
    rules = (DEPLOY / "prometheus-alerts.yml").read_text("utf-8")
    silent = re.sub(r"expr: (>-\n.*\n.*|.*)", "expr: vector(0) > 1", rules)
    (tmp_path / "prometheus-alerts.yml").write_text(silent, "utf-8")
    shutil.copy(DEPLOY / "prometheus-alerts-test.yml", tmp_path)
    with pytest.raises(AssertionError) as missed:
        promtool("test", "rules", "prometheus-alerts-test.yml", cwd=tmp_path)
    assert {alert for alert in alerts() if f"alertname: {alert}" in str(missed.value)} == alerts()


def test_the_dashboard_asks_what_prometheus_understands(tmp_path: Path) -> None:
    asked = [expr.replace("$__rate_interval", "5m") for expr in expressions()]
    rules = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(asked)]
    groups = {"groups": [{"name": "dashboard", "rules": rules}]}
    (tmp_path / "rules.yml").write_text(json.dumps(groups), "utf-8")  # JSON is YAML
    assert len(rules) > 30
    promtool("check", "rules", "rules.yml", cwd=tmp_path)
