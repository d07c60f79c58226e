"""The secret that bridges show: its file, and the gate that reads it from any chunking."""

from __future__ import annotations

from pathlib import Path

import pytest

from mldserver.base.secret import LONGEST, PREFIX, SecretGate, read_secret
from mldserver.errors import ConfigError

pytestmark = pytest.mark.quick

SECRET = b"correct-horse-battery"
SHOWN = PREFIX + SECRET + b"\n"
LINE = b'{"action":"initialize"}\n'


def test_the_secret_is_one_word_in_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"  " + SECRET + b"\r\n")
    path.chmod(0o600)
    assert read_secret(path) == SECRET
    path.chmod(0o440)
    assert read_secret(path), "as Kubernetes mounts a secret for a group"
    path.chmod(0o604)
    with pytest.raises(ConfigError, match="may be read by every user"):
        read_secret(path)
    path.chmod(0o600)
    for word in (b"", b"too-short", b"two words of sixteen", "sechzehn-zeichen-ü".encode(), b"x" * LONGEST):
        path.write_bytes(word)
        with pytest.raises(ConfigError, match="does not hold a secret"):
            read_secret(path)
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(path)


def passed(secret: bytes | None, data: bytes, size: int) -> tuple[bytes | None, str]:
    gate = SecretGate(secret)
    for at in range(0, len(data), size):
        rest = gate.feed(data[at : at + size])
        if rest is not None or gate.refused:
            return (rest, gate.refused) if rest is None else (rest + data[at + size :], gate.refused)
    return None, gate.refused


@pytest.mark.parametrize("size", [1, 2, 17, 18, 40, 1000])
def test_what_follows_the_secret_passes_whatever_the_chunks_are(size: int) -> None:
    assert passed(SECRET, SHOWN + LINE, size) == (LINE, "")
    # A server without a secret: bridges may have one already, or not.
    assert passed(None, SHOWN + LINE, size) == (LINE, "")
    assert passed(None, LINE, size) == (LINE, "")


@pytest.mark.parametrize("size", [1, 2, 17, 18, 40, 1000])
def test_another_secret_or_none_is_refused_whatever_the_chunks_are(size: int) -> None:
    for line in (LINE, b"mldserver-other\n", b"\n"):
        rest, refused = passed(SECRET, line, size)
        assert rest is None
        assert "did not show" in refused
    for word in (SECRET[:-1], SECRET + b"x", b"", b"x" * 5000):
        rest, refused = passed(SECRET, PREFIX + word + b"\n" + LINE, size)
        assert rest is None
        assert "another secret" in refused


def test_an_endless_secret_is_refused_before_it_fills_the_memory() -> None:
    for secret in (SECRET, None):
        gate = SecretGate(secret)
        assert gate.feed(PREFIX) is None
        assert not gate.refused
        assert gate.feed(b"x" * LONGEST) is None
        assert gate.refused
