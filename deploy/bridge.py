# ruff: noqa: INP001  # a script beside the daemon, no package
"""Joins the stdin and stdout of a MultiLangDaemon child to mldserver: ``python -ISE bridge.py ADDRESS [CA CERTIFICATE KEY] [SECRET]``.

ADDRESS is HOST:PORT, [IPV6]:PORT or unix:/path. With the three files (PEM) it speaks TLS. It shows the server the secret that is
in the file SECRET. The same program as ``bridge.c``, whose opening comment states the
contract, for machines without a compiler. It imports built-in and extension modules only, no ``socket``, ``signal`` or
``selectors``: that keeps one process at about 2.7 MiB of private memory; ``ssl``, where it is wanted, has its price.
"""

import _signal  # type: ignore[import-not-found]  # built in; it has no stub
import _socket
import posix
import select
import sys
import time

BUFFER = 65536
PIPE_BUF = 4096
LINGER_SECONDS = 2.0
HANDSHAKE_SECONDS = 30.0
LONGEST_SECRET = 1024
AGAIN = [BlockingIOError]
"""What a socket raises that has no room, or nothing to give."""
IGNORED = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGPIPE)
# How long a server may say nothing, not even that it is there; some platforms lack some of these.
SILENCE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class Flow:
    """Bytes on their way in one direction: nothing is read before the last read was passed on."""

    def __init__(self) -> None:
        self.waiting = memoryview(b"")
        self.eof = False
        self.hung_up = False

    def put(self, data: bytes) -> None:
        """Take what was read; nothing read is the end."""
        self.waiting = memoryview(data)
        self.eof = not data

    @property
    def readable(self) -> bool:
        """Whether there is room, and more may come."""
        return not self.waiting and not self.eof

    @property
    def over(self) -> bool:
        """Whether everything has been passed on, and nothing more will come."""
        return not self.waiting and self.eof


def connect(address: str, files: list[str]) -> _socket.socket:
    """Return a connected socket. Raises ValueError for what is no address, OSError when nobody is there, or not the right one."""
    if address.startswith("unix:"):
        server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        server.connect(address[5:])
        return server
    host, _, port = address.rpartition(":")
    if not host or not port:
        raise ValueError("not an address (HOST:PORT or unix:/path)")
    server = connect_tcp(host.strip("[]"), port)
    return server if not files else encrypted(server, host.strip("[]"), files)


def connect_tcp(host: str, port: str) -> _socket.socket:
    """Return a socket that is connected to one of the host's addresses."""
    problem = OSError("the host has no address")
    # The host as bytes: text would load the codec for international names.
    found = _socket.getaddrinfo(host.encode(), port, 0, _socket.SOCK_STREAM)
    for family, kind, protocol, _name, where in found:
        server = _socket.socket(family, kind, protocol)
        server.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
        for name, value in SILENCE:
            if hasattr(_socket, name):
                server.setsockopt(_socket.IPPROTO_TCP, getattr(_socket, name), value)
        try:
            server.connect(where)
        except OSError as error:
            problem = error
            server.close()
        else:
            return server
    raise problem


def encrypted(server: _socket.socket, host: str, files: list[str]) -> _socket.socket:
    """Return the socket with TLS on it, both sides being proven. Raises OSError."""
    import socket  # noqa: PLC0415  # memory: only where TLS is spoken
    import ssl  # noqa: PLC0415  # see above

    ca, certificate, key = files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(ca)
    context.load_cert_chain(certificate, key, password="")
    plain = socket.socket(server.family, server.type, server.proto, server.detach())
    plain.settimeout(HANDSHAKE_SECONDS)
    AGAIN.extend([ssl.SSLWantReadError, ssl.SSLWantWriteError])
    return context.wrap_socket(plain, server_hostname=host)


def greeting(path: str) -> bytes:
    """Return the line that shows the server the secret in a file. Raises OSError."""
    file = posix.open(path, posix.O_RDONLY)
    word = posix.read(file, LONGEST_SECRET).strip()
    posix.close(file)
    return b"mldserver-secret " + word + b"\n"


def relay(server: _socket.socket, first: bytes = b"") -> None:
    """Carry bytes both ways until either side has closed, ``first`` before all. Raises OSError when the connection breaks."""
    up, down = Flow(), Flow()
    up.waiting = memoryview(first)
    server.setblocking(False)
    half_closed, deadline = False, 0.0
    while not down.over:
        if up.over and not half_closed:
            half_closed = True
            # Of the socket's own class: with TLS no more than the end of the connection is said, and replies still come.
            _socket.socket.shutdown(server, _socket.SHUT_WR)
        if (up.eof or up.hung_up) and not deadline:
            deadline = time.monotonic() + LINGER_SECONDS
        left = deadline - time.monotonic() if deadline else None
        if left is not None and left <= 0:
            return
        ready = wait(up, down, server, left)
        if ready.get(1, 0) & (select.POLLERR | select.POLLNVAL):
            return  # nobody reads stdout any more: the daemon is gone
        try:
            step(up, down, server, ready)
        except tuple(AGAIN):
            continue  # no room after all; ask again


def wait(up: Flow, down: Flow, server: _socket.socket, seconds: float | None) -> dict[int, int]:
    """Return what each file descriptor is ready for: only what can be used now is asked for."""
    poll = select.poll()
    poll.register(1, select.POLLOUT if down.waiting else 0)
    if up.readable or not up.hung_up:
        poll.register(0, select.POLLIN if up.readable else 0)
    events = (select.POLLIN if down.readable else 0) | (select.POLLOUT if up.waiting else 0)
    if events:
        poll.register(server.fileno(), events)
    return dict(poll.poll(None if seconds is None else seconds * 1000))


def step(up: Flow, down: Flow, server: _socket.socket, ready: dict[int, int]) -> None:
    """Move bytes where ``ready`` allows it, without ever blocking."""
    on_socket = ready.get(server.fileno(), 0)
    if ready.get(1, 0) & select.POLLOUT:
        # poll() promises this many bytes on a pipe.
        down.waiting = down.waiting[posix.write(1, down.waiting[:PIPE_BUF]) :]
    if on_socket & select.POLLOUT and up.waiting:
        up.waiting = up.waiting[server.send(up.waiting) :]
    if on_socket & ~select.POLLOUT and down.readable:
        # Asked for first: Python's TLS takes a reset for an end.
        broken = on_socket & select.POLLERR and server.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
        down.put(server.recv(BUFFER))
        if down.eof and broken:
            raise OSError(broken, posix.strerror(broken))
    if ready.get(0, 0) & (select.POLLHUP | select.POLLERR):
        up.hung_up = True  # seen even while a server that does not read keeps the rest in the pipe
    if 0 in ready and up.readable:
        up.put(posix.read(0, BUFFER))


def main(arguments: list[str]) -> int:
    """Run; return the exit code."""
    for number in IGNORED:
        _signal.signal(number, _signal.SIG_IGN)
    if len(arguments) not in {1, 2, 4, 5}:
        return complain(2, "usage", "bridge HOST:PORT | unix:/path [CA CERTIFICATE KEY] [SECRET]")
    files = arguments[1:4] if len(arguments) >= 4 else []  # noqa: PLR2004  # TLS's three
    secret = arguments[1 + len(files) :]
    try:
        first = greeting(secret[0]) if secret else b""
        relay(connect(arguments[0], files), first)
    except OSError as error:  # first: a certificate that is refused is a ValueError too
        return complain(1, error.filename or arguments[0], sentence(error))
    except ValueError as error:
        return complain(2, arguments[0], error)
    return 0


def sentence(error: OSError) -> object:
    """Return what is wrong, without the numbers of Python's own sources."""
    reason = getattr(error, "reason", None) or ""
    if "ALERT" in reason:
        return f"the server refuses this client: {reason.replace('_', ' ').lower()}"
    return error.strerror or error


def complain(code: int, address: str, what: object) -> int:
    """Say in one line what is wrong; return the exit code."""
    posix.write(2, f"mldserver bridge: {address}: {what}\n".encode())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
