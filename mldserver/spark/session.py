"""The Spark session: every default, with its reason, and how the session is made. Runs in the driver's process.

Whatever the user configures wins. The defaults fit what a window is: small data, often, on a session that lives as
long as the server. ``java.py`` explains what the start takes, and what halves it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any

from mldserver.base.disk import umask
from mldserver.base.java_properties import as_text
from mldserver.base.uris import secrets_of
from mldserver.errors import OperatorError
from mldserver.handler.loader import entries_of
from mldserver.spark.driver_messages import StartSession
from mldserver.spark.health import DENIED, Cluster, ConnectServer, with_session
from mldserver.spark.java import unfinished

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EVERYWHERE = {
    # Event times are instants; text and hours derived from them must not depend on where the server stands.
    "spark.sql.session.timeZone": "UTC",
    # The default, INT96, is deprecated in Parquet, and most readers but Spark see it as nanoseconds.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # One Arrow batch a partition instead of one for every 10,000 rows, for pandas functions and createDataFrame.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    "spark.sql.adaptive.enabled": "true",
    # Small shuffles end in few partitions, hence few files, rather than in as many as there are cores.
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
}
"""Settings that a session may change on any master, Spark Connect included."""

_CLASSIC = {
    "spark.ui.showConsoleProgress": "false",
    # A driver that lives for months remembers the last few jobs only.
    "spark.ui.retainedJobs": "100",
    "spark.ui.retainedStages": "100",
    "spark.ui.retainedTasks": "1000",
    "spark.ui.retainedDeadExecutors": "10",
    "spark.sql.ui.retainedExecutions": "50",
    # Long-lived drivers clean up what has gone out of scope without waiting for a full collection to happen.
    "spark.cleaner.periodicGC.interval": "15min",
}

_LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # A window of more than 32 segments would cost a job just to look at its files.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
    # What is read from a disk while a file is opened. Spark's 4 MiB would give two thirds of a few files to one of two cores.
    "spark.sql.files.openCostInBytes": "262144",
}

WINDOWS = "windows"
QUERIES = "queries"
"""The pool of the fair scheduler that queries of handlers share."""
EARLY = "early"
"""The pool of early results."""
MOST_POOLS = 256
"""Threads for windows at most, each with a pool. The server has fewer jobs under way: ``window_concurrency``, and those whose
hooks are slow."""
_WEIGHT = 4
"""The weight of a pool of windows; those of queries and early results have 1. So a window gets four of five cores while queries wait."""
_POOLS = "pools.xml"
_LOG_SETTINGS = "log4j2.properties"
_SECRETS = "secrets.properties"

_LOG4J = """\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = JsonTemplateLayout
appender.stderr.layout.eventTemplate = {\
"level": {"$resolver": "level", "field": "name"}, \
"logger": {"$resolver": "logger", "field": "name"}, \
"msg": {"$resolver": "message", "stringified": true}, \
"exception": {"$resolver": "exception", "field": "stackTrace", "stackTrace": {"stringified": true}}}
"""
"""One JSON object a line on stderr, which the server passes into its own log. Spark's own setting for it,
``spark.log.structuredLogging.enabled``, was seen to do nothing for a session that Python starts (4.3)."""

_LAUNCHER_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For the small JVM that only computes the command line of the real one."""


def pool_name(number: int) -> str:
    """Return the name of a pool of the fair scheduler for windows."""
    return f"{WINDOWS}-{number % MOST_POOLS}"


def _pools() -> str:
    """Return the pools of the fair scheduler, as Spark reads them."""
    weights = {QUERIES: 1, EARLY: 1} | {pool_name(number): _WEIGHT for number in range(MOST_POOLS)}
    pools = (
        f'<pool name="{name}"><schedulingMode>FIFO</schedulingMode><weight>{weight}</weight><minShare>0</minShare></pool>'
        for name, weight in weights.items()  # Spark warns of what is left out
    )
    return f'<?xml version="1.0"?>\n<allocations>{"".join(pools)}</allocations>\n'


def is_connect(master: str) -> bool:
    """Whether the session is on a Spark Connect server: no JVM of ours."""
    return master.startswith("sc://")


def is_local(master: str) -> bool:
    """Whether Spark runs inside the driver's own JVM."""
    return master.startswith("local")


def defaults(start: StartSession, cores: int) -> dict[str, str]:
    """Return the session's settings for ``start``: ours, overridden by the user's."""
    if is_connect(start.master):
        return {**_EVERYWHERE, **start.conf}
    ours = {**_EVERYWHERE, **_CLASSIC, "spark.app.name": start.app_name}
    options = [
        f"-Djava.io.tmpdir={start.scratch}",
        f"-Dlog4j2.configurationFile={Path(start.scratch) / _LOG_SETTINGS}",
        "-XX:-UsePerfData",  # no file in the temporary directory that a killed JVM would leave there
        "-XX:+ExitOnOutOfMemoryError",  # such a session is unreliable; a fresh driver is not
    ]
    if start.quick:
        # C1 only: sooner warm, slower on jobs of minutes; for tests and demonstrations.
        options += ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    if start.archive is not None:
        written = f"-XX:ArchiveClassesAtExit={unfinished(Path(start.archive))}"
        options.append(written if start.train else f"-XX:SharedArchiveFile={start.archive}")
        # Errors only: writing names every class that cannot be archived, reading every reason not to use the file.
        options += ["-Xlog:disable", "-Xlog:all=error:stderr"]
    # The "default" options stand before the user's spark.driver.extraJavaOptions instead of replacing them.
    quoted = (f'"{option}"' if " " in option else option for option in options)
    ours["spark.driver.defaultJavaOptions"] = " ".join(quoted)
    ours["spark.ui.enabled"] = "false"
    ours["spark.sql.warehouse.dir"] = str(Path(start.scratch) / "warehouse")
    if start.own_umask:
        # Hadoop's default umask is 022: published windows would be open under a tighter one, and executors of another
        # user could not write under a wider one.
        ours["spark.hadoop.fs.permissions.umask-mode"] = f"{umask():03o}"
    # Windows and queries that run at the same time share the cores instead of queueing behind the first.
    ours["spark.scheduler.mode"] = "FAIR"
    # Spark takes the name as it is, and decodes nothing in it.
    ours["spark.scheduler.allocation.file"] = f"file://{Path(start.scratch) / _POOLS}"
    if is_local(start.master):
        ours |= _LOCAL
        ours["spark.sql.shuffle.partitions"] = str(cores)
    # No person looks at a session that only writes an archive.
    overrides = dict.fromkeys(("spark.eventLog.enabled", "spark.ui.enabled"), "false") if start.train else {}
    return {**ours, **start.conf, **overrides}


def secret_settings(start: StartSession) -> dict[str, str]:
    """Return the settings that come to a JVM by a file of the driver's own: a command line shows them to the whole host."""
    if is_connect(start.master):
        return {}
    return {name: value for name, value in secrets_of(start.conf).items() if name.startswith("spark.")}


def environment(
    start: StartSession, inherited: Mapping[str, str], *, java_home: str | None
) -> dict[str, str]:
    """Return the driver process's environment; Spark's scripts and Python workers inherit it."""
    ours = dict(inherited)
    # Left over from a Spark that started *us*: they would connect the new session to that one.
    for name in (
        "PYSPARK_GATEWAY_PORT",
        "PYSPARK_GATEWAY_SECRET",
        "SPARK_REMOTE",
        "SPARK_CONNECT_MODE_ENABLED",
    ):
        ours.pop(name, None)
    ours["TMPDIR"] = start.scratch
    if secret_settings(start):
        # Spark's defaults are read too, as they are without this file.
        file = shlex.quote(str(Path(start.scratch) / _SECRETS))
        others = inherited.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
        ours["PYSPARK_SUBMIT_ARGS"] = f"--properties-file {file} --load-spark-defaults {others}"
    path = [*start.python_path, *filter(None, [inherited.get("PYTHONPATH")]), *entries_of(start.py_files)]
    ours["PYTHONPATH"] = os.pathsep.join(path)
    # Of its settings, spark-submit alone reads the interpreter's.
    if python := start.python or start.conf.get("spark.pyspark.python"):
        ours["PYSPARK_PYTHON"] = python
    if java_home is not None:
        ours["JAVA_HOME"] = java_home
    ours.setdefault("SPARK_LAUNCHER_OPTS", _LAUNCHER_OPTIONS)
    if is_local(start.master):
        # Spark would look up the host's name, and warn when that is a loopback address.
        ours.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Its default is whatever `python3` on PATH is: not the virtual environment's.
        ours.setdefault("PYSPARK_PYTHON", sys.executable)
        if "spark.local.dir" not in start.conf:
            # The setting itself would be answered with a warning at every start.
            ours.setdefault("SPARK_LOCAL_DIRS", start.scratch)
    return ours


@dataclass(frozen=True, slots=True)
class DriverSession:
    """A session and what belongs to it."""

    spark: SparkSession
    connect: bool
    cores: int | None
    """Of a local master, which never change; None: ``slots`` asks the cluster."""
    jvm: Popen[bytes] | None
    """The JVM's process; None on Spark Connect."""
    server: ConnectServer | None = None
    """What looks at the Spark Connect server, and hears of its jobs."""

    @property
    def is_local(self) -> bool:
        """Whether tasks run in this process's JVM."""
        return self.cores is not None

    def hadoop(self, name: str) -> str | None:
        """Return one of Hadoop's settings as a classic session has it."""
        value: str | None = self.spark.sparkContext._jsc.hadoopConfiguration().get(name)  # noqa: SLF001  # no Python face yet
        return value

    def slots(self) -> int:
        """Return how many tasks run at the same time, as the cluster is now: bounds how finely small windows are cut.

        A Connect server is asked in a round trip without a job, by the plan of a range that names no parts.
        """
        if self.cores is not None:
            return self.cores
        if not self.connect:
            return self.spark.sparkContext.defaultParallelism
        (plan,) = self.spark.sql("EXPLAIN SELECT * FROM range(1)").collect()
        found = re.search(r"splits=(\d+)", plan[0])
        return int(found[1]) if found else os.cpu_count() or 1

    @property
    def is_stopped(self) -> bool:
        """Whether no job can run on it any more: the user's code stopped it, or Spark did, its cluster being gone."""
        if self.connect:
            return bool(self.spark.is_stopped)  # type: ignore[attr-defined]  # there in Connect's class
        context = self.spark.sparkContext._jsc  # noqa: SLF001  # no Python face yet
        return context is None or bool(context.sc().isStopped())

    def health_check(self) -> Callable[[], dict[str, str]]:
        """Return the function that looks at the session for signs of trouble (``health.py``)."""
        spark: Any = self.spark
        if self.server is not None:
            spark.registerProgressHandler(self.server.note_progress)
            return self.server.signs_of_trouble
        if self.is_local:
            return lambda: {"stopped": ""} if self.is_stopped else {}
        return Cluster(spark, lambda: self.is_stopped).signs_of_trouble

    def stop(self) -> None:
        """Stop the session and, in classic mode, close the JVM's standard input, so that it exits."""
        if self.jvm is None:
            self.spark.stop()
            return
        gateway = _gateway(self.spark)
        self.spark.stop()
        gateway.shutdown()
        if self.jvm.stdin is not None:
            self.jvm.stdin.close()


def open_session(start: StartSession) -> DriverSession:
    """Make the session, in the process's environment.

    Raises OperatorError when a Spark Connect server rejects the URL's credentials, and what pyspark raises.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415  # the server imports this module and never pyspark

    connect = is_connect(start.master)
    scratch, secrets = Path(start.scratch), secret_settings(start)
    (scratch / _LOG_SETTINGS).write_text(_LOG4J)
    (scratch / _POOLS).write_text(_pools())
    (scratch / _SECRETS).write_text(as_text(secrets))
    cores = os.cpu_count() or 1
    builder: Any = SparkSession.builder
    server = None
    if connect:
        from pyspark.sql.connect.client import SparkConnectClient  # noqa: PLC0415  # not there without its packages

        url = with_session(start.master)
        builder = builder.remote(url)
        # Check the server first, so that a failure is reported at once: the session's own client would retry for ten minutes.
        # Without the option, gRPC waits up to two minutes between connects, in which the server would seem to be gone.
        quick = [("grpc.max_reconnect_backoff_ms", 1000)]
        server = ConnectServer(
            SparkConnectClient(url, channel_options=quick, retry_policy={"max_retries": 0})
        )
        for sign, text in server.signs_of_trouble().items():
            if sign == DENIED:
                raise OperatorError(
                    f"The Spark Connect server refuses the token and user of spark_master: {text}",
                    advice="Name its token, as in sc://HOST:PORT/;token=TOKEN, and a permitted user.",
                )
            raise ConnectionError(f"the Spark Connect server does not answer: {text}")
    else:
        builder = builder.master(start.master)
    for name, value in defaults(start, cores).items():
        builder = builder if name in secrets else builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    if connect:
        return DriverSession(spark, connect=True, cores=None, jvm=None, server=server)
    local_cores = spark.sparkContext.defaultParallelism if is_local(start.master) else None
    return DriverSession(spark, connect=False, cores=local_cores, jvm=_gateway(spark).proc)


def _gateway(spark: SparkSession) -> Any:
    # The only way to the JVM's process; py4j's own object, the same in every pyspark since 2.
    return spark.sparkContext._gateway  # noqa: SLF001  # see above
