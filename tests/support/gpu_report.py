"""Run the kernel tests on this machine's GPU and save what came out.

    PYTHONPATH=. python tests/support/gpu_report.py --out results/h200 --commit HASH [-- pytest arguments]

Writes check.json (card, driver, versions, commit, counts by test file, failures by name) and check.md, the same as a
table. Exit status 1 when a test failed or none ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import triton

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def run_tests(arguments: list[str]) -> list[dict[str, str]]:
    """Every test with its file, name, outcome and message."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, check=False)
        cases = ET.parse(report).getroot().iter("testcase")
        return [_outcome(case) for case in cases]


def _outcome(case: ET.Element) -> dict[str, str]:
    found = {"file": case.get("classname", "").split(".")[-1], "name": case.get("name", ""), "outcome": "passed"}
    for child in case:
        if child.tag in OUTCOMES:
            found |= {"outcome": OUTCOMES[child.tag], "message": (child.get("message") or "")[:300]}
    return found


def summarise(tests: list[dict[str, str]], commit: str) -> dict[str, Any]:
    """The report as it is saved."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for test in tests:
        counts[test["file"]][test["outcome"]] += 1
    return {
        "schema_version": 1,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "counts": {name: dict(sorted(counter.items())) for name, counter in sorted(counts.items())},
        "total": dict(sorted(sum(counts.values(), Counter()).items())),
        "bfloat16": dict(Counter(test["outcome"] for test in tests if "bfloat16" in test["name"])),
        "failed": [test for test in tests if test["outcome"] == "failed"],
        "skipped": sorted({test["message"] for test in tests if test["outcome"] == "skipped"}),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def as_markdown(report: dict[str, Any]) -> str:
    """check.md: a heading with the machine, a row a test file."""
    lines = [
        f"# Kernel tests on {report['card']}",
        "",
        f"Driver {report['driver']}, torch {report['torch']}, triton {report['triton']}, commit {report['commit']}.",
        "",
        "| tests | passed | failed | skipped |",
        "| --- | --- | --- | --- |",
    ]
    for name, counts in (
        *report["counts"].items(),
        ("all", report["total"]),
        ("of these bfloat16", report["bfloat16"]),
    ):
        lines.append(f"| {name} | " + " | ".join(str(counts.get(k, 0)) for k in ("passed", "failed", "skipped")) + " |")
    lines += ["", "Skipped because: " + ("; ".join(report["skipped"]) or "nothing was") + "."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for check.json and check.md")
    parser.add_argument("--commit", required=True, help="commit of the checkout")
    parser.add_argument("pytest", nargs="*", default=["tests/kernels"], help="arguments for pytest")
    arguments = parser.parse_args()
    report = summarise(run_tests(arguments.pytest), arguments.commit)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "check.json").write_text(json.dumps(report, indent=2) + "\n")
    (arguments.out / "check.md").write_text(as_markdown(report))
    print(as_markdown(report))
    return 0 if report["total"].get("passed") and not report["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
