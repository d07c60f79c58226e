from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mldserver.spark.driver_messages import StartSession
from mldserver.spark.session import (
    DriverSession,
    defaults,
    environment,
    is_connect,
    is_local,
    secret_settings,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def start(master: str = "local[*]", **told: Any) -> StartSession:
    return StartSession(master, "/scratch", **told)


def test_masters_are_told_apart() -> None:
    assert [is_local(m) for m in ("local", "local[*]", "spark://h:7077", "sc://h")] == [
        True,
        True,
        False,
        False,
    ]
    assert [is_connect(m) for m in ("local", "spark://h:7077", "sc://h")] == [False, False, True]


def test_what_the_user_sets_wins() -> None:
    conf = defaults(start(conf={"spark.sql.session.timeZone": "Europe/Berlin", "spark.x": "1"}), cores=2)
    assert conf["spark.sql.session.timeZone"] == "Europe/Berlin"
    assert conf["spark.x"] == "1"


def test_local_files_of_spark_follow_the_umask_of_the_server() -> None:
    name, before = "spark.hadoop.fs.permissions.umask-mode", os.umask(0o027)
    try:
        assert defaults(start("spark://h:7077"), cores=1)[name] == "027"
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert name not in defaults(start(own_umask=False), cores=1)


def test_small_local_data_gets_small_local_settings() -> None:
    conf = defaults(start(), cores=3)
    assert conf["spark.sql.shuffle.partitions"] == "3"
    assert conf["spark.ui.enabled"] == "false"
    assert conf["spark.driver.bindAddress"] == "127.0.0.1"
    # Queries run beside windows, even if one window is computed at a time.
    assert conf["spark.scheduler.mode"] == "FAIR"


def test_the_application_is_called_after_its_pipeline_unless_the_user_names_it() -> None:
    named = {"spark.app.name": "nightly"}
    assert (
        defaults(start(app_name="mldserver: departures"), cores=3)["spark.app.name"]
        == "mldserver: departures"
    )
    assert (
        defaults(start(app_name="mldserver: departures", conf=named), cores=3)["spark.app.name"] == "nightly"
    )


def test_a_start_that_only_writes_an_archive_leaves_no_event_log() -> None:
    shown = {"spark.eventLog.enabled": "true", "spark.ui.enabled": "true"}
    assert shown.items() <= defaults(start(conf=shown), cores=3).items()
    assert dict.fromkeys(shown, "false").items() <= defaults(start(conf=shown, train=True), cores=3).items()


def test_asked_for_things_are_there() -> None:
    conf = defaults(start(conf={"spark.ui.enabled": "true"}, concurrency=2), cores=3)
    assert conf["spark.ui.enabled"] == "true"
    assert conf["spark.scheduler.mode"] == "FAIR"


def test_a_clusters_driver_is_reachable_and_sizes_its_shuffles_itself() -> None:
    conf = defaults(start("spark://h:7077"), cores=3)
    assert "spark.driver.bindAddress" not in conf
    assert "spark.sql.shuffle.partitions" not in conf


def test_a_connect_session_sets_only_what_a_session_may() -> None:
    conf = defaults(start("sc://h", conf={"spark.x": "1"}), cores=3)
    assert all(name.startswith("spark.sql.") or name == "spark.x" for name in conf)


def test_jvm_options_follow_what_is_asked() -> None:
    def options(**told: Any) -> list[str]:
        return shlex.split(defaults(start(**told), cores=3)["spark.driver.defaultJavaOptions"])

    assert not any("Tiered" in option for option in options())
    assert "-XX:TieredStopAtLevel=1" in options(quick=True)
    assert "-XX:SharedArchiveFile=/c/a.jsa" in options(archive="/c/a.jsa")
    trained = options(archive="/a b/a.jsa", train=True)
    assert any(option.startswith("-XX:ArchiveClassesAtExit=/a b/a.jsa.") for option in trained)


class Cluster:
    """A session of which only its parallelism is asked."""

    def __init__(self, plan: str = "") -> None:
        self.defaultParallelism = 2
        self.sparkContext = self
        self.plan = plan

    def sql(self, _: str) -> Cluster:
        return self

    def collect(self) -> list[tuple[str]]:
        return [(self.plan,)]


def test_a_cluster_is_asked_for_its_cores_each_time() -> None:
    cluster = Cluster()
    session = DriverSession(cast("SparkSession", cluster), connect=False, cores=None, jvm=None)
    assert session.slots() == 2
    cluster.defaultParallelism = 64
    assert session.slots() == 64
    assert replace(session, cores=4).slots() == 4


def test_a_connect_server_tells_its_cores_by_the_plan_of_a_range() -> None:
    plan = "== Physical Plan ==\n*(1) Range (0, 1, step=1, splits=48)\n"
    session = DriverSession(cast("SparkSession", Cluster(plan)), connect=True, cores=None, jvm=None)
    assert session.slots() == 48
    unknown = replace(session, spark=cast("SparkSession", Cluster("another plan")))
    assert unknown.slots() == (os.cpu_count() or 1)


@pytest.mark.parametrize("inherited", [{}, {"PYTHONPATH": "/old"}])
def test_the_drivers_environment_has_the_users_path_first_and_nothing_of_another_spark(
    inherited: dict[str, str],
) -> None:
    ours = environment(
        start(python_path=("/here",)), {**inherited, "PYSPARK_GATEWAY_PORT": "1"}, java_home="/java"
    )
    assert ours["PYTHONPATH"].split(":") == ["/here", *inherited.values()]
    assert "PYSPARK_GATEWAY_PORT" not in ours
    assert (ours["JAVA_HOME"], ours["TMPDIR"], ours["PYSPARK_PYTHON"]) == (
        "/java",
        "/scratch",
        sys.executable,
    )
    assert ours["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert ours["SPARK_LOCAL_DIRS"] == "/scratch"


def test_a_clusters_workers_choose_their_own_python() -> None:
    ours = environment(start("spark://h:7077"), {}, java_home=None)
    assert not {"PYSPARK_PYTHON", "SPARK_LOCAL_IP", "JAVA_HOME"} & set(ours)


SECRETS = {"spark.hadoop.fs.s3a.secret.key": "hush hush", "spark.x": "1", "other.password": "hush hush"}


def test_secrets_go_to_the_jvm_in_a_file_and_not_on_its_command_line() -> None:
    ours = environment(start(conf=SECRETS), {}, java_home=None)
    assert ours["PYSPARK_SUBMIT_ARGS"] == (
        "--properties-file /scratch/secrets.properties --load-spark-defaults pyspark-shell"
    )
    assert secret_settings(start(conf=SECRETS)) == {"spark.hadoop.fs.s3a.secret.key": "hush hush"}
    assert "hush" not in repr(ours)


def test_the_users_arguments_for_spark_are_kept_beside_the_file() -> None:
    inherited = {"PYSPARK_SUBMIT_ARGS": "--packages a:b:1 pyspark-shell"}
    assert environment(start(), inherited, java_home=None) | inherited == environment(
        start(), inherited, java_home=None
    )
    ours = environment(start(conf=SECRETS), inherited, java_home=None)
    assert ours["PYSPARK_SUBMIT_ARGS"].endswith("--load-spark-defaults --packages a:b:1 pyspark-shell")


def test_a_connect_session_takes_its_secrets_with_its_other_settings() -> None:
    assert secret_settings(start("sc://h", conf=SECRETS)) == {}
    assert defaults(start("sc://h", conf=SECRETS), cores=3).items() >= SECRETS.items()


def test_the_users_scratch_disks_are_kept() -> None:
    ours = environment(start(conf={"spark.local.dir": "/fast"}), {}, java_home=None)
    assert "SPARK_LOCAL_DIRS" not in ours
