"""Where a result comes from: versions, commit, machine, seeds, hashes of inputs. The one file that may differ
between two equal runs, beside the measured times."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "pandas", "pyarrow", "matplotlib", "pydantic", "sortedcontainers", "xxhash", "torch", "triton")
_GPU_FIELDS = ("name", "driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem")


def provenance(seeds: Iterable[int], inputs: Iterable[Path], started: float) -> dict[str, Any]:
    """Everything, as plain data. `started` is `time.time()` at the start; nothing here imports torch."""
    return {
        "kvarena": code_version(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": {
            "system": platform.platform(),
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": _memory(),
            "gpus": _gpus(),
        },
        "seeds": list(seeds),
        "inputs": [{"name": path.name, "sha256": sha256(path), "bytes": path.stat().st_size} for path in inputs],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "wall_s": _passed(started),
        "peak_memory_bytes": _peak_memory(),
    }


def _passed(started: float) -> float | None:
    """Seconds since `started`; None when the clock was set back meanwhile."""
    passed = time.time() - started
    return None if passed < 0 else round(passed, 3)


def code_version() -> dict[str, Any]:
    """Version, and in a checkout the commit and whether tracked files differ from it."""
    import kvarena

    root = Path(kvarena.__file__).resolve().parent.parent
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    status = _git(root, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {"version": kvarena.__version__, "commit": commit, "dirty": None if status is None else bool(status)}


def footer(config: Mapping[str, Any], trace_name: str, visible_outputs: str) -> str:
    """One line under every figure, without a date: version, trace, model, how it was replayed, hash of the config."""
    import kvarena

    engine = config["engine"]
    if "scheduler" in engine:
        from kvarena.experiments.engine.figures import engine_footer

        how = engine_footer(dict(config))
    else:
        how = f"{engine['live']} live · {'replies replayed' if engine['outputs'] == 'replay' else 'prompts only'}"
    model = config["pool"]["model"] if isinstance(config["pool"]["model"], str) else "own model shape"
    parts = (f"kvarena {kvarena.__version__}", trace_name, model, how)
    return " · ".join([*parts, f"outputs {outputs_words(config, visible_outputs)}", f"config {config_digest(config)}"])


def config_digest(config: Mapping[str, Any]) -> str:
    """Ten hex digits that name a resolved config under figures."""
    import tomli_w

    return hashlib.sha256(tomli_w.dumps(config).encode()).hexdigest()[:10]


def outputs_words(config: Mapping[str, Any], visible_outputs: str) -> str:
    """What a trace has of replies and what became of it: replies that were not replayed say so.

    >>> outputs_words({"engine": {"outputs": "none"}, "workload": {}}, "recorded")
    'recorded, not replayed'
    """
    if config["workload"].get("replies") == "band":
        return "none to unreachable (band)"
    if "scheduler" in config["engine"]:  # it writes its replies, under ids that no prompt has where none are known
        return "unreachable" if visible_outputs == "none" else visible_outputs
    left_out = config["engine"]["outputs"] == "none" and visible_outputs != "none"
    return f"{visible_outputs}, not replayed" if left_out else visible_outputs


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the platform module knows less
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _gpus() -> list[dict[str, str]]:
    """What nvidia-smi says; none where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(_GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(_GPU_FIELDS)]


def _peak_memory() -> int | None:
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
