"""The failure policy: which failures are tried again, how others end, and what is told of an error."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import ssl
import struct
import traceback
import zlib
from decimal import InvalidOperation
from typing import Any

import msgspec
import pytest

from mldserver import Discard, Fatal, Retry
from mldserver.handler.failure import Requested, bad_row, describe
from mldserver.records import Verdict
from mldserver.runtime.failure_policy import (
    Ending,
    FailurePolicy,
    FailureRule,
    OnFailure,
    failure_rule,
)

pytestmark = pytest.mark.quick


def test_delays_double_from_the_base_to_the_cap_and_jitter_takes_away_up_to_half() -> None:
    policy = FailurePolicy(retry_base_seconds=0.1)
    assert [policy.delay(n, 1.0) for n in (1, 2, 3, 7, 8, 10_000)] == [0.1, 0.2, 0.4, 6.4, 10.0, 10.0]
    assert [FailurePolicy(retry_base_seconds=20.0).delay(n, 1.0) for n in (1, 2)] == [20.0, 20.0]
    assert policy.delay(2, 0.0) == 0.1
    assert not policy.parks


def end(policy: Any, error: Any, *, calls: int = 1, age_ms: int = 0) -> Any:
    return policy.ending(describe(raised(error)), calls=calls, age_ms=age_ms)


@pytest.mark.parametrize("on_failure", list(OnFailure))
def test_a_record_is_called_so_many_times_and_then_ends_as_the_policy_says(on_failure: Any) -> None:
    policy = FailurePolicy(attempts=2, on_failure=on_failure)
    assert end(policy, ConnectionError()) is None
    assert end(policy, ConnectionError(), calls=2) == Ending(on_failure)


def test_a_record_that_is_too_old_is_not_called_again() -> None:
    policy = FailurePolicy(max_age_ms=1_000)
    assert end(policy, ConnectionError(), age_ms=999) is None
    assert end(policy, ConnectionError(), age_ms=1_000) is Ending.DEAD_LETTER


@pytest.mark.parametrize("on_failure", list(OnFailure))
def test_fatal_ends_at_once_as_the_policy_says_and_discard_without_a_trace(on_failure: Any) -> None:
    policy = FailurePolicy(attempts=9, on_failure=on_failure)
    assert end(policy, Fatal("no")) == Ending(on_failure)
    assert end(policy, Discard()) is Ending.DISCARD
    assert end(policy, Retry(after=1)) is None
    assert end(policy, Retry(), calls=9) == Ending(on_failure)


BY_NATURE = (
    *(
        KeyError("x"),
        IndexError(),
        TypeError(),
        ValueError(),
        AttributeError(),
        ZeroDivisionError(),
        NameError(),
    ),
    *(json.JSONDecodeError("no", "", 0), UnicodeDecodeError("utf-8", b"", 0, 1, "no"), InvalidOperation()),
    *(csv.Error(), struct.error(), zlib.error(), gzip.BadGzipFile(), pickle.UnpicklingError()),
    *(msgspec.ValidationError(), NotImplementedError(), AssertionError(), SyntaxError()),
)


@pytest.mark.parametrize("error", BY_NATURE, ids=lambda error: type(error).__name__)
def test_an_error_that_repeats_by_its_nature_ends_a_record_at_once_unless_a_rule_says_otherwise(
    error: Any,
) -> None:
    assert end(FailurePolicy(attempts=9), error) is Ending.DEAD_LETTER
    assert end(FailurePolicy(attempts=9, on_failure=OnFailure.HALT), error) is Ending.HALT
    for rule in (f"{type(error).__name__}=retry", "Exception=retry"):
        ruled = FailurePolicy(attempts=9, failure_rules=(failure_rule(rule),))
        assert [end(ruled, error, calls=calls) for calls in (8, 9)] == [None, Ending.DEAD_LETTER]


def test_a_refused_row_ends_its_record_at_once_too() -> None:
    assert FailurePolicy().ending(bad_row("no"), calls=1, age_ms=0) is Ending.DEAD_LETTER


class ErrorPage(OSError, ValueError):
    """What ``requests`` raises for a body that is no JSON."""


class Busy(Retry, ValueError):
    """On purpose, whatever else it is."""


@pytest.mark.parametrize(
    "error",
    [ErrorPage(), Busy(), ssl.SSLCertVerificationError(), TimeoutError(), RuntimeError(), MemoryError()],
)
def test_what_may_go_better_next_time_is_tried_again(error: Any) -> None:
    assert end(FailurePolicy(attempts=9), error, calls=8) is None


class Timeout(OSError):
    __module__ = "requests.exceptions"


RULES = ("OSError=dead_letter", "requests.Timeout=retry:10", "KeyError=skip", "LookupError=halt")
RULED = FailurePolicy(failure_rules=tuple(map(failure_rule, RULES)))


@pytest.mark.parametrize(
    ("error", "calls", "ending"),
    [
        (ConnectionResetError(), 1, Ending.DEAD_LETTER),
        (Timeout(), 9, None),
        (Timeout(), 10, Ending.DEAD_LETTER),
        (KeyError("x"), 1, Ending.SKIP),
        (IndexError("x"), 1, Ending.HALT),
        (ConnectionError("x"), 2, Ending.DEAD_LETTER),
        (RuntimeError("x"), 2, None),
    ],
)
def test_the_rule_of_the_nearest_class_decides(error: Any, calls: int, ending: Any) -> None:
    assert end(RULED, error, calls=calls) is ending


def test_the_rule_that_says_more_of_a_class_wins() -> None:
    rules = tuple(
        map(failure_rule, ("Timeout=skip", "requests.exceptions.Timeout=halt", "requests.Timeout=retry"))
    )
    assert end(FailurePolicy(failure_rules=rules), Timeout()) is Ending.HALT


def test_rules_are_for_what_handlers_raise_on_purpose_too() -> None:
    policy = FailurePolicy(
        attempts=2, failure_rules=(failure_rule("mldserver.Retry=retry:5"), failure_rule("Fatal=skip"))
    )
    assert end(policy, Retry(), calls=4) is None
    assert end(policy, Fatal()) is Ending.SKIP


def test_dead_letters_that_run_once_more_are_dead_letters_again_when_they_fail() -> None:
    policy = FailurePolicy(
        attempts=2,
        on_failure=OnFailure.HALT,
        failure_rules=tuple(map(failure_rule, ("KeyError=skip", "OSError=halt", "IndexError=retry:5"))),
    ).redriving()
    for error in (KeyError(), OSError()):
        assert end(policy, error) is Ending.DEAD_LETTER
    assert end(policy, IndexError(), calls=4) is None
    assert end(policy, ConnectionError(), calls=2) is Ending.DEAD_LETTER
    assert end(policy, Discard()) is Ending.DISCARD


@pytest.mark.parametrize(
    ("name", "dotted", "matches"),
    [
        ("Timeout", "requests.exceptions.Timeout", True),
        ("requests.Timeout", "requests.exceptions.Timeout", True),
        ("requests.exceptions.Timeout", "requests.exceptions.Timeout", True),
        ("exceptions.Timeout", "requests.exceptions.Timeout", False),
        ("req.Timeout", "requests.exceptions.Timeout", False),
        ("requests.ReadTimeout", "requests.exceptions.Timeout", False),
        ("meout", "requests.exceptions.Timeout", False),
    ],
)
def test_a_rule_names_a_class_and_how_its_module_begins(name: Any, dotted: Any, matches: bool) -> None:
    assert FailureRule(name, OnFailure.SKIP).matches(dotted) is matches


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("KeyError=skip", FailureRule("KeyError", OnFailure.SKIP)),
        (" a.b.C = dead_letter ", FailureRule("a.b.C", OnFailure.DEAD_LETTER)),
        ("X=halt", FailureRule("X", OnFailure.HALT)),
        ("X=retry", FailureRule("X")),
        ("X=retry:10", FailureRule("X", attempts=10)),
    ],
)
def test_rules_are_read_from_text_and_written_so_again(text: Any, rule: Any) -> None:
    assert failure_rule(text) == rule
    assert failure_rule(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        "KeyError",
        "KeyError=ignore",
        "=skip",
        "Key Error=skip",
        "1a=skip",
        "X=retry:0",
        "X=retry:-1",
        "X=skip:2",
    ],
)
def test_what_is_no_rule_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"is not CLASS=|is no name"):
        failure_rule(text)


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"attempts": 2, "on_failure": OnFailure.SKIP}])
def test_impossible_rules_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="attempts must"):
        FailureRule("X", **wrong)


@pytest.mark.parametrize("after", [-1, float("nan"), float("inf")])
def test_a_retry_after_no_time_at_all_is_refused(after: Any) -> None:
    with pytest.raises(ValueError, match="number of seconds"):
        Retry(after=after)


def test_what_a_handler_asks_for_is_in_its_failure() -> None:
    retry, discard = describe(raised(Retry("busy", after=5))), describe(Discard("old", records=[1]))
    assert retry.traceback
    assert retry.logged(messages=True) == {"what": "Retry: busy"}
    assert discard.logged(messages=True) == {"what": "Discard: old"}
    assert (retry.error, retry.requested, retry.after_seconds, retry.records) == (
        "Retry: busy",
        Requested.RETRY,
        5,
        None,
    )
    assert (discard.requested, discard.records, describe(Fatal()).error) == (Requested.DISCARD, (1,), "Fatal")
    assert describe(Verdict("what?")).requested is None


def test_the_names_of_an_error_go_from_its_class_to_its_bases() -> None:
    assert describe(Timeout()).names == (
        "requests.exceptions.Timeout",
        "builtins.OSError",
        "builtins.Exception",
        "builtins.BaseException",
    )


def raised(error: Any) -> Any:
    try:
        raise error  # noqa: TRY301  # the traceback is the point
    except BaseException as caught:  # noqa: BLE001  # the tests raise what handlers may raise
        return caught


def test_an_error_is_told_by_type_and_message_with_the_users_frames() -> None:
    failure = describe(raised(KeyError("carrier")))
    assert failure.error == "KeyError: 'carrier'"
    assert "in raised" in failure.traceback
    assert "raise error" in failure.traceback


def shown_by_python(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_a_traceback_reads_as_pythons_does_also_from_memory_and_with_causes() -> None:
    def fails(how: str) -> None:
        try:
            {}["first"]
        except KeyError as error:
            if how == "because":
                raise LookupError("second") from error
            if how == "hidden":
                raise LookupError("second") from None
            raise LookupError(how)  # noqa: B904  # while the first is handled

    for how in ("because", "hidden", "while", "while"):
        error = _caught(lambda how=how: fails(how))
        error.__traceback__ = error.__traceback__.tb_next
        assert describe(error).traceback == shown_by_python(error)
    circle, other = ValueError("a"), ValueError("b")
    circle.__context__, other.__context__ = other, circle
    assert describe(circle).traceback == shown_by_python(circle)


def test_notes_groups_and_places_in_a_text_are_told_too() -> None:
    noted, error = ValueError("x"), ValueError("y")
    noted.add_note("at the river")
    error.__cause__ = noted
    for special in (
        noted,
        error,
        ExceptionGroup("two", [KeyError("a"), noted]),
        SyntaxError("x", ("f", 1, 2, "a b")),
    ):
        assert describe(special).traceback == shown_by_python(special)


def test_failures_of_one_place_have_one_fingerprint_whatever_they_say() -> None:
    one, two = describe(raised(ValueError("a"))), describe(raised(ValueError("b")))
    assert one.fingerprint == two.fingerprint
    assert one.traceback != two.traceback
    assert one.fingerprint != describe(raised(TypeError("a"))).fingerprint
    assert one.fingerprint != describe(_caught(lambda: int("a"))).fingerprint
    refused = [bad_row(f"column n: 'x{number}' is not INT").fingerprint for number in (1, 22)]
    assert refused[0] == refused[1] != bad_row("column m: 'x' is not INT").fingerprint


def test_what_is_remembered_of_places_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mldserver.handler.failure._REMEMBERED", 2)
    for number in range(5):
        module: dict[str, Any] = {}
        exec(f"class E{number}(Exception): pass\ndef fail(): raise E{number}", module)
        assert f"E{number}" in describe(_caught(module["fail"])).traceback
    from mldserver.handler import failure

    assert len(failure._frames) <= 2


def test_an_error_without_a_message_is_told_by_its_type() -> None:
    assert describe(raised(StopIteration())).error == "StopIteration"


def test_an_error_that_was_never_raised_has_no_frames() -> None:
    assert describe(ValueError("x")).traceback == "ValueError: x\n"


def test_an_error_that_cannot_print_itself_is_told_all_the_same() -> None:
    class Rude(Exception):
        def __str__(self) -> None:
            raise RuntimeError

    failure = describe(raised(Rude()))
    assert failure.error.endswith("Rude: (its message cannot be printed)")
    assert "Rude" in failure.traceback


def test_an_error_whose_traceback_cannot_be_printed_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr("mldserver.handler.failure.traceback.TracebackException", fail)
    assert describe(ValueError("x")).traceback == "ValueError: x\n"


def test_long_tracebacks_are_cut_in_the_middle() -> None:
    def deep(depth: int) -> None:
        def step() -> None:
            deep(depth - 1)

        if not depth:
            raise ValueError("x" * 100_000)
        step()

    text = describe(_caught(lambda: deep(200))).traceback
    assert len(text) < 21_000
    assert "\n…\n" in text


def test_a_message_is_cut_and_says_how_much_is_left_out() -> None:
    told = describe(ValueError("x" * 10_000 + "y" * 190_000_000)).error
    assert told == f"ValueError: {'x' * 10_000}… (190000000 more characters)"


def test_long_messages_of_an_errors_causes_are_cut_too() -> None:
    error = ValueError("x")
    error.__cause__ = KeyError("y" * 100_000)
    text = describe(error).traceback
    assert len(text) < 21_000
    assert text.endswith("ValueError: x\n")


def test_an_error_may_hold_anything_in_the_place_of_what_its_base_says() -> None:
    class Busy(Retry):
        def __init__(self, after: Any = None, records: Any = None) -> None:
            if after is not None:
                self.after = after
            if records is not None:
                self.records = records

    assert (describe(Busy()).after_seconds, describe(Busy()).records) == (None, None)
    assert describe(Busy(after=5)).after_seconds == 5
    for odd in ("5", -1, float("nan"), float("inf"), 10**400, object()):
        failure = describe(Busy(after=odd, records=odd if odd == "5" else 7))
        assert (failure.requested, failure.after_seconds) == (Requested.RETRY, None)
    assert describe(Busy(records=iter([1, 2]))).records == (1, 2)
    assert describe(Busy(records=7)).records is None


def test_an_error_whose_class_does_not_tell_its_name_is_told_all_the_same() -> None:
    class Nameless(type):
        @property
        def __module__(cls) -> str:
            raise SystemExit

    class Odd(Exception, metaclass=Nameless):
        pass

    failure = describe(Odd("why"))
    assert failure.error.endswith("Odd: why")
    assert failure.names[1:] == ("builtins.Exception", "builtins.BaseException")


def test_a_message_of_a_class_of_its_own_is_plain_text() -> None:
    class Text(str):
        __slots__ = ()

        def __getitem__(self, _: Any) -> Any:
            raise SystemExit

        def __len__(self) -> int:
            raise SystemExit

    class Odd(Exception):
        def __str__(self) -> str:
            return Text("why")

    assert describe(Odd()).error.endswith("Odd: why")


def test_the_servers_own_frames_are_left_out() -> None:
    def handler() -> None:
        raise ValueError("x")

    from mldserver.runtime.values import materialized

    def generator() -> Any:
        handler()
        yield

    text = describe(_caught(lambda: materialized(generator()))).traceback
    assert "in handler" in text
    refused = _caught(lambda: FailureRule("X", attempts=0))
    deepest = refused.__traceback__
    while deepest.tb_next is not None:
        deepest = deepest.tb_next
    assert "in __post_init__" in describe(refused.with_traceback(deepest)).traceback


def _caught(function: Any) -> Any:
    try:
        function()
    except Exception as error:  # noqa: BLE001  # see raised
        return error
    raise AssertionError
