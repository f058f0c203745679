"""The closed form of SGLang's admission, by hand, and against the engine over random servers as deployed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kvarena.experiments.capacity import Cell, capacity_plan, measure
from kvarena.experiments.capacity_law import Rules, carried, demand
from kvarena.experiments.capacity_loads import LOADS, Load
from kvarena.experiments.capacity_prefill import Prefixes
from kvarena.experiments.capacity_sglang import max_tokens, sglang_prefill
from kvarena.experiments.capacity_sizing import GIB, MIB, WEIGHTS, Card, card
from kvarena.experiments.models import SHAPES

MODEL = "smollm2-135m"
TOKEN = ("token-1", "token-16", "token-64")


def burst(prompts: list[int], outputs: int = 20, groups: list[int] | None = None, shared: int = 0) -> Load:
    """A burst of these lengths."""
    sizes = np.array(prompts, np.int64)
    group = np.full(len(prompts), -1) if groups is None else np.array(groups)
    return Load(LOADS["short"], ((),) * len(prompts), sizes, np.full_like(sizes, outputs), group, shared)  # type: ignore[arg-type]


def sglang(num_pages: int, page_size: int = 1, **more: Any) -> Rules:
    return Rules(num_pages, page_size, policy="sglang", publish="commit", **more)


# --- by hand ---


def test_a_prompt_that_the_first_pass_refuses_is_taken_by_the_second() -> None:
    """One pass charges 10 + 1 + 1,000 a prompt: the third needs 3,033 < free. The second pass charges 700 for each of
    two who run and 20 tokens less are free."""
    load = burst([10, 10, 10])
    one_pass = 2 * (10 + 1 + 1000) + 10 + 1000 + 1
    two_passes = 20 + 2 * 700 + 10 + 1000 + 1
    assert two_passes + 1 < one_pass
    assert carried(load, sglang(two_passes + 1, declared=1000))
    assert not carried(load, sglang(two_passes, declared=1000))


def test_what_the_second_pass_refuses_waits_until_somebody_ends() -> None:
    rules = sglang(4_000, declared=1000)
    passes = [size for size in range(1, 6) if carried(burst([10] * size), rules)]
    # First pass: k x 1,011 < 4,000 takes 3. Second: 30 + 2,100 + 1,011 < 4,000 takes one, the next needs 4,152.
    assert passes == [1, 2, 3, 4]
    # A third pass would charge 40 + 2,800 + 1,011 and take one more.
    assert 40 + 4 * 700 + 1011 < 4_000


def test_what_a_running_request_has_generated_is_not_reserved_once_its_token_is_known() -> None:
    """Passes of one prompt each. The fourth faces two who have one token of 1,000 and one whose token is in flight."""
    load = burst([64] * 4)
    need = 3 * 64 + int(0.7 * (999 + 999 + 1000)) + 64 + 1000 + 1
    assert carried(load, sglang(need + 1, declared=1000, chunk_tokens=64))
    assert not carried(load, sglang(need, declared=1000, chunk_tokens=64))
    assert int(0.7 * (999 + 1000 + 1000)) > int(0.7 * (999 + 999 + 1000))


def test_declared_output_is_never_below_the_true_one_and_cut_to_row_and_pool() -> None:
    load = burst([10, 10, 100], outputs=20)
    assert max_tokens(load, sglang(10_000, declared=5)).tolist() == [20, 20, 20]
    assert max_tokens(load, sglang(10_000, declared=4096, max_model_len=256)).tolist() == [246, 246, 156]
    assert max_tokens(load, sglang(16, 16, declared=4096)).tolist() == [223, 223, 127]  # 256 - 16 - 16 - 1
    assert sglang_prefill(burst([300]), sglang(16, 16)) is None


def test_an_end_by_max_tokens_is_foreseen_and_one_by_a_stop_token_is_not() -> None:
    load = burst([10], outputs=20)
    assert len(demand(load, sglang(1000, declared=20))) == 20
    assert len(demand(load, sglang(1000, declared=21))) == 21


def test_prefixes_of_the_last_pass_are_held_twice_in_the_first_decode() -> None:
    rules = sglang(1000, declared=20)
    filled = sglang_prefill(burst([50, 50, 50], groups=[0, 0, 0], shared=40), rules)
    assert filled is not None
    assert filled.twice == [(0, 2, 40), (0, 2, 40)]
    # 50 + 2 x 10 own ones and 40 shared; two more copies of 40, and a token each.
    tight = sglang(153, declared=20, reserves=False)
    assert carried(burst([50, 50, 50], outputs=3, groups=[0, 0, 0], shared=40), tight)
    assert not carried(burst([50, 50, 50], outputs=3, groups=[0, 0, 0], shared=40), replace(tight, num_pages=152))


def test_a_prefix_that_a_chunk_has_covered_is_no_longer_held_twice() -> None:
    """Chunks of 64: the second prompt covers the 40 shared tokens in pass 1 and is done in pass 5."""
    filled = sglang_prefill(burst([50, 300], groups=[0, 0], shared=40), sglang(4000, declared=20, chunk_tokens=64))
    assert filled is not None
    assert filled.twice == []


def test_a_chunk_is_found_a_pass_before_what_a_whole_prompt_of_the_same_pass_published() -> None:
    load = burst([50, 60, 60], groups=[0, 0, 0], shared=40)
    prefixes = Prefixes(load, sglang(4000))
    prefixes.new_tokens(0, 0)
    prefixes.computed(0, 0)
    prefixes.new_tokens(1, 0)
    prefixes.chunk(1, 0, 14)
    assert [prefixes.new_tokens(2, step) for step in (0, 1, 2)] == [60, 46, 20]


def test_a_prompt_in_chunks_takes_a_place_of_the_pass_and_a_row() -> None:
    """Pass 2 ends the second prompt and has no place left: the flag stays up until somebody ends."""
    load = burst([64, 100, 10])
    assert not carried(load, sglang(100_000, declared=1000, chunk_tokens=64, rows=3))
    assert carried(load, sglang(100_000, declared=1000, chunk_tokens=64, rows=4))
    assert carried(burst([100, 10]), sglang(100_000, declared=1000, chunk_tokens=64, rows=2))


def test_a_prompt_as_long_as_a_row_is_turned_away_in_law_and_engine() -> None:
    on = {"on": Card("x", 40 * GIB, 0, 0), "max_model_len": 32_768}
    for cell in capacity_plan("llama-3-8b", panels=["deployed"], loads=["long"], designs=["token-1"], **on):
        assert cell.lost["rows"] > 0
        assert measure(cell).measured == cell.predicted == 8  # the ninth prompt has 35,968 tokens


# --- the engine confirms it ---


@pytest.mark.parametrize(("memory", "carries"), [(32, 9), (40, 30)])
def test_a_burst_of_short_prompts_is_predicted_to_the_request(memory: int, carries: int) -> None:
    on = card("llama-3-8b", memory * GIB)
    given = {"on": on, "panels": ["deployed"], "loads": ["short"], "designs": ["token-1", "token-16"]}
    found = [measure(cell) for cell in capacity_plan("llama-3-8b", **given)]
    assert [one.measured for one in found] == [one.cell.predicted for one in found]
    assert found[0].measured == carries


POOLS = {"short": (2_000, 30_000), "chat": (8_000, 40_000), "shared": (6_000, 30_000), "long": (30_000, 120_000)}


def random_server(number: int) -> list[Cell]:
    """Pool, rows, tokens a row and a step, declared output and seed at random; the four loads in turn."""
    draw, load = random.Random(number), list(POOLS)[number % 4]
    least, most = POOLS[load]
    pool = round(least * (most / least) ** draw.random())
    step, row = draw.choice([1024, 2048, 8192, 16_384]), draw.choice([256, 4096, 131_072])
    kept = 512 + 1.5 * max(step, 2048) + 512 + 128  # MiB that SGLang 0.5.22 keeps beside weights and KV
    weights = round(2 * WEIGHTS[MODEL])
    total = round(kept * MIB) + weights + pool * SHAPES[MODEL].bytes_per_token
    return capacity_plan(
        MODEL,
        on=Card("x", total, weights, 0),
        panels=["deployed"],
        loads=[load],
        designs=draw.sample(TOKEN, 2),
        max_model_len=row if load == "short" else 131_072,
        step_tokens=step,
        declared=draw.choice([1, 32, 256, 1024, 4096, 4096, 9000]),
        seed=draw.randrange(4),
    )


@pytest.mark.parametrize("number", range(16))
def test_the_prediction_holds_within_one_request_on_random_servers(number: int) -> None:
    for cell in random_server(number):
        assert cell.policy == "sglang"
        assert abs(measure(cell).measured - cell.predicted) <= 1, cell
