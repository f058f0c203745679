"""With three fields set the token design is plain LRU with reverse release, at every capacity."""

import gzip
import json
import os
import random
from array import array
from pathlib import Path

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Release, Sequence
from support.lru import replay_lru

CHECK_EVERY = 4000  # requests
LRU = {
    "kind": "token",
    "page_size": 1,
    "last_token_rule": False,
    "eviction_unit": "page",
    "split_touches_suffix": False,
    "demand_slack": 0,
}


def prefix_chains(seed: int, num_requests: int) -> list[list[int]]:
    """Requests over ids that name a whole prefix, as a trace has them: a random tree's paths."""
    rng = random.Random(seed)
    children: dict[tuple[int, int], int] = {}
    requests = []
    for _ in range(num_requests):
        node, path = 0, []
        for _ in range(rng.randint(1, 12)):
            branch = min(int(rng.expovariate(0.9)), 6)
            node = children.setdefault((node, branch), len(children) + 1)
            path.append(node)
        requests.append(path)
    return requests


def hits_of_token(requests: list[list[int]], capacity: int, **fields: object) -> int:
    allocator = make_allocator({**LRU, **fields}, num_pages=capacity)
    hits = 0
    for number, ids in enumerate(requests):
        seq = Sequence(f"r{number}", array("i", ids))
        pin = allocator.admit(seq)
        assert pin is not None
        hits += pin.hit_tokens
        allocator.commit([(seq, len(ids))])
        allocator.release([seq], Release.FINISH)
        if number % CHECK_EVERY == 0:
            allocator.check()
    allocator.check()
    return hits


@pytest.mark.parametrize("seed", range(4))
def test_hits_are_those_of_plain_lru_at_every_capacity(seed: int) -> None:
    requests = prefix_chains(seed, 400)
    distinct = len({number for ids in requests for number in ids})
    for capacity in sorted({*range(12, 80, 3), *range(80, distinct, 97), distinct}):
        plain = replay_lru([(ids, len(ids)) for ids in requests], capacity, grain=1, reverse=True)
        assert hits_of_token(requests, capacity) == plain.hits, capacity


@pytest.mark.parametrize("field", [{"eviction_unit": "leaf"}, {"split_touches_suffix": True}])
def test_each_upstream_rule_by_itself_departs_from_plain_lru(field: dict[str, object]) -> None:
    requests = prefix_chains(0, 400)
    plain = replay_lru([(ids, len(ids)) for ids in requests], 60, grain=1, reverse=True)
    assert hits_of_token(requests, 60, **field) != plain.hits


@pytest.mark.trace
@pytest.mark.skipif("KVARENA_TRACES" not in os.environ, reason="needs the public traces: set KVARENA_TRACES")
def test_the_whole_mooncake_conversation_has_the_published_lru_rates() -> None:
    path = Path(os.environ["KVARENA_TRACES"]) / "mooncake" / "conversation_trace.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        requests = [json.loads(line)["hash_ids"] for line in lines]
    accesses = sum(map(len, requests))
    rates = {1: 0.0525, 5: 0.1958, 10: 0.2789, 25: 0.3535, 50: 0.3631, 100: 0.3664}
    for percent, rate in rates.items():
        assert round(hits_of_token(requests, 182_790 * percent // 100) / accesses, 4) == rate
