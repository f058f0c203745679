"""Same config and seed, same files byte for byte: across processes, hash seeds, interpreters, time zones and clocks.

Measured times and the provenance stand apart and are left out. Worker counts are compared in
`tests/experiments/test_sweep.py`, figures in `tests/experiments/test_results.py`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "one_of_each.py"
MEASURED = {"timings.parquet", "provenance.json"}
# What depends on the versions of pandas and pyarrow, but for its contents: compared as tables, not as bytes.
BY_VERSION = {".parquet"}


def carry_out(folder: Path, python: str = sys.executable, **environment: str) -> None:
    """The script in a process of its own, in an empty environment but for what is given."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment = {"PYTHONPATH": str(ROOT), **keep, **environment}
    done = subprocess.run(
        [python, str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that must not differ."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in MEASURED)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@cache
def first_run() -> Path:
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"kvarena-determinism-{os.getpid()}"
    carry_out(folder, PYTHONHASHSEED="0")
    return folder


@pytest.fixture(scope="module", autouse=True)
def cleared():
    yield
    if first_run.cache_info().currsize:
        shutil.rmtree(first_run(), ignore_errors=True)


def test_the_run_writes_what_it_is_meant_to_write():
    names = set(digests(first_run()))
    tables = {f"{kind}/{name}" for kind in ("compare", "run") for name in
              ("config.toml", "result.json", "summary.csv", "requests.parquet", "steps.parquet")}  # fmt: skip
    assert names == tables | {"block.jsonl", "token.jsonl", "agents.jsonl.gz"}


SETTINGS = {
    "another hash seed": {"PYTHONHASHSEED": "4711"},
    "random hashes, another place and language": {
        "PYTHONHASHSEED": "random",
        "TZ": "Pacific/Auckland",
        "LC_ALL": "C",
        "LANG": "tr_TR.UTF-8",
        "PYTHONUTF8": "0",
        "COLUMNS": "20",
        "NO_COLOR": "1",
        "PYTHONOPTIMIZE": "1",
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_another_process_writes_the_same_bytes(tmp_path, setting):
    carry_out(tmp_path / "again", **SETTINGS[setting])
    assert digests(tmp_path / "again") == digests(first_run())


def python312() -> str | None:
    """An interpreter of that version that has the dependencies: KVARENA_PYTHON312, or python3.12."""
    for name in (os.environ.get("KVARENA_PYTHON312"), "python3.12"):
        if name is None or (path := shutil.which(name)) is None:
            continue
        asked = "import sys, numpy, pandas, pyarrow, pydantic, typer, xxhash; assert sys.version_info[:2] == (3, 12)"
        if subprocess.run([path, "-c", asked], capture_output=True, check=False).returncode == 0:
            return path
    return None


def test_python_3_12_decides_and_writes_alike(tmp_path):
    """What runs without torch. Parquet files name the versions that wrote them: their tables are compared."""
    import pandas as pd

    python = python312()
    if sys.version_info[:2] != (3, 11) or python is None:
        pytest.skip("needs Python 3.11 here, and 3.12 with the dependencies (python3.12 or KVARENA_PYTHON312)")
    carry_out(tmp_path / "other", python)
    mine, theirs = digests(first_run()), digests(tmp_path / "other")
    assert mine.keys() == theirs.keys()
    for name in mine:
        if Path(name).suffix in BY_VERSION:
            left, right = (pd.read_parquet(folder / name) for folder in (first_run(), tmp_path / "other"))
            pd.testing.assert_frame_equal(left, right, check_exact=True)
        else:
            assert mine[name] == theirs[name], name
