"""Where windows are published, as the setting ``sink`` names it: files in the output folder, or a table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from mldserver.config import redaction
from mldserver.config.kinds import Kind, local_path
from mldserver.errors import ConfigError

if TYPE_CHECKING:
    from mldserver.config.settings import Settings

__all__ = ["TableSink", "check", "sink", "table_name"]

_WORD: Final = "parquet"
_CATALOG_NAME = re.compile(r"(?:\w+|`[^`]+`)(?:\.(?:\w+|`[^`]+`)){2,}")
_JDBC = re.compile(r"jdbc:[A-Za-z0-9]+:\S.*")
_SQL_PART: Final = r"(?:[\w$#]+|\"[^\"]+\"|`[^`]+`|\[[^\]]+\])"
_SQL_NAME = re.compile(rf"{_SQL_PART}(?:\.{_SQL_PART})*")


@dataclass(frozen=True, slots=True)
class TableSink:
    """A table that windows are published into."""

    format: Literal["delta", "iceberg", "jdbc"]
    target: str
    """``delta``: an absolute path or a URI; ``iceberg``: catalog.database.table; ``jdbc``: the URL."""

    def __str__(self) -> str:
        """Return it as it was written, without secrets: for logs and messages."""
        if self.format == "jdbc":
            return redaction.url(self.target)
        return f"{self.format}:{self.target}"

    __repr__ = __str__


def sink() -> Kind[TableSink | None]:
    """``parquet`` (None), ``delta:PATH|URI``, ``iceberg:CATALOG.DATABASE.TABLE``, or ``jdbc:…``."""

    def parse(raw: object) -> TableSink | None:
        if raw is None or isinstance(raw, TableSink):
            return raw
        if not isinstance(raw, str):
            raise ValueError("it is not text")  # noqa: TRY004  # kinds promise ValueError, whatever is wrong
        given = raw.strip()
        word, _, target = given.partition(":")
        match word.lower():
            case "parquet" if not target:
                return None
            case "delta":
                return TableSink("delta", _place(target))
            case "iceberg":
                if not _CATALOG_NAME.fullmatch(target):
                    raise ValueError("after iceberg: comes CATALOG.DATABASE.TABLE")
                return TableSink("iceberg", target)
            case "jdbc":
                if not _JDBC.fullmatch(given):
                    raise ValueError("it is no JDBC URL")
                return TableSink("jdbc", given)
        raise ValueError("it names no format of these")

    return Kind(
        "parquet, delta:PATH or delta:URI, iceberg:CATALOG.DATABASE.TABLE, or a JDBC URL (jdbc:…)",
        parse,
        lambda value: _WORD if value is None else str(value),
        metavar="SINK",
    )


def _place(target: str) -> str:
    if not target.strip("/"):
        raise ValueError("after delta: comes a path or a URI")
    # Spark has a working directory of its own.
    return target if "://" in target else str(local_path(target).absolute())


def table_name() -> Kind[str]:
    """A table as SQL names it, with or without its schema, its parts in quotes or not."""

    def parse(raw: object) -> str:
        if not isinstance(raw, str) or not _SQL_NAME.fullmatch(raw.strip()):
            raise ValueError("it is no table's name")
        return raw.strip()

    return Kind("a table's name as SQL takes it, such as SCHEMA.TABLE", parse, metavar="TABLE")


def check(settings: Settings) -> None:
    """Raise ConfigError where the settings of a sink do not fit together."""
    jdbc = settings.sink is not None and settings.sink.format == "jdbc"
    if jdbc and settings.sink_table is None:
        raise ConfigError(
            f"sink = {settings.sink} ({settings.origin('sink')}) names a database, and no table in it.",
            advice="Set sink_table.",
        )
    if settings.sink_table is not None and not jdbc:
        raise ConfigError(
            f"sink_table = {settings.sink_table} ({settings.origin('sink_table')}) is for a JDBC sink only.",
            advice="Set sink = jdbc:…, or leave sink_table out.",
        )
    if settings.sink is None and settings.sink_options:
        raise ConfigError(
            f"sink_options ({settings.origin('sink_options')}) are for a sink that is a table.",
            advice="Set sink too, or leave sink_options out.",
        )
