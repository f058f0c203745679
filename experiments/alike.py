"""What makes the numbers of one table unlike, as warnings: pages of unlike tokens, and rates of unlike requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kvarena.experiments.budget import format_bytes
from kvarena.experiments.specs import ID_PAGE

if TYPE_CHECKING:
    import pandas as pd

UNLIKE = "the allocators did not reject the same requests"
CELL_KEYS = ("seed", "pool_bytes", "allocator")


def page_notes(sizes: Mapping[str, int], tokens_per_id: int) -> list[str]:
    """What a page is where a trace is replayed by its ids, and a warning where it is not the same for all. `sizes`: the
    page size of each allocator, ids."""
    ids = "1 token" if tokens_per_id == 1 else f"{tokens_per_id:,} tokens"
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{size * tokens_per_id:,} ({name})" for name, size in sizes.items())
        return [
            f"pages are unlike, and hits end at whole pages: one id of the trace stands for {ids}, so a page holds "
            f"{each}; leave page_size out for one id a page"
        ]
    size = next(iter(sizes.values()))
    named = {1: "the design", 2: "both designs"}.get(len(sizes), f"all {len(sizes)} designs")
    if size == ID_PAGE:
        return [f"one id ({ids}) is a page in {named}"]
    return [f"{size:,} ids ({size * tokens_per_id:,} tokens) are a page in {named}"]


def unlike_requests(cells: Iterable[pd.DataFrame]) -> list[str]:
    """Of rows a request, one table a cell: a warning where the allocators of a seed and pool did not reject the same
    requests, so that their rates, ceilings and bounds are not of the same requests. The first such pool, and how many
    there are."""
    rejected: dict[tuple[int, int], dict[str, frozenset[int]]] = {}
    for rows in cells:
        seed, pool, name = (rows[key].iloc[0] for key in CELL_KEYS)
        own = frozenset(rows.loc[~rows["admitted"].astype(bool), "index"].tolist())
        rejected.setdefault((int(pool), int(seed)), {})[str(name)] = own
    unlike = {key: by for key, by in sorted(rejected.items()) if len(set(by.values())) > 1}
    if not unlike:
        return []
    (pool, _), first = next(iter(unlike.items()))
    counts = ", ".join(f"{name} {len(own):,}" for name, own in first.items())
    pools, known = len({pool for pool, _ in unlike}), len({pool for pool, _ in rejected})
    where = f"at {format_bytes(pool)}" + (f", and at {pools} of {known} pool sizes in all" if known > 1 else "")
    return [
        f"{UNLIKE} ({counts} {where}): hit rates, ceilings and bounds leave "
        "rejected requests out, so they and their differences are of unlike requests there; a larger pool serves all"
    ]
