"""Handlers in this checkout, whose neighbours hundreds of test modules are: a process parses each of these once."""

from __future__ import annotations

import functools

from mldserver.handler import loader

__all__ = ["parse_once"]


def parse_once() -> None:
    """Let this process find the imports of a module once for each source, not again for each handler.

    All modules of a handler's folder that are imported count as the handler's own code. Of a handler in the checkout these are
    the tests of a whole run: parsing them takes two seconds of the processor for each handler. What a source imports
    depends on nothing else.
    """
    loader._imports = functools.cache(loader._imports)
