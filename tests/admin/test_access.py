"""Who may do what at the admin endpoint: listener x credential x act, and what browsers are kept from."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from pathlib import Path

import pytest

from mldserver.admin.access import (
    Act,
    Credential,
    Listener,
    browser_refusal,
    find_token,
    make_token,
    read_token,
    refusal,
    same_token,
)
from mldserver.errors import OperatorError

pytestmark = pytest.mark.quick

NOTHING, LIVE, READ, STEER = 0, Act.LIVE, Act.READ, Act.STEER

# The most that each may do: as it is, with a token file that was given (guarded), insecure, and both.
TABLE = {
    (Listener.UNIX, Credential.OWNER): (STEER, STEER, STEER, STEER),
    (Listener.LOOPBACK, Credential.NONE): (READ, LIVE, READ, LIVE),
    (Listener.LOOPBACK, Credential.TOKEN): (STEER, STEER, STEER, STEER),
    (Listener.LOOPBACK, Credential.WRONG_TOKEN): (LIVE, LIVE, LIVE, LIVE),
    (Listener.LOOPBACK, Credential.CERTIFICATE): (STEER, STEER, STEER, STEER),
    (Listener.LOOPBACK, Credential.WRONG_NAME): (LIVE, LIVE, LIVE, LIVE),
    (Listener.REMOTE, Credential.NONE): (NOTHING, NOTHING, READ, LIVE),
    (Listener.REMOTE, Credential.TOKEN): (NOTHING, NOTHING, READ, READ),
    (Listener.REMOTE, Credential.WRONG_TOKEN): (NOTHING, NOTHING, LIVE, LIVE),
    (Listener.REMOTE, Credential.CERTIFICATE): (STEER, STEER, STEER, STEER),
}
WAYS = ((False, False), (True, False), (False, True), (True, True))


@pytest.mark.parametrize(("listener", "credential"), list(itertools.product(Listener, Credential)))
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_each_client_may_do_what_the_table_says_and_nothing_else(
    listener: Listener, credential: Credential, way: int
) -> None:
    guarded, insecure = WAYS[way]
    most = TABLE.get((listener, credential), (NOTHING,) * 4)[way]
    for act in Act:
        why = refusal(listener, credential, act, guarded=guarded, insecure=insecure)
        assert (why is None) == (act <= most), f"{act}: {why}"


def test_nobody_steers_from_outside_without_a_certificate_whatever_the_settings() -> None:
    for credential, (guarded, insecure) in itertools.product(Credential, WAYS):
        may = refusal(Listener.REMOTE, credential, Act.STEER, guarded=guarded, insecure=insecure) is None
        assert may == (credential is Credential.CERTIFICATE)


@pytest.mark.parametrize("listener", Listener)
def test_a_refusal_says_what_is_missing(listener: Listener) -> None:
    missing = {Listener.UNIX: "own user", Listener.LOOPBACK: "token file", Listener.REMOTE: "certificate"}
    assert missing[listener] in str(refusal(listener, Credential.WRONG_NAME, Act.STEER))


def asked(listener: Listener = Listener.LOOPBACK, path: str = "/status", **headers: str) -> str | None:
    request = {"method": "GET", "host": "localhost:7071", "origin": "", "site": ""} | headers
    return browser_refusal(listener, path, **request)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:7071", "LOCALHOST.:1", "127.0.0.1:7071", "[::1]:7071", "127.3.2.1"]
)
def test_on_loopback_this_hosts_own_names_are_known(host: str) -> None:
    assert asked(host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:7071",
        "127.0.0.1.evil.example",
        "localhost.evil.example:7071",
        "10.0.0.1:7071",
        "[::2]:7071",
        ":7071",
    ],
)
def test_on_loopback_any_other_host_is_refused_as_a_name_that_was_rebound(host: str) -> None:
    assert "Host header" in str(asked(host=host))
    assert asked(Listener.UNIX, host=host) is None


def test_under_insecure_a_page_under_a_rebound_name_may_read_as_anyone_may_and_never_steer() -> None:
    assert asked(Listener.REMOTE, host="evil.example") is None
    for act in Act:
        why = refusal(Listener.REMOTE, Credential.NONE, act, insecure=True)
        assert (why is None) == (act <= Act.READ)


@pytest.mark.parametrize("path", ["/status", "/act/pause"])
@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_page_of_another_site_may_not_ask(path: str, site: str, method: str) -> None:
    assert "other sites" in str(asked(path=path, site=site, method=method))
    assert "other sites" in str(asked(path=path, method=method, origin="https://evil.example"))
    assert "other sites" in str(asked(path=path, method=method, origin="null"))


@pytest.mark.parametrize("site", ["", "none", "same-origin"])
def test_the_endpoints_own_page_and_who_is_no_browser_may_ask(site: str) -> None:
    assert asked(site=site, origin="http://localhost:7071" if site else "") is None


def test_a_link_to_the_page_may_come_from_anywhere_but_a_form_may_not() -> None:
    assert asked(path="/", site="cross-site") is None
    assert asked(path="/", site="cross-site", method="POST") is not None


# The token


def test_a_token_is_made_once_at_random_and_for_its_user_alone(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "admin.token", tmp_path / "b" / "admin.token"
    make_token(one)
    make_token(other)
    token = read_token(one)
    assert len(token) >= 40
    assert token != read_token(other)
    assert one.stat().st_mode & 0o777 == 0o600
    make_token(one)
    assert read_token(one) == token
    assert list(one.parent.iterdir()) == [one]


def test_a_token_that_others_may_read_is_refused_and_the_servers_own_gives_way_to_a_new_one(
    tmp_path: Path,
) -> None:
    file = tmp_path / "token"
    make_token(file)
    for mode in (0o660, 0o640, 0o604, 0o620):
        token = read_token(file)
        file.chmod(mode)
        with pytest.raises(OperatorError, match="may be read by others"):
            read_token(file)
        make_token(file)
        assert read_token(file) != token
        assert file.stat().st_mode & 0o777 == 0o600
        assert list(tmp_path.iterdir()) == [file]


def test_a_token_file_that_a_crash_left_empty_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    make_token(file)
    assert len(read_token(file)) >= 40


def test_where_no_file_can_be_kept_from_others_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstat
    monkeypatch.setattr(
        os, "fstat", lambda file: Stat(real(file), st_mode=stat.S_IFREG | 0o777)
    )  # as on CIFS
    with pytest.raises(OperatorError, match=r"may be read by others \(mode 777\)"):
        make_token(tmp_path / "token")


def test_another_users_file_is_no_token_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    make_token(file)
    held, owner = file.read_text(), file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(os, "fstat", lambda _file: Stat(file.stat(), st_uid=owner + 2))
    for take in (read_token, make_token):
        with pytest.raises(OperatorError, match=f"belongs to user {owner + 2}, not to the server's user"):
            take(file)
    assert file.read_text() == held
    assert find_token(file).owner == owner + 2
    monkeypatch.setattr(os, "fstat", lambda _file: Stat(file.stat(), st_uid=0))
    assert read_token(file) == held.strip()


def test_a_token_needs_no_hard_links_and_no_name_that_another_server_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "elsewhere").touch()
    (tmp_path / f".token.{os.getpid()}").symlink_to("elsewhere")
    make_token(tmp_path / "token")
    assert read_token(tmp_path / "token")
    assert (tmp_path / "elsewhere").read_bytes() == b""


class Stat:
    """What the system tells of a file, but for what is told otherwise."""

    def __init__(self, real: os.stat_result, **otherwise: int) -> None:
        self.st_mode, self.st_uid, self.st_size = real.st_mode, real.st_uid, real.st_size
        self.st_blksize = real.st_blksize
        vars(self).update(otherwise)


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe", "cannot be read")]
)
def test_a_token_file_without_a_token_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(OperatorError, match=said):
        read_token(file)


def test_a_token_file_that_is_missing_or_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="No such file"):
        read_token(tmp_path / "none")
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "file" / "token", tmp_path / "folder"):
        with pytest.raises(
            OperatorError, match=r"cannot be (made|read): (Not a directory|File exists|Is a dir)"
        ):
            make_token(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_only_the_same_token_is_the_token() -> None:
    assert same_token("ab", "ab")
    assert not same_token("ab", "abc")
    assert not same_token("", "abc")
    assert not same_token("\udcff", "abc")
