"""The life cycle of a function: what operators may ask for in each state, and what a state is called. Pure.

The ledger holds what is wanted (``ledger/contract.py``: ``FunctionLife``). Every server of the function follows it, so that a restart in any
state goes on. ``CELLS`` is the table of commands, which the page of functions shows too.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from mldserver.errors import OperatorError
from mldserver.ledger.contract import CodeVersion, FunctionLife, Wanted


class Shown(enum.StrEnum):
    """The state of a function, as status and commands show it."""

    UNDEPLOYED = "undeployed"
    """It has no parts, and does nothing until it is deployed."""
    DEPLOYING = "deploying"
    """Its parts start."""
    DEPLOYED = "deployed"
    """It works. It is ready or not, as readiness says."""
    PAUSING = "pausing"
    """Batches run, or are not durable yet, or not checkpointed."""
    PAUSED = "paused"
    """All shards are held and durable; daemons wait and keep their leases."""
    RESUMING = "resuming"
    """Shards that were held are released."""
    UNDEPLOYING = "undeploying"
    """Its servers drain, and its windows are published."""
    FAILED = "failed"
    """An error that a person must fix has ended it."""


class Command(enum.StrEnum):
    """What an operator asks for."""

    DEPLOY = "deploy"
    PAUSE = "pause"
    RESUME = "resume"
    UNDEPLOY = "undeploy"
    ROLLBACK = "rollback"


DONE: Final = "carried out"
NO_OP: Final = "no-op"
_WAIT: Final = "Wait until it is {}: `mldserver status` shows the state."
_WAIT_DEPLOYED: Final = _WAIT.replace("{}", "deployed")
_WAIT_UNDEPLOYED: Final = _WAIT.replace("{}", "undeployed", 1) + " Then deploy it."
_WAIT_PAUSED: Final = _WAIT.replace("{}", "paused")
_DEPLOY: Final = "Deploy it first: `mldserver functions deploy {name}`."
_CORRECT: Final = "Correct what ended it, then deploy it: `mldserver functions deploy {name}`."

_IN_ORDER: Final = tuple(Shown)
CELLS: Final[Mapping[Command, Mapping[Shown, str]]] = {
    command: dict(zip(_IN_ORDER, cells, strict=True))
    for command, cells in {
        Command.DEPLOY: (
            *(DONE, _WAIT_DEPLOYED, DONE, _WAIT_PAUSED, DONE, _WAIT_DEPLOYED),
            *(_WAIT_UNDEPLOYED, DONE),
        ),
        Command.PAUSE: (
            *(_DEPLOY, _WAIT_DEPLOYED, DONE, NO_OP, NO_OP, _WAIT_DEPLOYED),
            *(_WAIT_UNDEPLOYED, DONE),
        ),
        Command.RESUME: (
            *(_DEPLOY, _WAIT_DEPLOYED, NO_OP, DONE, DONE, NO_OP),
            *(_WAIT_UNDEPLOYED, _CORRECT),
        ),
        Command.UNDEPLOY: (*(NO_OP, DONE, DONE, DONE, DONE, DONE), *(NO_OP, DONE)),
        Command.ROLLBACK: (
            *(_DEPLOY, _WAIT_DEPLOYED, DONE, _WAIT_PAUSED, DONE, _WAIT_DEPLOYED),
            *(_WAIT_UNDEPLOYED, DONE),
        ),
    }.items()
}
"""What a command does in each state: ``DONE``, ``NO_OP``, or it is refused with this advice."""


def shown(life: FunctionLife, *, runs: bool, started: bool, holds: bool, failed: bool) -> Shown:
    """Return the state of a function at one server.

    ``runs``: it has parts, or they start or stop. ``started``: their start is complete. ``holds``: all shards are held and durable;
    while no pause is wanted: some are held still. ``failed``: an error that does not pass has ended it.
    """
    if life.wanted is Wanted.UNDEPLOYED:
        return Shown.UNDEPLOYING if runs else Shown.UNDEPLOYED
    if failed:
        return Shown.FAILED
    if not started:
        return Shown.DEPLOYING
    if life.wanted is Wanted.PAUSED:
        return Shown.PAUSED if holds else Shown.PAUSING
    return Shown.RESUMING if holds else Shown.DEPLOYED


def decide(
    command: Command, life: FunctionLife, state: Shown, *, name: str, keep: bool = False
) -> FunctionLife | None:
    """Return the life that a command asks for; None: nothing changes.

    The life may equal ``life``: a failed function then starts again as it is. ``name``: the function's. ``keep``: an undeploy keeps
    positions, state, timers and dead letters. Raises OperatorError, with the next step, for a command that the state does not allow.
    """
    cell = CELLS[command][state]
    if cell is NO_OP:
        return None
    if cell is not DONE:
        raise OperatorError(
            f"The function {name} is {state}: {command} is not possible.", advice=cell.format(name=name)
        )
    match command:
        case Command.DEPLOY:
            return _deployed(life, state)
        case Command.ROLLBACK:
            return _rolled_back(life, name)
        case Command.UNDEPLOY:
            return replace(life, wanted=Wanted.UNDEPLOYED, keep=keep)
    return replace(life, wanted=Wanted.PAUSED if command is Command.PAUSE else Wanted.DEPLOYED)


def _deployed(life: FunctionLife, state: Shown) -> FunctionLife | None:
    """Return the life with the staged version deployed, if there is one; None if that changes nothing."""
    if state is Shown.UNDEPLOYED:
        life = replace(life, wanted=Wanted.DEPLOYED, keep=False)
    if life.other is not None and not life.other_is_previous:
        return _swapped(life, life.other)
    return life if state in {Shown.UNDEPLOYED, Shown.FAILED} else None


def _rolled_back(life: FunctionLife, name: str) -> FunctionLife:
    """Return the life with the previous version deployed. Raises OperatorError if there is none."""
    if life.other is None or not life.other_is_previous:
        raise OperatorError(
            f"The function {name} has no previous version.",
            advice=f"Stage the one that you want: `mldserver functions stage {name} --code PATH`.",
        )
    return _swapped(life, life.other)


def _swapped(life: FunctionLife, other: CodeVersion) -> FunctionLife:
    """Return the life with the ``other`` version deployed; the one before is the previous version then."""
    return replace(life, deployed=other, other=life.deployed, other_is_previous=True)
