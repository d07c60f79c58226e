"""Where dead letters go, as the setting ``dead_letters`` names it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from mldserver.config.kinds import Kind, local_path
from mldserver.errors import ConfigError
from mldserver.remote import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mldserver.config.settings import Settings

__all__ = ["LetterPlace", "check", "dead_letters"]

_WORD: Final = "ledger"
_STREAM = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class LetterPlace(NamedTuple):
    """A place that is not the ledger."""

    kind: Literal["jsonl", "parquet", "sqs", "s3", "kinesis"]
    target: str = ""
    """Files: a folder or a URI, empty for the output folder; a queue's URL; ``bucket/prefix``; a stream's name."""

    def __str__(self) -> str:
        """Return it as it was written, without secrets."""
        if self.kind == "s3":
            return f"s3://{self.target}"
        return f"{self.kind}:{redacted(self.target)}" if self.target else self.kind


def dead_letters() -> Kind[LetterPlace | None]:
    """``ledger`` (None), ``jsonl`` or ``parquet`` with or without a place, ``sqs:…``, ``s3://…`` or ``kinesis:…``."""

    def parse(raw: object) -> LetterPlace | None:
        if raw is None or isinstance(raw, LetterPlace):
            return raw
        if not isinstance(raw, str):
            raise ValueError("it is not text")  # noqa: TRY004  # kinds promise ValueError, whatever is wrong
        word, colon, target = raw.strip().partition(":")
        word = word.lower()
        if word == _WORD and not colon:
            return None
        if word in {"jsonl", "parquet"} and not colon:
            return LetterPlace(word)  # type: ignore[arg-type]  # one of the two
        if word not in _TARGETS:
            raise ValueError("it names no place of these")
        return LetterPlace(word, _TARGETS[word](target))  # type: ignore[arg-type]  # its keys are the kinds

    return Kind(
        "ledger, jsonl, parquet, jsonl:PATH or URI, parquet:PATH or URI, sqs:QUEUE_URL, s3://BUCKET/PREFIX, or "
        "kinesis:STREAM",
        parse,
        lambda value: _WORD if value is None else str(value),
        metavar="PLACE",
    )


def _folder(target: str) -> str:
    if not target.strip("/"):
        raise ValueError("after the colon comes a folder or a URI")
    return target if "://" in target else str(local_path(target).absolute())


def _queue(target: str) -> str:
    found = urlsplit(target)
    if found.scheme not in {"http", "https"} or not found.path.strip("/"):
        raise ValueError("after sqs: comes a queue's URL")
    return target


def _bucket(target: str) -> str:
    if not target.startswith("//") or not target.strip("/"):
        raise ValueError("after s3:// comes BUCKET or BUCKET/PREFIX")
    return target.strip("/")


def _stream(target: str) -> str:
    if not _STREAM.fullmatch(target):
        raise ValueError("after kinesis: comes a stream's name")
    return target


_TARGETS: Final[Mapping[str, Callable[[str], str]]] = {
    "jsonl": _folder,
    "parquet": _folder,
    "sqs": _queue,
    "s3": _bucket,
    "kinesis": _stream,
}


def check(settings: Settings) -> None:
    """Raise ConfigError where the place does not fit the other settings."""
    if settings.dead_letters is not None and settings.on_key_failure == "park":
        raise ConfigError(
            f"on_key_failure = park ({settings.origin('on_key_failure')}) needs dead letters in the ledger: only it "
            "tells which keys wait.",
            advice="Leave dead_letters out, or set on_key_failure = continue.",
        )
