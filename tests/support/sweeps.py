"""A small sweep, what it writes, and a command line to kill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
from kvarena.experiments.sweep_plan import SweepCell
from support.interrupts import listen

MEASURED = ("provenance.json", "timings.parquet")  # what two equal runs may differ in
BASE: dict[str, Any] = {
    "workload": {
        "trace": "chat",
        "options": {"num_sessions": 8, "num_system_prompts": 2, "max_message": 80, "max_reply": 40},
    },
    "pool": {"pool": ["300 MiB", "500 MiB"]},
}
GRID = {"live": [1, 2, 4], "allocators.0.page_size": [16, 32], "outputs": ["none", "replay"]}


def config_file(path: Path, **parts: Any) -> Path:
    """The small sweep as a TOML file; `parts` replace or add tables."""
    path.write_text(tomli_w.dumps({**BASE, "sweep": GRID, **parts}), encoding="utf-8")
    return path


def written(folder: Path) -> dict[str, bytes]:
    """Every file of a sweep but those of measured times, by its path inside the folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (*MEASURED, ".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def finished(folder: Path) -> list[Path]:
    """Folders of finished cells."""
    return sorted(path for path in (folder / "cells").glob("*") if not path.name.startswith("."))


def start(*arguments: Any) -> subprocess.Popen[str]:
    """`kvarena ARGUMENTS` as leader of a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvarena", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen,
    )


def wait_for(what: Callable[[], Any], seconds: float = 60) -> None:
    """Until `what()` is true. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds} s in vain")
        time.sleep(0.005)


def group_is_gone(group: int) -> bool:
    """Whether no process of a process group runs (what has ended and waits to be noticed does not count)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return False
    return True


class DeadlyCell(SweepCell):
    """Kills the process that unpickles it, as the kernel does when memory runs out."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)
