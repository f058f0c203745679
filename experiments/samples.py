"""Batches of a replay for the kernel check: the same steps for every allocator."""

from __future__ import annotations

from typing import Any

from kvarena.experiments.config import Config
from kvarena.experiments.pools import Cell
from kvarena.experiments.replay import Lane


class Samples:
    """Batches of the first seed at the reference pool, the same steps for every allocator, for the kernel check."""

    def __init__(self, config: Config, cells: list[Cell]) -> None:
        self._count = config.engine.kernel_batches
        pools = sorted({cell.pool_bytes for cell in cells})
        self._seed, self._pool = cells[0].workload.seed, pools[len(pools) // 2]
        self._lanes: dict[str, Lane] = {}

    def _chosen(self, cell: Cell) -> bool:
        return cell.workload.seed == self._seed and cell.pool_bytes == self._pool

    def steps(self, cell: Cell) -> list[int]:
        """Steps spread over the run, none in its first tenth, when everything is cold."""
        if not self._chosen(cell):
            return []
        total = len(cell.workload.requests)
        return sorted({total * (2 * i + 2) // (2 * self._count + 1) for i in range(self._count)})

    def add(self, cell: Cell, lane: Lane) -> None:
        if self._chosen(cell):
            self._lanes[cell.entry.name] = lane

    def check(self) -> dict[str, Any]:
        """The report of `check_batches` over the batches that all allocators have."""
        if not self._count:
            return {"status": "not run", "reason": "kernel_batches = 0"}
        from kvarena.experiments.kernel_check import BatchSample, check_batches

        samples = []
        for records in zip(*(lane.batches for lane in self._lanes.values()), strict=True):
            common = [n for n in records[0].requests if all(n in r.requests for r in records)]
            common = [n for n in common if len({r.requests[n][0] for r in records}) == 1]
            if common:
                tables = {
                    name: (record.page_size, [record.requests[n][1] for n in common])
                    for name, record in zip(self._lanes, records, strict=True)
                }
                samples.append(BatchSample([records[0].requests[n][0] for n in common], tables, records[0].step))
        return check_batches(samples)
