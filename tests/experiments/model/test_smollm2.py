"""A real model on paged attention: greedy output is what the model's own `generate` gives, token for token.

Every cell is one run with cold and warm prefixes, prompts in chunks, a preemption by recompute, one by swap, and a
fork. Answers that part where the model's two best logits are closer than 1e-4 are ties, and listed as warnings.
"""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch", reason="a real model needs torch")

from kvarena.experiments.model.loading import missing  # noqa: E402

if missing():
    pytest.skip(missing(), allow_module_level=True)

from kvarena.experiments.model.loading import load_smollm2  # noqa: E402
from support.chats import NUM_TOKENS, compare, fork_reference, prompts, references  # noqa: E402
from support.model_cells import CellRun, make_engine, run_cell  # noqa: E402
from support.threads import one_thread  # noqa: E402

FORKED = "long0"
pytestmark = pytest.mark.timeout(600)  # the first test loads the model and computes the references: 40 s of CPU time


@pytest.fixture(scope="module", autouse=True)
def _threads():
    with one_thread():
        yield


def assert_own_answers(run: CellRun) -> None:
    """Every output is the reference's, or a listed tie."""
    wanted = {**references(), "fork": fork_reference(FORKED)[1]}
    found = [compare(name, output, wanted[name]) for name, output in run.outputs.items()]
    assert run.outputs.keys() == wanted.keys()
    for line in filter(None, found):
        if line.startswith("tie"):
            warnings.warn(line, stacklevel=1)
    assert not [line for line in found if line.startswith("fault")]


@pytest.mark.parametrize("table", ["block_table", "req_to_token"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kind", ["block", "token"])
def test_greedy_output_is_the_models_own(kind: str, page_size: int, table: str) -> None:
    references()  # before the model's attention is ours
    token, _ = fork_reference(FORKED)
    engine = make_engine(load_smollm2(), kind, page_size, table)
    run = run_cell(engine, prompts(), NUM_TOKENS, FORKED, token)
    assert_own_answers(run)
    assert run.counts["cold"] >= 2
    assert run.counts["hit_tokens"] >= 500
    assert run.chunks > 0
    assert run.counts["preemptions"] >= 2
    assert run.counts["swapped_tokens"] > 0
    assert run.counts["recomputed_tokens"] > 0
    assert run.fork_shares > 0 or page_size == 64  # no whole page to share in 51 tokens
