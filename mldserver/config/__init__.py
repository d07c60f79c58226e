"""Every setting: command line > environment ``MLDSERVER_…`` > ``mldserver.toml`` > default.

``settings.py`` is the one table that options, variable names, TOML keys and the page of settings follow, in sections that
parts take as they are; ``kinds.py`` says what values may look like; ``resolve.py`` puts the sources in order and remembers
where each value came from.
"""

from mldserver.config import locations
from mldserver.config.kinds import Address, TcpAddress, UnixAddress
from mldserver.config.locations import DynamoPlace, LedgerPlace, OutPlace, RemoteOut, SqlitePlace
from mldserver.config.resolve import home, ledger_file, resolve, sink_of
from mldserver.config.settings import Level, LogFormat, Settings, Spec, specs

__all__ = [
    "Address",
    "DynamoPlace",
    "LedgerPlace",
    "Level",
    "LogFormat",
    "OutPlace",
    "RemoteOut",
    "Settings",
    "Spec",
    "SqlitePlace",
    "TcpAddress",
    "UnixAddress",
    "home",
    "ledger_file",
    "locations",
    "resolve",
    "sink_of",
    "specs",
]
