"""The driver's own process, in this one."""

from __future__ import annotations

import io
import os
import socket
import sys
from contextlib import closing

import pytest

from mldserver.spark.driver import Driver


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_driver_leaves_though_a_hook_has_closed_a_standard_stream(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    monkeypatch.setattr(sys, name, closed)
    here, there = socket.socketpair()
    with closing(here), closing(there):
        Driver(here)._leave()
    assert left == [0]
