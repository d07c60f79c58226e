"""Steps of setuptools that note the commit in what they build; named in pyproject.toml, run by the build alone."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_PACKAGE = Path(__file__).parent


def _note_commit(package: Path) -> None:
    # Not imported: what the package itself needs is not there while it is built.
    version = runpy.run_path(str(_PACKAGE / "version.py"))
    if commit := version["commit_of"](_PACKAGE):
        (package / version["COMMIT_FILE"]).write_text(f"{commit}\n", "ascii")


class BuildPy(build_py):  # type: ignore[misc]  # setuptools has no types
    """Copies the package; a wheel's copy gets the commit, an editable one asks git when it runs."""

    def run(self) -> None:
        """Do so."""
        super().run()
        if not self.editable_mode:
            _note_commit(Path(self.build_lib, _PACKAGE.name))


class Sdist(sdist):  # type: ignore[misc]  # see above
    """Adds the commit to the source archive, which is unpacked without a clone."""

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        """Do so."""
        super().make_release_tree(base_dir, files)
        _note_commit(Path(base_dir, _PACKAGE.name))
