"""A catalogue of conversations between the MultiLangDaemon and a child, and a judge of the child's answers."""

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
