"""The functions of a server, and which of them a driver has loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mldserver.base.backoff import Backoff
from mldserver.base.uris import redacted
from mldserver.errors import HandlerInvalid, HandlerUnready, MldserverError, NotThereYet, OperatorError
from mldserver.spark.driver_messages import LoadFailed, LoadFunction, StartFailed


def conflict(one: LoadFunction, other: LoadFunction) -> str:
    """Return what one driver cannot have of two functions at a time, as part of a sentence; empty: nothing.

    A Python process imports one module of a name, and Spark reaches a bucket by one set of settings.
    """
    for name in one.code.keys() & other.code.keys():
        if one.code[name][1] != other.code[name][1]:
            return f"a module {name} with another text"
    for name in one.storage.keys() & other.storage.keys():
        if one.storage[name] != other.storage[name]:
            return f"another value of Spark's setting {name}, which comes from the URI of out"
    return ""


@dataclass(slots=True)
class LoadedFunctions:
    """What one driver process has loaded. Each field is by the functions' names."""

    asked: dict[str, LoadFunction] = field(default_factory=dict)
    """By function: the message for which the driver loads it."""
    loaded: set[str] = field(default_factory=set)
    """The functions that are loaded."""
    refused: dict[str, LoadFailed] = field(default_factory=dict)
    """Why functions were not loaded."""
    stuck: dict[str, str] = field(default_factory=dict)
    """Functions whose cancelled jobs did not end in time, and that in a sentence."""
    imported: list[LoadFunction] = field(default_factory=list)
    """All messages that the process got: the modules stay imported."""

    def ask(self, load: LoadFunction) -> None:
        """Note that the driver gets a message to load a function, maybe again."""
        self.asked[load.name] = load
        self.imported.append(load)
        self.loaded.discard(load.name)
        self.refused.pop(load.name, None)


@dataclass(eq=False)
class DriverFunction:
    """A function as the driver's owner knows it."""

    load: LoadFunction = field(repr=False)
    """What a driver is sent. Replaced when the handler's code has changed."""
    work_dir: Path | None = None
    """A directory for scratch space; None: the machine's temporary directory."""
    serial: int = 0
    """Grows with each change of ``load``, over all functions."""
    was_loaded: bool = False
    trouble: str | None = None
    """Why this function could not be loaded."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no job of it will ever run again."""
    end_reason: str = ""
    error: MldserverError | None = None
    """Why it ended, unless it was closed."""
    backoff: Backoff = field(default_factory=lambda: Backoff(base=1.0, cap=60.0))
    """Of further attempts to load it."""

    @property
    def name(self) -> str:
        """The function's name."""
        return self.load.name

    def is_loaded_in(self, driver: LoadedFunctions) -> bool:
        """Whether a driver has loaded the present code."""
        return driver.asked.get(self.name) is self.load and self.name in driver.loaded

    def needs_other_than(self, driver: LoadedFunctions) -> bool:
        """Whether a driver can never run this function's present code."""
        if self.name in driver.stuck:
            return True
        if self.name in driver.asked:
            return driver.asked[self.name] is not self.load
        return any(conflict(self.load, each) for each in driver.imported)


def excluded(function: DriverFunction, others: Iterable[DriverFunction]) -> str:
    """Return in a sentence what a function cannot have, because a function with older code has other; empty: nothing."""
    for other in others:
        is_older = other is not function and other.serial < function.serial
        if is_older and (what := conflict(function.load, other.load)):
            return f"Function {function.name} has {what} than function {other.name}: one Spark driver cannot have both."
    return ""


def error_of(
    failed: StartFailed | LoadFailed, function: DriverFunction | None, master: str, *, hopeless: bool = False
) -> MldserverError | None:
    """Return the error that ends a function; None: another attempt may succeed.

    HandlerInvalid or HandlerUnready if the handler is at fault, OperatorError if the settings are, and NotThereYet if
    Spark itself has failed too often (``hopeless``). ``function``: the one that was not loaded; None: there is no session. ``master``: its URL.
    """
    if failed.fault == "handler" and function is not None:
        handler_error = HandlerUnready if failed.error == HandlerUnready.__name__ else HandlerInvalid
        return handler_error(failed.message, handler=function.load.handler, traceback=failed.traceback)
    if failed.fault != "operator" and not hopeless:
        return None
    for error_type in (OperatorError, NotThereYet):
        if failed.error == error_type.__name__:
            return error_type(failed.message)  # the driver's own message already contains the advice
    # An unreachable Connect server has the fault "spark" and is not local: None was returned above.
    lacks_connect_packages = failed.error == "PySparkImportError" or "grpc" in failed.message
    if lacks_connect_packages:
        advice = "Spark Connect needs more packages: pip install 'mldserver[connect]'."
    else:
        advice = "Look at the settings spark_master and spark_conf."
    # Without a fault of the operator: the metastore or memory may be available at the next start.
    final_error = OperatorError if failed.fault == "operator" else NotThereYet
    return final_error(
        f"Spark cannot start on {redacted(master)}: {failed.error}: {failed.message}", advice=advice
    )
