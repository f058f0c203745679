"""`make fuzz`: coverage-guided fuzzing (atheris) of every reader and config loader, for a stated number of runs each.

    python tests/fuzz/run.py [--runs 20000] [--only REGEX] [--keep]

A reader may give anything, or raise a ValueError that names its file; any other exception, and an input that takes
longer than 10 s or 1 GiB, is a crash, is kept under out/fuzz/ and ends with exit code 1. Each starts from the committed
corpus (`tests/fuzz/corpus/READER`) and from its right input; --keep adds what opened new code to the corpus, the
smallest files first.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CORPUS = HERE / "corpus"
CRASHES = ROOT / "out" / "fuzz"
sys.path[:0] = [str(ROOT / "tests")]
KEPT_FILES, KEPT_BYTES = 12, 2048


@dataclass(frozen=True)
class Report:
    """What came of one reader."""

    name: str
    code: int
    seconds: float
    runs: int
    coverage: str
    crash: str
    found: dict[str, bytes]

    def __str__(self) -> str:
        state = "no crash" if self.code == 0 else f"CRASH (exit code {self.code}): {self.crash}"
        covered = self.coverage or "coverage unknown"
        return f"{self.name:<16} {self.runs:>8,} runs, {self.seconds:5.0f} s, {covered}, {state}"


def slug(name: str) -> str:
    return name.replace(" ", "_")


def fuzz(name: str, runs: int) -> Report:
    """One reader in a process of its own: a crash of the interpreter ends that alone."""
    started = time.monotonic()
    CRASHES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvarena-fuzz-") as folder:
        fresh = Path(folder) / "corpus"
        fresh.mkdir()
        command = [sys.executable, str(HERE / "one_reader.py"), name, str(fresh), f"-atheris_runs={runs}"]
        command += [f"-artifact_prefix={CRASHES}/{slug(name)}-", "-timeout=10", "-rss_limit_mb=1024", "-max_len=4096"]
        committed = CORPUS / slug(name)
        done = subprocess.run([*command, str(committed)] if committed.is_dir() else command, capture_output=True,
                              text=True, cwd=ROOT, check=False)  # fmt: skip
        found = {path.name: path.read_bytes() for path in fresh.iterdir()}
    text = done.stderr
    counted = [int(number) for number in re.findall(r"^(?:#|Done )(\d+)\s", text, re.MULTILINE)]
    covered = re.findall(r"cov: (\d+) ft: (\d+)", text)
    coverage = f"{covered[-1][0]} edges" if covered else ""
    faults = [line for line in (done.stdout + text).splitlines() if re.match(r"(\w+\.)*\w+(Error|Exception)\b", line)]
    code = done.returncode
    if code == -signal.SIGALRM and re.search(r"^Done \d+ ", text, re.MULTILINE) and "ALARM: working" not in text:
        code = 0  # libFuzzer's own timer, still armed when all runs were done; a real time-out says on what it worked
    return Report(name, code, time.monotonic() - started, max(counted, default=0), coverage,
                  (faults or [text[-300:]])[-1][:300], found)  # fmt: skip


def keep(report: Report) -> None:
    """Commit-sized: the smallest inputs that opened new code."""
    folder = CORPUS / slug(report.name)
    folder.mkdir(parents=True, exist_ok=True)
    room = KEPT_FILES - len(list(folder.iterdir()))
    small = sorted((data, name) for name, data in report.found.items() if len(data) <= KEPT_BYTES)
    for data, name in sorted(small, key=lambda item: len(item[0]))[::3][: max(room, 0)]:
        (folder / name[:16]).write_bytes(data)


def main(arguments: list[str] | None = None) -> int:
    from support.readers import readers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20_000, help="inputs a reader; a config loader gets a tenth")
    parser.add_argument("--only", default="", help="regular expression over the readers' names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="add what opened new code to the corpus")
    given = parser.parse_args(arguments)
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("fuzz: atheris is not installed; install the extra: pip install 'kvarena[fuzz]'", file=sys.stderr)
        return 2
    chosen = [name for name in readers() if re.search(given.only, name)]
    with ThreadPoolExecutor(given.jobs) as pool:
        asked = [max(given.runs // 10, 1) if "config" in name else given.runs for name in chosen]
        reports = []
        for report in pool.map(fuzz, chosen, asked):
            print(report, flush=True)
            reports.append(report)
            if given.keep:
                keep(report)
    failed = [report for report in reports if report.code]
    print(f"{len(reports)} readers, {sum(report.runs for report in reports):,} inputs, {len(failed)} crashes")
    return 1 if failed or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
