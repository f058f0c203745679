"""`make mutants`: plant each committed fault in a copy of the tree, and require that its tests notice it.

    python tests/mutants/run.py [--jobs 2] [--only REGEX]

A fault is a small patch: file, text before, text after, and the tests that must fail (arguments of pytest). Before any
fault is planted, its tests must pass on the clean copy. Exit code 1 when a fault survives, when a patch no longer
applies, when tests fail without a fault, and when a fault that is stated to be equivalent is noticed after all.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LEFT_OUT = (".git", ".venv*", "build", "out", "results", "__pycache__", ".*_cache", ".benchmarks", "*.egg-info", "docs")
LIMIT_S = 300
LIMIT_BYTES = 12 * 2**30  # of address space; torch alone takes some 5
PASSED, FAILED = 0, 1  # exit codes of pytest


@dataclass(frozen=True)
class Fault:
    """One planted fault. `equivalent`: why no test can tell; "" for those that must be noticed."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def plant(self, text: str) -> str:
        """The faulty source. Raises ValueError unless the text before stands there exactly once."""
        found = text.count(self.before)
        if found != 1:
            raise ValueError(
                f"{self.name}: {self.file}: expected the text once, found it {found} times: {self.before!r}"
            )
        if self.before == self.after:
            raise ValueError(f"{self.name}: {self.file}: the patch changes nothing")
        return text.replace(self.before, self.after)


def faults() -> list[Fault]:
    """All committed faults. Raises ValueError for one that is not whole, or named twice."""
    found: list[Fault] = []
    for path in sorted(HERE.glob("*.toml")):
        for row in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
            try:
                found.append(Fault(**{**row, "tests": tuple(row["tests"])}))
            except (TypeError, KeyError) as error:
                raise ValueError(f"{path.name}: {row.get('name')}: {error}") from None
    names = [fault.name for fault in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"faults named twice: {sorted(twice)}")
    return found


def _limit_memory() -> None:
    """A fault that asks for memory without end fails its test, and takes no other process with it."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[int | None, str]:
    """Exit code of pytest in `tree` (None: it ran out of time), and the end of what it said."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            preexec_fn=_limit_memory,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"no end after {LIMIT_S} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return done.returncode, "; ".join(lines[-1:])[:200] or done.stdout[-300:] + done.stderr[-300:]


def judge(tree: Path, fault: Fault, clean: tuple[int | None, str]) -> tuple[str, str]:
    """(verdict, detail): caught, survives, equivalent, or broken (with what is wrong with the fault itself)."""
    if clean[0] != PASSED:
        return "broken", f"its tests do not pass without it: {clean[1]}"
    source = tree / fault.file
    text = source.read_text(encoding="utf-8")
    try:
        source.write_text(fault.plant(text), encoding="utf-8")
        _new_time(source)
        code, said = run_tests(tree, fault.tests)
    except ValueError as error:
        return "broken", str(error)
    finally:
        source.write_text(text, encoding="utf-8")
        _new_time(source)
    if code == PASSED:
        return ("equivalent", fault.equivalent) if fault.equivalent else ("survives", "no test of its own failed")
    if code not in (FAILED, None):
        return "broken", f"pytest ended with {code}: {said}"
    return ("broken", f"stated to be equivalent, and noticed: {said}") if fault.equivalent else ("caught", said)


_times = iter(range(2_000_000_000, 3_000_000_000, 10))


def _new_time(path: Path) -> None:
    """A time of its own for every version, so that no compiled file of another one is taken for it."""
    stamp = next(_times)
    os.utime(path, (stamp, stamp))


def trees(count: int, folder: Path) -> Queue[Path]:
    """Copies of the working tree, one a worker."""
    queue: Queue[Path] = Queue()
    for number in range(count):
        tree = folder / f"tree{number}"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        queue.put(tree)
    return queue


def verdicts(chosen: list[Fault], jobs: int) -> Iterator[tuple[Fault, str, str, float]]:
    """Every fault with its verdict, detail and seconds, in order."""
    with tempfile.TemporaryDirectory(prefix="kvarena-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        free = trees(jobs, Path(folder))

        def clean(tests: tuple[str, ...]) -> tuple[int | None, str]:
            tree = free.get()
            try:
                return run_tests(tree, tests)
            finally:
                free.put(tree)

        def planted(fault: Fault) -> tuple[str, str, float]:
            tree, started = free.get(), time.monotonic()
            try:
                return *judge(tree, fault, before[fault.tests]), time.monotonic() - started
            finally:
                free.put(tree)

        distinct = list(dict.fromkeys(fault.tests for fault in chosen))
        before = dict(zip(distinct, pool.map(clean, distinct), strict=True))
        for fault, result in zip(chosen, pool.map(planted, chosen), strict=True):
            yield fault, *result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="regular expression over names and files")
    given = parser.parse_args(arguments)
    chosen = [fault for fault in faults() if re.search(given.only, f"{fault.name} {fault.file}")]
    counts: dict[str, int] = {}
    started = time.monotonic()
    for fault, verdict, detail, seconds in verdicts(chosen, given.jobs):
        counts[verdict] = counts.get(verdict, 0) + 1
        print(f"{verdict:<10} {seconds:5.1f} s  {fault.name}", flush=True)
        if verdict != "caught":
            print(f"           {fault.file}: {detail}", flush=True)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"{len(chosen)} faults: {summary}; {time.monotonic() - started:.0f} s")
    return 1 if counts.get("survives", 0) or counts.get("broken", 0) or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
