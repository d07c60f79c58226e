"""Modules that use Spark while they are imported, where there is no session: in ``mldserver check``'s process."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from mldserver.handler import spark_at_import
from mldserver.handler.spark_at_import import ImportGuard
from mldserver.runtime.trial import check_handler

HANDLER = """
schema = "carrier STRING, delay DOUBLE"
def process_record(record): ...
def on_window(rows, window): return rows
"""

FUNCTIONS = """
import pandas as pd
from pyspark.sql import Window, functions as F
from pyspark.sql.functions import pandas_udf, udf

LATE = F.when(F.col("delay") > 15, F.lit("late")).otherwise(F.expr("'in time'"))
LATEST = Window.partitionBy("carrier").orderBy(F.desc("delay")).rowsBetween(0, 1)

@udf("int")
def twice(delay):
    return int(2 * delay)

@udf("a INT, b STRING")
def pair(delay): ...

@pandas_udf("double")
def half(delays: pd.Series) -> pd.Series: ...

@pandas_udf("double")
def mean(delays: pd.Series) -> float: ...

TWICE = twice("delay").alias("twice")
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str) -> None:
    Path("flights.py").write_text(text)


def test_functions_and_columns_at_module_level_need_no_session_where_nobody_calls_them() -> None:
    write(FUNCTIONS + HANDLER)
    report = check_handler("flights")
    assert (report.findings, report.output, report.can_run) == ((), "", True)


@pytest.mark.parametrize(
    "makes",
    [
        "from pyspark.sql import SparkSession\nspark = SparkSession.builder.master('local[1]').getOrCreate()\n",
        "import pyspark\ncontext = pyspark.SparkContext('local[1]')\n",
        "from pyspark import SparkContext\ncontext = SparkContext.getOrCreate()\n",
    ],
)
def test_a_session_that_a_module_makes_is_refused_with_its_line(makes: str) -> None:
    write(makes + HANDLER)
    (found,) = check_handler("flights").findings
    assert str(found) == (
        "flights.py:2: SessionAtImport: the module makes a Spark session while it is imported. The server makes the only "
        "one: take rows.sparkSession in on_window"
    )


def test_a_schema_that_only_spark_can_read_is_refused_with_the_way_out() -> None:
    write("from pyspark.sql.types import StructType\nROW = StructType.fromDDL('a INT')\n" + HANDLER)
    (found,) = check_handler("flights").findings
    assert "[SESSION_OR_CONTEXT_NOT_EXISTS]" in found.text
    assert found.text.endswith(
        "Write the type as an object, such as IntegerType() or StructType([...]), or make it inside on_window."
    )


def test_what_was_made_without_a_session_says_so_in_one_that_comes_later() -> None:
    write(FUNCTIONS + HANDLER)
    program = (
        "from mldserver.handler.loader import load\n"
        "from py4j.protocol import get_command_part\n"
        "flights = load('flights').target\n"
        "def told(use):\n"
        "    try: use()\n"
        "    except RuntimeError as error: return str(error)\n"
        "print(told(lambda: get_command_part(flights.LATE._jc, {})))\n"
        "for function in (flights.twice, flights.pair, flights.mean): print(told(function.returnType.json))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    told = done.stdout.splitlines()
    assert len(told) == 4
    assert all(line.startswith("A function or column was made without a Spark session") for line in told)


def test_what_another_pyspark_does_not_have_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("pyspark.sql.session")
    builder = type("Builder", (), {"getOrCreate": "as it was"})
    other.SparkSession = type("SparkSession", (), {"Builder": builder})  # type: ignore[attr-defined]  # as pyspark's has it
    monkeypatch.setitem(sys.modules, "pyspark.sql.session", other)
    monkeypatch.setitem(sys.modules, "pyspark.sql.udf", ModuleType("pyspark.sql.udf"))
    guard = ImportGuard()
    guard.begin()
    assert (builder.__dict__["getOrCreate"] == "as it was", hasattr(builder, "create")) == (False, False)
    guard.end()
    assert builder.__dict__["getOrCreate"] == "as it was"
    assert guard not in sys.meta_path


def test_in_sparks_driver_sessions_are_refused_to_the_thread_that_imports_and_to_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hooks of other functions run meanwhile: a UDF that they call looks for the session."""

    class Builder:
        def create(self, name: str) -> str:
            return name

        @classmethod
        def get_or_create(cls, name: str) -> str:
            return cls.__name__ + name

    module = ModuleType("sessions_by_test")
    module.Builder = Builder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sessions_by_test", module)
    guarded = {"sessions_by_test": ("Builder.create", "Builder.get_or_create")}
    monkeypatch.setattr(spark_at_import, "_GUARDED", guarded)
    guard = ImportGuard(threading.get_ident())
    guard.begin()
    try:
        with ThreadPoolExecutor(1) as elsewhere:
            assert elsewhere.submit(Builder().create, "a").result() == "a"
            assert elsewhere.submit(Builder.get_or_create, "b").result() == "Builderb"
        for refused in (Builder().create, Builder.get_or_create):
            with pytest.raises(spark_at_import.SessionAtImport):
                refused("c")
    finally:
        guard.end()
    assert (Builder().create("d"), Builder.get_or_create("e")) == ("d", "Buildere")
