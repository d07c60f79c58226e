"""The public API, as a type checker sees it in user code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import mldserver

HERE = Path(__file__).parent
CONFIG = """
[mypy]
strict = true
python_version = 3.11

[mypy-pyarrow.*]
ignore_missing_imports = true

# As where it is installed: what it imports itself is none of the user's.
[mypy-mldserver.*]
follow_imports = silent

# All of Spark would be analysed, for one name.
[mypy-pyspark.*]
follow_imports = skip
"""


def mypy(folder: Path, file: Path) -> tuple[int, str]:
    config = folder / "mypy.ini"
    config.write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(config),
        "--cache-dir",
        str(folder / "cache"),
        str(file),
    ]
    # Installed, the package is found by its py.typed; an editable install hides it from mypy, so its folder is named.
    package = Path(mldserver.__file__).parent
    assert (package / "py.typed").exists()
    installed = str(package.parent) in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    env = os.environ | ({} if installed else {"MYPYPATH": str(package.parent)})
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_user_code_passes_a_strict_check_and_misuse_does_not(tmp_path: Path) -> None:
    both = tmp_path / "code"
    both.mkdir()
    for name in ("user_handlers.py", "broken_handlers.py"):
        (both / name).write_text((HERE / name).read_text())
    code, output = mypy(tmp_path, both)
    assert code == 1, output
    lines = (HERE / "broken_handlers.py").read_text().splitlines()
    expected = {
        ("broken_handlers", number) for number, line in enumerate(lines, 1) if line.endswith("  # error")
    }
    found = {(match[1], int(match[2])) for match in re.finditer(r"(\w+)\.py:(\d+): error: ", output)}
    assert expected
    assert found == expected, output
