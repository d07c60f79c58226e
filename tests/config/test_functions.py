"""Several functions in one settings file or on one command line."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from mldserver.config.kinds import TcpAddress
from mldserver.config.locations import RemoteOut
from mldserver.config.resolve import resolve, resolve_functions
from mldserver.config.settings import Settings, specs
from mldserver.errors import ConfigError

pytestmark = pytest.mark.quick

MIB = 2**20
TWO = """\
attempts = 5

[functions.orders]
handler = "shop.orders:Orders"
listen = ":7001"
attempts = 7

[functions.departures]
handler = "handlers.departures"
listen = ":7002"
"""


def functions(
    folder: Path,
    *handlers: str,
    environ: dict[str, str] | None = None,
    **options: object,
) -> dict[str, Settings]:
    all_settings = resolve_functions(options, environ=environ or {}, folder=folder, handlers=handlers)
    return {settings.pipeline: settings for settings in all_settings}


def written(folder: Path, text: str, **files: str) -> Path:
    (folder / "mldserver.toml").write_text(text)
    for name, content in files.items():
        (folder / "functions.d").mkdir(exist_ok=True)
        (folder / "functions.d" / f"{name}.toml").write_text(content)
    return folder


def refusal(folder: Path, *handlers: str, environ: dict[str, str] | None = None, **options: object) -> str:
    with pytest.raises(ConfigError) as refused:
        functions(folder, *handlers, environ=environ, **options)
    return str(refused.value)


def two(more: str = "", orders: str = "", departures: str = "") -> str:
    """Return two tables that fit together, with further lines at the top and in each table."""
    return (
        f'{more}\n[functions.orders]\nhandler = "a.orders"\nlisten = ":7001"\n{orders}\n'
        f'[functions.departures]\nhandler = "a.departures"\n{departures}\n'
    )


# Where values come from


def test_each_table_is_a_function_named_by_the_table(tmp_path: Path) -> None:
    given = functions(written(tmp_path, TWO))
    assert list(given) == ["orders", "departures"]
    assert given["orders"].handler == "shop.orders:Orders"
    assert given["departures"].listen == TcpAddress("127.0.0.1", 7002)


def test_a_table_beats_the_command_line_beats_variables_beat_the_top_level(tmp_path: Path) -> None:
    folder = written(tmp_path, TWO)
    assert [each.attempts for each in functions(folder).values()] == [7, 5]
    environ = {"MLDSERVER_ATTEMPTS": "6"}
    assert [each.attempts for each in functions(folder, environ=environ).values()] == [7, 6]
    assert [each.attempts for each in functions(folder, environ=environ, attempts="8").values()] == [7, 8]


@pytest.mark.parametrize("given", list(product([False, True], repeat=4)))
@pytest.mark.parametrize("name", ["attempts", "buffer_bytes", "workers", "out"])
def test_the_nearest_place_that_gives_a_value_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, given: tuple[bool, ...]
) -> None:
    """The four places are the top level, a variable, the command line and the table of one of two functions."""
    monkeypatch.setattr("os.cpu_count", lambda: 9)
    values = [f"x{n}" for n in range(4)] if name == "out" else [str(n * 2**30) for n in range(1, 5)]
    top, variable, option, own = [
        value if is_given else None for value, is_given in zip(values, given, strict=True)
    ]
    is_number = name in {"attempts", "workers"}
    lines = [value and f"{name} = {value if is_number else json.dumps(value)}" for value in (top, own)]
    folder = written(tmp_path, two(lines[0] or "", orders=lines[1] or ""))
    both = functions(folder, environ={f"MLDSERVER_{name.upper()}": variable or ""}, **{name: option})
    common = option or variable or top
    default = {"attempts": "3", "buffer_bytes": str(512 * MIB), "workers": "8", "out": "out"}[name]
    for function, settings in both.items():
        is_own = own is not None and function == "orders"
        expected = own if is_own else common or default
        users = 1 if own else 2
        if name == "out":
            assert settings.out == (Path(expected) if is_own else Path(expected) / function)
            continue
        is_divided = not is_own and (name == "buffer_bytes" or (name == "workers" and common is None))
        assert getattr(settings, name) == int(expected) // (users if is_divided else 1)


@pytest.mark.parametrize(
    ("top", "table", "reads"),
    [
        ('stream = "s"', 'source = "dynamodb://orders"', ("dynamodb://orders", None)),
        ('source = "dynamodb://orders"', 'stream = "s"', ("mld", "s")),
        ('stream = "s"', 'source = "mld"', ("mld", "s")),
    ],
)
def test_a_function_s_own_stream_or_source_replaces_the_common_one_of_either_kind(
    tmp_path: Path, top: str, table: str, reads: tuple[str, str | None]
) -> None:
    orders = functions(written(tmp_path, two(top, orders=table)))["orders"]
    assert (str(orders.source), orders.stream) == reads


def test_origins_name_file_line_and_table(tmp_path: Path) -> None:
    given = functions(written(tmp_path, TWO, trips='handler = "a.trips"\nlisten = ":7003"\n'))
    assert given["orders"].origin("attempts") == "mldserver.toml line 6 [functions.orders]"
    assert given["departures"].origin("attempts") == "mldserver.toml line 1"
    assert given["trips"].origin("listen") == "functions.d/trips.toml line 2"
    assert given["orders"].own == {"handler", "listen", "attempts"}


def test_a_file_beside_the_settings_file_is_a_function_even_without_one(tmp_path: Path) -> None:
    (tmp_path / "functions.d").mkdir()
    (tmp_path / "functions.d" / "trips.toml").write_text('handler = "a.trips"\n')
    (tmp_path / "functions.d" / "notes.txt").write_text("not TOML")
    (settings,) = functions(tmp_path).values()
    assert (settings.pipeline, settings.handler) == ("trips", "a.trips")


def test_the_files_of_functions_lie_beside_the_settings_file(tmp_path: Path) -> None:
    written(tmp_path, "", trips='handler = "a.trips"\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (settings,) = resolve_functions(
        {}, environ={"MLDSERVER_CONFIG": str(tmp_path / "mldserver.toml")}, folder=elsewhere
    )
    assert settings.pipeline == "trips"


def test_settings_files_of_several_servers_have_different_folders_of_functions(tmp_path: Path) -> None:
    folder = written(tmp_path, "", trips='handler = "a.trips"\n')
    (folder / "shop.toml").write_text("attempts = 4\n")
    (folder / "shop.functions.d").mkdir()
    (folder / "shop.functions.d" / "orders.toml").write_text('handler = "a.orders"\nstream = "s"')
    (settings,) = resolve_functions({}, environ={}, folder=folder, config=folder / "shop.toml")
    assert (settings.pipeline, settings.attempts) == ("orders", 4)
    assert settings.origin("stream") == "shop.functions.d/orders.toml line 2"


def test_settings_of_the_server_are_the_same_for_all(tmp_path: Path) -> None:
    given = functions(written(tmp_path, two('admin = ":7099"\nlog_level = "debug"')), grace="1 min")
    for name in (spec.field for spec in specs().values() if spec.server):
        assert len({str(getattr(settings, name)) for settings in given.values()}) == 1, name
    assert given["orders"].grace_seconds == 60


@pytest.mark.parametrize("name", [spec.name for spec in specs().values() if spec.server])
def test_a_setting_of_the_server_cannot_stand_in_a_table(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path, two(orders=f'{name} = "x"'))
    assert refusal(folder) == (
        f"mldserver.toml line 5 [functions.orders]: {name} is a setting of the server, not of the function orders. "
        "Move it to the top level of mldserver.toml."
    )


def test_constants_of_a_function_are_its_settings(tmp_path: Path) -> None:
    given = functions(written(tmp_path, two(orders="[functions.orders.settings]\nthreshold = 20")))
    assert given["orders"].handler_settings == {"threshold": "20"}
    assert given["orders"].origin("handler_settings") == "mldserver.toml line 5 [functions.orders]"
    assert given["departures"].handler_settings == {}


def test_a_function_takes_secrets_from_variables(tmp_path: Path) -> None:
    orders = 'sink = "jdbc:postgresql://db/shop"\nsink_table = "t"\nsink_options = { user = "u", password = "${DB_WORD}" }'
    folder = written(tmp_path, "", orders=f'handler = "a.orders"\n{orders}\n')
    (settings,) = functions(folder, environ={"DB_WORD": "hush"}).values()
    assert settings.sink_options == {"user": "u", "password": "hush"}
    assert settings.origin("sink_options") == "functions.d/orders.toml line 4 and environment DB_WORD"
    assert (settings.secrets(), settings.files_with_secrets()) == ({"hush"}, set())
    assert refusal(folder).startswith(
        "sink_options (functions.d/orders.toml line 4) needs the environment variable DB_WORD, which is not set."
    )


def test_files_that_hold_secrets_are_known(tmp_path: Path) -> None:
    secret = 'sink = "jdbc:postgresql://db/shop"\nsink_table = "t"\nsink_options = { password = "hush" }'
    given = functions(
        written(tmp_path, two(orders=secret), trips=f'handler = "a.t"\nlisten = ":1"\n{secret}')
    )
    assert {name: settings.files_with_secrets() for name, settings in given.items()} == {
        "orders": {tmp_path / "mldserver.toml"},
        "departures": set(),
        "trips": {tmp_path / "functions.d" / "trips.toml"},
    }


# Folders and shares


@pytest.mark.parametrize(
    ("base", "folders"),
    [
        (None, [Path("out/orders"), Path("out/departures")]),
        ("/srv", [Path("/srv/orders"), Path("/srv/departures")]),
        ("s3://b", [RemoteOut("s3://b/orders"), RemoteOut("s3://b/departures")]),
        (
            "s3://b/x/?region=r",
            [RemoteOut("s3://b/x/orders?region=r"), RemoteOut("s3://b/x/departures?region=r")],
        ),
    ],
)
def test_out_is_the_folder_of_the_functions_folders(
    tmp_path: Path, base: str | None, folders: list[object]
) -> None:
    ledger = 'ledger = "dynamodb://ledgers"'
    given = functions(written(tmp_path, two(ledger)), out=base)
    assert [settings.out for settings in given.values()] == folders
    own = functions(written(tmp_path, two(ledger, orders='out = "elsewhere"')), out=base)
    assert [settings.out for settings in own.values()] == [Path("elsewhere"), folders[1]]


def test_limits_of_the_server_are_divided_among_functions_without_their_own(tmp_path: Path) -> None:
    text = two('buffer_bytes = "300 MiB"', orders='state_bytes = "100 MiB"')
    given = functions(written(tmp_path, text, trips='handler = "a.t"\nlisten = ":1"\n'))
    assert [settings.buffer_bytes // MIB for settings in given.values()] == [100] * 3
    assert [settings.state_bytes // MIB for settings in given.values()] == [100, 128, 128]
    assert {settings.segment_disk_bytes for settings in given.values()} == {
        Settings().segment_disk_bytes // 3
    }
    assert given["trips"].origin("buffer_bytes") == "mldserver.toml line 1, divided among 3 functions"
    assert given["trips"].origin("state_bytes") == "default, divided among 2 functions"


def test_rows_are_written_before_a_divided_buffer_is_full(tmp_path: Path) -> None:
    given = functions(written(tmp_path, two('buffer_bytes = "100 MiB"')))
    assert {settings.flush_bytes for settings in given.values()} == {25 * MIB}
    assert "is above buffer_bytes = 50 MiB (mldserver.toml line 2, divided among 2 functions)" in refusal(
        written(tmp_path, two('flush_bytes = "60 MiB"\nbuffer_bytes = "100 MiB"'))
    )


@pytest.mark.parametrize(("cores", "workers"), [(2, [1, 1]), (8, [3, 3])])
def test_workers_are_divided_unless_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, workers: list[int]
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert [each.workers for each in functions(written(tmp_path, two())).values()] == workers
    assert [each.workers for each in functions(tmp_path, workers="4").values()] == [4, 4]
    given = functions(written(tmp_path, two(orders="workers = 2")))
    assert [each.workers for each in given.values()] == [2, cores - 1]


def test_a_single_table_has_the_whole_server(tmp_path: Path) -> None:
    (settings,) = functions(written(tmp_path, '[functions.orders]\nhandler = "a.b"\n')).values()
    usual = Settings(handler="a.b", pipeline="orders", cache_dir=settings.cache_dir)
    assert settings == usual


# One function as ever


def test_one_handler_has_the_settings_that_it_always_had(tmp_path: Path) -> None:
    folder = written(tmp_path, 'out = "data"\nattempts = 4\n')
    (several,) = resolve_functions({"grace": "9 s"}, environ={}, folder=folder, handlers=["a.b"])
    one = resolve({"handler": "a.b", "grace": "9 s"}, environ={}, folder=folder)
    assert (several, several.origins, several.out) == (one, one.origins, Path("data"))
    (of_file,) = resolve_functions({}, environ={"MLDSERVER_HANDLER": "a.b"}, folder=folder)
    assert of_file.origin("handler") == "environment MLDSERVER_HANDLER"


# Several handlers on the command line


def test_handlers_of_the_command_line_are_functions_with_their_own_ports(tmp_path: Path) -> None:
    given = functions(tmp_path, "a.orders", "b:Trips", "c.other", out="/srv")
    assert [(name, str(each.out), str(each.listen)) for name, each in given.items()] == [
        ("orders", "/srv/orders", "127.0.0.1:7070"),
        ("Trips", "/srv/Trips", "127.0.0.1:7080"),
        ("other", "/srv/other", "127.0.0.1:7090"),
    ]
    moved = functions(tmp_path, "a.orders", "b:Trips", environ={"MLDSERVER_LISTEN": "[::1]:8000"})
    assert [str(each.listen) for each in moved.values()] == ["[::1]:8000", "[::1]:8010"]
    free = functions(tmp_path, "a.orders", "b:Trips", listen=":0")
    assert [str(each.listen) for each in free.values()] == ["127.0.0.1:0"] * 2


def test_handlers_of_the_command_line_replace_the_one_of_a_variable(tmp_path: Path) -> None:
    assert list(functions(tmp_path, "a.b", "c.d", environ={"MLDSERVER_HANDLER": "x.y"})) == ["b", "d"]


# Refused


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            two(departures='listen = ":7001"'),
            "The functions orders and departures have the same listen: 127.0.0.1:7001 (mldserver.toml line 8 [functions.departures]).",
        ),
        (
            two(orders='out = "x/same"', departures='out = "x/../x/same"'),
            "The functions orders and departures have the same out: ",
        ),
        (
            two(orders='ledger = "sqlite:/l"', departures='ledger = "sqlite:/l"'),
            "The functions orders and departures have the same ledger: /l",
        ),
        (
            two('handler = "a.b"'),
            "handler (mldserver.toml line 1) stands beside functions: orders, departures.",
        ),
        (
            two('pipeline = "p"'),
            "pipeline (mldserver.toml line 1) stands beside functions: orders, departures.",
        ),
        (
            two(orders='pipeline = "p"'),
            "mldserver.toml line 5 [functions.orders]: the function's name, orders, gives pipeline already.",
        ),
        (
            two(orders='settings = { a = "1" }\nhandler_settings = { a = "2" }'),
            "mldserver.toml line 6 [functions.orders]: the key settings gives handler_settings already.",
        ),
        (
            two(orders="attemps = 3"),
            "mldserver.toml line 5 [functions.orders]: there is no setting 'attemps'.",
        ),
        (
            two(orders="attempts = 0"),
            "attempts = 0 (mldserver.toml line 5 [functions.orders]) is not possible",
        ),
        (two() + "[functions.trips]\nattempts = 3\nlisten = ':1'", "The function trips has no handler."),
        ("[functions.trips]", "The function trips has no handler."),
        ('[functions."a-b"]\nhandler = "a.b"', "functions.a-b: a function cannot have the name 'a-b'."),
        ("functions = 3", "mldserver.toml: functions has an entry that is not a table."),
        ("[functions]\norders = 3", "mldserver.toml: functions has an entry that is not a table."),
    ],
)
def test_what_cannot_run_in_one_server_is_refused(tmp_path: Path, text: str, error: str) -> None:
    assert refusal(written(tmp_path, text)).startswith(error)


def test_the_default_address_is_one_functions_only(tmp_path: Path) -> None:
    text = '[functions.a]\nhandler = "a.b"\n[functions.b]\nhandler = "a.b"\n'
    assert refusal(written(tmp_path, text)) == (
        "The functions a and b have the same listen: 127.0.0.1:7070 (default). Give each function its own: listen in its table."
    )


def test_a_third_reader_of_a_dynamodb_stream_is_refused(tmp_path: Path) -> None:
    table = '[functions.{}]\nhandler = "a.b"\nsource = "dynamodb://orders?region=r"\n'
    assert len(functions(written(tmp_path, table.format("a") + table.format("b")))) == 2
    text = "".join(map(table.format, "abc"))
    assert refusal(written(tmp_path, text)).startswith(
        "The functions a and b and c have the same source: dynamodb://orders?region=r (mldserver.toml line 9 [functions.c])."
    )


def test_a_function_has_one_place(tmp_path: Path) -> None:
    folder = written(tmp_path, two(), orders='handler = "a.b"')
    assert refusal(folder).startswith(
        "The function orders is in mldserver.toml and in functions.d/orders.toml."
    )


def test_handlers_of_the_command_line_do_not_go_with_tables(tmp_path: Path) -> None:
    assert refusal(written(tmp_path, two()), "a.b").startswith(
        "The command line names the handler a.b, and mldserver.toml has functions: orders, departures."
    )


def test_handlers_of_one_name_need_tables(tmp_path: Path) -> None:
    assert refusal(tmp_path, "a.orders", "b:orders").startswith(
        "Two handlers of the command line have the name orders."
    )
    assert "a function cannot have the name '_b'" in refusal(tmp_path, "a", "a:_b")
    assert "have the same listen: unix:/s" in refusal(tmp_path, "a", "b", listen="unix:/s")


# Tools


def chosen(folder: Path, function: str | None = None, **options: object) -> Settings:
    return resolve(options, environ={}, folder=folder, handler_required=False, function=function)


def test_a_tool_names_one_of_several_functions(tmp_path: Path) -> None:
    folder = written(tmp_path, two())
    assert chosen(folder, "departures").out == Path("out/departures")
    assert chosen(folder, pipeline="orders").listen == TcpAddress("127.0.0.1", 7001)
    with pytest.raises(ConfigError, match=r"several functions: orders, departures. Name one with --function"):
        chosen(folder)
    with pytest.raises(ConfigError, match=r"no function 'trips'. The settings have: orders, departures"):
        chosen(folder, "trips")
    with pytest.raises(ConfigError, match=r"--pipeline departures is not the function orders"):
        chosen(folder, "orders", pipeline="departures")


def test_a_tool_need_not_name_the_only_function(tmp_path: Path) -> None:
    assert chosen(written(tmp_path, '[functions.orders]\nhandler = "a.b"\n')).pipeline == "orders"


def test_the_command_line_of_a_tool_means_the_function_itself(tmp_path: Path) -> None:
    folder = written(tmp_path, two('out = "/srv"', orders="attempts = 7"))
    assert chosen(folder, "orders").out == Path("/srv/orders")
    settings = chosen(folder, "orders", out="/backup/orders", attempts="9")
    assert (settings.out, settings.attempts) == (Path("/backup/orders"), 9)


def test_a_folder_on_the_command_line_needs_no_function(tmp_path: Path) -> None:
    settings = chosen(written(tmp_path, two()), out="/backup/orders")
    assert (settings.out, settings.handler) == (Path("/backup/orders"), "")


def test_a_tool_finds_functions_that_the_servers_command_line_named(tmp_path: Path) -> None:
    assert chosen(tmp_path, "orders").out == Path("out/orders")
    assert chosen(written(tmp_path, 'out = "/srv"'), "orders").out == Path("/srv/orders")
    single = written(tmp_path, 'out = "/srv"\nhandler = "a.orders"')
    assert chosen(single, "orders").out == Path("/srv")
    with pytest.raises(ConfigError, match=r"no function 'trips'. The settings have: orders"):
        chosen(single, "trips")


def test_what_a_tool_leaves_out_counts_in_no_function(tmp_path: Path) -> None:
    folder = written(tmp_path, two("log_file = 'm.log'", orders="attempts = 9"))
    left_out = resolve_functions({}, environ={}, folder=folder, leave_out=("log_file", "attempts"))
    assert [(each.log_file, each.attempts) for each in left_out] == [(None, 3), (None, 3)]


def test_tables_can_be_tried_before_they_are_files(tmp_path: Path) -> None:
    folder = written(tmp_path, two(), trips='handler = "a.t"\nlisten = ":1"\n')

    def tried(**more: dict[str, object]) -> list[str]:
        return [each.handler for each in resolve_functions({}, environ={}, folder=folder, more=more)]

    assert tried(shop={"handler": "a.shop", "listen": ":2"}) == ["a.orders", "a.departures", "a.t", "a.shop"]
    assert tried(trips={"handler": "a.new", "listen": ":1"}) == ["a.orders", "a.departures", "a.new"]
    with pytest.raises(
        ConfigError, match=r"The function orders is in mldserver.toml and in functions.d/orders"
    ):
        tried(orders={"handler": "a.b"})
    with pytest.raises(ConfigError, match=r"functions.d/shop.toml: there is no setting 'x'"):
        tried(shop={"x": 1})
