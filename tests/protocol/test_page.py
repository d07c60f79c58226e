"""The page of the protocol says what the table says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.generated import protocol_page

from mldserver.protocol.states import TABLE, Action, Input, State, Transition

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[2] / "mldserver" / "docs" / "protocol.md"
ARROW = re.compile(r"^(?:    (\w+) -->|\*) (\w+): (.+) / (.+)$", re.MULTILINE)


def test_the_table_can_be_read_back_from_the_diagram() -> None:
    drawn: dict[State, dict[Input, Transition]] = {state: {} for state in State}
    for begins, leads, happened, done in ARROW.findall(protocol_page()):
        row = Transition(State(leads), tuple(Action[name.upper()] for name in done.split(", ")))
        for state in [State(begins)] if begins else [each for each in State if TABLE[each]]:
            drawn[state] |= {Input(name): row for name in happened.split(", ")}
    assert drawn == TABLE


def test_the_page_is_what_the_table_says() -> None:
    written = "python3 -m mldserver.protocol > mldserver/docs/protocol.md"
    assert PAGE.read_text("utf-8") == protocol_page(), f"write it anew: {written}"
