"""A catalogue of what the MultiLangDaemon may say to a child, and a judge of how the child takes it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from mldserver.conformance import checkpoint_cases, life_cases, wire_cases

if TYPE_CHECKING:
    from mldserver.conformance.cases import Case


@functools.cache
def catalogue() -> tuple[Case, ...]:
    """Return every case, in the order of the sections."""
    sections = (*wire_cases.SECTIONS, *checkpoint_cases.SECTIONS, *life_cases.SECTIONS)
    return tuple(case for section in sections for case in section().cases)
