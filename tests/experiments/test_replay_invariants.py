"""On whole public traces, where grain, last token and overlap are taken away, both designs are a plain LRU."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from kvarena.allocators.config import block, make_allocator, token
from kvarena.experiments.config import EngineConfig
from kvarena.experiments.loading import as_ids
from kvarena.experiments.replay import Replay
from kvarena.experiments.traces import load_trace
from support.plain_lru import lru_hits

pytestmark = pytest.mark.trace

FILES = {"conversation": "conversation_trace.jsonl.gz", "synthetic": "synthetic_trace.jsonl.gz"}
DESIGNS = {
    "block": block(page_size=1, last_token_rule=False),
    "token": token(eviction_unit="page", split_touches_suffix=False, demand_slack=0, last_token_rule=False),
}
# Capacity in ids: hit ids of all ids, as published for LRU that releases a request's blocks in reverse.
KNOWN = {
    "conversation": {1828: ".0525", 9140: ".1958", 18279: ".2789", 45698: ".3535", 91395: ".3631", 182790: ".3664"},
    "synthetic": {439: ".0381", 2196: ".1566", 4392: ".2623", 10981: ".4441", 21962: ".5888", 43924: ".6396"},
}
LONGEST = {"conversation": 247, "synthetic": 374}


@cache
def requests(name: str, unit: str):
    folder = os.environ.get("KVARENA_TRACES")
    if not folder:
        pytest.skip("KVARENA_TRACES is not set: the public traces are not part of the project")
    found = list(Path(folder).rglob(FILES[name]))
    if not found:
        pytest.skip(f"{FILES[name]} is not under KVARENA_TRACES")
    loaded = list(load_trace(found[0]))
    return as_ids(loaded) if unit == "ids" else loaded


def replayed_hits(design, name: str, num_pages: int, unit: str = "ids") -> list[int]:
    engine = EngineConfig(steps_every=10**9)
    lane = Replay(make_allocator(design, num_pages=num_pages), engine).run(requests(name, unit))
    assert all(row.admitted for row in lane.requests)
    return [row.hit_tokens for row in lane.requests]


def cases():
    for name, rows in KNOWN.items():
        for capacity in [LONGEST[name], LONGEST[name] + 1, 1000, *rows]:
            yield pytest.param(name, capacity, id=f"{name}-{capacity}")


@pytest.mark.parametrize("kind", list(DESIGNS))
@pytest.mark.parametrize(("name", "capacity"), list(cases()))
def test_at_id_grain_every_request_hits_what_a_plain_lru_hits(name, capacity, kind):
    expected = lru_hits((request.token_ids for request in requests(name, "ids")), capacity)
    assert replayed_hits(DESIGNS[kind], name, capacity) == expected


@pytest.mark.parametrize("name", list(KNOWN))
def test_plain_lru_gives_the_published_rates(name):
    prompts = [request.token_ids for request in requests(name, "ids")]
    total = sum(map(len, prompts))
    rates = {capacity: f"{sum(lru_hits(prompts, capacity)) / total:.4f}"[1:] for capacity in KNOWN[name]}
    assert rates == KNOWN[name]
    assert max(map(len, prompts)) == LONGEST[name]


@pytest.mark.parametrize(
    ("design", "expected"), [(block(), 0.203), (token(), 0.200)], ids=["block-upstream", "token-upstream"]
)
def test_with_upstream_rules_and_real_tokens_they_differ_from_it(design, expected):
    pool_tokens = 9140 * 512
    hits = replayed_hits(design, "conversation", pool_tokens // design.page_size, unit="tokens")
    total = sum(request.num_prompt_tokens for request in requests("conversation", "tokens"))
    assert sum(hits) / total == pytest.approx(expected, abs=0.0006)
