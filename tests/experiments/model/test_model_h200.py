"""The benchmark of a decode step: what it gates on is right, and can fail, on a CPU without graphs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="models need torch")
pytest.importorskip("transformers", reason="models come from transformers: pip install 'kvarena[model]'")

from kvarena.experiments.bench import model_h200  # noqa: E402
from kvarena.experiments.bench.model_h200 import Decoder, gate  # noqa: E402
from kvarena.experiments.model.loading import random_model  # noqa: E402
from support.threads import one_thread  # noqa: E402


@pytest.fixture(autouse=True)
def _threads():
    with one_thread():
        yield


def test_all_designs_sample_the_same_tokens() -> None:
    sampled = gate(random_model("llama"), context=21, backend="torch")
    assert len(sampled) == 3
    tokens = sampled["block, 16"]
    assert len(tokens) == 4 * 8
    assert len({tuple(tokens[8 * i : 8 * i + 8]) for i in range(4)}) == 4  # the requests differ


def test_a_design_that_reads_wrong_pages_does_not_pass_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Decoder._fill

    def shifted(self, seq, context, seed):
        fill(self, seq, context, seed + (self.allocator.kind == "token"))

    monkeypatch.setattr(Decoder, "_fill", shifted)
    with pytest.raises(ValueError, match="do not sample the same tokens"):
        gate(random_model("llama"), context=21, backend="torch")


def test_host_times_are_taken_each_step() -> None:
    decoder = Decoder(random_model("llama"), "token, 1", 3, 10, 5, "torch")
    decoder.capture()
    assert len(decoder.run(5)) == 5
    assert len(decoder.allocator_ms) == len(decoder.adapter_ms) == 6
    assert all(seq.num_computed_tokens == 16 for seq in decoder.seqs)
    decoder.allocator.check()


def test_without_a_gpu_the_script_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("sys.argv", ["model_h200"])
    with pytest.raises(ValueError, match="needs a CUDA device"):
        model_h200.main()
