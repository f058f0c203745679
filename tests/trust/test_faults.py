"""Faults of the machine: kill -9 at any moment of a write, a full disk, a disk that takes no files, a clock set back.
After each, what is on disk is whole or absent, the message says what happened, and a re-run succeeds.

Ctrl-C: `test_interrupts.py`. A sweep that is killed, interrupted, or loses a worker:
`tests/experiments/test_sweep.py`, `test_sweep_ray.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvarena.experiments import report
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.provenance import provenance
from kvarena.experiments.results import load_result
from kvarena.experiments.scenarios import write_log
from kvarena.experiments.sweep import open_sweep, sweep
from kvarena.experiments.verify_result import verify
from support.interrupts import listen
from support.small import OPTIONS, shared

ROOT = Path(__file__).resolve().parents[2]
KILLS = 18
SETS = ("trace='chat'", "requests=20", "options={num_sessions=4}", "pool='450 MiB'", "speed=20.0")


def engine_run():
    return run_engine(run_config({}, SETS))


@pytest.fixture
def quick_figures(monkeypatch):
    """Files where the figures go, without the seconds of drawing them."""

    def drawn(result: object, folder: Path) -> list[Path]:
        (folder / "figures").mkdir()
        for number in range(30):
            (folder / "figures" / f"f{number}.svg").write_bytes(b"x" * 5000)
        return []

    monkeypatch.setattr(report, "write_figures", drawn)
    monkeypatch.setattr(report, "write_report", lambda result, path: path.write_text("page"))


# --- kill -9 ---


@pytest.mark.usefixtures("quick_figures")
@pytest.mark.parametrize("kind", ["compare", "run"])
def test_a_writer_killed_at_any_moment_leaves_a_whole_result_or_none(tmp_path, kind):
    result = shared() if kind == "compare" else engine_run()
    out, rng = tmp_path / "out", random.Random(7)
    started = time.monotonic()
    result.save(out)
    one_save = time.monotonic() - started
    seen = set()
    for number in range(KILLS):
        child = os.fork()
        if child == 0:  # writes the result again and again until it is killed
            with contextlib.suppress(BaseException):
                while True:
                    result.save(out)
            os._exit(1)
        time.sleep(rng.uniform(0.0, 2.5 * one_save))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        if out.exists():
            assert verify(out).problems == []
        seen.add(out.exists())
        if number % 3 == 2:
            shutil.rmtree(out, ignore_errors=True)
    assert seen == {True, False}
    result.save(out)
    assert verify(out).problems == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # what the killed ones left half is gone


@pytest.mark.parametrize("command", ["compare", "run"])
def test_a_command_killed_on_the_way_leaves_nothing_that_looks_finished(tmp_path, command):
    arguments = {
        "compare": ["compare", "chat", "--set", "seeds=40", "--set", "kernel_batches=0"],
        "run": ["run", "--set", "trace='chat'", "--set", "seeds=40", "--set", "pool='4 GiB'"],
    }[command]
    child = start(*arguments, "--out", str(tmp_path / "out"), "--quiet")
    time.sleep(4)
    child.kill()
    child.wait()
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
    assert not list(tmp_path.rglob("result.json"))


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvarena", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen,
    )


# --- disks ---


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs at `folder`; skips with the reason where mounting is not allowed."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True, capture_output=True)


@pytest.fixture
def tmpfs(tmp_path):
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root and mount")
    return tmp_path / "disk"


@pytest.mark.usefixtures("quick_figures")
@pytest.mark.parametrize("kib", [4, 8, 20, 60, 100, 180])
def test_a_disk_that_fills_up_keeps_the_earlier_result_and_takes_the_next(tmpfs, kib):
    with mounted(tmpfs, "size=64m") as disk:
        before = shared().save(disk / "out")
        used = sum(path.stat().st_size for path in before.rglob("*") if path.is_file())
        old = {path.name: path.read_bytes() for path in before.rglob("*") if path.is_file()}
        filler = disk / "filler"
        remount(disk, f"size={used // 1024 + 400 + kib}k")
        with open(filler, "wb") as file, contextlib.suppress(OSError):
            while free_bytes(disk) > kib * 1024:
                file.write(b"x" * 4096)
                file.flush()
        with pytest.raises(OSError, match="No space left on device"):
            shared().save(disk / "out")
        assert {path.name: path.read_bytes() for path in before.rglob("*") if path.is_file()} == old
        assert verify(disk / "out").problems == []
        filler.unlink()
        remount(disk, "size=64m")
        shared().save(disk / "out")
        assert verify(disk / "out").problems == []
        assert [path.name for path in disk.iterdir()] == ["out"]


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def test_a_sweep_whose_disk_fills_up_goes_on_where_it_stopped(tmpfs):
    base = {"workload": {"trace": "chat", "options": OPTIONS}, "pool": {"pool": "450 MiB"}}
    config = {**base, "allocators": [{"name": "vllm"}], "sweep": {"live": [1, 2, 3]}}
    with mounted(tmpfs, "size=60k") as disk:
        with pytest.raises(OSError, match="No space left on device"):
            sweep(config, disk / "out", jobs=1)
        remount(disk, "size=64m")
        done = sweep(config, disk / "out", jobs=1)
        assert [cell["state"] for cell in done.cells] == ["finished"] * 3, done.failures
        assert verify(disk / "out").problems == []
        assert not list((disk / "out").rglob("*.partial"))


def test_a_disk_that_takes_no_files_is_refused_before_anything_runs(tmpfs):
    with mounted(tmpfs, "ro") as disk:
        for arguments in (["compare", "chat"], ["run", "--set", "trace='chat'"]):
            child = start(*arguments, "--out", str(disk / "out"), "--quiet")
            _, said = child.communicate(timeout=120)
            assert child.returncode == 2
            assert said.startswith("kvarena: ")
            assert "cannot be written" in said
            assert len(said.splitlines()) == 1
        config = {"workload": {"trace": "chat"}, "sweep": {"live": [1]}}
        with pytest.raises(ValueError, match="cannot be written"):
            sweep(config, disk / "out")
        with pytest.raises(ValueError, match="cannot be written"):
            write_log([{"i": 1}], disk / "log.jsonl")
        assert list(disk.iterdir()) == []


# --- clocks ---


@pytest.mark.usefixtures("quick_figures")
def test_a_clock_that_is_set_back_leaves_a_result_that_stands_and_no_negative_time(tmp_path, monkeypatch):
    clock = iter(range(2_000_000_000, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    result = engine_run()
    assert result.provenance["wall_s"] is None
    assert verify(result.save(tmp_path / "out")).problems == []
    assert load_result(tmp_path / "out").provenance["started"].startswith("2033")


def test_an_hour_that_passed_is_an_hour():
    assert provenance([0], [], time.time() - 3600)["wall_s"] == pytest.approx(3600, abs=60)


def test_a_sweep_reads_back_after_the_clock_was_set_back(tmp_path, monkeypatch):
    clock = iter(range(2_000_000_000, 0, -60))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    base = {"workload": {"trace": "chat", "options": OPTIONS}, "pool": {"pool": "1 B"}}
    # 1 byte holds no page: the cell fails, which is quick.
    sweep({**base, "allocators": [{"name": "vllm"}], "sweep": {"live": [1]}}, tmp_path / "out", jobs=1)
    assert [cell["state"] for cell in open_sweep(tmp_path / "out").cells] == ["failed"]
