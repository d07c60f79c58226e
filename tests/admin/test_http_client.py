"""The admin endpoint's client: what it asks, in what ways, and what it makes of answers that are none."""

from __future__ import annotations

import os
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from support.admin_endpoint import DOCUMENT, Endpoint, endpoint
from support.certificates import Certificates

from mldserver.admin.access import AccessToken
from mldserver.admin.http_client import Answer, Client, NoAnswer, Refused, listening_users, read_status
from mldserver.base.tls import ServerTLS, client_context
from mldserver.config.kinds import address


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as served:
        yield served


def client(server: Endpoint, word: str | None = None, tls: ssl.SSLContext | None = None) -> Client:
    token = None if word is None else AccessToken(word, os.geteuid())
    return Client(address.parse(server.address), token=token, tls=tls, seconds=600)


def test_the_status_is_what_was_sent(server: Endpoint) -> None:
    assert read_status(client(server).status()) == DOCUMENT
    assert server.asked == [("/status", None, None)]


def test_an_act_goes_with_its_argument_and_the_token(server: Endpoint) -> None:
    server.answers["/act/log-level"] = 200, {"done": True, "text": "The level is debug."}
    assert client(server, "secret").act("log-level", "debug", seconds=600) == Answer(
        True, "The level is debug."
    )
    assert server.asked == [("/act/log-level", {"argument": "debug"}, "Bearer secret")]


@pytest.mark.parametrize("status", [401, 403])
def test_who_reads_shows_the_token_only_to_a_server_that_wants_it(status: int, server: Endpoint) -> None:
    client(server, "secret").status()
    server.answers["/status"] = status, {"error": "This needs the token."}
    with pytest.raises(Refused, match="This needs the token"):
        client(server, "secret").status()
    with pytest.raises(Refused, match="This needs the token"):
        client(server).status()
    assert [token for _, _, token in server.asked] == [None, None, "Bearer secret", None]


def test_a_stranger_who_has_taken_the_port_is_not_shown_the_token(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = os.geteuid() + 1
    monkeypatch.setattr("mldserver.admin.http_client.listening_users", lambda _socket: {stranger})
    server.answers["/status"] = 401, {"error": "Your token, please."}
    ours = client(server, "secret")
    for ask in (ours.status, lambda: ours.act("pause", "", seconds=600)):
        with pytest.raises(
            Refused, match=f"is of user {stranger}, and the token of user .*: it was not sent"
        ):
            ask()
    assert {token for _, _, token in server.asked} == {None}
    monkeypatch.setattr("mldserver.admin.http_client.listening_users", lambda _socket: {0})
    server.answers["/act/pause"] = 200, {"done": True, "text": "It is paused."}
    assert ours.act("pause", "", seconds=600).done


class Socket(NamedTuple):
    """A connection, from one port to another."""

    here: tuple[str, int]
    there: tuple[str, int]

    def getsockname(self) -> tuple[str, int]:
        return self.here

    def getpeername(self) -> tuple[str, int]:
        return self.there


OURS = Socket(("127.0.0.1", 0x9000), ("127.0.0.1", 0x1B9F))
HOME, ANY, ANY_6 = "0100007F", "0" * 8, "0" * 32
MAPPED = "0000000000000000FFFF0000" + HOME


def row(local: str, remote: str, state: str, uid: int, inode: int) -> str:
    return f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000 {uid:5} 0 {inode} 1 0"


@pytest.mark.skipif(sys.byteorder != "little", reason="the tables are of a little-endian machine")
@pytest.mark.parametrize(
    ("tcp", "tcp6", "users"),
    [
        ([], [], set()),
        ([(f"{HOME}:1B9F", f"{ANY}:0000", "0A", 7, 1)], [], {7}),
        ([(f"{HOME}:1B9E", f"{ANY}:0000", "0A", 7, 1)], [], set()),
        ([(f"{ANY}:1B9F", f"{ANY}:0000", "0A", 8, 1)], [], {8}),
        ([], [(f"{ANY_6}:1B9F", f"{ANY_6}:0000", "0A", 9, 1)], {9}),
        # Who listens just there has it, whoever else listens everywhere.
        (
            [(f"{HOME}:1B9F", f"{ANY}:0000", "0A", 7, 1)],
            [(f"{ANY_6}:1B9F", f"{ANY_6}:0000", "0A", 9, 1)],
            {7},
        ),
        # Accepted, by a process that does not listen any more; and not accepted yet.
        ([(f"{HOME}:1B9F", f"{HOME}:9000", "01", 8, 5)], [], {8}),
        ([], [(f"{MAPPED}:1B9F", f"{MAPPED}:9000", "01", 8, 5)], {8}),
        (
            [(f"{HOME}:1B9F", f"{ANY}:0000", "0A", 7, 1), (f"{HOME}:1B9F", f"{HOME}:9000", "01", 0, 0)],
            [],
            {7},
        ),
        # Our own end, and another client's.
        (
            [(f"{HOME}:9000", f"{HOME}:1B9F", "01", 3, 5), (f"{HOME}:1B9F", f"{HOME}:9001", "01", 4, 5)],
            [],
            set(),
        ),
    ],
)
def test_the_kernels_tables_tell_whose_a_port_is(
    tcp: list[tuple[str, str, str, int, int]],
    tcp6: list[tuple[str, str, str, int, int]],
    users: set[int],
    tmp_path: Path,
) -> None:
    for name, rows in (("tcp", tcp), ("tcp6", tcp6)):
        (tmp_path / name).write_text("\n".join(["  sl  local_address", *(row(*one) for one in rows)]))
    assert listening_users(OURS, tmp_path) == users  # type: ignore[arg-type]  # of a socket it asks only these


def test_where_the_system_has_no_such_tables_nothing_is_told(tmp_path: Path) -> None:
    assert listening_users(OURS, tmp_path) == set()  # type: ignore[arg-type]  # as above


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_real_ports_user_is_told_before_and_after_the_accept(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as ours,
    ):
        assert listening_users(ours) == {os.geteuid()}
        with listener.accept()[0]:
            listener.close()
            assert listening_users(ours) == {os.geteuid()}


def test_an_act_that_was_not_done_has_its_sentence(server: Endpoint) -> None:
    server.answers["/act/reload"] = 409, {"done": False, "text": "It does not load."}
    assert client(server).act("reload", "", seconds=600) == Answer(False, "It does not load.")


def test_an_act_that_the_server_does_not_know_is_refused_in_its_words(server: Endpoint) -> None:
    server.answers["/act/a%2Fb"] = 404, {"error": "There is no such act."}
    with pytest.raises(Refused, match=r"did not do it: There is no such act\.$"):
        client(server).act("a/b", "", seconds=600)


@pytest.mark.parametrize("status", [401, 403])
def test_who_is_not_let_in_is_told_why_and_what_helps(status: int, server: Endpoint) -> None:
    server.answers["/act/flush"] = status, {"error": "This needs the token."}
    with pytest.raises(Refused, match=r"refuses: This needs the token\. --admin-token-file names"):
        client(server).act("flush", "", seconds=600)


@pytest.mark.parametrize(
    ("body", "told"), [(b"no \xff", "no �"), (b"", "HTTP status 500."), (b"{}", "HTTP status 500.")]
)
def test_an_answer_without_a_sentence_is_told_as_it_is(body: bytes, told: str, server: Endpoint) -> None:
    server.answers["/status"] = 500, body
    with pytest.raises(NoAnswer, match=f"has no status to show: {told}"):
        client(server).status()


def test_a_unix_socket_is_asked_like_any_other(tmp_path: Path) -> None:
    with endpoint(path=tmp_path / "admin") as served:
        assert read_status(client(served).status()) == DOCUMENT


@pytest.mark.parametrize("place", ["unix:nowhere", "127.0.0.1:1"])
def test_nobody_at_the_address_is_no_answer(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoAnswer, match=r"^No server answers at .*: (No such file|Connection refused)"):
        Client(address.parse(place)).status()


@contextmanager
def saying(
    data: bytes,
    *,
    then_close: bool = True,
    tls: ssl.SSLContext | None = None,
    ours: ssl.SSLContext | None = None,
) -> Iterator[Client]:
    """The client of something that says this to whoever connects."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with tls.wrap_socket(peer, server_side=True) if tls else peer as peer:
                peer.recv(4096)
                peer.sendall(data)
                if not then_close:
                    done.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Client(
                address.parse(f"127.0.0.1:{listener.getsockname()[1]}"),
                seconds=600 if then_close else 0.05,
                tls=ours,
            )
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize("data", [b"\x15\x03\x03\x00\x02\x02\x46", b"SSH-2.0-OpenSSH\r\n", b""])
def test_what_is_no_endpoint_is_told(data: bytes) -> None:
    with saying(data) as wrong, pytest.raises(NoAnswer, match="is no admin endpoint of mldserver"):
        wrong.status()


def test_a_server_that_says_nothing_is_waited_for_within_bounds() -> None:
    with (
        saying(b"", then_close=False) as silent,
        pytest.raises(NoAnswer, match=r"it did not within 0\.05 s\."),
    ):
        silent.status()


# TLS


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def guarded(files: Certificates) -> Iterator[Endpoint]:
    """An endpoint that wants certificates."""
    with endpoint(tls=ServerTLS(files.server, client_ca=files.ca).context) as served:
        yield served


def test_certificates_prove_both_sides_to_each_other(guarded: Endpoint, files: Certificates) -> None:
    tls = client_context(files.client, None, files.ca)
    assert read_status(client(guarded, tls=tls).status()) == DOCUMENT


@pytest.mark.parametrize("wrong", ["no certificate", "a stranger's", "another authority"])
def test_where_one_side_proves_nothing_neither_is_told_a_word(
    wrong: str, guarded: Endpoint, files: Certificates
) -> None:
    certificate = {"no certificate": None, "a stranger's": files.stranger}.get(wrong, files.client)
    tls = client_context(certificate, None, None if wrong == "another authority" else files.ca)
    with pytest.raises(Refused, match=r"do not trust each other: .* --admin names the server"):
        client(guarded, tls=tls).status()
    assert guarded.asked == []


def test_a_server_that_hangs_up_after_the_handshake_has_refused(files: Certificates) -> None:
    ours = client_context(files.client, None, files.ca)
    hangs_up = saying(b"", tls=ServerTLS(files.server).context, ours=ours)
    with hangs_up as refusing, pytest.raises(Refused, match="do not trust each other: Remote end closed"):
        refusing.status()


def test_plain_http_to_a_server_with_tls_is_told(guarded: Endpoint) -> None:
    with pytest.raises(NoAnswer, match="or speaks TLS where none was asked for"):
        client(guarded).status()
