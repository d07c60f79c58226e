"""What a test holds of one life of a server, whatever kind of process it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mldserver.config.locations import DynamoPlace
from mldserver.testing import FakeStream


@dataclass(frozen=True, slots=True)
class Plan:
    """What every life of one story needs to know."""

    out: Path
    handler: str
    python_path: str
    """The folder that holds the handler."""
    settings: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    stream: FakeStream | None = None
    """What the stream lists, for a server whose settings name it."""
    hangs: bool = False
    """Whether a life hangs at its step instead of ending there."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What a story's servers have in common."""

    dynamodb: DynamoPlace | None = None
    """Where the ledger is, if not in a file."""
    environ: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    pace: float = 1.0
    """How long leases stay where they are, beside what a ledger in a file allows."""
    timeout_seconds: float = 1.2
    """``server_timeout``."""
    apart: bool = False
    """Whether they are on hosts of their own: now and then the lock of a dead server cannot be seen."""


class Life(Protocol):
    """One process, armed to end at a step or not at all."""

    async def start(self) -> None:
        """Start it."""
        ...

    def stream_is_over(self) -> None:
        """Let it end in good order once all is published."""
        ...

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        ...

    async def ended(self) -> int:
        """Return its exit code (minus the signal's number) once it is gone."""
        ...
