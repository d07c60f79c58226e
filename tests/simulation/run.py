"""Run worlds from the shell: ``python -m simulation.run 0 500 2`` plays every second seed from 0 on below 500.

Prints one line of JSON for each world. With ``SIM_LOG`` in the environment the server's log goes to stderr. ``SIM_DONE``
names a file of such lines: its worlds are left out, so that a long run that was cut off goes on by the same command:

    SIM_DONE=worlds.jsonl PYTHONPATH=tests:. python -m simulation.run 0 5000 >> worlds.jsonl
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa
import structlog
from simulation.oracles import leaves
from simulation.plan import make_plan
from simulation.planted import BUGS, EARLY_BUGS, KEYED_BUGS, ORDERED_BUGS, SLIDING_BUGS, TIMED_BUGS
from simulation.world import play, summary
from support.checked_logger import CheckedLogger
from support.parsed_once import parse_once


def run(seed: int, bug: str | None = None) -> dict[str, Any]:
    """Play one world and tell what became of it."""
    CheckedLogger.violations.clear()
    told: dict[str, Any] = {"seed": seed, "why": None}
    try:
        world = play(
            make_plan(seed),
            {**BUGS, **KEYED_BUGS, **TIMED_BUGS, **SLIDING_BUGS, **EARLY_BUGS, **ORDERED_BUGS}[bug]
            if bug
            else None,
        )
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # whatever it is, the seed has failed
        return told | {
            "why": "; ".join(f"{type(each).__name__}: {each}" for each in leaves(error)),
            "trace": _notes(error),
        }
    if CheckedLogger.violations:
        return told | {"why": "; ".join(map(str, CheckedLogger.violations)), "trace": []}
    same = hashlib.sha256(json.dumps(summary(world)).encode()).hexdigest()
    lives = sum(each.lives for each in world.servers)
    return told | {"same": same, "lives": lives, "calls": world.faults.calls, "faults": world.faults.told}


def _notes(error: BaseException) -> list[str]:
    return [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]


def _drop(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    if "SIM_LOG" in os.environ:
        sys.stderr.write(f"{event}\n")
        if event.get("exc_info"):
            traceback.print_exc()
    raise structlog.DropEvent


def _done(file: str | None) -> set[int]:
    """Return the seeds of the worlds that a file tells of; the last line may have been cut off."""
    seeds: set[int] = set()
    if file is not None and Path(file).exists():
        for line in Path(file).read_text("utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                seeds.add(json.loads(line)["seed"])
    return seeds


def main(first: int, end: int, step: int = 1, bug: str | None = None) -> None:
    """Play worlds; a planted bug ends the run at the first one that finds it."""
    pa.set_cpu_count(1)  # the other cores play other worlds
    parse_once()
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, _drop],
        wrapper_class=CheckedLogger,
    )
    done = _done(os.environ.get("SIM_DONE"))
    for seed in range(first, end, step):
        if seed in done:
            continue
        told = run(seed, bug)
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        if bug is not None and told["why"] is not None:
            return


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
