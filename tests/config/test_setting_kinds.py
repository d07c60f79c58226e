"""What values of settings may look like: read from text and TOML, and shown again."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.config import kinds, locations
from mldserver.config.kinds import TcpAddress, UnixAddress, is_loopback, show_duration, show_size

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("127.0.0.1:7070", TcpAddress("127.0.0.1", 7070)),
        (":0", TcpAddress("127.0.0.1", 0)),
        ("0.0.0.0:80", TcpAddress("0.0.0.0", 80)),
        ("[::1]:7070", TcpAddress("::1", 7070)),
        ("localhost:7070", TcpAddress("localhost", 7070)),
        ("unix:/run/m.sock", UnixAddress(Path("/run/m.sock"))),
        ("unix:///run/m.sock", UnixAddress(Path("/run/m.sock"))),
        ("unix:relative.sock", UnixAddress(Path("relative.sock"))),
    ],
)
def test_addresses_are_read_and_shown_again(raw: str, expected: object) -> None:
    kind = kinds.address
    assert kind.parse(raw) == expected
    assert kind.parse(kind.show(kind.parse(raw))) == expected


@pytest.mark.parametrize(
    "raw", ["", "7070", "host", "host:", "host:70000", "host:x", "::1:7070", 7070, "h:-1", "h:٣"]
)
def test_impossible_addresses_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match=r"it |IPv6"):
        kinds.address.parse(raw)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ("http://localhost:7070", "it is a URL"),
        ("localhost:7070:7071", "a host has no ':'"),
        ("::1:7070", "an IPv6 host needs brackets"),
        ("..:7070", "its host is not a name"),
        (f"{'a' * 64}.example:7070", "its host is not a name"),
    ],
)
def test_a_host_that_can_be_none_is_told_what_is_wrong(raw: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        kinds.address.parse(raw)


def test_a_unix_address_without_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="path is missing"):
        kinds.address.parse("unix:")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("256 MiB", 256 * 2**20),
        ("1.5 KiB", 1536),
        ("2kb", 2000),
        ("1 GB", 10**9),
        ("3 TiB", 3 * 2**40),
        ("100", 100),
        ("100 B", 100),
        (4096, 4096),
    ],
)
def test_sizes_are_bytes(raw: object, expected: int) -> None:
    assert kinds.size().parse(raw) == expected


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "MiB",
        "1 MiBs",
        "-1",
        "1 m",
        "0",
        0,
        -5,
        True,
        None,
        float("inf"),
        float("nan"),
        [1],
        10**400,
        2.0**63,
    ],
)
def test_impossible_sizes_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="it is"):
        kinds.size().parse(raw)


@given(st.integers(1, 2**62))
def test_a_size_survives_being_shown(value: int) -> None:
    shown = show_size(value)
    number, unit = shown.split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert int(number) * factor == value


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("30 s", 30.0),
        ("10 minutes", 600.0),
        ("500ms", 0.5),
        ("45", 45.0),
        ("0.25", 0.25),
        (5, 5.0),
        (0.1, 0.1),
        ("1 day", 86_400.0),
    ],
)
def test_durations_are_seconds(raw: object, expected: float) -> None:
    assert kinds.duration_seconds().parse(raw) == expected


@pytest.mark.parametrize(
    "raw", ["", "soon", "-1 s", -1, 0, "0", "0 s", 0.0001, True, None, float("inf"), float("nan")]
)
def test_impossible_durations_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match=r"it is|duration"):
        kinds.duration_seconds().parse(raw)


def test_zero_is_a_duration_only_where_it_makes_sense() -> None:
    assert kinds.duration_ms(zero=True).parse("0 s") == 0


@given(st.integers(1, 10**9))
def test_a_duration_survives_being_shown(ms: int) -> None:
    assert kinds.duration_ms().parse(show_duration(ms)) == ms


def test_durations_are_shown_in_their_largest_unit() -> None:
    assert [show_duration(1000 * s) for s in (0, 5, 60, 3600, 86_400, 691_200, 90)] == [
        "0 s",
        "5 s",
        "1 min",
        "1 h",
        "1 day",
        "8 days",
        "90 s",
    ]


@pytest.mark.parametrize(("raw", "expected"), [("3", 3), (3, 3), (" 7 ", 7)])
def test_counts_are_whole_numbers(raw: object, expected: int) -> None:
    assert kinds.count.parse(raw) == expected


@pytest.mark.parametrize("raw", ["", "0", 0, "1.5", 1.5, True, "-1", "x", "²", 2**63, "9" * 400])
def test_impossible_counts_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="it is"):
        kinds.count.parse(raw)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [("true", True), ("No", False), ("on", True), ("0", False), (True, True), (False, False)],
)
def test_flags_are_yes_or_no(raw: object, expected: bool) -> None:
    assert kinds.flag.parse(raw) is expected
    assert kinds.flag.show(expected) == str(expected).lower()


@pytest.mark.parametrize("raw", ["", "maybe", 1, None])
def test_impossible_flags_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="it is"):
        kinds.flag.parse(raw)


def test_choices_forgive_case_and_hyphens() -> None:
    kind = kinds.choice(("dead_letter", "halt"))
    assert kind.parse("Dead-Letter") == "dead_letter"
    with pytest.raises(ValueError, match="none of the choices"):
        kind.parse("stop")


@pytest.mark.parametrize("raw", ["a", "a.b", "a.b:C", "a.b:C.d", "über.mäßig"])
def test_dotted_paths_are_modules_or_attributes(raw: str) -> None:
    assert kinds.dotted_path.parse(raw) == raw


@pytest.mark.parametrize("raw", ["a..b", ".a", "a:", ":C", "a b", "1a", "a:b:c", ""])
def test_impossible_dotted_paths_are_refused(raw: str) -> None:
    with pytest.raises(ValueError, match="it is"):
        kinds.dotted_path.parse(raw)


@pytest.mark.parametrize("raw", ["handlers/departures.py", "handlers/departures", "departures-x.py"])
def test_a_file_instead_of_a_dotted_path_is_explained(raw: str) -> None:
    with pytest.raises(ValueError, match="file's path is none"):
        kinds.dotted_path.parse(raw)


@pytest.mark.parametrize("raw", ["a/b", "..", ".hidden", "a b", "-x", ""])
def test_names_are_safe_as_directories(raw: str) -> None:
    with pytest.raises(ValueError, match="it "):
        kinds.name.parse(raw)


def test_folders_are_local_paths() -> None:
    kind = kinds.folder
    assert kind.parse("~/out") == Path.home() / "out"
    assert kind.parse(Path("x")) == Path("x")
    with pytest.raises(ValueError, match="URL"):
        kind.parse("s3://bucket/out")


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (kinds.folder, "~nosuchuser/x"),
        (kinds.address, "unix:~nosuchuser/x"),
        (locations.out, "~nosuchuser/x"),
        (locations.ledger, "sqlite:~nosuchuser/x"),
        (locations.dead_letters, "jsonl:~nosuchuser/x"),
        (locations.sink, "delta:~nosuchuser/x"),
    ],
)
def test_the_home_of_a_user_who_does_not_exist_is_refused(kind: kinds.Kind[Any], raw: str) -> None:
    with pytest.raises(ValueError, match="there is no home directory for ~nosuchuser"):
        kind.parse(raw)


def test_pairs_come_as_text_as_a_list_or_as_a_table() -> None:
    kind = kinds.pairs
    assert kind.parse("a=1; b=x=y;") == {"a": "1", "b": "x=y"}
    assert kind.parse(["a=1,2", "b="]) == {"a": "1,2", "b": ""}
    assert kind.parse({"spark": {"ui": {"port": 4040, "enabled": True}}, "x.y": "z"}) == {
        "spark.ui.port": "4040",
        "spark.ui.enabled": "true",
        "x.y": "z",
    }
    assert kind.parse(kind.show({"a": "1", "b": "2"})) == {"a": "1", "b": "2"}


@pytest.mark.parametrize("raw", ["a", "=1", 5, {"a": [1]}, {"a": datetime(2026, 1, 1, tzinfo=UTC)}, ["a"]])
def test_impossible_pairs_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match=r"key=value|neither"):
        kinds.pairs.parse(raw)


def test_optional_values_may_be_none() -> None:
    kind = kinds.optional(kinds.duration_seconds())
    assert kind.parse("None") is None
    assert kind.parse(None) is None
    assert kind.parse("5 s") == 5.0
    assert (kind.show(None), kind.show(5.0)) == ("none", "5 s")


def test_a_word_may_stand_for_itself() -> None:
    kind = kinds.optional(kinds.or_word(kinds.duration_seconds(), "by_size", "by_size"))
    assert [kind.parse(raw) for raw in ("5 s", "By-Size", "none", 7)] == [5.0, "by_size", None, 7.0]
    assert [kind.show(value) for value in (5.0, "by_size", None)] == ["5 s", "by_size", "none"]
    assert kind.allowed.endswith(", or by_size, or none")


@pytest.mark.parametrize(
    "master",
    [
        *("local", "local[4]", "local[*]", "local[2,3]", "local-cluster[2,1,1024]", "yarn"),
        *("spark://h:7077", "spark://a.b:7077,10.0.0.1:7077", "spark://[::1]:7077"),
        *("k8s://https://h:6443", "k8s://kubernetes.default.svc", "k8s://http://127.0.0.1:8001/path"),
        *(
            "sc://h",
            "sc://h:15002",
            "sc://h:15002/",
            "sc://h:443/;use_ssl=true;token=abc",
            "sc://h/;user_id=me",
        ),
    ],
)
def test_a_master_is_what_spark_takes(master: str) -> None:
    assert locations.spark_master.parse(f" {master} ") == master


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        *((raw, "not a master that Spark knows") for raw in ("foo", "locale[2]", "yarn-client", "sc://")),
        ("foo://x;token=hush", "not a master that Spark knows"),
        ("", "empty"),
    ],
)
def test_a_master_of_an_unknown_kind_is_refused(raw: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        locations.spark_master.parse(raw)
    assert "hush" not in str(caught.value)


def test_loopback_is_told_from_its_looks() -> None:
    names = ("localhost", "127.0.0.1", "127.1.2.3", "::1", "10.0.0.1", "0.0.0.0", "example.org", "")
    assert [name for name in names if is_loopback(name)] == ["localhost", "127.0.0.1", "127.1.2.3", "::1"]
