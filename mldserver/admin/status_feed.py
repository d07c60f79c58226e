"""The server's latest status document, renewed once a second, and what the endpoint's clients read from it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
import structlog

from mldserver.admin import metrics
from mldserver.admin.history import History
from mldserver.base.clock import Flag
from mldserver.children.channel import encodable
from mldserver.status_document import Status, for_json

log = structlog.get_logger("mldserver")

_INTERVAL_SECONDS: Final = 1.0


class StatusFeed:
    """Holds the latest status. Each representation is made when a client first asks for it, once for all clients."""

    def __init__(self, collect: Callable[[str], Status | None], hide: Callable[[str], str]) -> None:
        """``collect`` is described at ``AdminEndpoint.serving``. ``hide`` removes the settings' secrets from JSON."""
        self._collect = collect
        self._hide = hide
        self._failure = ""
        self._latest: Status | None = None
        self._histories: defaultdict[str, History] = defaultdict(History)
        """Of each function."""
        self._made: dict[str, bytes] = {}
        self._shown: Status | None = None
        self.renewed = Flag()
        """Set when a newer status replaces the present one; each status has a separate flag."""

    async def run(self, pause: Callable[[float], Awaitable[None]]) -> None:
        """Collect a status every second until cancelled; ``pause`` sleeps for at least the given seconds."""
        while True:
            self._refresh()
            await pause(_INTERVAL_SECONDS)

    def _refresh(self) -> None:
        """Collect a status. If that fails, log a new reason once, and collect what is known without the server's parts."""
        try:
            status = self._collect("")
        except Exception as error:
            reason, status = f"the status cannot be collected: {type(error).__name__}: {error}", None
            with contextlib.suppress(Exception):  # if this fails, too, the feed keeps the former status
                status = self._collect(reason)
            if reason != self._failure:
                log.exception(
                    "admin.failed", did="/readyz is red and /status has the reason; the pipeline continues."
                )
            self._failure = reason
        if status is not None:
            self.show(status)

    def show(self, status: Status) -> None:
        """Replace the latest status."""
        self._latest, self._shown, self._made = status, None, {}
        for name, function in status.by_name.items():
            self._histories[name].add(status, function)
        renewed, self.renewed = self.renewed, Flag()
        renewed.set()

    @property
    def status(self) -> Status | None:
        """The latest status without the settings' secrets; None until the first one."""
        if self._shown is None and self._latest is not None:
            self._shown = msgspec.json.decode(self.json(), type=Status)
        return self._shown

    def json(self) -> bytes:
        """Return the latest status as JSON without the settings' secrets, including secrets in users' texts; b"" for None."""
        return self._once("json", self._encode)

    def event(self) -> bytes:
        """Return the latest status as a server-sent event."""
        return self._once("event", lambda: b"event: status\ndata: %b\n\n" % self.json())

    def history(self, function: str) -> bytes:
        """Return the last hour of a function as JSON."""
        return self._once(f"history of {function}", self._histories[function].json)

    def metrics(self, status: Status, kind: str) -> bytes:
        """Return ``status``, which must be the latest one, as metrics in the format of the content type ``kind``."""
        return self._once(kind, lambda: metrics.exposed(status, kind))

    def _once(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return the representation ``name`` of the latest status; ``make`` creates it at the first call for each status."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def _encode(self) -> bytes:
        """Return the latest status as JSON without secrets; empty before the first status."""
        if self._latest is None:
            return b""
        latest = for_json(self._latest)
        try:
            data = msgspec.json.encode(latest)
        except UnicodeEncodeError:  # a handler's text has lone surrogates, which UTF-8 cannot encode
            data = msgspec.json.encode(encodable(msgspec.to_builtins(latest)))
        return self._hide(data.decode()).encode()
