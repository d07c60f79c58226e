"""Public test tools: a daemon that speaks the real protocol, a stream, a small engine, a virtual clock.

``FakeMLD`` plays a ``FakeStream`` to a server over a real socket as strictly as the Java does (``DaemonShard`` is the
same without I/O); ``LocalEngine`` computes windows without Spark; ``VirtualClock`` moves only when told to. The pytest
fixtures ``virtual_clock``, ``fake_stream`` and ``local_engine`` come with the installed package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mldserver.testing.daemon import DaemonShard, Hang, JvmExit, NoServer
    from mldserver.testing.daemon_session import DaemonHangs, Habits
    from mldserver.testing.fake_mld import FakeMLD
    from mldserver.testing.fake_stream import FakeStream, StreamRecord
    from mldserver.testing.java_wire import Form
    from mldserver.testing.leases import JavaThrow, LeaseTable, Place
    from mldserver.testing.local_engine import LocalEngine
    from mldserver.testing.manual_clock import VirtualClock

__all__ = [
    "DaemonHangs",
    "DaemonShard",
    "FakeMLD",
    "FakeStream",
    "Form",
    "Habits",
    "Hang",
    "JavaThrow",
    "JvmExit",
    "LeaseTable",
    "LocalEngine",
    "NoServer",
    "Place",
    "StreamRecord",
    "VirtualClock",
]

_HOMES: Final = {
    "DaemonHangs": "daemon_session",
    "DaemonShard": "daemon",
    "FakeMLD": "fake_mld",
    "FakeStream": "fake_stream",
    "Form": "java_wire",
    "Habits": "daemon_session",
    "Hang": "daemon",
    "JavaThrow": "leases",
    "JvmExit": "daemon",
    "LeaseTable": "leases",
    "LocalEngine": "local_engine",
    "NoServer": "daemon",
    "Place": "leases",
    "StreamRecord": "fake_stream",
    "VirtualClock": "manual_clock",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the pytest plugin lives here and must load lightly."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
