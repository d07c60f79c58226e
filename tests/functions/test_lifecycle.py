"""The life cycle of a function as a table: every command in every state."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from mldserver.errors import OperatorError
from mldserver.functions.lifecycle import CELLS, DONE, NO_OP, Command, Shown, decide, shown
from mldserver.ledger.contract import CodeVersion, FunctionLife, Wanted

pytestmark = [pytest.mark.quick, pytest.mark.core]

ONE, TWO = CodeVersion("1", "one.zip", 1), CodeVersion("2", "two.zip", 2)
STAGED = FunctionLife(deployed=ONE, other=TWO)
PREVIOUS = FunctionLife(deployed=TWO, other=ONE, other_is_previous=True)
WANTED = {
    Shown.PAUSING: Wanted.PAUSED,
    Shown.PAUSED: Wanted.PAUSED,
    Shown.UNDEPLOYING: Wanted.UNDEPLOYED,
    Shown.UNDEPLOYED: Wanted.UNDEPLOYED,
}
# From the design: the states in which a command is carried out, and those in which it changes nothing.
CARRIED_OUT = {
    Command.DEPLOY: {"undeployed", "failed", "paused", "deployed"},
    Command.PAUSE: {"deployed", "failed"},
    Command.RESUME: {
        "paused",
        "pausing",
    },  # the design waits for the end of the pause, which a hung batch prevents
    Command.UNDEPLOY: {"deploying", "deployed", "pausing", "paused", "resuming", "failed"},
    Command.ROLLBACK: {"deployed", "paused", "failed"},
}
NOTHING = {
    Command.PAUSE: {"pausing", "paused"},
    Command.RESUME: {"deployed", "resuming"},
    Command.UNDEPLOY: {"undeployed", "undeploying"},
}


@pytest.mark.parametrize(("command", "state"), list(product(Command, Shown)))
def test_each_cell_is_what_the_design_says(command: Command, state: Shown) -> None:
    cell = CELLS[command][state]
    assert (cell is DONE) == (state in CARRIED_OUT[command])
    assert (cell is NO_OP) == (state in NOTHING.get(command, set()))


@pytest.mark.parametrize(("command", "state"), list(product(Command, Shown)))
def test_a_command_is_carried_out_or_nothing_or_refused_with_the_next_step(
    command: Command, state: Shown
) -> None:
    before = PREVIOUS if command is Command.ROLLBACK else STAGED
    life = replace(before, wanted=WANTED.get(state, Wanted.DEPLOYED))
    if CELLS[command][state] in {DONE, NO_OP}:
        after = decide(command, life, state, name="orders")
        assert (after is None) == (CELLS[command][state] == NO_OP)
        return
    with pytest.raises(OperatorError) as refused:
        decide(command, life, state, name="orders")
    assert refused.value.what == f"The function orders is {state}: {command} is not possible."
    assert refused.value.advice.endswith((".", "`."))
    assert "{" not in refused.value.advice


@pytest.mark.parametrize("state", [Shown.DEPLOYED, Shown.PAUSED, Shown.FAILED])
def test_deploy_and_rollback_exchange_the_versions(state: Shown) -> None:
    wanted = WANTED.get(state, Wanted.DEPLOYED)
    staged, previous = replace(STAGED, wanted=wanted), replace(PREVIOUS, wanted=wanted)
    assert decide(Command.DEPLOY, staged, state, name="f") == previous
    back = decide(Command.ROLLBACK, previous, state, name="f")
    assert back == FunctionLife(wanted, ONE, TWO, other_is_previous=True)
    with pytest.raises(OperatorError, match="has no previous version"):
        decide(Command.ROLLBACK, staged, state, name="f")


def test_only_a_rollback_goes_back() -> None:
    for state in (Shown.DEPLOYED, Shown.PAUSED):
        assert decide(Command.DEPLOY, PREVIOUS, state, name="f") is None
    assert decide(Command.DEPLOY, PREVIOUS, Shown.FAILED, name="f") == PREVIOUS, "it starts again as it is"


def test_an_undeployed_function_is_deployed_with_what_is_staged() -> None:
    life = replace(STAGED, wanted=Wanted.UNDEPLOYED, keep=True)
    assert decide(Command.DEPLOY, life, Shown.UNDEPLOYED, name="f") == PREVIOUS
    life = replace(PREVIOUS, wanted=Wanted.UNDEPLOYED)
    assert decide(Command.DEPLOY, life, Shown.UNDEPLOYED, name="f") == PREVIOUS


def test_pause_resume_and_undeploy_change_what_is_wanted_alone() -> None:
    assert decide(Command.PAUSE, STAGED, Shown.FAILED, name="f") == replace(STAGED, wanted=Wanted.PAUSED)
    paused = replace(STAGED, wanted=Wanted.PAUSED)
    assert decide(Command.RESUME, paused, Shown.PAUSED, name="f") == STAGED
    for keep in (False, True):
        after = decide(Command.UNDEPLOY, paused, Shown.PAUSED, name="f", keep=keep)
        assert after == replace(STAGED, wanted=Wanted.UNDEPLOYED, keep=keep)


@pytest.mark.parametrize(
    ("wanted", "facts", "state"),
    [
        (Wanted.UNDEPLOYED, "", Shown.UNDEPLOYED),
        (Wanted.UNDEPLOYED, "failed", Shown.UNDEPLOYED),
        (Wanted.UNDEPLOYED, "runs", Shown.UNDEPLOYING),
        (Wanted.UNDEPLOYED, "runs started", Shown.UNDEPLOYING),
        (Wanted.DEPLOYED, "", Shown.DEPLOYING),
        (Wanted.DEPLOYED, "runs", Shown.DEPLOYING),
        (Wanted.DEPLOYED, "runs started", Shown.DEPLOYED),
        (Wanted.DEPLOYED, "runs started holds", Shown.RESUMING),
        (Wanted.DEPLOYED, "failed", Shown.FAILED),
        (Wanted.PAUSED, "failed", Shown.FAILED),
        (Wanted.PAUSED, "runs", Shown.DEPLOYING),
        (Wanted.PAUSED, "runs started", Shown.PAUSING),
        (Wanted.PAUSED, "runs started holds", Shown.PAUSED),
    ],
)
def test_what_is_shown_follows_from_what_is_wanted_and_what_is(
    wanted: Wanted, facts: str, state: Shown
) -> None:
    are = {name: name in facts.split() for name in ("runs", "started", "holds", "failed")}
    assert shown(FunctionLife(wanted), **are) == state


class Operator:
    """What an operator's notes say of a function: the naive model that commands at random are compared with."""

    def __init__(self) -> None:
        self.wanted, self.runs, self.staged, self.previous = "deployed", "1", "", ""

    def swap_to(self, version: str) -> None:
        self.previous, self.runs, self.staged = self.runs, version, ""

    def carries_out(self, command: Command, state: Shown) -> bool | None:
        """Do a command; None: nothing is to be done; False: it is refused."""
        if state in NOTHING.get(command, set()):
            return None
        if state not in CARRIED_OUT[command] or (command is Command.ROLLBACK and not self.previous):
            return False
        if command is Command.DEPLOY:
            if not self.staged and state in {"deployed", "paused"}:
                return None
            self.wanted = "deployed" if state == "undeployed" else self.wanted
            if self.staged:
                self.swap_to(self.staged)
        elif command is Command.ROLLBACK:
            self.swap_to(self.previous)
        else:
            self.wanted = {"pause": "paused", "resume": "deployed", "undeploy": "undeployed"}[command]
        return True


@pytest.mark.parametrize("seed", range(20))
def test_commands_at_random_do_what_an_operator_has_noted(seed: int) -> None:
    dice, notes, life = random.Random(seed), Operator(), FunctionLife(deployed=CodeVersion("1"))
    for number in range(2, 300):
        if dice.random() < 0.2:
            notes.staged, notes.previous = str(number), ""
            life = replace(life, other=CodeVersion(str(number)), other_is_previous=False)
        facts = {name: dice.random() < 0.7 for name in ("runs", "started", "holds")}
        state = shown(life, **facts, failed=dice.random() < 0.2)
        command = dice.choice(list(Command))
        before = life
        try:
            after = decide(command, life, state, name="f")
            carried_out = None if after is None else True
            life = after or life
        except OperatorError:
            carried_out = False
        assert carried_out == notes.carries_out(command, state), (command, state)
        assert carried_out or life == before
        other = (notes.previous, True) if notes.previous else (notes.staged, False)
        found = (life.other.id if life.other else "", life.other_is_previous)
        assert (life.wanted, life.deployed.id, found) == (notes.wanted, notes.runs, other)
