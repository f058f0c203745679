"""Random-weight Llama and Qwen in the twelve cells of the real-model matrix: greedy output is the model's own.

Each cell is one run of 18 ragged prompts with cold and warm prefixes, prompts in chunks, a preemption by recompute, one
by swap, and a fork; 16 tokens out. Answers that part at a near tie are listed as warnings.
"""

from __future__ import annotations

import random
import warnings
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="models need torch")
pytest.importorskip("transformers", reason="models come from transformers: pip install 'kvarena[model]'")

from kvarena.experiments.model.loading import random_model  # noqa: E402
from support.chats import NUM_TOKENS, Reference, compare, own_answers  # noqa: E402
from support.model_cells import NUM_SAMPLES_BEFORE_FORK, make_engine, run_cell  # noqa: E402
from support.threads import one_thread  # noqa: E402

FORKED = "long0"


@pytest.fixture(autouse=True)
def _threads():
    with one_thread():
        yield


def ragged_prompts() -> dict[str, list[int]]:
    """Two long cold ones, ten behind a common head of 76 tokens, six short cold ones."""
    draw = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(1, 256) for _ in range(count)]

    head = tokens(76)
    groups = {"long": [tokens(52), tokens(63)], "warm": [head + tokens(draw.randint(3, 24)) for _ in range(10)]}
    groups["cold"] = [tokens(draw.randint(14, 30)) for _ in range(6)]
    return {f"{name}{i}": prompt for name, prompts in groups.items() for i, prompt in enumerate(prompts)}


@cache
def reference(family: str) -> tuple[Any, dict[str, Reference], int]:
    """(model, its own answers, the token with which the fork goes on)."""
    model, prompts = random_model(family), ragged_prompts()
    answers = dict(zip(prompts, own_answers(model, list(prompts.values()), NUM_TOKENS), strict=True))
    ours = answers[FORKED].tokens
    token = (ours[NUM_SAMPLES_BEFORE_FORK - 1] + 1) % 256
    forked = [*prompts[FORKED], *ours[: NUM_SAMPLES_BEFORE_FORK - 1], token]
    answers["fork"] = own_answers(model, [forked], NUM_TOKENS - NUM_SAMPLES_BEFORE_FORK)[0]
    return model, answers, token


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("table", ["block_table", "req_to_token"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kind", ["block", "token"])
def test_greedy_output_is_the_models_own(family: str, kind: str, page_size: int, table: str) -> None:
    model, wanted, token = reference(family)
    run = run_cell(make_engine(model, kind, page_size, table), ragged_prompts(), NUM_TOKENS, FORKED, token)
    assert run.outputs.keys() == wanted.keys()
    found = [compare(name, output, wanted[name]) for name, output in run.outputs.items()]
    for line in filter(None, found):
        if line.startswith("tie"):
            warnings.warn(line, stacklevel=1)
    assert not [line for line in found if line.startswith("fault")]
    assert run.counts["cold"] >= 2
    assert run.counts["hit_tokens"] >= 500
    assert run.chunks > 0
    assert run.counts["preemptions"] >= 2
    assert run.counts["swapped_tokens"] > 0
    assert run.counts["recomputed_tokens"] > 0
    assert run.fork_shares > 0 or page_size == 64  # no whole page to share in 57 tokens
