"""Triton 3.6 beside the installed one: the release that the Gluon kernel is written for, with numpy below 2.4."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import triton

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".venv-triton36"  # ignored by git
PACKAGES = ("triton==3.6.0", "numpy<2.4")


@functools.cache
def environment() -> tuple[dict[str, str], str | None]:
    """(environment of a process that imports Triton 3.6, reason why there is none).

    Installed once into .venv-triton36, which stands before site-packages on the path; torch stays the installed one.
    """
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    if triton.__version__.startswith("3.6."):
        return variables, None
    if not (FOLDER / "done").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER), *PACKAGES]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if result.returncode:
            return variables, f"Triton 3.6 cannot be installed: {result.stderr.strip().splitlines()[-1:]}"
        (FOLDER / "done").touch()
    variables["PYTHONPATH"] = os.pathsep.join([str(FOLDER), variables["PYTHONPATH"]])
    return variables, None
