"""Public test tools: a daemon that speaks the real protocol, streams, a small engine, a virtual clock.

``FakeMLD`` plays a ``FakeStream`` to a server over a real socket as strictly as the Java does (``DaemonProtocol`` is the
same without I/O); ``FakeStreams`` answers as DynamoDB Streams do; ``LocalEngine`` computes windows without Spark;
``VirtualClock`` moves only when told to; ``HandlerRun`` tries a handler and its timers under it. The pytest fixtures come with the installed package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mldserver.testing.daemon import DaemonProtocol, Form, Hang, JvmExit, NoServer
    from mldserver.testing.daemon_session import DaemonHangs, Habits
    from mldserver.testing.fake_mld import FakeMLD
    from mldserver.testing.fake_stream import FakeStream, JavaThrow, LeaseTable, Place, StreamRecord
    from mldserver.testing.fake_streams import FakeStreams
    from mldserver.testing.fake_table import FakeShard
    from mldserver.testing.handler_run import HandlerRun
    from mldserver.testing.stand_ins import LocalEngine, VirtualClock

__all__ = [
    "DaemonHangs",
    "DaemonProtocol",
    "FakeMLD",
    "FakeShard",
    "FakeStream",
    "FakeStreams",
    "Form",
    "Habits",
    "HandlerRun",
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
    "daemon": ("DaemonProtocol", "Form", "Hang", "JvmExit", "NoServer"),
    "daemon_session": ("DaemonHangs", "Habits"),
    "fake_mld": ("FakeMLD",),
    "fake_stream": ("FakeStream", "JavaThrow", "LeaseTable", "Place", "StreamRecord"),
    "fake_streams": ("FakeStreams",),
    "fake_table": ("FakeShard",),
    "handler_run": ("HandlerRun",),
    "stand_ins": ("LocalEngine", "VirtualClock"),
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the pytest plugin lives here and must load lightly."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
