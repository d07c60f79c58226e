"""What a handler is: every way it can be wrong is one finding with its place."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mldserver import batches, tumbling
from mldserver.errors import HandlerInvalid
from mldserver.handler.inspection import inspect_handler, load_spec
from mldserver.handler.loader import Loaded, load
from mldserver.handler.spec import Finding, HandlerKind, HookSpec, RecordHook, TimerHook, windows_text
from mldserver.windows import duration_ms, span_text

pytestmark = pytest.mark.quick

PROCESS = "def process_record(record): ...\n"
ANY_HOOK = "process_record, process_records, process_table, on_insert, on_update, on_delete"


@pytest.fixture
def inspect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Write a module ``mine`` and inspect it, or something in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def inspect(text: Any, name: Any = "", retention: Any = None) -> Any:
        (tmp_path / "mine.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        sys.modules.pop("mine", None)
        retention_ms = None if retention is None else duration_ms(retention)
        return inspect_handler(load(f"mine:{name}" if name else "mine"), retention_ms=retention_ms)

    yield inspect
    sys.modules.pop("mine", None)


def errors(found: Any) -> Any:
    spec, findings = found
    assert spec is None
    return [str(finding) for finding in findings if finding.is_error]


def warnings(found: Any) -> Any:
    spec, findings = found
    assert spec is not None
    assert spec.warnings == findings
    return [str(finding) for finding in findings]


def test_a_module_with_every_hook(inspect: Any) -> None:
    spec, findings = inspect("""
        from mldserver import tumbling
        schema = "carrier STRING, at TIMESTAMP"
        windows = tumbling("1 hour", on="at")
        async def process_record(record): ...
        def initialize(shard): ...
        async def lease_lost(shard): ...
        def shard_ended(shard): ...
        def shutdown_requested(shard): ...
        def on_window(rows, window): return rows
    """)
    assert findings == ()
    assert (spec.path, spec.kind, spec.record_hook) == ("mine", HandlerKind.MODULE, RecordHook.RECORD)
    assert spec.hooks["process_record"] == HookSpec("process_record", is_async=True)
    assert [name for name, hook in spec.hooks.items() if hook.is_async] == ["process_record", "lease_lost"]
    assert len(spec.hooks) == 6
    assert spec.schema.names == ("carrier", "at")
    assert (spec.windows, spec.time_column, "on_window" in spec.hooks) == (
        tumbling("1 hour", on="at"),
        "at",
        True,
    )


def test_a_class_with_methods_of_every_kind(inspect: Any) -> None:
    spec, findings = inspect(
        """
        class Clicks:
            schema = "n INT"
            def process_records(self, batch): ...
            @staticmethod
            def initialize(shard): ...
            @classmethod
            async def lease_lost(cls, shard): ...
        """,
        "Clicks",
    )
    assert findings == ()
    assert (spec.kind, spec.record_hook, spec.path) == (HandlerKind.CLASS, RecordHook.RECORDS, "mine:Clicks")
    assert spec.hooks["lease_lost"].is_async
    assert (spec.windows, spec.time_column, "on_window" in spec.hooks) == (batches(), None, False)


def test_callable_objects_and_partials_are_hooks_too(inspect: Any) -> None:
    spec, findings = inspect(
        """
        from functools import partial
        class Call:
            async def __call__(self, record): ...
        class Mine:
            process_record = Call()
            initialize = staticmethod(partial(print, "opened"))
            lease_lost = partial(print)
        """,
        "Mine",
    )
    assert findings == ()
    assert spec.hooks["process_record"].is_async
    assert not spec.hooks["initialize"].is_async


def test_a_hook_that_does_not_tell_its_signature_is_taken(inspect: Any) -> None:
    spec, findings = inspect("process_record = max")
    assert (spec.record_hook, findings) == (RecordHook.RECORD, ())


def test_a_handler_without_a_schema_has_only_side_effects(inspect: Any) -> None:
    spec, _ = inspect(PROCESS + "schema = None\nwindows = None\non_window = None")
    assert (spec.schema, spec.windows, "on_window" in spec.hooks) == (None, None, False)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", f"mine.py:1: it has no record hook ({ANY_HOOK})"),
        (
            "class Clicks:\n    def process_record(self, r): ...",
            (
                f"mine.py:1: it has no record hook ({ANY_HOOK}), "
                "but its class Clicks has one: write mine:Clicks"
            ),
        ),
        (
            PROCESS + "def process_table(table): ...",
            "mine.py:2: it has process_record and process_table; exactly one is needed",
        ),
        ("process_record = 5", "mine.py:1: process_record is an int, not a function"),
        (
            "def process_record(): ...",
            "mine.py:1: process_record is called as process_record(record) or process_record(record, ctx), but is process_record()",
        ),
        (
            "def process_record(a, b): ...",
            "mine.py:1: process_record is called as process_record(record) or process_record(record, ctx), but is process_record(a, b)",
        ),
        (
            "async def process_record(r):\n    yield",
            "mine.py:1: process_record is an async generator; return a list",
        ),
        (
            PROCESS + "schema = 'n INT'\ndef on_window(rows): return rows",
            "mine.py:3: on_window is called as on_window(rows, window) or on_window(rows, window, previous), but is on_window(rows)",
        ),
        (PROCESS + "schema = ['n INT']", "mine.py:2: schema is a list, not Spark DDL as text"),
        (
            PROCESS + "\nschema: str = 'n IMT'",
            "mine.py:3: schema: it cannot be read at 'IMT'; did you mean INT?",
        ),
        (PROCESS + "schema = '_n INT'", "mine.py:2: schema: column _n: names that begin with an underscore"),
        (
            "schema = 'record INT'\ndef process_table(table): ...",
            "mine.py:1: schema: column record: with process_table it names each row's record",
        ),
        (
            PROCESS + "schema = 'n INT'\nwindows = '1 hour'",
            "mine.py:3: windows is a str; write tumbling('1 hour'), sliding('1 hour', every='5 minutes') or batches(max_rows=100_000)",
        ),
        (
            PROCESS + "from mldserver import tumbling\nwindows = tumbling('1 hour')",
            "mine.py:3: windows needs rows, but the handler has no schema",
        ),
        (
            PROCESS + "def on_window(rows, window): return rows",
            "mine.py:2: on_window needs rows, but the handler has no schema",
        ),
    ],
)
def test_what_cannot_be_run_is_told_with_file_and_line(inspect: Any, text: Any, found: Any) -> None:
    (told,) = errors(inspect(text))
    assert told.startswith(found)


@pytest.mark.parametrize(
    ("on", "found"),
    [
        (
            "scheduld",
            "windows are cut on 'scheduld', which is not a column of the schema (did you mean scheduled?)",
        ),
        ("zzz", "windows are cut on 'zzz', which is not a column of the schema (scheduled, local, n)"),
        ("local", "windows are cut on 'local', which is TIMESTAMP_NTZ; it must be a TIMESTAMP"),
        ("n", "windows are cut on 'n', which is INT; it must be a TIMESTAMP"),
    ],
)
def test_windows_are_cut_on_a_timestamp_column_of_the_schema(inspect: Any, on: Any, found: Any) -> None:
    text = f"""
    from mldserver import tumbling
    schema = "scheduled TIMESTAMP, local TIMESTAMP_NTZ, n INT"
    windows = tumbling("1 hour", on={on!r})
    def process_record(record): ...
    """
    assert errors(inspect(text)) == [f"mine.py:4: {found}"]


def test_windows_longer_than_the_streams_retention_are_refused(inspect: Any) -> None:
    text = (
        PROCESS
        + "from mldserver import tumbling\nschema = 'n INT'\nwindows = tumbling('1 day', lateness='90 minutes')"
    )
    assert errors(inspect(text, retention="24 hours")) == [
        "mine.py:4: windows of 1 d with a lateness of 90 min are longer than the stream keeps its records (1 d)"
    ]
    assert inspect(text, retention="48 hours")[1] == ()
    assert inspect(text)[1] == ()


def test_batches_have_no_retention_to_fit(inspect: Any) -> None:
    text = PROCESS + "from mldserver import batches\nschema = 'n INT'\nwindows = batches(max_rows=5)"
    spec, findings = inspect(text, retention="1 s")
    assert (findings, spec.windows) == ((), batches(max_rows=5))


def test_a_class_must_be_made_without_arguments(inspect: Any) -> None:
    text = "class C:\n    def __init__(self, x): ...\n    def process_record(self, r): ..."
    assert errors(inspect(text, "C")) == [
        "mine.py:2: class C is made once per shard, without arguments; its __init__ wants some"
    ]


def test_a_method_without_self_is_told(inspect: Any) -> None:
    text = "class C:\n    def process_record(record): ..."
    assert errors(inspect(text, "C")) == [
        "mine.py:2: process_record is called as process_record(record) or process_record(record, ctx), but is process_record(record)"
    ]


def test_an_abstract_class_is_told_with_what_it_lacks(inspect: Any) -> None:
    text = """
    import abc
    class C(abc.ABC):
        def process_record(self, record): ...
        @abc.abstractmethod
        def lookup(self): ...
    """
    assert errors(inspect(text, "C")) == ["mine.py:3: class C is abstract: it lacks lookup"]


def test_a_class_without_hooks_does_not_suggest_others(inspect: Any) -> None:
    assert errors(inspect("class C: ...", "C")) == [f"mine.py:1: it has no record hook ({ANY_HOOK})"]


def test_what_is_neither_module_nor_class_is_told(inspect: Any) -> None:
    assert errors(inspect("def f(): ...", "f")) == [
        "mine.py:1: mine:f is a function; a handler is a module or a class"
    ]


def test_every_problem_is_told_at_once(inspect: Any) -> None:
    told = errors(inspect("schema = 'n IMT'\nwindows = 5\ndef on_window(): return 1"))
    assert [line.split(":")[1] for line in told] == ["3", "1", "1", "2"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def proces_record(r): ...", "proces_record is never called or read; did you mean process_record?"),
        ("window = 1", "window is never called or read; did you mean windows?"),
        ("def shard_end(s): ...", "shard_end is never called or read; did you mean shard_ended?"),
        ("def on_windows(r, w): ...", "on_windows is never called or read; did you mean on_window?"),
    ],
)
def test_a_name_that_is_nearly_the_servers_is_a_warning(inspect: Any, text: Any, told: Any) -> None:
    _, findings = inspect(text)
    assert f"mine.py:1: warning: {told}" in [str(finding) for finding in findings]


def test_helpers_beside_a_record_hook_are_no_misspelt_record_hooks(inspect: Any) -> None:
    assert warnings(inspect(PROCESS + "def _window(): ...\ndef process_recorded(r): ...\na, b = 1, 2")) == []


def test_a_hook_that_comes_from_elsewhere_is_placed_where_it_is_written(inspect: Any, tmp_path: Path) -> None:
    (tmp_path / "base_of_mine.py").write_text("\n\ndef process_record(): ...\n")
    (told,) = errors(inspect("from base_of_mine import process_record"))
    assert told.startswith("base_of_mine.py:3: process_record is called as")


def test_a_module_without_source_has_findings_without_a_place() -> None:
    module = type(sys)("ghost")
    _, findings = inspect_handler(Loaded("ghost", module, module))
    assert str(findings[0]).startswith("it has no record hook")


def test_a_class_that_its_module_made_at_run_time_is_placed_by_the_module(inspect: Any) -> None:
    assert errors(inspect("C = type('C', (), {})", "C"))[0].startswith("mine.py:1: it has no record hook")


def test_a_handler_says_how_many_records_it_takes_at_the_same_time(inspect: Any) -> None:
    assert inspect(PROCESS)[0].concurrency == 1
    assert inspect(PROCESS + "concurrency = 8")[0].concurrency == 8
    assert inspect("concurrency = 1\ndef process_records(batch): ...")[0].concurrency == 1


@pytest.mark.parametrize("wrong", ["0", "-1", "True", "2.0", "'4'"])
def test_an_impossible_concurrency_is_told_with_its_line(inspect: Any, wrong: str) -> None:
    assert errors(inspect(f"{PROCESS}concurrency = {wrong}")) == [
        f"mine.py:2: concurrency is {wrong}; it must be a number from 1 on"
    ]


@pytest.mark.parametrize("hook", ["process_records(batch)", "process_table(table)"])
def test_concurrency_is_for_process_record_only(inspect: Any, hook: str) -> None:
    name = hook.partition("(")[0]
    assert errors(inspect(f"concurrency = 2\ndef {hook}: ...")) == [
        f"mine.py:1: concurrency is for process_record: {name} takes all records of a batch at once"
    ]


def test_a_misspelt_concurrency_is_told(inspect: Any) -> None:
    assert warnings(inspect(PROCESS + "concurency = 2"))[0].endswith("did you mean concurrency?")


def test_load_spec_raises_with_every_error(inspect: Any) -> None:
    inspect("schema = 5\nwindows = 6\ndef shard_end(s): ...")
    with pytest.raises(HandlerInvalid) as caught:
        load_spec("mine")
    assert len(caught.value.what.splitlines()) == 3
    assert caught.value.where["handler"] == "mine"


def test_load_spec_returns_what_can_be_run(inspect: Any) -> None:
    inspect(PROCESS)
    assert load_spec("mine", retention_ms=1).record_hook is RecordHook.RECORD


def test_findings_say_as_much_of_their_place_as_is_known() -> None:
    assert str(Finding("x", "f.py", 3)) == "f.py:3: x"
    assert str(Finding("x", "f.py", is_error=False)) == "f.py: warning: x"
    assert str(Finding("x")) == "x"


def test_durations_and_windows_are_told_for_people() -> None:
    assert [span_text(ms) for ms in (0, 1, 1500, 2000, 5_400_000, 7_200_000, 172_800_000)] == [
        "0 ms",
        "1 ms",
        "1500 ms",
        "2 s",
        "90 min",
        "2 h",
        "2 d",
    ]
    assert windows_text(None) == "none"
    assert (
        windows_text(batches(max_rows=5, max_age=2)) == "batches of at most 5 rows, each open for at most 2 s"
    )
    assert windows_text(tumbling("1 hour")) == "tumbling, 1 h of arrival time"
    assert (
        windows_text(tumbling(60, on="at", lateness=5))
        == "tumbling, 1 min of at, open for 5 s after their end"
    )


ROWS = PROCESS + "schema = 'n INT'\n"


@pytest.mark.parametrize(
    "text",
    [
        "def on_window(rows, window):\n    rows.groupBy('n').count()",
        "async def on_window(rows, window):\n    if window.start is None:\n        return\n    return None",
        "def on_window(rows, window):\n    def inner():\n        return rows\n    inner()",
        "class Mine:\n    def on_window(self, rows, window):\n        rows.count()\non_window = Mine().on_window",
    ],
)
def test_an_on_window_without_a_return_is_found_before_anything_runs(inspect: Any, text: str) -> None:
    (told,) = errors(inspect(ROWS + text))
    assert "on_window has no return with a value" in told
    assert "writes_for_itself = True" in told
    spec, findings = inspect(ROWS + "writes_for_itself = True\n" + text)
    assert (spec.writes_for_itself, findings) == (True, ())


@pytest.mark.parametrize(
    "text",
    [
        "def on_window(rows, window):\n    if window.start:\n        return rows",
        "on_window = lambda rows, window: rows",
        "from functools import partial\non_window = partial(lambda other, rows, window: rows, 1)",
        "exec('def on_window(rows, window): pass')",
        (
            "from functools import wraps\ndef kept(hook):\n    @wraps(hook)\n    def call(rows, window):\n"
            "        hook(rows, window)\n        return rows\n    return call\n"
            "@kept\ndef on_window(rows, window):\n    rows.count()"
        ),
    ],
)
def test_where_the_source_does_not_show_it_the_window_will_tell(inspect: Any, text: str) -> None:
    spec, findings = inspect(ROWS + text)
    assert findings == ()
    assert not spec.writes_for_itself


def test_a_handler_that_blocks_says_so(inspect: Any) -> None:
    assert not inspect(ROWS)[0].blocking
    assert inspect(ROWS + "blocking = True")[0].blocking
    assert errors(inspect(ROWS + "blocking = 'yes'")) == ["mine.py:3: blocking is 'yes'; write True or False"]


def test_a_handler_that_writes_for_itself_says_so(inspect: Any) -> None:
    spec, findings = inspect(ROWS + "writes_for_itself = True\ndef on_window(rows, window): rows.count()")
    assert findings == ()
    assert spec.writes_for_itself
    assert errors(inspect(ROWS + "writes_for_itself = True")) == [
        "mine.py:3: writes_for_itself needs an on_window that writes"
    ]
    assert errors(inspect(ROWS + "writes_for_itself = 'yes'\ndef on_window(rows, window): ...")) == [
        "mine.py:3: writes_for_itself is 'yes'; it is True or False"
    ]


def test_the_columns_of_a_windows_bounds_are_named_or_switched_off(inspect: Any) -> None:
    assert inspect(ROWS)[0].window_columns == ("window_start", "window_end")
    assert inspect(ROWS + "window_columns = ['since', 'until']")[0].window_columns == ("since", "until")
    assert inspect(ROWS + "window_columns = None")[0].window_columns is None
    for wrong in ("'since'", "('a', 'A')", "('a',)", "True", "('', 'b')"):
        (told,) = errors(inspect(ROWS + f"window_columns = {wrong}"))
        assert "write two names, such as ('window_start', 'window_end'), or None" in told


def test_hooks_of_changes_stand_for_a_record_hook(inspect: Any) -> None:
    spec, findings = inspect("""
        plain_numbers = True
        async def on_insert(change): ...
        async def on_delete(change): ...
        def initialize(shard): ...
    """)
    assert findings == ()
    assert spec.record_hook is RecordHook.RECORD
    assert spec.hooks["process_record"].is_async
    assert list(spec.hooks) == ["on_insert", "on_delete", "initialize", "process_record"]
    told = "records are changes of a DynamoDB table, their numbers int and float; updates give no row"
    assert str(spec.changes) == told


@pytest.mark.parametrize("hook", ["process_record", "process_records"])
def test_a_record_hook_takes_changes_when_the_handler_says_so(inspect: Any, hook: str) -> None:
    spec, _ = inspect(f"class C:\n    changes = True\n    def {hook}(self, changes): ...", "C")
    assert (spec.kind, spec.record_hook) == (HandlerKind.CLASS, hook)
    assert str(spec.changes) == "records are changes of a DynamoDB table, their numbers Decimal"
    assert inspect(PROCESS + "changes = False")[0].changes is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (PROCESS + "changes = 'yes'", "mine.py:2: changes is 'yes'; write True or False"),
        (PROCESS + "changes = True\nplain_numbers = 1", "mine.py:3: plain_numbers is 1; write True or False"),
        (
            PROCESS + "plain_numbers = True",
            "mine.py:2: plain_numbers is for changes: say changes = True, too",
        ),
        (
            "changes = True\ndef process_table(table): ...",
            "mine.py:1: changes are for process_record and process_records: a table has payloads",
        ),
        (
            PROCESS + "def on_insert(change): ...",
            "mine.py:2: it has process_record and on_insert; write the one or the others",
        ),
        (
            "def on_insert(change): ...\nasync def on_delete(change): ...",
            "mine.py:2: on_insert and on_delete: all are `async def`, or none",
        ),
        ("on_update = 5", "mine.py:1: on_update is an int, not a function"),
        (
            "def on_delete(): ...",
            "mine.py:1: on_delete is called as on_delete(change) or on_delete(change, ctx), but is on_delete()",
        ),
    ],
)
def test_hooks_of_changes_that_cannot_be_called_are_told(inspect: Any, text: str, found: str) -> None:
    assert errors(inspect(text)) == [found]


def test_a_hook_of_changes_that_is_nearly_called_so_is_told(inspect: Any) -> None:
    assert warnings(inspect("def on_insert(change): ...\ndef on_updated(change): ...")) == [
        "mine.py:2: warning: on_updated is never called or read; did you mean on_update?"
    ]


@pytest.mark.parametrize(
    "hook",
    [
        "def process_record(record, ctx): ...",
        "async def process_record(record, ctx): ...",
        "from mldserver import Context\ndef process_record(record, mine: Context): ...",
        "from __future__ import annotations\nimport mldserver\ndef process_record(r, c: mldserver.Context = None): ...",
        "def on_insert(change, ctx): ...\ndef on_delete(change): ...",
        "changes = True\ndef process_record(change, ctx=None): ...",
    ],
)
def test_a_second_parameter_that_is_a_context_makes_a_handler_keep_state(inspect: Any, hook: str) -> None:
    spec, findings = inspect(hook)
    assert (spec.keyed, spec.state_ttl_ms, findings) == (True, None, ())
    assert spec.hooks["process_record"].takes_context


@pytest.mark.parametrize(
    "hook",
    [
        PROCESS,
        "def process_record(record, limit=5): ...",
        "def process_record(record, *ctx): ...",
        "def process_record(record, *, ctx=None): ...",
        "def on_insert(change): ...",
        "def process_records(batch): ...",
    ],
)
def test_other_handlers_keep_no_state(inspect: Any, hook: str) -> None:
    spec, findings = inspect(hook)
    assert (spec.keyed, findings) == (False, ())


def test_methods_take_a_context_too(inspect: Any) -> None:
    spec, _ = inspect(
        """
        class C:
            state_ttl = "1 day"
            def process_record(self, record, ctx): ...
        class S:
            @staticmethod
            def process_record(record, ctx): ...
        """,
        "C",
    )
    assert (spec.keyed, spec.state_ttl_ms) == (True, 86_400_000)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "concurrency = 2\ndef process_record(record, ctx): ...",
            "mine.py:1: concurrency is for handlers without ctx: calls with state follow one another",
        ),
        (
            "def process_records(batch, ctx): ...",
            "mine.py:1: process_records takes ctx, but it has no key: process_record and the hooks of changes have one",
        ),
        (
            "def process_table(table, ctx): ...",
            "mine.py:1: process_table takes ctx, but it has no key: process_record and the hooks of changes have one",
        ),
        (
            PROCESS + "state_ttl = '1 day'",
            "mine.py:2: state_ttl is for handlers with ctx: process_record(record, ctx)",
        ),
        (
            "state_ttl = 'soon'\ndef process_record(record, ctx): ...",
            "mine.py:1: state_ttl is 'soon'; write a duration such as '1 day'",
        ),
        (
            "state_ttl = 0\ndef process_record(record, ctx): ...",
            "mine.py:1: state_ttl is 0; write a duration such as '1 day'",
        ),
        (
            "state_ttl = []\ndef process_record(record, ctx): ...",
            "mine.py:1: state_ttl is []; write a duration such as '1 day'",
        ),
    ],
)
def test_what_state_cannot_go_with_is_told(inspect: Any, text: str, found: str) -> None:
    assert errors(inspect(text)) == [found]


WINDOWS = "from mldserver import batches, tumbling\nschema = 'a INT'\ndef process_record(record): ...\n"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("", ()),
        ("after = 'payments'", ("payments",)),
        ("after = ['payments', 'clicks', 'payments']", ("payments", "clicks")),
    ],
)
def test_a_handler_may_come_after_other_functions(inspect: Any, text: str, after: tuple[str, ...]) -> None:
    spec, findings = inspect(f"{WINDOWS}windows = tumbling('1 hour')\n{text}")
    assert (spec.after, findings) == (after, ())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "windows = batches()\nafter = 'x'",
            "after is for windows of time: windows = tumbling(…) or sliding(…)",
        ),
        ("after = ['x', 3]", "after is ['x', 3]; write the names of functions, such as ['payments']"),
        ("after = ''", "after is ''; write the names of functions, such as ['payments']"),
    ],
)
def test_what_after_cannot_go_with_is_told(inspect: Any, text: str, found: str) -> None:
    (error,) = errors(inspect(WINDOWS + text))
    assert error.endswith(found)


def test_a_misspelt_state_ttl_is_told(inspect: Any) -> None:
    assert warnings(inspect("state_tll = '1 day'\ndef process_record(record, ctx): ..."))[0].endswith(
        "did you mean state_ttl?"
    )


TIMER = "from mldserver import timer\n"
KEYED = TIMER + "def process_record(record, ctx): ...\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            KEYED
            + "@timer\ndef alarm(due, ctx): ...\n@timer(max_lateness='6 hours')\ndef bell(due, ctx): ...",
            "",
        ),
        (
            """
            from mldserver import timer
            class Handler:
                def process_record(self, record, ctx): ...
                @timer
                def alarm(self, due, ctx): ...
                @staticmethod
                @timer(max_lateness="6 hours")
                def bell(due, ctx): ...
            """,
            "Handler",
        ),
        (
            """
            from mldserver import timer
            class Base:
                @timer
                def alarm(self, due, ctx): ...
            class Handler(Base):
                def on_insert(self, change, ctx): ...
                @classmethod
                @timer(max_lateness="6 hours")
                def bell(cls, due, ctx): ...
            """,
            "Handler",
        ),
    ],
)
def test_callbacks_of_timers_are_found_by_name(inspect: Any, text: str, name: str) -> None:
    spec, findings = inspect(text, name)
    assert findings == ()
    assert spec.timers == {"alarm": TimerHook("alarm", False), "bell": TimerHook("bell", False, 21_600_000)}


def test_callbacks_may_be_async(inspect: Any) -> None:
    spec, _ = inspect(
        TIMER + "async def process_record(record, ctx): ...\n@timer\nasync def alarm(due, ctx): ..."
    )
    assert spec.timers == {"alarm": TimerHook("alarm", True)}


def test_a_handler_without_callbacks_has_no_timers(inspect: Any) -> None:
    spec, _ = inspect(KEYED + "bell = timer\nclass Other:\n    @timer\n    def alarm(self, due, ctx): ...")
    assert spec.timers == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            TIMER + PROCESS + "@timer\ndef alarm(due, ctx): ...",
            "mine.py:4: alarm is never called: only a hook with ctx sets timers, such as process_record(record, ctx)",
        ),
        (
            TIMER + "def process_records(batch): ...\n@timer\ndef alarm(due, ctx): ...",
            "mine.py:4: alarm is never called: only a hook with ctx sets timers, such as process_record(record, ctx)",
        ),
        (
            KEYED + "@timer\ndef alarm(due): ...",
            "mine.py:4: alarm is called as alarm(due, ctx), but is alarm(due)",
        ),
        (
            KEYED + "@timer\nasync def alarm(due, ctx): ...",
            "mine.py:4: process_record and alarm: both are `async def`, or neither",
        ),
        (
            KEYED + "@timer\nasync def alarm(due, ctx):\n    yield 1",
            "mine.py:4: alarm is an async generator; return a list instead",
        ),
        (
            KEYED + "@timer\ndef alarm(due, ctx): ...\nbell = alarm\ndel alarm",
            "mine.py:5: the callback alarm has another name here (bell): write it under its own",
        ),
    ],
)
def test_what_is_wrong_with_a_callback_is_told(inspect: Any, text: str, found: str) -> None:
    assert errors(inspect(text)) == [found]


def test_a_callback_must_be_a_function_with_a_name(inspect: Any) -> None:
    with pytest.raises(HandlerInvalid, match="<lambda> is not a callback of timers"):
        inspect(KEYED + "alarm = timer(lambda due, ctx: None)")


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("set(alrm, after=1)", "ctx.timers.set(alrm, …): did you mean alarm?"),
        ("cancel(plain)", "ctx.timers.cancel(plain, …): plain is not marked with @timer"),
        (
            "get(process_record)",
            "ctx.timers.get(process_record, …): process_record is not marked with @timer",
        ),
        (
            "set('alarm', after=1)",
            "ctx.timers.set('alarm', …): a callback is a function of the module or a method of the class, marked with @timer",
        ),
        (
            "set(lambda due, ctx: None, after=1)",
            "ctx.timers.set(lambda due, ctx: None, …): a callback is a function of the module or a method of the class, marked with @timer",
        ),
    ],
)
def test_a_call_that_names_no_callback_is_told_before_it_fails(inspect: Any, call: str, found: str) -> None:
    text = TIMER + "def plain(due, ctx): ...\n@timer\ndef alarm(due, ctx): ...\n"
    assert errors(inspect(f"{text}def process_record(record, ctx):\n    ctx.timers.{call}\n")) == [
        f"mine.py:6: {found}"
    ]


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("self.unpayed, after=1", "did you mean unpaid?"),
        ("self.plain, after=1", "plain is not marked with @timer"),
    ],
)
def test_a_call_that_names_no_method_is_told_before_it_fails(inspect: Any, call: str, found: str) -> None:
    text = f"""
        from mldserver import timer
        class Handler:
            def on_insert(self, change, ctx):
                ctx.timers.set({call})
            def plain(self, due, ctx): ...
            @timer
            def unpaid(self, due, ctx): ...
        """
    told = f"mine.py:5: ctx.timers.set({call.partition(',')[0]}, …): {found}"
    assert errors(inspect(text, "Handler")) == [told]


@pytest.mark.parametrize(
    "body",
    [
        "ctx.timers.set(alarm, after=1)",
        "ctx.timers.clear(plain)",
        "ctx.other.set(plain)",
        "ctx.timers.set()",
        "for each in (alarm,): ctx.timers.set(each, after=1)",
        "ctx.timers.set(unknown, after=1)",
        "ctx.timers.set(record.alarm, after=1)",
        "(lambda plain: ctx.timers.cancel(plain))(alarm)",
    ],
)
def test_a_call_that_may_name_a_callback_is_not_told(inspect: Any, body: str) -> None:
    text = TIMER + "def plain(due, ctx): ...\n@timer\ndef alarm(due, ctx): ...\n"
    spec, findings = inspect(f"{text}def process_record(record, ctx):\n    {body}\n")
    assert (list(spec.timers), findings) == (["alarm"], ())


def test_a_record_processor_has_no_timers(inspect: Any) -> None:
    text = """
        from amazon_kclpy.v3.processor import RecordProcessorBase
        from mldserver import timer
        class Mine(RecordProcessorBase):
            def initialize(self, initialize_input): ...
            def process_records(self, process_records_input): ...
            def lease_lost(self, lease_lost_input): ...
            def shard_ended(self, shard_ended_input): ...
            def shutdown_requested(self, shutdown_requested_input): ...
            @timer
            def alarm(self, due, ctx): ...
        """
    assert errors(inspect(text, "Mine")) == [
        "mine.py:11: alarm is never called: a record processor has no timers, process_record(record, ctx) has"
    ]
