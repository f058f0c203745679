"""A real model on paged attention: greedy output is what the model's own `generate` gives, token for token.

Every cell is one run with cold and warm prefixes, prompts in chunks, a preemption by recompute, one by swap, and a
fork. Answers that part where the model's two best logits are closer than 1e-4 are ties, and listed as warnings.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a real model needs torch")

from kvarena.experiments.model.loading import missing  # noqa: E402

if missing():
    pytest.skip(missing(), allow_module_level=True)

from kvarena.allocators.config import make_allocator  # noqa: E402
from kvarena.experiments.engine.paged_memory import MemoryOptions  # noqa: E402
from kvarena.experiments.engine.scheduler import SchedulerConfig  # noqa: E402
from kvarena.experiments.model.generate import ModelEngine  # noqa: E402
from kvarena.experiments.model.loading import load_smollm2, load_tokenizer  # noqa: E402
from support.chats import NUM_TOKENS, compare, fork_reference, own_answers, prompts, references  # noqa: E402
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


def test_loading_shows_no_bar_of_the_library(capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import modeling_gguf_pytorch_utils as converting

    shown = converting.tqdm
    load_smollm2.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.AutoModelForCausalLM.from_pretrained", _convert)
        load_smollm2()
    load_smollm2.cache_clear()
    assert capfd.readouterr().err == ""
    assert converting.tqdm is shown


def _convert(*arguments: Any, **options: Any) -> Any:
    """Counts as the library does when it converts a GGUF file."""
    from transformers import modeling_gguf_pytorch_utils as converting

    for _ in converting.tqdm(range(3), desc="Converting"):
        pass
    return torch.nn.Identity()


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


@pytest.mark.parametrize(("kind", "table"), [("block", "block_table"), ("token", "req_to_token")])
def test_triton_kernels_give_the_models_own_output(kind: str, table: Any) -> None:
    """A thin slice for the interpreter: two prompts of a handful of tokens, the second hits the first's page."""
    pytest.importorskip("triton", reason="the kernels need triton")
    if torch.cuda.is_available():
        pytest.skip("the model of this test lies on the CPU")
    encode = load_tokenizer()
    texts = ("The capital of France is", "The capital of France was")
    prompts = {text: encode(text, add_special_tokens=False)["input_ids"] for text in texts}
    wanted = dict(zip(texts, own_answers(load_smollm2(), list(prompts.values()), 2), strict=True))
    limits = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=2, max_model_len=32)
    allocator = make_allocator({"kind": kind, "page_size": 4}, num_pages=8)
    engine = ModelEngine(load_smollm2(), allocator, limits=limits, options=MemoryOptions(backend="triton", table=table))
    for text, prompt in prompts.items():
        engine.add(text, prompt, 2)
        engine.run()
        assert not compare(text, engine.output(text), wanted[text]).startswith("fault")
    assert engine.requests[texts[1]].hits == [4]
