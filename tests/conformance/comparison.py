"""What amazon_kclpy came to: ``PYTHONPATH=tests python3 -m conformance.comparison`` plays the catalogue at it anew.

``page`` is the documentation's page about the suite, with these results.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Final

from mldserver.conformance import catalogue
from mldserver.conformance.cases import Case
from mldserver.conformance.player import Grade, Target, play_all
from mldserver.testing import Form

PROCESSOR: Final = Path(__file__).parent / "record_processor.py"
RESULTS: Final = Path(__file__).parent / "results_of_amazon_kclpy.json"

_PAGE: Final = """\
# Conformance

`mldserver conformance` runs {cases} cases of the MultiLangDaemon's protocol against any child of the daemon, and judges the child's behaviour.

```sh
mldserver serve handlers.raw --accept-gap --listen 127.0.0.1:7075 --out out/trial
mldserver conformance 127.0.0.1:7075
mldserver conformance --json report.json -- python3 processor.py
mldserver conformance --only 'checkpoint*' --only C14 -- python3 processor.py
mldserver conformance --list
```

A child is reached over TCP (`HOST:PORT`, without TLS) or a Unix socket (`unix:PATH`), with a connection for each case; or it is
a command that speaks on its standard streams, and is started for each case. What is played looks like records of a stream:
never play at a server that works. `--accept-gap` is there because some cases begin a shard in its middle, as daemons do whose
checkpoint another child made; this server refuses that otherwise.

## Verdicts

| verdict | meaning |
|---|---|
| pass | as it should be |
| non-strict | it works with a real daemon, and is a mistake all the same: a line that the daemon skips, a checkpoint where none is allowed, a retry without a pause, an answer to what no daemon sends |
| not shown | the case is about a checkpoint, and the child's handler asked for none |
| fail | it hurts with a real daemon: that waits for ever, its JVM exits with every shard of the host, records are acknowledged unread, or a shard's children are blocked |

The command prints a table by section and every case that does not pass. It exits with 1 when a case failed. `--list` shows
each case with its source: a class of KCL 3.1.3, an earlier version's behaviour, or an AWS API. The lines played are those of
captures of KCL 3.1.3, byte for byte, and the judge replies as it did there; no jars of KCL 1.x were at hand, so its forms rest
on its source.

## Results

This server passes every case; a test in `tests/conformance/` plays them.

Beside it stands amazon_kclpy {version}, with [a record processor](../../tests/conformance/record_processor.py) that checkpoints
each batch and retries. It comes with the daemon of KCL 3 and does not claim to speak with that of KCL 1.x (V1, and V2
with `shutdown`), as this server does. (pass / non-strict / fail)

| section | cases | this server | amazon_kclpy, KCL 2 and 3 | amazon_kclpy, KCL 1.x |
|---|---|---|---|---|
{table}

What it fails of KCL 2 and 3:

{failures}

Why cases are not strict there:

{others}
"""


def play() -> dict[str, list[str]]:
    """Return the verdict, and why, of each case that does not pass."""
    target = Target(command=(sys.executable, str(PROCESSOR)))
    results = asyncio.run(play_all(catalogue(), target, at_a_time=4, patience=30))
    return {one.case.number: [one.verdict, one.why] for one in results if one.verdict != "pass"}


def page() -> str:
    """Return the page, with what amazon_kclpy came to when it was played at last."""
    document = json.loads(RESULTS.read_text("utf-8"))
    cases, others = catalogue(), document["others"]
    assert document["cases"] == len(cases), "play the catalogue at amazon_kclpy anew"

    def came_to(some: list[Case]) -> str:
        counted = Counter(Grade(others.get(case.number, ["pass"])[0]) for case in some)
        assert not counted[Grade.NOT_SHOWN]
        parts = [str(counted[verdict]) for verdict in (Grade.PASS, Grade.NON_STRICT, Grade.FAIL)]
        return " / ".join(parts) if some else ""

    rows = []
    for section in [*dict.fromkeys(case.section for case in cases), "all"]:
        mine = [case for case in cases if section in {case.section, "all"}]
        now = [case for case in mine if case.form is Form.KCL3]
        then = [case for case in mine if case.form is not Form.KCL3]
        rows.append(f"| {section} | {len(mine)} | {len(mine)} / 0 / 0 | {came_to(now)} | {came_to(then)} |")
    told = [
        (case, *others[case.number]) for case in cases if case.number in others and case.form is Form.KCL3
    ]
    reasons: dict[str, list[Case]] = {}
    for case, verdict, why in told:
        if verdict != Grade.FAIL:
            reasons.setdefault(why.partition(":")[0], []).append(case)
    return _PAGE.format(
        cases=len(cases),
        version=document["version"],
        table="\n".join(rows),
        failures="\n".join(
            f"* {why}: {_named([case])}" for case, verdict, why in told if verdict == Grade.FAIL
        ),
        others="\n".join(f"* {why}: {_named(some)}" for why, some in reasons.items()),
    )


def _named(cases: list[Case]) -> str:
    few = len(cases) <= 2
    return "; ".join(f"{case.number}, {case.title}" if few else case.number for case in cases)


if __name__ == "__main__":
    document = {"version": version("kclpy-ext"), "cases": len(catalogue()), "others": play()}
    RESULTS.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
