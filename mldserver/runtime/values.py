"""From Python values to Arrow columns, without silent changes of meaning. Synchronous, no state.

``pyarrow.array`` alone cuts 1.5 to 1 for a BIGINT, takes a naive datetime for UTC, a number for a date, text for a
list of its letters, and drops unknown keys of a STRUCT. So each type names the Python types that Arrow takes as they
are (``plain``) and has a function for all others, which returns such a value or says in a sentence why it cannot.
"""

from __future__ import annotations

import inspect
import math
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from functools import partial
from types import GeneratorType
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import types

_NULLS: Final = frozenset({"NAType", "NaTType"})
"""The types of pandas' missing values, known by name: handlers that do not use pandas never load it."""
_FIXED: Final = frozenset({type(None), bool, int, float, str, bytes, Decimal, date, datetime})
"""Types of values that cannot be changed."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class _WrongKind(ValueError):
    """A value is of the wrong kind; its sentence goes on after "is not TYPE"."""


def shown(value: object) -> str:
    """Return a short ``repr`` of anything a handler may return, even of what has a broken ``repr``."""
    try:
        return _SHORT.repr(value)
    except BaseException:  # noqa: BLE001  # the value's own code runs here and may raise anything
        return f"<{type(value).__name__} without a repr>"


def materialized(value: Any) -> Any:
    """Run a generator that a hook returned to its end; refuse a coroutine, which the hook did not await."""
    if isinstance(value, GeneratorType):
        return list(value)
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("it returned a coroutine without awaiting it: declare the hook with `async def`")
    return value


def owned(value: Any) -> Any:
    """Return a value of a row without anything that the handler could still change: lists, dicts and such are copied."""
    if type(value) in _FIXED:
        return value
    if type(value) is list and _FIXED.issuperset(map(type, value)):
        return value[:]
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        copies = [each if type(each) in _FIXED else owned(each) for each in value]
        return tuple(copies) if isinstance(value, tuple) else copies
    if isinstance(value, Mapping):
        return {name: owned(held) for name, held in value.items()}
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return value.copy() if isinstance(value, np.ndarray) else value


@dataclass(frozen=True, slots=True)
class Converter:
    """Turns the values of one column into an Arrow array."""

    sql: str
    type: Any
    plain: frozenset[type]
    """Types that Arrow takes without a change of meaning."""
    normal: Callable[[Any], Any]
    """Returns a plain value for one of another type; raises ValueError with the reason."""
    certain: Callable[[Any], bool]
    """Returns True only for values that Arrow takes for certain: a quick test of a single value."""

    def array(self, values: Sequence[Any]) -> Any:
        """Return ``values`` as an Arrow array. Raises whatever the first bad value makes Arrow or Python raise."""
        if not self.plain.issuperset(map(type, values)):
            values = [self.one(value) for value in values]
        return pa.array(values, type=self.type)

    def one(self, value: Any) -> Any:
        """Return one value in the form that Arrow takes; None for null in any library's spelling."""
        if value is None or type(value) in self.plain:
            return value
        if type(value).__name__ in _NULLS:
            return None
        if isinstance(value, np.generic):
            value = value.item()
            if type(value) in self.plain:
                return value
        return self.normal(value)

    def fault(self, value: Any) -> str | None:
        """Return why ``value`` cannot be in the column (``'x' is not DOUBLE``), or None when it can."""
        try:
            pa.array([self.one(value)], type=self.type)
        except _WrongKind as error:
            return f"{shown(value)} is not {self.sql}{error}"
        except Exception:  # noqa: BLE001  # Arrow and the value's own code may raise anything; all mean the same
            return f"{shown(value)} is not {self.sql}"
        return None


def converter(sql: str, type_: Any) -> Converter:
    """Return the converter for an Arrow type of a schema; ``sql`` is its name in messages."""
    plain: tuple[type, ...] = ()
    normal: Callable[[Any], Any]
    if types.is_timestamp(type_):
        normal = partial(_moment, bool(type_.tz))
    elif types.is_list(type_):
        normal = partial(_listed, converter("", type_.value_type))
    elif types.is_map(type_):
        normal = partial(_mapped, converter("", type_.key_type), converter("", type_.item_type))
    elif types.is_struct(type_):
        normal = partial(_structured, {field.name: converter("", field.type) for field in type_})
    else:
        plain, normal = next((plain, normal) for test, plain, normal in _SCALARS if test(type_))
    return Converter(sql, type_, frozenset({*plain, type(None)}), normal, _certain(type_))


def _certain(type_: Any) -> Callable[[Any], bool]:
    if types.is_integer(type_):
        limit = 1 << (type_.bit_width - 1)
        return lambda value: type(value) is int and -limit <= value < limit
    if types.is_string(type_):
        return lambda value: type(value) is str and value.isascii()
    if types.is_timestamp(type_):
        zone = UTC if type_.tz else None
        return lambda value: type(value) is datetime and value.tzinfo is zone
    tests = (
        (types.is_boolean, bool),
        (types.is_float64, float),
        (types.is_binary, bytes),
        (types.is_date32, date),
    )
    wanted = next((kind for test, kind in tests if test(type_)), None)
    return lambda value: type(value) is wanted


def _refuse(_: Any) -> Any:
    raise _WrongKind


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _WrongKind
    if not isinstance(value, int) and (not math.isfinite(value) or value != int(value)):
        raise _WrongKind(": it is no whole number")
    return int(value)


def _real(largest: float, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _WrongKind
    number = float(value)
    finite = value.is_finite() if isinstance(value, Decimal) else math.isfinite(number)
    if finite and abs(number) > largest:
        raise _WrongKind(": it is too large")
    return number


def _text(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        raise _WrongKind(": decode it first")
    if not isinstance(value, str):
        raise _WrongKind
    return str.__str__(value)


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _WrongKind
    return bytes(value)


def _decimal(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise _WrongKind
    try:
        # A float is converted from its shortest text: 12.34 means 12.34, not the nearest binary fraction.
        return Decimal(repr(float(value)) if isinstance(value, float) else value)
    except InvalidOperation:
        raise _WrongKind from None


def _date(value: Any) -> date:
    if isinstance(value, datetime):
        raise _WrongKind(": it is a point in time, use .date()")
    if isinstance(value, str):
        return _parsed(date.fromisoformat, value)  # type: ignore[no-any-return]  # one parser for two types
    if not isinstance(value, date):
        raise _WrongKind
    return value


def _moment(zoned: bool, value: Any) -> datetime:  # noqa: FBT001  # of a column, which is bound to it
    if isinstance(value, str):
        value = _parsed(datetime.fromisoformat, value)
    if not isinstance(value, datetime):
        raise _WrongKind(": it wants a datetime or ISO-8601 text")
    if zoned and value.utcoffset() is None:
        raise _WrongKind(": it has no time zone (give it one, or declare the column TIMESTAMP_NTZ)")
    if not zoned and value.utcoffset() is not None:
        raise _WrongKind(": it has a time zone (declare the column TIMESTAMP)")
    return value


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError:
        raise _WrongKind(": it is not ISO-8601") from None


def _listed(element: Converter, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple | np.ndarray):
        raise _WrongKind(": it wants a list")
    return [element.one(item) for item in value]


def _mapped(key: Converter, item: Converter, value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise _WrongKind(": it wants a dict")
    return [(key.one(name), item.one(held)) for name, held in value.items()]


def _structured(fields: dict[str, Converter], value: Any) -> dict[str, Any]:
    if isinstance(value, tuple) and len(value) == len(fields):
        value = dict(zip(fields, value, strict=True))
    if not isinstance(value, Mapping):
        raise _WrongKind(f": it wants a dict or a tuple of {len(fields)}")
    unknown = [name for name in value if name not in fields]
    if unknown:
        raise _WrongKind(f": it has no field {shown(unknown[0])}")
    return {name: field.one(value.get(name)) for name, field in fields.items()}


_Scalar = tuple[Callable[[Any], bool], tuple[type, ...], Callable[[Any], Any]]
_SCALARS: Final[tuple[_Scalar, ...]] = (
    (types.is_boolean, (bool,), _refuse),
    (types.is_integer, (int,), _integer),
    (types.is_float64, (float, int), partial(_real, sys.float_info.max)),
    (types.is_float32, (), partial(_real, float(np.finfo(np.float32).max))),
    (types.is_string, (str,), _text),
    (types.is_binary, (bytes,), _bytes),
    (types.is_decimal, (Decimal, int), _decimal),
    (types.is_date32, (date,), _date),
)
"""For each test of a column's type: the types that Arrow takes as they are, and the function for all others."""
