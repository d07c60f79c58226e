"""A client of its own process: exchanges one-record batches until its input ends, and prints the longest answer in ms."""

from __future__ import annotations

import select
import socket
import sys
import time

from bench.hot.lines import SHAPES, answer_to, initialize

__all__: list[str] = []


def exchange(peer: socket.socket, line: bytes) -> None:
    """Send a line, answer what is asked meanwhile, and return when the action is over."""
    peer.sendall(line)
    begun = b""
    while True:
        *lines, begun = (begun + peer.recv(1 << 16)).split(b"\n")
        for said in filter(bytes.strip, lines):
            answer = answer_to(said)
            if answer is None:
                return
            peer.sendall(answer)


def main(path: str) -> None:
    """Probe what listens at ``path``."""
    shape = SHAPES[0]
    line, longest, number = shape.line(), 0.0, 0
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        exchange(peer, initialize("probed"))
        for number in range(20):
            exchange(peer, shape.numbered(line, number))
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], 0.002)[0]:
            number += 1
            sent = time.perf_counter()
            exchange(peer, shape.numbered(line, number))
            longest = max(longest, time.perf_counter() - sent)
    print(longest * 1000)


if __name__ == "__main__":
    main(sys.argv[1])
