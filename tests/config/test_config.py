from __future__ import annotations

import errno
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from support.generated import settings_page

from mldserver.config.locations import cache_folder
from mldserver.config.resolve import resolve
from mldserver.config.settings import REMOVED, Settings, specs
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.errors import ConfigError
from mldserver.protocol.connection import ConnectionLimits

pytestmark = pytest.mark.quick

DOCS = Path(__file__).parents[2] / "mldserver" / "docs"


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


# The table


def test_every_default_is_a_value_that_its_own_kind_reads_again() -> None:
    defaults = Settings(handler="a.b")
    for name, spec in specs().items():
        value = getattr(defaults, spec.field)
        assert spec.kind.parse(spec.kind.show(value)) == value, name


def test_a_durations_name_tells_its_unit_and_the_settings_name_does_not() -> None:
    for name, spec in specs().items():
        unit = spec.field.removesuffix("_").removeprefix(name)
        second = {"_ms": 1000, "_seconds": 1.0, "": None}[unit]
        assert (spec.kind.metavar == "DURATION") is bool(unit), name
        assert second is None or (spec.kind.parse("1 s"), type(spec.kind.parse("1 s"))) == (
            second,
            type(second),
        )


def test_every_setting_says_what_it_does() -> None:
    assert specs()["grace"].help == "How long a shutdown may take before it is forced."
    assert specs()["log_format"].help.endswith("(auto | json | pretty)")
    assert all(len(spec.help) > 10 for spec in specs().values())


def test_a_part_takes_its_section_as_it_is_beside_what_is_its_own() -> None:
    settings = resolved({"flush_interval": "2 s", "line_limit": "1 MiB"})
    assert settings.part(CoordinatorRules, disorder_ms=7) == CoordinatorRules(
        flush_interval_ms=2000, disorder_ms=7
    )
    assert settings.part(ConnectionLimits).line_limit == 1 << 20


def test_tests_replace_constants_of_parts() -> None:
    settings = replace(resolved({}), constants={"settle_time_ms": 5, "list_seconds": 1.0})
    assert settings.part(CoordinatorRules) == CoordinatorRules(settle_time_ms=5)
    assert settings.replaced("list_seconds", "poll_seconds") == {"list_seconds": 1.0}


def test_names_follow_from_the_handler() -> None:
    assert Settings(handler="handlers.departures").pipeline == "departures"
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


def test_without_any_home_directory_the_cache_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_uid: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert "no home directory for a cache" in refusal()
    assert resolved({"cache_dir": "/c"}).cache_dir == Path("/c")
    assert resolved(environ={"XDG_CACHE_HOME": "/c"}).cache_dir == Path("/c/mldserver")


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (8, 7), (None, 1)])
def test_one_core_is_left_to_the_server(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, workers: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert Settings().workers == workers


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
    assert (
        settings.attempts,
        settings.retry_base_seconds,
        settings.flush_interval_ms,
        settings.grace_seconds,
    ) == (
        6,
        3.0,
        9_000,
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


def test_what_is_left_out_has_its_default_and_only_the_command_line_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text("attempts = 4\n")
    environ = {"MLDSERVER_GRACE": "5"}

    def left_out(**options: str) -> Settings:
        given_options = {"handler": "a.b", **options}
        return resolve(given_options, environ=environ, folder=tmp_path, leave_out={"attempts", "grace"})

    settings = left_out()
    assert (settings.attempts, settings.grace_seconds, settings.origin("grace")) == (3, 30.0, "default")
    assert left_out(attempts="7").attempts == 7


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


def test_a_token_of_spark_connect_is_not_told() -> None:
    settings = resolved({"spark_master": "sc://h:1/;user_id=me;token=hush"})
    assert settings.spark_master == "sc://h:1/;user_id=me;token=hush"
    assert settings.given()["spark_master"].startswith("sc://h:1/;user_id=me;token=… (")


@pytest.mark.parametrize(
    "pair",
    [
        "spark.hadoop.fs.azure.account.key.me.dfs.core.windows.net=hush",
        "spark.hadoop.fs.azure.sas.box.me.blob.core.windows.net=hush",
        "spark.hadoop.fs.gs.auth.service.account.private.key=hush",
        "spark.driver.extraJavaOptions=-Djavax.net.ssl.keyStorePassword=hush",
        "sfPasswd=hush",
    ],
)
def test_no_value_that_opens_something_is_told(pair: str) -> None:
    for option in ("spark_conf", "sink_options"):
        settings = resolved({option: [pair, "x=shown"], "sink": "delta:/t"})
        assert "hush" not in str(settings.given())
        assert f"{pair.partition('=')[0]}=…; x=shown" in settings.given()[option]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sink_options": ["password=hush", "oops"]}, "sink_options .* the pair 2 is not key=value"),
        ({"spark_conf": "a.secret=hush;hush; b=c"}, "spark_conf .* the pair 2 is not key=value"),
        ({"spark_conf": {"a.secret": "hush", "b": []}}, "spark_conf .* the value of 'b' is neither"),
        ({"sink": "jbdc:postgresql://db/x?user=me&password=hush"}, r"sink = 'jbdc:.*password=…' \("),
        ({"out": "s4://key:hush@bucket/x"}, r"out = 's4://…@bucket/x' \("),
    ],
)
def test_a_refusal_tells_what_is_wrong_without_secrets(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        resolved(given)
    assert "hush" not in str(caught.value)


# What is refused


def test_an_unknown_key_is_refused_with_its_place_and_a_close_match(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text("\nline-limit = 5\n")
    told = refusal(folder=tmp_path)
    assert "mldserver.toml line 2: there is no setting 'line-limit'" in told
    assert "Did you mean 'line_limit'?" in told


def test_an_unknown_variable_is_refused_with_a_close_match() -> None:
    told = refusal(environ={"MLDSERVER_LISTN": "x"})
    assert "environment: there is no setting 'MLDSERVER_LISTN'" in told
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


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_removed_setting_is_refused_with_what_holds_instead(tmp_path: Path, name: str) -> None:
    assert name not in specs()
    (tmp_path / "mldserver.toml").write_text(f'attempts = 2\n{name} = "1 s"\n')
    told = refusal(folder=tmp_path)
    assert f"mldserver.toml line 2: the setting {name!r} was removed." in told
    assert REMOVED[name] in told
    variable = f"MLDSERVER_{name.upper()}"
    assert f"environment: the setting {variable!r} was removed." in refusal(environ={variable: "1 s"})


def test_the_master_has_a_setting_of_its_own() -> None:
    told = refusal(command_line={"spark_conf": ["spark.master=yarn"]})
    assert "spark_conf (command line --spark-conf) contains spark.master" in told


def test_a_connect_server_chooses_its_executors_python_itself() -> None:
    assert resolved({"spark_master": "spark://h:7077", "spark_python": "/py"}).spark_python == "/py"
    told = refusal(command_line={"spark_master": "sc://h", "spark_python": "/py"})
    assert "set PYSPARK_PYTHON where that server starts" in told


def test_no_handler_at_all_is_refused() -> None:
    assert "No handler was named" in refusal(command_line={"handler": None})


def test_flushes_that_the_buffer_cannot_hold_are_refused() -> None:
    told = refusal(command_line={"flush_bytes": "2 MiB", "buffer_bytes": "1 MiB"})
    assert "flush_bytes = 2 MiB (command line --flush-bytes) is above buffer_bytes = 1 MiB" in told


# Who may connect

CERTIFICATES = {"tls_certificate": "server.pem", "tls_client_ca": "ca.pem"}


@pytest.mark.parametrize("name", ["listen", "admin"])
@pytest.mark.parametrize("address", ["0.0.0.0:7070", "[::]:7070", "10.0.0.1:7070", "server.example:7070"])
def test_outside_loopback_both_sides_show_certificates_unless_it_is_said_in_so_many_words(
    name: str, address: str
) -> None:
    told = refusal(command_line={name: address})
    assert f"{name} = {address} (command line --{name}) is outside loopback" in told
    assert "is outside loopback" in refusal(command_line={name: address, "tls_certificate": "server.pem"})
    for more in (CERTIFICATES, {"insecure": "true"}):
        assert str(getattr(resolved({name: address, **more}), name)) == address


def test_tools_which_listen_nowhere_do_not_mind() -> None:
    settings = resolve({"listen": "0.0.0.0:1"}, environ={}, folder=Path("/nowhere"), handler_required=False)
    assert str(settings.listen) == "0.0.0.0:1"


@pytest.mark.parametrize(
    "address", ["127.0.0.1:7070", "127.8.9.1:0", "[::1]:1", "localhost:1", "unix:/run/m.sock"]
)
@pytest.mark.parametrize("name", ["listen", "admin"])
def test_on_loopback_and_unix_sockets_certificates_are_not_asked_for(name: str, address: str) -> None:
    assert str(getattr(resolved({name: address}), name)) == address


def test_listener_and_admin_endpoint_are_on_loopback_unless_they_are_elsewhere_or_nowhere() -> None:
    assert str(resolved().listen) == "127.0.0.1:7070"
    assert str(resolved().admin) == "127.0.0.1:7071"
    assert resolved({"admin": "none"}).admin is None


@pytest.mark.parametrize(
    ("name", "needs"),
    [("tls_key", "tls_certificate"), ("tls_client_ca", "tls_certificate"), ("tls_names", "tls_client_ca")],
)
def test_a_part_of_tls_without_what_it_belongs_to_is_refused(name: str, needs: str) -> None:
    assert f"{name} (command line --{name.replace('_', '-')}) means nothing without {needs}" in refusal(
        command_line={name: "x"}
    )


def test_shards_and_names_are_limited_by_patterns(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text('allow_shards = ["shardId-0*", "shardId-9"]\n')
    settings = resolved({"tls_names": ["kcl-?", "a, b"], **CERTIFICATES}, folder=tmp_path)
    assert settings.allow_shards == ("shardId-0*", "shardId-9")
    assert settings.tls_names == ("kcl-?", "a", "b")
    assert (resolved().allow_shards, resolved({"allow_shards": "any"}).allow_shards) == ((), ())
    assert "it names nothing" in refusal(command_line={"allow_shards": []})
    assert "it is not a list of names" in refusal(command_line={"allow_shards": 7})


# The page of settings


def test_the_page_has_a_row_for_every_setting_and_each_section_once() -> None:
    rows = settings_page().splitlines()
    for name in specs():
        assert sum(row.startswith(f"| `{name}` |") for row in rows) == 1
    assert "| `on_failure` | `dead_letter` |" in settings_page()
    titles = [row for row in rows if row.startswith("## ")]
    assert titles == [f"## {section}" for section in dict.fromkeys(spec.section for spec in specs().values())]


def test_the_page_is_what_the_settings_say() -> None:
    written = "PYTHONPATH=tests python3 -m support.generated"
    assert (DOCS / "settings.md").read_text("utf-8") == settings_page(), f"write it anew: {written}"


def test_a_folder_that_may_not_be_looked_into_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exists(_path: Path) -> bool:  # root may look anywhere, and tests may run as root
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", exists)
    told = refusal(folder=tmp_path)
    assert "mldserver.toml cannot be told: Permission denied. Start from a folder that you may read" in told
