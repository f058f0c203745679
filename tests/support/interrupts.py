"""Ctrl-C at a moment that is the same every time, however the tests were started."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def listen() -> None:
    """For `preexec_fn`: a job started in the background of a shell ignores SIGINT, and so would every child of it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def nth_call(target: str, number: int, act: Callable[[], None]) -> tuple[Any, str, Any]:
    """(owner, name, replacement) of `module:Class.method` or `module:function`: its `number`-th call acts first."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return real(*arguments, **named)

    return owner, name, counted


def stop() -> None:
    """What Ctrl-C raises in the main thread."""
    raise KeyboardInterrupt


def interrupted(
    *arguments: str, at: str, call: int, by: signal.Signals = signal.SIGINT
) -> subprocess.CompletedProcess[str]:
    """Run `kvarena ARGUMENTS` in a process of its own that gets a signal at that call of that function."""
    script = (
        "import os, signal, sys\n"
        "from support.interrupts import nth_call\n"
        "number = int(sys.argv[3])\n"
        "setattr(*nth_call(sys.argv[1], int(sys.argv[2]), lambda: os.kill(os.getpid(), number)))\n"
        "del sys.argv[1:4]\n"
        "from kvarena.experiments.cli import run\n"
        "run()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script, at, str(call), str(int(by)), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        preexec_fn=listen,
        timeout=120,
        check=False,
    )
