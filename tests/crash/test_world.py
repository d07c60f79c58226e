"""What a world tells of a server that ended as it should not."""

from __future__ import annotations

from pathlib import Path

from crash.world import tail


def test_of_a_log_its_last_lines_are_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\n".join(b"line %d" % number for number in range(30)) + b"\n\xff")
    assert tail(log).splitlines() == [f"line {number}" for number in range(11, 30)] + ["\ufffd"]


def test_of_a_server_that_wrote_no_log_that_is_told(tmp_path: Path) -> None:
    assert tail(tmp_path / "log") == "(there is no log: log was never written)"
