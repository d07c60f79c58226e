"""What fails in a world: ledger, disk, engine and whole processes, before or after a call took effect."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ledger.dynamodb_fake import client_error, lost_answer
from simulation.outputs import Outputs
from simulation.plan import Plan
from simulation.tables import VirtualTable
from support.virtual_process import Call, ProcessDied, VirtualProcess

from mldserver.base.clock import Clock
from mldserver.engine_jobs import WindowJob
from mldserver.errors import DriverLost, LedgerError, WindowFailed
from mldserver.ledger.sqlite import SqliteStore
from mldserver.output.store import OutputStore

if TYPE_CHECKING:
    import pyarrow as pa
    from simulation.oracles import Positions

_R = TypeVar("_R")

_GIVES_UP = frozenset({"open", "enter", "close", "state", "leave"})
"""Calls to the ledger at a server's start and end, where it may give up instead of trying again."""


MOVES = frozenset({"rename", "exchange", "delete"})


@dataclass
class Faults:
    """An ``Observer`` of every server's blocking calls."""

    plan: Plan
    dice: random.Random
    positions: Positions
    note: Callable[[str], None]
    outputs: Outputs
    clock: Clock
    calm: bool = False
    """No more faults from now on."""
    calls: int = 0
    told: Counter[str] = field(default_factory=Counter)
    """What went wrong, and how often."""
    die_at: dict[int, bool] = field(default_factory=dict)
    """At which calls a process dies, and whether after they took effect."""
    cursed: dict[str, bool] = field(default_factory=dict)
    """Windows, and whether their jobs fail until an operator comes."""
    locks: dict[VirtualProcess, list[object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dice = self.dice
        self.die_at = {dice.randint(1, 300): dice.random() < 0.5 for _ in range(self.plan.deaths)}

    def before(self, process: VirtualProcess, call: Call) -> None:
        self.calls += 1
        self.note(f"{process.name} {call.owner}.{_name(call)}")
        if isinstance(call.target, OutputStore) and call.name == "write" and "/state/" not in call.args[0]:
            self.outputs.wrote(*call.args)
        self._perhaps_die(process, after=False)
        if self.calm:
            return
        if isinstance(call.target, OutputStore) and call.name == "write" and self.hit(self.plan.store_fails):
            self.tell("disk full", "write fails")
            raise OSError(28, "No space left on device")
        if isinstance(call.target, OutputStore) and call.name in MOVES and self.hit(self.plan.moves_fail):
            self.tell("not moved", call.name)
            raise OSError(5, "Input/output error")
        if _is_transaction(call) and self.hit(self.plan.ledger_before):
            self.tell("refused", _name(call))
            if isinstance(call.target, VirtualTable):
                raise client_error(self.dice.choice(("ThrottlingException", "AccessDeniedException")), "")
            raise LedgerError(f"{_name(call)} failed before it took effect.")

    def after(self, process: VirtualProcess, call: Call, result: object) -> None:
        if isinstance(call.target, SqliteStore) and call.name == "transact":
            told, _ = result  # type: ignore[misc]  # what came of the rule, and what was read then
            if _name(call) != "register" or told.registered:
                self.happened(_name(call), *call.args[0].args[:1])
        if isinstance(call.target, VirtualTable) and call.target.deed and _is_transaction(call):
            self.happened(*call.target.deed)
        if call.owner == "ServerLocks" and call.name == "hold":
            self.locks.setdefault(process, []).append(call.target)
        self._perhaps_die(process, after=True)
        if self.calm:
            return
        if isinstance(call.target, OutputStore) and call.name in MOVES and self.hit(self.plan.moves_fail / 2):
            self.tell("moved after all", call.name)
            raise OSError(5, "Input/output error")
        if _is_transaction(call) and self.hit(self.plan.ledger_after):
            self.tell("answer lost", _name(call))
            if isinstance(call.target, VirtualTable):
                raise lost_answer() if self.hit(0.5) else client_error("AccessDeniedException", "")
            raise LedgerError(f"{_name(call)} took effect, but its answer was lost.")

    def happened(self, call: str, argument: Any = None) -> None:
        """Let the oracles know of a transaction of the ledger that took effect."""
        if call == "register":
            self.positions.register(argument)
        if call == "compact":
            self.told["compacted"] += 1
        self.outputs.happened(call, argument, self.clock.now_ms())

    def fail_job(self, job: WindowJob) -> Exception | None:
        window = job.window.id
        if self.cursed.setdefault(window, not self.calm and self.hit(self.plan.cursed)):
            self.tell("cursed", window)
            return WindowFailed(f"{window} is not to be computed before somebody helps")
        if self.calm or not self.hit(self.plan.engine_fails):
            return None
        self.tell("job failed", window)
        return self.dice.choice((WindowFailed, DriverLost))(f"{window} was not to be computed")

    def mend(self, windows: Iterable[str]) -> None:
        """Take away what windows fail of: an operator has come."""
        self.cursed |= dict.fromkeys(windows, False)

    def tell(self, what: str, where: str) -> None:
        """Count something that goes wrong."""
        self.told[what] += 1
        self.note(f"!! {what}: {where}")

    def hit(self, odds: float) -> bool:
        return odds > 0 and self.dice.random() < odds

    def kill(self, process: VirtualProcess) -> None:
        """Let a process die where it stands; the kernel lets its locks go."""
        process.kill()
        for lock in self.locks.pop(process, ()):
            held = lock._held  # type: ignore[attr-defined]  # a ServerLocks, which nobody else can let go any more
            if held is not None:
                os.close(held[1])
                lock._held = None  # type: ignore[attr-defined]  # see above

    def _perhaps_die(self, process: VirtualProcess, *, after: bool) -> None:
        if self.die_at.get(self.calls) is after and not (self.calm or process.dead):
            self.tell("died", process.name)
            self.kill(process)
            raise LedgerError("The process is dead.")


def _name(call: Call) -> str:
    """Return what is called; of a ledger in a file the rule, or what is read."""
    if not isinstance(call.target, SqliteStore) or call.name not in {"transact", "look"}:
        return call.name
    name: str = getattr(call.args[0], "rule", call.args[0]).__name__
    return name


def _is_transaction(call: Call) -> bool:
    if isinstance(call.target, VirtualTable):
        return bool(call.args[0] == "transact_write_items")
    return isinstance(call.target, SqliteStore) and _name(call) not in _GIVES_UP


class FaultyStore(OutputStore):
    """An output folder whose writes, renames, exchanges and deletions fail, or are a process's last, one by one."""

    faults: Faults

    def write(self, path: str, rows: pa.Table) -> int:
        return self._watched("write", super().write, path, rows)

    def rename(self, source: str, target: str) -> None:
        self._watched("rename", super().rename, source, target)

    def exchange(self, one: str, other: str) -> None:
        self._watched("exchange", super().exchange, one, other)

    def delete(self, path: str) -> None:
        self._watched("delete", super().delete, path)

    def _watched(self, name: str, step: Callable[..., _R], *args: Any) -> _R:
        process, call = VirtualProcess.current(), Call(self, name, args)
        if process.dead:
            raise ProcessDied(name)
        self.faults.before(process, call)
        result = step(*args)
        self.faults.after(process, call, result)
        return result
