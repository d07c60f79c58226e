"""What settings must not tell a log or a terminal: values that open something, in pairs, in URLs and among Java's options."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["java_option", "pairs", "url"]

_HIDDEN: Final = "…"
_SECRET = re.compile(
    r"secret|passw|passphrase|pwd|token|private.?key|(access|account)[._-]?key|\.sas\.", re.IGNORECASE
)
"""What Spark redacts (its default of ``spark.redaction.regex``), and names of Azure and of databases."""

_SECRET_OPTION = re.compile(r"([^;?&:=]*(?:secret|password|token|key)[^;?&:=]*=)[^;&]*", re.IGNORECASE)
_PASSWORD = re.compile(r"([:/][^/:@;?]+[/:])[^/@;?]+@")
"""``//user:password@host``, and Oracle's ``:user/password@host``."""


def pairs(value: Mapping[str, str]) -> dict[str, str]:
    """Return pairs without the values that are secret, or, as Spark sees it, hold one (``-DkeyStorePassword=…``)."""
    return {
        key: _HIDDEN if _SECRET.search(key) or _SECRET.search(item) else item for key, item in value.items()
    }


def url(text: str) -> str:
    """Return a URL, JDBC's too, without its password and secret options."""
    return _PASSWORD.sub(rf"\1{_HIDDEN}@", _SECRET_OPTION.sub(rf"\1{_HIDDEN}", text))


def java_option(option: str) -> str:
    """Return an option of the JVM such as ``-Daws.secretAccessKey=…`` without its value, where that is secret."""
    name, equals, _ = option.partition("=")
    return f"{name}={_HIDDEN}" if equals and _SECRET.search(option) else option
