"""What becomes of records by the class of their error, as the setting ``failure_rules`` says it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mldserver.config import kinds
from mldserver.config.kinds import Kind
from mldserver.runtime.failure_policy import FailureRule, failure_rule

__all__ = ["failure_rules"]


def failure_rules() -> Kind[tuple[FailureRule, ...]]:
    """``CLASS=ACTION``, repeated or with commas between them, or a TOML table."""
    pairs = kinds.pairs()

    def parse(raw: object) -> tuple[FailureRule, ...]:
        if isinstance(raw, Mapping):
            items = [f"{name}={action}" for name, action in pairs.parse(raw).items()]
        elif isinstance(raw, str | list | tuple):
            given = [raw] if isinstance(raw, str) else raw
            items = [item for text in given for item in re.split("[,;]", str(text))]
        else:
            raise ValueError("it is no list of CLASS=ACTION")  # noqa: TRY004  # kinds promise ValueError
        rules = tuple(failure_rule(item) for item in items if item.strip())
        names = [rule.name for rule in rules]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} has two rules")
        return rules

    def show(rules: tuple[FailureRule, ...]) -> str:
        return ", ".join(map(str, rules))

    return Kind(
        "CLASS=dead_letter | skip | halt | retry | retry:N, repeated or with commas between, or a TOML table",
        parse,
        show,
        many=True,
        metavar="CLASS=ACTION",
    )
