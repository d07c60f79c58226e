"""What a test holds of one life of a server, whatever kind of process it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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
