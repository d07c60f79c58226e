from __future__ import annotations

import pickle
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.config import Settings, TcpAddress, UnixAddress, kinds, resolve, settings_table, specs
from mldserver.config.kinds import show_duration, show_size
from mldserver.config.settings import cache_folder, default_pipeline
from mldserver.errors import ConfigError

README = Path(__file__).parent.parent / "README.md"


def resolved(
    command_line: dict[str, object] | None = None,
    *,
    environ: dict[str, str] | None = None,
    folder: Path = Path("/nonexistent"),
    config: Path | None = None,
) -> Settings:
    given_options: dict[str, object] = {"handler": "handlers.departures"} | (command_line or {})
    return resolve(given_options, environ=environ or {}, folder=folder, config=config)


def refusal(**arguments: object) -> str:
    with pytest.raises(ConfigError) as refused:
        resolved(**arguments)  # type: ignore[arg-type]  # passed on as they are
    return str(refused.value)


# What values may look like


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
    kind = kinds.address()
    assert kind.parse(raw) == expected
    assert kind.parse(kind.show(kind.parse(raw))) == expected


@pytest.mark.parametrize(
    "raw", ["", "7070", "host", "host:", "host:70000", "host:x", "::1:7070", 7070, "h:-1", "h:٣"]
)
def test_impossible_addresses_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match=r"it |IPv6"):
        kinds.address().parse(raw)


def test_a_unix_address_without_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="path is missing"):
        kinds.address().parse("unix:")


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
    "raw", ["", "MiB", "1 MiBs", "-1", "1 m", "0", 0, -5, True, None, float("inf"), float("nan"), [1]]
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
    assert kinds.duration().parse(raw) == expected


@pytest.mark.parametrize(
    "raw", ["", "soon", "-1 s", -1, 0, "0", "0 s", 0.0001, True, None, float("inf"), float("nan")]
)
def test_impossible_durations_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match=r"it is|duration"):
        kinds.duration().parse(raw)


def test_zero_is_a_duration_only_where_it_makes_sense() -> None:
    assert kinds.duration(zero=True).parse("0 s") == 0.0


@given(st.integers(1, 10**9))
def test_a_duration_survives_being_shown(ms: int) -> None:
    assert kinds.duration().parse(show_duration(ms / 1000)) == ms / 1000


def test_durations_are_shown_in_their_largest_unit() -> None:
    assert [show_duration(value) for value in (0, 0.1, 5, 60, 3600, 86_400, 90)] == [
        "0 s",
        "100 ms",
        "5 s",
        "1 min",
        "1 h",
        "1 day",
        "90 s",
    ]


@pytest.mark.parametrize(("raw", "expected"), [("3", 3), (3, 3), (" 7 ", 7)])
def test_counts_are_whole_numbers(raw: object, expected: int) -> None:
    assert kinds.count(at_least=1).parse(raw) == expected


@pytest.mark.parametrize("raw", ["", "0", 0, "1.5", 1.5, True, "-1", "x", "²"])
def test_impossible_counts_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="it is"):
        kinds.count(at_least=1).parse(raw)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [("true", True), ("No", False), ("on", True), ("0", False), (True, True), (False, False)],
)
def test_flags_are_yes_or_no(raw: object, expected: bool) -> None:
    assert kinds.flag().parse(raw) is expected
    assert kinds.flag().show(expected) == str(expected).lower()


@pytest.mark.parametrize("raw", ["", "maybe", 1, None])
def test_impossible_flags_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="it is"):
        kinds.flag().parse(raw)


def test_choices_forgive_case_and_hyphens() -> None:
    kind = kinds.choice("dead_letter", "halt")
    assert kind.parse("Dead-Letter") == "dead_letter"
    with pytest.raises(ValueError, match="none of the choices"):
        kind.parse("stop")


@pytest.mark.parametrize("raw", ["a", "a.b", "a.b:C", "a.b:C.d", "über.mäßig"])
def test_dotted_paths_are_modules_or_attributes(raw: str) -> None:
    assert kinds.dotted_path().parse(raw) == raw


@pytest.mark.parametrize("raw", ["a..b", ".a", "a:", ":C", "a b", "1a", "a:b:c", ""])
def test_impossible_dotted_paths_are_refused(raw: str) -> None:
    with pytest.raises(ValueError, match="it is"):
        kinds.dotted_path().parse(raw)


@pytest.mark.parametrize("raw", ["handlers/departures.py", "handlers/departures", "departures-x.py"])
def test_a_file_instead_of_a_dotted_path_is_explained(raw: str) -> None:
    with pytest.raises(ValueError, match="file's path is none"):
        kinds.dotted_path().parse(raw)


@pytest.mark.parametrize("raw", ["a/b", "..", ".hidden", "a b", "-x", ""])
def test_names_are_safe_as_directories(raw: str) -> None:
    with pytest.raises(ValueError, match="it "):
        kinds.name().parse(raw)


def test_folders_are_local_paths() -> None:
    kind = kinds.folder()
    assert kind.parse("~/out") == Path.home() / "out"
    assert kind.parse(Path("x")) == Path("x")
    with pytest.raises(ValueError, match="URL"):
        kind.parse("s3://bucket/out")


def test_pairs_come_as_text_as_a_list_or_as_a_table() -> None:
    kind = kinds.pairs()
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
        kinds.pairs().parse(raw)


def test_optional_values_may_be_none() -> None:
    kind = kinds.optional(kinds.duration())
    assert kind.parse("None") is None
    assert kind.parse(None) is None
    assert kind.parse("5 s") == 5.0
    assert (kind.show(None), kind.show(5.0)) == ("none", "5 s")


# The table


def test_every_default_is_a_value_that_its_own_kind_reads_again() -> None:
    defaults = Settings(handler="a.b")
    for name, spec in specs().items():
        value = getattr(defaults, name)
        assert spec.kind.parse(spec.kind.show(value)) == value, name


def test_names_follow_from_the_handler() -> None:
    assert default_pipeline("handlers.departures") == "departures"
    assert default_pipeline("shop.orders:Orders") == "Orders"
    settings = Settings(handler="shop.orders:Orders")
    assert (settings.pipeline, settings.out) == ("Orders", Path("out/Orders"))
    assert Settings().pipeline == "pipeline"


def test_what_was_given_is_not_derived() -> None:
    settings = resolved({"pipeline": "p", "out": "."})
    assert (settings.pipeline, settings.out) == ("p", Path())


def test_the_cache_lies_where_xdg_says() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/mldserver")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "mldserver"
    assert resolved(environ={"XDG_CACHE_HOME": "/c"}).cache_dir == Path("/c/mldserver")
    assert Settings().cache_dir.name == "mldserver"


def test_settings_survive_pickling() -> None:
    settings = resolved({"spark_conf": ["a=b"]})
    assert pickle.loads(pickle.dumps(settings)) == settings


# Where values come from


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text('attempts = 4\nretry_base = "2 s"\nflush_interval = 9\n')
    settings = resolved(
        {"attempts": "6", "grace": None},
        environ={"MLDSERVER_ATTEMPTS": "5", "MLDSERVER_RETRY_BASE": "3 s", "PATH": "/bin"},
        folder=tmp_path,
    )
    assert (settings.attempts, settings.retry_base, settings.flush_interval, settings.grace) == (
        6,
        3.0,
        9.0,
        30.0,
    )
    assert [settings.origin(name) for name in ("attempts", "retry_base", "flush_interval", "grace")] == [
        "command line --attempts",
        "environment MLDSERVER_RETRY_BASE",
        "mldserver.toml line 3",
        "default",
    ]


def test_the_file_is_the_one_named_first(tmp_path: Path) -> None:
    for number, name in enumerate(("mldserver.toml", "variable.toml", "option.toml"), 11):
        (tmp_path / name).write_text(f"attempts = {number}\n")
    environ = {"MLDSERVER_CONFIG": "variable.toml"}
    assert resolved(folder=tmp_path).attempts == 11
    assert resolved(folder=tmp_path, environ=environ).attempts == 12
    assert resolved(folder=tmp_path, environ=environ, config=tmp_path / "option.toml").attempts == 13


def test_tables_and_dotted_keys_give_spark_properties(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text('[spark_conf]\n"spark.a" = "1"\nspark.b.c = 2\n')
    settings = resolved(folder=tmp_path)
    assert settings.spark_conf == {"spark.a": "1", "spark.b.c": "2"}
    assert settings.origin("spark_conf") == "mldserver.toml line 1"


def test_a_line_that_is_not_certain_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text('stream = """\nattempts = 5\n"""\nattempts = 6\n')
    assert resolved(folder=tmp_path).origin("attempts") == "mldserver.toml"


def test_an_empty_variable_counts_as_not_set() -> None:
    assert resolved(environ={"MLDSERVER_REGION": " "}).region is None


def test_what_was_given_is_told_without_secrets() -> None:
    settings = resolved(
        {"spark_conf": ["spark.hadoop.fs.s3a.secret.key=hush", "spark.x=1"], "grace": "1 min"}
    )
    assert settings.given() == {
        "handler": "handlers.departures (command line --handler)",
        "grace": "1 min (command line --grace)",
        "spark_conf": "spark.hadoop.fs.s3a.secret.key=…; spark.x=1 (command line --spark-conf)",
    }


# What is refused


def test_an_unknown_key_is_refused_with_its_place_and_a_close_match(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text("\nline-limit = 5\n")
    told = refusal(folder=tmp_path)
    assert "mldserver.toml line 2: there is no setting 'line-limit'" in told
    assert "Did you mean 'line_limit'?" in told


def test_an_unknown_variable_is_refused_with_a_close_match() -> None:
    told = refusal(environ={"MLDSERVER_LISTN": "x"})
    assert "environment MLDSERVER_LISTN" in told
    assert "Did you mean 'MLDSERVER_LISTEN'?" in told


def test_where_nothing_is_close_the_help_is_named() -> None:
    assert "mldserver serve --help" in refusal(environ={"MLDSERVER_QQQQQQQQQQ": "x"})


def test_a_bad_value_is_refused_with_its_origin_and_what_is_allowed() -> None:
    told = refusal(environ={"MLDSERVER_ON_FAILURE": "explode"})
    assert "on_failure = 'explode' (environment MLDSERVER_ON_FAILURE)" in told
    assert "Allowed is dead_letter | skip | halt." in told


def test_damaged_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text("attempts = 1\nthis is none\n")
    assert "line 2" in refusal(folder=tmp_path)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_bytes(b"\xff\xfe")
    assert "not valid TOML" in refusal(folder=tmp_path)


def test_a_named_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(config=tmp_path / "none.toml")


def test_no_handler_at_all_is_refused() -> None:
    assert "No handler was named" in refusal(command_line={"handler": None})


@pytest.mark.parametrize(
    ("low", "high"),
    [("retry_base", "retry_cap"), ("window_retry_base", "window_retry_cap"), ("flush_bytes", "buffer_bytes")],
)
def test_a_lower_bound_above_its_upper_bound_is_refused(low: str, high: str) -> None:
    told = refusal(command_line={low: "20", high: "10"})
    assert f"{low} = " in told
    assert f"is above {high} = " in told


# The README


def test_the_table_has_a_row_for_every_setting() -> None:
    rows = settings_table().splitlines()
    for name in specs():
        assert sum(row.startswith(f"| `{name}` |") for row in rows) == 1
    assert "| `on_failure` | `dead_letter` |" in settings_table()


def test_the_module_prints_the_table() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "mldserver.config"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == settings_table()


def test_the_readme_holds_the_table() -> None:
    _, marker, rest = README.read_text("utf-8").partition("<!-- settings -->")
    if not marker:
        pytest.skip("the README has no settings yet")
    assert rest.partition("<!-- /settings -->")[0].strip() == settings_table().strip()
