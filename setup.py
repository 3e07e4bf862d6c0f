"""Puts configs/ into the wheel, as jgt/configs. Everything else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies the shipped configs into the package. A checkout and an editable install read them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "jgt" / "configs"
            # The folder may contain files of an earlier build that are not shipped.
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("configs", target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithConfigs})
