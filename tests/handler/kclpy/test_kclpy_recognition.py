"""Which classes are taken for record processors of amazon_kclpy, and what a check says of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from amazon_kclpy import kcl
from amazon_kclpy.v2 import processor as v2
from amazon_kclpy.v3 import processor as v3

from mldserver.handler.inspection import load_spec
from mldserver.handler.kclpy.processor import problems, recognised, written
from mldserver.handler.spec import HandlerKind
from mldserver.runtime.trial import report

pytestmark = pytest.mark.quick

HOOKS = ("initialize", "process_records", "lease_lost", "shard_ended", "shutdown_requested")


class First(kcl.RecordProcessorBase):
    def initialize(self, shard_id: str) -> None: ...
    def process_records(self, records: Any, checkpointer: Any) -> None: ...
    def shutdown(self, checkpointer: Any, reason: str) -> None: ...


class Second(v2.RecordProcessorBase):
    def initialize(self, initialize_input: Any) -> None: ...
    def process_records(self, process_records_input: Any) -> None: ...
    def shutdown(self, shutdown_input: Any) -> None: ...
    def shutdown_requested(self, shutdown_requested_input: Any) -> None: ...


class Third(v3.RecordProcessorBase):
    def initialize(self, initialize_input: Any) -> None: ...
    def process_records(self, process_records_input: Any) -> None: ...
    def lease_lost(self, lease_lost_input: Any) -> None: ...
    def shard_ended(self, shard_ended_input: Any) -> None: ...
    def shutdown_requested(self, shutdown_requested_input: Any) -> None: ...


class Duck:
    """Without a base class: amazon_kclpy asks for its version only."""

    version = 2
    process_records = Second.process_records


@pytest.mark.parametrize(("cls", "version"), [(First, 1), (Second, 2), (Third, 3), (Duck, 2)])
def test_a_class_is_recognised_by_its_base_or_by_its_version_beside_amazon_kclpy(
    cls: type, version: int
) -> None:
    assert recognised(cls) == version


@pytest.mark.parametrize(
    "target",
    [
        kcl.RecordProcessorBase,
        Third(),
        sys,
        type("Plain", (), {"process_records": len}),
        type("Other", (), {"version": 4}),
        type("Flag", (), {"version": True}),
        type("Elsewhere", (), {"version": 3, "__module__": "no.such.module"}),
        type("Unlike", (), {"version": [1]}),
        type("Native", (), {"version": 3, "__module__": "json"}),
    ],
)
def test_all_else_is_not(target: object) -> None:
    assert recognised(target) is None


def test_hooks_that_only_the_base_class_has_are_not_called() -> None:
    assert written(First, 1) == HOOKS[:4]
    assert written(Second, 2) == HOOKS
    assert written(Third, 3) == HOOKS
    assert written(Duck, 2) == ("process_records",)


@pytest.mark.parametrize(("cls", "version"), [(First, 1), (Second, 2), (Third, 3)])
def test_a_whole_processor_has_no_problems(cls: type, version: int) -> None:
    assert problems(cls, version) == []


class Troubled(v3.RecordProcessorBase):
    async def initialize(self, initialize_input: Any) -> None: ...
    def process_records(self, records: Any, checkpointer: Any) -> None: ...

    @staticmethod
    def lease_lost(lease_lost_input: Any) -> None: ...


def test_what_cannot_work_is_an_error_and_what_is_missing_a_warning() -> None:
    signature = "process_records(self, records: 'Any', checkpointer: 'Any') -> 'None'"
    assert problems(Troubled, 3) == [
        ("initialize is async, which amazon_kclpy never awaits", "initialize", True),
        (
            f"process_records is called with 1 argument by version 3 of amazon_kclpy, but is {signature}",
            "process_records",
            True,
        ),
        ("it has no shard_ended: nothing is called then", "", False),
    ]
    assert ("it has no process_records", "", True) in problems(type("Empty", (Third.__base__,), {}), 3)


APPLICATION = """
from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor
from amazon_kclpy.v3.processor import RecordProcessorBase


class Mine(RecordProcessorBase):
    def __init__(self{arguments}):
        pass

    def initialize(self, initialize_input): ...
    def process_records(self, process_records_input): ...
    def shard_ended(self, shard_ended_input): ...


if __name__ == "__main__":
    kcl.KCLProcess(Mine()).run()
"""


@pytest.fixture
def application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"application_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(APPLICATION.format(arguments=getattr(request, "param", "")))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return name


def test_a_check_tells_the_version_and_what_is_missing(application: str) -> None:
    told = report(f"{application}:Mine", None)
    assert told.summary[:2] == (
        ("kind", "record processor of amazon_kclpy, version 3, made once per shard"),
        ("hooks", "initialize, process_records, shard_ended"),
    )
    (finding,) = told.findings
    assert (finding.line, finding.text, finding.is_error) == (
        7,
        "it has no lease_lost: nothing is called then",
        False,
    )


def test_it_loads_as_a_handler_without_rows(application: str) -> None:
    spec = load_spec(f"{application}:Mine")
    assert (spec.kind, spec.schema, spec.windows) == (HandlerKind.PROCESSOR, None, None)
    assert len(spec.warnings) == 1
    assert spec.version.startswith("sha256:")


@pytest.mark.parametrize("application", [", config"], indirect=True)
def test_a_processor_that_wants_arguments_cannot_be_made(application: str) -> None:
    told = report(f"{application}:Mine", None)
    assert told.summary == ()
    assert "without arguments" in told.findings[0].text


def test_a_module_alone_gets_its_class_suggested_and_not_the_base(application: str) -> None:
    (finding,) = (each.text for each in report(application, None).findings if each.is_error)
    assert finding.endswith(f"its class Mine has one: write {application}:Mine")
