"""Chromium as Debian packages it, without a screen, and an admin endpoint for it that shows made-up statuses."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.wait import WebDriverWait

from mldserver.admin.http_listener import Access, HttpListener
from mldserver.admin.routes import Routes
from mldserver.admin.status_feed import StatusFeed
from mldserver.base.listening import listen_tcp
from mldserver.status_document import Status

PROGRAMS: Final = {"chromium": "chromium", "chromedriver": "chromium-driver"}
"""What is needed, and Debian's package that has it."""
_SECONDS: Final = 60
"""Longest wait for what a page is to show: a guard against hanging."""


def require() -> None:
    """Without the browser skip the test, which CI may not."""
    if lacks := [package for name, package in PROGRAMS.items() if shutil.which(name) is None]:
        said = f"there is no browser: apt-get install {' '.join(lacks)}"
        assert os.environ.get("CI") != "true", said
        pytest.skip(said)


class Browser:
    """A browser with one page."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        # How long a machine takes is no silence of the server.
        self._tell(
            "Page.addScriptToEvaluateOnNewDocument", source="performance.now = () => window.passed ?? 0;"
        )

    def open(self, url: str, *, theme: str = "light", width: int = 1280) -> None:
        """Open a page as on a screen so wide; below 600 pixels, a phone's."""
        self._tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        phone = width < 600
        self._tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        # The page before, whose server is gone, complains no more.
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(url)

    def pass_seconds(self, seconds: float) -> None:
        """Move on the page's clock, which else stands still."""
        self.run("window.passed = (window.passed ?? 0) + 1000 * arguments[0]", seconds)

    def run(self, script: str, *arguments: object) -> Any:
        """Return what JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: object) -> Any:
        """Wait until an expression of JavaScript is true."""
        waiting = WebDriverWait(self.driver, _SECONDS, poll_frequency=0.1)
        return waiting.until(lambda _: self.run(f"return {script}", *arguments), f"never was: {script}")

    def until_health(self, word: str) -> None:
        """Wait until the admin page calls the server's health so."""
        self.until("document.getElementById('word').textContent === arguments[0]", word)

    def text(self, selector: str) -> str:
        """Return what an element shows, its spaces plain."""
        shown = self.run("return document.querySelector(arguments[0]).innerText", selector)
        return str(shown).replace("\u00a0", " ").replace("\u202f", " ")

    def complaints(self) -> list[str]:
        """Return the console's errors since the page was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def accessible(self) -> list[tuple[str, str]]:
        """Return what a screen reader finds: each element's role and name."""
        nodes = self._tell("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]

    def shoot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        width, height = self.run(
            "const at = document.documentElement; return [at.clientWidth, at.scrollHeight]"
        )
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        picture = self._tell("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _tell(self, command: str, **arguments: object) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)


@contextmanager
def browsing() -> Iterator[Browser]:
    """Start a browser, which ends with the test."""
    require()
    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Named, so that selenium looks for no newer one elsewhere.
    driver = Chrome(options=options, service=ChromeService(str(shutil.which("chromedriver"))))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Stage:
    """An endpoint that shows what it is told to."""

    def __init__(self, feed: StatusFeed, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.url = url
        self._feed, self._loop = feed, loop

    def show(self, *statuses: Status) -> None:
        """Send documents to whoever looks."""

        async def showing() -> None:
            for status in statuses:
                self._feed.show(status)

        asyncio.run_coroutine_threadsafe(showing(), self._loop).result(_SECONDS)


@contextmanager
def serving(statuses: Iterable[Status]) -> Iterator[Stage]:
    """Serve an endpoint on a free port of loopback, in a thread of its own, which has seen some documents."""
    ready: list[Stage] = []
    begun, over = threading.Event(), threading.Event()

    async def steer(act: str, argument: str, function: str, who: str) -> tuple[bool, str]:
        raise AssertionError(act)

    async def serve() -> None:
        sock = await listen_tcp("127.0.0.1", 0)
        feed = StatusFeed(lambda _: None, str)
        runner = web.AppRunner(Routes(feed, steer, str).application(), handler_cancellation=True)
        await runner.setup()
        assert runner.server is not None
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/"
        ready.append(Stage(feed, asyncio.get_running_loop(), url))
        serving = asyncio.create_task(HttpListener(sock, Access.READ).run(runner.server))
        begun.set()
        await asyncio.to_thread(over.wait)
        serving.cancel()
        await asyncio.wait({serving})
        await runner.cleanup()
        sock.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert begun.wait(_SECONDS)
        ready[0].show(*statuses)
        yield ready[0]
    finally:
        over.set()
        thread.join()
