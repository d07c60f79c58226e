"""Where a stream is to be read from: ``trim_horizon``, ``latest``, a time, or a token. Pure.

A token says where every shard was read up to, in JSON that people can read. It holds no iterator: those live for
15 minutes only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from mldserver.dynamodb_streams.shard_tree import LATEST, TRIM_HORIZON, After, At, Sentinel, Since
from mldserver.errors import ConfigError

VERSION: Final = 1
"""Of tokens, as this program writes them; it reads no other."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_NUMBERED: Final[dict[str, type[At | After]]] = {"AT_SEQUENCE_NUMBER": At, "AFTER_SEQUENCE_NUMBER": After}
_DIGITS: Final = re.compile("[0-9]{1,100}")
_ADVICE: Final = "Give trim_horizon, latest, a time with its offset (2026-11-22T18:00:00Z), or a token."


class ShardPosition(NamedTuple):
    """Where one shard was read up to."""

    id: str
    parent: str | None
    start: Sentinel | At | After | Since
    """Where to go on; never LATEST, which means another place later."""
    effective_ms: int | None = None
    """Effective time of what was handed over last, here or in the parent: no later record counts as earlier."""

    def moved(self, number: int, latest_ms: int) -> ShardPosition:
        """Return the position behind records that were handed over, the latest of them created at ``latest_ms``."""
        return self._replace(start=After(number), effective_ms=max(self.effective_ms or 0, latest_ms))

    def child(self, shard_id: str) -> ShardPosition:
        """Return where a child begins once this shard was read to its end.

        One that has nothing as late as the time that was asked for leaves that to its children.
        """
        start = self.start if isinstance(self.start, Since) else TRIM_HORIZON
        return ShardPosition(shard_id, self.id, start, self.effective_ms)


@dataclass(frozen=True, slots=True)
class Token:
    """Where a stream was read up to. ``str`` of it is what ``parse_position`` reads."""

    stream: str
    """The stream's ARN. A table whose stream is disabled and enabled again has another."""
    shards: tuple[ShardPosition, ...]
    """Those that are being read; all others are their ancestors, have yet to be, or are new."""
    since_ms: int | None = None
    """The time at which reading began, if it did at one: shards that turn up later count from there."""

    def __str__(self) -> str:
        token = {
            "version": VERSION,
            "stream": self.stream,
            "since": _text(self.since_ms),
            "shards": [_shard_json(shard) for shard in self.shards],
        }
        return orjson.dumps(token, option=orjson.OPT_INDENT_2).decode()

    def require(self, arn: str) -> None:
        """Raise ConfigError when the token is of another stream than ``arn``."""
        if self.stream != arn:
            raise ConfigError(
                f"The token is of the stream {self.stream}, not of {arn}.",
                did="Nothing was moved.",
                advice="A stream that was disabled and enabled again is another one: begin it with trim_horizon. What is "
                "left of the old one can be read for 24 hours by its ARN.",
            )


Position: TypeAlias = Sentinel | Since | Token
"""``TRIM_HORIZON``, ``LATEST``, a time, or a token."""


def parse_position(position: object) -> Position:
    """Return what a user gave: a name in any case, an aware datetime or its ISO text, a token or its JSON.

    Raises ConfigError for all else, a datetime without an offset among it.
    """
    match position:
        case Token():
            return position
        case datetime():
            return _since(position)
        case str():
            text = position.strip()
            name = text.upper().replace("-", "_")
            if name in Sentinel.__members__:
                return Sentinel[name]
            return _parse_token(text) if text.startswith("{") else _parse_time(text)
        case _:
            raise ConfigError(f"{position!r} is no position in a stream.", advice=_ADVICE)


def _parse_time(text: str) -> Since:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no position in a stream.", advice=_ADVICE) from None
    return _since(time)


def _since(time: datetime) -> Since:
    if time.utcoffset() is None:
        raise ConfigError(
            f"The time {time.isoformat()} has no offset: it means another instant on every host.",
            advice="Give an aware time, such as datetime.now(UTC) or 2026-11-22T18:00:00Z.",
        )
    return Since((time - _EPOCH) // _MS)


def _parse_token(text: str) -> Token:
    try:
        token = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _damaged(f"it is no JSON ({error})") from None
    if (version := token.get("version")) != VERSION:
        raise _damaged(f"its version is {version!r}, this program reads {VERSION}")
    stream, shards = token.get("stream"), token.get("shards")
    if not isinstance(stream, str) or not isinstance(shards, list):
        raise _damaged("it needs a stream (an ARN) and a list of shards")
    positions = tuple(map(_parse_shard, shards))
    if len({position.id for position in positions}) < len(positions):
        raise _damaged("it names a shard twice")
    return Token(stream, positions, _ms(token.get("since")))


def _parse_shard(entry: Any) -> ShardPosition:
    if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
        raise _damaged(f"{entry!r} is no shard")
    shard_id, parent, time_ms = entry["id"], entry.get("parent"), _ms(entry.get("time"))
    if not isinstance(parent, str | None):
        raise _damaged(f"shard {shard_id} has the parent {parent!r}")
    match entry.get("iterator"):
        case "TRIM_HORIZON":
            return ShardPosition(shard_id, parent, TRIM_HORIZON, time_ms)
        case "AT_TIMESTAMP" if time_ms is not None:
            return ShardPosition(shard_id, parent, Since(time_ms))
        case ("AT_SEQUENCE_NUMBER" | "AFTER_SEQUENCE_NUMBER") as name:
            number = entry.get("sequence_number")
            if not isinstance(number, str) or not _DIGITS.fullmatch(number):
                raise _damaged(
                    f"shard {shard_id} has the sequence number {number!r}: it must be a text of digits"
                )
            return ShardPosition(shard_id, parent, _NUMBERED[name](int(number)), time_ms)
        case other:
            raise _damaged(f"shard {shard_id} has the iterator {other!r}, or lacks its time")


def _shard_json(shard: ShardPosition) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": shard.id, "parent": shard.parent}
    match shard.start:
        case Since(ms):
            return entry | {"iterator": "AT_TIMESTAMP", "time": _text(ms)}
        case At(number):
            entry |= {"iterator": "AT_SEQUENCE_NUMBER", "sequence_number": str(number)}
        case After(number):
            entry |= {"iterator": "AFTER_SEQUENCE_NUMBER", "sequence_number": str(number)}
        case _:
            assert shard.start is not LATEST, "what is latest moves"
            entry |= {"iterator": "TRIM_HORIZON"}
    return entry | {"time": _text(shard.effective_ms)}


def _text(ms: int | None) -> str | None:
    return None if ms is None else (_EPOCH + ms * _MS).isoformat(timespec="milliseconds")


def _ms(text: object) -> int | None:
    if text is None:
        return None
    try:
        return _since(datetime.fromisoformat(text)).ms  # type: ignore[arg-type]  # that it is none is what is asked
    except (TypeError, ValueError, ConfigError):
        raise _damaged(f"{text!r} is no time with an offset") from None


def _damaged(why: str) -> ConfigError:
    return ConfigError(
        f"The token cannot be read: {why}.",
        did="Nothing was moved.",
        advice="Give a token as Stream.token returned it, unchanged.",
    )
