"""Whatever happens in whatever order, on one server or two: every row once, in order, and nothing ahead of what is durable.

That the machines can fail is shown by bugs that are planted, and that they find.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from coordinator import machine_mutants as mutants
from coordinator.machine import FleetMachine, PipelineMachine
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from mldserver.errors import InternalError

EXAMPLES = settings(
    max_examples=settings().max_examples // 8,
    stateful_step_count=25,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
PipelineMachine.TestCase.settings = FleetMachine.TestCase.settings = EXAMPLES
TestOneServer = PipelineMachine.TestCase
TestTwoServers = FleetMachine.TestCase

# Each is found within some tens of examples; so many that chance cannot hide it.
SEARCH = settings(
    EXAMPLES, max_examples=600, phases=[Phase.generate], database=None, report_multiple_bugs=False
)


@pytest.mark.parametrize(
    ("machine", "plant"),
    [
        (PipelineMachine, mutants.checkpoint_before_register),
        (PipelineMachine, mutants.await_between_check_and_act),
        (PipelineMachine, mutants.deliver_twice),
        (PipelineMachine, mutants.never_holds),
        (PipelineMachine, mutants.children_without_floor),
        (PipelineMachine, mutants.watermark_goes_back),
        pytest.param(FleetMachine, mutants.register_without_fences, marks=pytest.mark.long),
        (FleetMachine, mutants.deliver_twice),
        (FleetMachine, mutants.await_between_check_and_act),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch,
    machine: type[PipelineMachine],
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, InternalError, ExceptionGroup)) as found:
        run_state_machine_as_test(machine, settings=SEARCH)
    # Groups come from a server that stopped itself: only for what cannot be.
    group = found.value
    assert not isinstance(group, ExceptionGroup) or group.split((InternalError, AssertionError))[1] is None
