"""Who carries out the cells of a sweep: processes of this machine, or the nodes of a Ray cluster. Same work, same code.

A worker takes a cell and gives back the files of its result, or a traceback; it writes nothing. So a worker may die at
any moment, and nodes need not share a file system with the one who asks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from kvarena.experiments.sweep_plan import SweepCell, code_digest

T = TypeVar("T")
R = TypeVar("R")
RETRIES = 3  # of a cell whose Ray node or process died


@dataclass(frozen=True)
class Outcome:
    """What came of a cell: the files of its result by name, or what went wrong."""

    files: dict[str, bytes] = field(default_factory=dict)
    error: str = ""
    traceback: str = ""

    @property
    def failed(self) -> bool:
        return not self.files


Outcomes: TypeAlias = Generator[tuple[SweepCell, Outcome], None, None]


class Workers(Protocol):
    """Carries out cells, and hands each over with its outcome as it ends. Closing the iterator stops what runs."""

    def outcomes(self, cells: list[SweepCell]) -> Outcomes: ...


def carry_out(cell: SweepCell, folder: str, code: str) -> Outcome:
    """Run one cell in working folder `folder` (relative traces lie there), if this process has the sweep's code: its
    files may have been edited meanwhile, or a node may have another version. Never raises for a fault of the cell."""
    if code_digest() != code:
        return Outcome(error="the code of this worker is not that of the sweep: edited meanwhile, or another version")
    try:
        with contextlib.chdir(folder) if os.path.isdir(folder) else contextlib.nullcontext():
            return Outcome(_result_files(cell))
    except Exception as error:
        return Outcome(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


def _result_files(cell: SweepCell) -> dict[str, bytes]:
    from kvarena.experiments.results import Result

    result: Result
    if cell.kind == "run":
        from kvarena.experiments.engine.run import run_engine
        from kvarena.experiments.engine.run_config import run_config

        result = run_engine(run_config(cell.config))
    else:
        from kvarena.experiments.compare import run
        from kvarena.experiments.config import config_from_mapping

        result = run(config_from_mapping(cell.config))
    with tempfile.TemporaryDirectory() as folder:
        result._write_tables(Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


# --- processes ---


class LocalWorkers:
    """`jobs` processes of this machine. They end with the one who started them, whatever ends that."""

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ValueError(f"jobs: expected at least 1, found {jobs}")
        self.jobs = jobs

    def outcomes(self, cells: list[SweepCell]) -> Outcomes:
        """A process that dies (out of memory, killed) takes the pool with it: the cells that ran then are tried again,
        each alone, and the one that kills its process once more has failed."""
        waiting = deque(cells)
        while waiting:
            suspects = yield from self._together(waiting)
            for cell in suspects:
                again = deque([cell])
                if (yield from self._together(again, jobs=1)):
                    yield cell, Outcome(error="the process that ran it died (killed, or out of memory), twice")

    def _together(
        self, waiting: deque[SweepCell], jobs: int | None = None
    ) -> Generator[tuple[SweepCell, Outcome], None, list[SweepCell]]:
        """Empties `waiting`; returns the cells that ran when the pool broke, if it did."""
        flying: dict[Future[Outcome], SweepCell] = {}
        count = min(jobs or self.jobs, len(waiting))
        with worker_pool(count) as pool:
            try:
                while waiting or flying:
                    while waiting and len(flying) < count:
                        flying[pool.submit(carry_out, waiting[0], os.getcwd(), code_digest())] = waiting[0]
                        waiting.popleft()
                    for future in wait(flying, return_when=FIRST_COMPLETED).done:
                        outcome = future.result()
                        yield flying.pop(future), outcome
            except BrokenProcessPool:
                return list(flying.values())
        return []


@contextlib.contextmanager
def worker_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes die at once when the block is left by an exception, or when this process ends."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_tie, initargs=(theirs,))
    try:
        yield pool
        pool.shutdown()
    finally:
        ours.close()
        pool.shutdown(wait=False, cancel_futures=True)
        theirs.close()


def in_processes(work: Callable[[T], R], items: Sequence[T], jobs: int) -> Generator[tuple[int, R], None, None]:
    """(place, result) of each item as it ends, on `jobs` processes; in this one when that is 1. Closing the generator
    ends them. No more items are handed out than run: one that waits in the pool cannot be taken back in peace."""
    if jobs == 1:
        for place, item in enumerate(items):
            yield place, work(item)
        return
    waiting = deque(enumerate(items))
    flying: dict[Future[R], int] = {}
    with worker_pool(jobs) as pool:
        while waiting or flying:
            while waiting and len(flying) < jobs:
                place, item = waiting.popleft()
                flying[pool.submit(work, item)] = place
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                yield flying.pop(future), future.result()


def _tie(line: Connection) -> None:
    """In a worker: leave Ctrl-C to the parent, and end when the parent's end of the line is closed or gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(line,), daemon=True).start()


def _end_with(line: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        line.recv()
    os._exit(1)


# --- Ray ---


class RayWorkers:
    """Nodes of a Ray cluster: "local" starts one on this machine, anything else is the address of one that runs.

    Every node needs this very version of kvarena, which is checked, and the trace. A cell whose node dies is run again
    on another.
    """

    def __init__(self, address: str, jobs: int | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError("ray: is not installed; install the extra: pip install 'kvarena[ray]'") from None
        self._ray: Any = ray
        self.address = address
        self.jobs = jobs

    def outcomes(self, cells: list[SweepCell]) -> Outcomes:
        ray = self._ray
        started = not ray.is_initialized()
        if started:
            self._connect()
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(carry_out)
        flying = {task.remote(cell, os.getcwd(), code_digest()): cell for cell in cells}
        try:
            while flying:
                for ref in ray.wait(list(flying), num_returns=1)[0]:
                    yield flying.pop(ref), self._outcome(ref)
        finally:
            for ref in flying:
                ray.cancel(ref, force=True)
            if started:
                ray.shutdown()

    def _connect(self) -> None:
        self._expect_listener()
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if self.address == "local":
            options |= {"num_cpus": self.jobs, "include_dashboard": False}
        try:
            self._ray.init(address=self.address, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ValueError(f"ray: no cluster at {self.address!r} ({error})") from None

    def _expect_listener(self) -> None:
        """Raise ValueError when nobody listens at host:port: Ray itself would try again for minutes."""
        host, separator, port = self.address.removeprefix("ray://").rpartition(":")
        if not separator or not port.isdigit():
            return
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ValueError(f"ray: no cluster at {self.address!r} ({error.strerror or error})") from None

    def _outcome(self, ref: Any) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            return Outcome(error=f"{type(error).__name__}: {error}".partition("\n")[0], traceback=str(error))
        return outcome
