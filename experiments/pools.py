"""From a config's [pool] to the pages of every cell, at equal bytes for every allocator."""

from __future__ import annotations

from dataclasses import dataclass

from kvarena.experiments import budget as bytes_of
from kvarena.experiments.budget import Budget, Tables
from kvarena.experiments.config import Config, ConfigError
from kvarena.experiments.loading import Workload
from kvarena.experiments.replay import too_long_message
from kvarena.experiments.specs import AllocatorEntry

SWEEP_SIZES = 8
SWEEP_FIRST_SHARE = 0.01
MIB = 2**20


@dataclass(frozen=True)
class Cell:
    """One seed, one pool and one allocator."""

    workload: Workload
    pool_bytes: int
    entry: AllocatorEntry
    budget: Budget


def plan(config: Config, workloads: list[Workload], entries: list[AllocatorEntry]) -> list[Cell]:
    """Every cell, after checking that each request fits each pool. Raises ValueError before anything runs."""
    sizes = pool_sizes(config, workloads, entries)
    cells = []
    for workload in workloads:
        for size in sizes:
            for entry in entries:
                cells.append(Cell(workload, size, entry, _budget(config, workload, entry, size)))
    if config.engine.too_long == "error":
        for cell in cells:
            if -(-cell.workload.longest // cell.entry.page_size) > cell.budget.num_pages:
                raise bytes_of.PoolTooSmallError(
                    too_long_message(
                        cell.workload.longest_id,
                        cell.workload.longest,
                        cell.entry.page_size,
                        cell.budget.num_pages,
                        cell.entry.name,
                    )
                )
    return cells


def pool_sizes(config: Config, workloads: list[Workload], entries: list[AllocatorEntry]) -> list[int]:
    """Pool sizes in bytes, ascending, each once. The same for every allocator and seed."""
    sizes: set[int] = set()
    for size in config.pool.sizes:
        if isinstance(size, int):
            sizes.add(_bytes_of_pages(config, workloads, entries, size))
        elif size == "sweep":
            sizes.update(_sweep(config, workloads, entries))
        elif (share := bytes_of.parse_share(size)) is not None:
            sizes.add(_bytes_of_share(config, workloads, entries, share))
        else:
            sizes.add(bytes_of.parse_bytes(size))
    return sorted(sizes)


def _tables(config: Config, workload: Workload) -> Tables:
    return Tables(config.engine.live, workload.longest)


def _budget(config: Config, workload: Workload, entry: AllocatorEntry, size: int) -> Budget:
    shape = config.pool.shape
    return bytes_of.fit_pool(
        size, entry.kind, entry.page_size, shape, _tables(config, workload), tokens_per_id=workload.tokens_per_id
    )


def _bytes_of_pages(config: Config, workloads: list[Workload], entries: list[AllocatorEntry], pages: int) -> int:
    """Bytes in which every allocator has exactly `pages` pages, up to tables too small for one more page."""
    page_sizes = sorted({entry.page_size for entry in entries})
    if len(page_sizes) > 1:
        raise ConfigError(
            "pool.pool",
            f"a page count ({pages}) says something only where all allocators share one page size, "
            f"found {', '.join(map(str, page_sizes))}; give bytes",
        )
    needs = [
        bytes_of.bytes_for_pages(
            pages, e.kind, e.page_size, config.pool.shape, _tables(config, w), tokens_per_id=w.tokens_per_id
        )
        for w in workloads
        for e in entries
    ]
    most = max(need.pool_bytes for need in needs)
    page_bytes = page_sizes[0] * config.pool.shape.bytes_per_token * workloads[0].tokens_per_id
    if most - min(need.pool_bytes for need in needs) >= page_bytes:
        raise ConfigError(
            "pool.pool", f"{pages} pages take unlike bytes, since the tables differ by a page; give bytes"
        )
    return most


def _bytes_of_share(config: Config, workloads: list[Workload], entries: list[AllocatorEntry], share: float) -> int:
    """`share` of the working set's KV, and the tables of the allocator whose tables are largest, in whole MiB."""
    token_bytes = config.pool.shape.bytes_per_token
    kv = max(workload.working_set_tokens for workload in workloads) * token_bytes * share
    return _whole_mib(kv + _overhead(config, workloads, entries))


def _overhead(config: Config, workloads: list[Workload], entries: list[AllocatorEntry]) -> int:
    budgets = [
        bytes_of.bytes_for_pages(
            1, e.kind, e.page_size, config.pool.shape, _tables(config, w), tokens_per_id=w.tokens_per_id
        )
        for w in workloads
        for e in entries
    ]
    return max(b.padding_page_bytes + b.table_bytes + b.slot_mapping_bytes for b in budgets)


def _sweep(config: Config, workloads: list[Workload], entries: list[AllocatorEntry]) -> list[int]:
    """Eight sizes, evenly spaced in the logarithm, from 1 % of the working set (more where the longest request does
    not fit that) to all of it."""
    token_bytes = config.pool.shape.bytes_per_token
    overhead = _overhead(config, workloads, entries)
    most = max(w.working_set_tokens for w in workloads) * token_bytes
    page = max(entry.page_size for entry in entries)
    longest = max((w.longest + page) * w.tokens_per_id for w in workloads) * token_bytes
    first = max(SWEEP_FIRST_SHARE * most, longest)
    if first >= most:
        return [_whole_mib(max(first, most) + overhead)]
    step = (most / first) ** (1 / (SWEEP_SIZES - 1))
    return [_whole_mib(first * step**i + overhead) for i in range(SWEEP_SIZES)]


def _whole_mib(number: float) -> int:
    return -(-int(number) // MIB) * MIB
