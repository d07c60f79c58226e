from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Never

import py4j.protocol
import pytest

from mldserver.spark.driver_messages import describe, lost_connection, message


def caught(function: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as info:  # noqa: PT011  # any error will do
        function()
    return info.value


def raising_in(file: str) -> Callable[[], object]:
    """Return a function that raises, and stands in this file."""
    namespace = {}
    exec(compile("def inner(): raise ValueError('deep')", file, "exec"), namespace)
    return namespace["inner"]


def test_the_java_stack_below_a_message_is_cut() -> None:
    java = "An error occurred.\n: java.lang.IllegalStateException: no\n\tat a.B.c(B.java:1)\n\tat d.E"
    assert message(RuntimeError(java)) == "An error occurred.\n: java.lang.IllegalStateException: no"
    assert message(RuntimeError("plain\n\nJVM stacktrace:\njava.lang.X")) == "plain"


def test_an_error_without_words_is_told_by_its_class() -> None:
    assert message(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_message_of_megabytes_is_clipped() -> None:
    assert len(message(ValueError("x" * 10**6))) < 21_000


def test_the_users_frames_are_kept_and_the_machinerys_are_not() -> None:
    def user_code() -> None:
        subprocess.run([sys.executable, "-c", ""], check=True, timeout="never")

    told = describe(caught(user_code)).traceback
    assert "in user_code" in told
    told = describe(caught(raising_in(py4j.protocol.__file__))).traceback
    assert "py4j" not in told
    assert told.endswith("ValueError: deep")


@pytest.mark.parametrize("folder", ["pyspark", "py4j", "asyncio"])
def test_a_users_folder_may_be_named_as_one_of_the_machinerys(folder: str) -> None:
    told = describe(caught(raising_in(f"/srv/{folder}/departures.py"))).traceback
    assert f'File "/srv/{folder}/departures.py", line 1, in inner' in told


def test_causes_are_told_first() -> None:
    def user_code() -> None:
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("wrong window") from error

    told = describe(caught(user_code)).traceback
    assert told.index("KeyError: 'key'") < told.index("direct cause") < told.index("ValueError: wrong window")


def test_what_was_being_handled_is_told_unless_it_was_hidden() -> None:
    def shown() -> None:
        try:
            {}["key"]
        except KeyError:
            raise ValueError("second")  # noqa: B904  # that is the case in question

    def hidden() -> None:
        try:
            {}["key"]
        except KeyError:
            raise ValueError("second") from None

    assert "being handled during" in describe(caught(shown)).traceback
    assert "KeyError" not in describe(caught(hidden)).traceback


def test_a_circle_of_causes_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert describe(one).traceback.count("ValueError: one") == 1


def test_a_fault_names_class_sentence_and_place() -> None:
    class Odd(Exception):
        pass

    def user_code() -> Never:
        raise Odd("a sentence")

    fault = describe(caught(user_code))
    assert (fault.error, fault.message) == ("Odd", "a sentence")
    assert f"{__name__}.Odd: a sentence" in fault.traceback


class Py4JNetworkError(Exception):
    """Named as py4j's own."""


def test_a_lost_connection_is_seen_through_what_came_of_it() -> None:
    wrapped = ValueError("could not count")
    wrapped.__cause__ = ConnectionRefusedError(111, "refused")
    circle = ValueError("round")
    circle.__context__ = KeyError("and")
    circle.__context__.__context__ = circle
    errors = [wrapped, EOFError(), Py4JNetworkError(), ValueError("no"), circle]
    assert [lost_connection(error) for error in errors] == [True, True, True, False, False]


IN_A_WORKER = """An error occurred while calling o408.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times
\tat org.apache.spark.A.b(A.scala:1)
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 4207, in invoke_udf
    func, profiler, deserializer, serializer = read_udfs(
                                               ^^^^^^^^^^
  File "/mine/flow.py", line 12, in minutes
    return int(text)
           ^^^^^^^^^
  File "/opt/spark/python/lib/pyspark.zip/pyspark/util.py", line 98, in wrapper
    return f(*args, **kwargs)
ValueError: invalid literal for int() with base 10: 'x7'

\tat org.apache.spark.api.python.BasePythonRunner.c(PythonRunner.scala:2)
"""


def test_what_a_function_of_the_users_raised_on_an_executor_comes_first() -> None:
    told = message(Exception(IN_A_WORKER)).splitlines()
    assert (
        told[0] == "ValueError: invalid literal for int() with base 10: 'x7' (/mine/flow.py:12, in minutes)"
    )
    assert told[1] == "An error occurred while calling o408.parquet."
    short = IN_A_WORKER.replace("/mine/flow.py", "/opt/spark/python/lib/pyspark.zip/flow.py")
    assert message(Exception(short)).startswith("ValueError: invalid literal for int() with base 10: 'x7'\n")
    assert (
        message(Exception("Traceback (most recent call last):\n  cut"))
        == "Traceback (most recent call last):\n  cut"
    )
