"""Handlers of DynamoDB changes behind the server's own hooks.

Any of ``on_insert(change)``, ``on_update(change)`` and ``on_delete(change)``; or ``changes = True`` and one
``process_record(change)`` or ``process_records(batch of changes)``. To the other modules it is a handler of records:
an adapter converts each record to a change and calls the hook. A change whose kind has no hook gives no row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from mldserver.change import KINDS, Change, Kind, deserializer
from mldserver.handler.context import Context
from mldserver.records import Batch, Record

HOOKS: Final[dict[str, Kind]] = {f"on_{kind}": kind for kind in KINDS.values()}
"""The hooks that a handler may have in the place of a record hook, and the kind of changes that each takes."""


@dataclass(frozen=True, slots=True)
class ChangeHooks:
    """A handler whose hooks take changes."""

    target: Any
    """The module or class."""
    names: tuple[str, ...]
    """One of the record hooks, or some of HOOKS."""
    is_async: bool
    plain_numbers: bool
    with_context: frozenset[str] = frozenset()
    """Those of ``names`` that take a ``Context``, too. If there are any, the adapter's ``process_record`` takes one."""

    def __call__(self) -> ChangeHandler:
        """Make the handler of one shard; raises whatever the class's ``__init__`` raises."""
        return ChangeHandler(self.target(), self)

    def __str__(self) -> str:
        numbers = "int and float" if self.plain_numbers else "Decimal"
        absent = [f"{kind}s" for name, kind in HOOKS.items() if name not in self.names]
        no_row = f"; {' and '.join(absent)} give no row" if absent and self.names[0] in HOOKS else ""
        return f"records are changes of a DynamoDB table, their numbers {numbers}{no_row}"


class ChangeHandler:
    """A module or an instance of the user's, as the runtime sees it: all its names, and a record hook that takes records."""

    def __init__(self, handler: Any, hooks: ChangeHooks) -> None:
        deserializer(plain_numbers=hooks.plain_numbers)  # boto3 is loaded now, not in the first call's time
        self._handler = handler
        self._change = partial(Change, plain_numbers=hooks.plain_numbers)
        self.process_record = self._await_one if hooks.is_async else self._call_one
        functions = {name: getattr(handler, name) for name in hooks.names}
        if hooks.with_context:
            functions = {
                name: function if name in hooks.with_context else partial(_without_context, function)
                for name, function in functions.items()
            }
        self._hooks = {HOOKS[name]: function for name, function in functions.items() if name in HOOKS}
        if not self._hooks:
            self._hooks = dict.fromkeys(HOOKS.values(), functions[hooks.names[0]])

    def __getattr__(self, name: str) -> Any:
        """Return what the user's has: life-cycle hooks."""
        return getattr(self._handler, name)

    def process_records(self, batch: Batch) -> Any:
        """Call the handler with a batch of changes."""
        changes: list[Any] = [self._change(record) for record in batch]
        lag = batch.millis_behind_latest
        return self._handler.process_records(
            Batch(changes, shard_id=batch.shard_id, millis_behind_latest=lag)
        )

    def _call_one(self, record: Record, *context: Context) -> Any:
        change = self._change(record)
        hook = self._hooks.get(change.kind)
        return None if hook is None else hook(change, *context)

    async def _await_one(self, record: Record, *context: Context) -> Any:
        returned = self._call_one(record, *context)
        return None if returned is None else await returned


def _without_context(function: Callable[[Change], Any], change: Change, _: Context) -> Any:
    return function(change)
