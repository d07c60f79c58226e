"""The admin endpoint's client: what it asks, in what ways, and what it makes of answers that are none."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.admin_endpoint import DOCUMENT, Endpoint, endpoint
from support.certificates import Certificates

from mldserver.admin.http_client import ActResult, Client, NoAnswer, Refused, read_status
from mldserver.base.tls import ServerTLS, client_context
from mldserver.config.kinds import address


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as served:
        yield served


def client(server: Endpoint, tls: ssl.SSLContext | None = None) -> Client:
    return Client(address.parse(server.address), tls=tls, seconds=600)


def test_the_status_is_what_was_sent(server: Endpoint) -> None:
    assert read_status(client(server).status()) == DOCUMENT
    assert server.asked == [("/status", None)]


def test_an_act_goes_with_its_argument(server: Endpoint) -> None:
    server.answers["/act/log-level"] = 200, {"done": True, "text": "The level is debug."}
    assert client(server).act("log-level", "debug", seconds=600) == ActResult(True, "The level is debug.")
    assert server.asked == [("/act/log-level", {"argument": "debug"})]


def test_an_act_that_was_not_done_has_its_sentence(server: Endpoint) -> None:
    server.answers["/act/reload"] = 409, {"done": False, "text": "It does not load."}
    assert client(server).act("reload", "", seconds=600) == ActResult(False, "It does not load.")


def test_an_act_that_the_server_does_not_know_is_refused_in_its_words(server: Endpoint) -> None:
    server.answers["/act/a%2Fb"] = 404, {"error": "There is no such act."}
    with pytest.raises(Refused, match=r"did not do it: There is no such act\.$"):
        client(server).act("a/b", "", seconds=600)


def test_who_is_not_let_in_is_told_why(server: Endpoint) -> None:
    server.answers["/act/flush"] = 403, {"error": "This address is read-only."}
    with pytest.raises(Refused, match=r"refuses: This address is read-only\.$"):
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
    with saying(data) as wrong, pytest.raises(NoAnswer, match="is not an admin endpoint of mldserver"):
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
    with pytest.raises(NoAnswer, match="or it expects TLS"):
        client(guarded).status()
