"""Random-weight models of three families on paged attention, in every way the engine can run them."""

from __future__ import annotations

import doctest
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="models need torch")
pytest.importorskip("transformers", reason="models come from transformers: pip install 'kvarena[model]'")

from kvarena.allocators.config import make_allocator  # noqa: E402
from kvarena.experiments.engine.engine import Engine, make_scheduler  # noqa: E402
from kvarena.experiments.engine.executors import HiddenOutputs, ScriptedExecutor  # noqa: E402
from kvarena.experiments.engine.kernel_executor import KernelExecutor  # noqa: E402
from kvarena.experiments.engine.paged_memory import MemoryOptions  # noqa: E402
from kvarena.experiments.engine.request import make_request  # noqa: E402
from kvarena.experiments.engine.scheduler import SchedulerConfig  # noqa: E402
from kvarena.experiments.model import generate  # noqa: E402
from kvarena.experiments.model.attention import kv_shape  # noqa: E402
from kvarena.experiments.model.generate import ModelEngine  # noqa: E402
from kvarena.experiments.model.loading import random_model  # noqa: E402
from support.chats import compare, own_answers  # noqa: E402
from support.threads import one_thread  # noqa: E402

NUM_TOKENS = 10
FAMILIES = ("llama", "qwen2", "qwen3")
POOL = 160  # tokens: ten requests of up to 50 outgrow it


@pytest.fixture(autouse=True)
def _threads():
    with one_thread():
        yield


def ragged_prompts(seed: int = 0) -> dict[str, list[int]]:
    """Ten prompts of 3 to 40 tokens, every second one behind a common head of 20."""
    rng = random.Random(seed)
    head = [rng.randrange(1, 256) for _ in range(20)]
    tails = [[rng.randrange(1, 256) for _ in range(rng.randint(3, 20))] for _ in range(10)]
    return {f"r{i}": (head if i % 2 else []) + tail for i, tail in enumerate(tails)}


_models: dict[str, tuple[Any, dict[str, Any]]] = {}


def model_and_answers(family: str) -> tuple[Any, dict[str, Any]]:
    if family not in _models:
        model, prompts = random_model(family), ragged_prompts()
        answers = own_answers(model, list(prompts.values()), NUM_TOKENS)
        _models[family] = model, dict(zip(prompts, answers, strict=True))
    return _models[family]


def limits(**fields: Any) -> SchedulerConfig:
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "max_model_len": 128, "conservativeness": 0.0}
    return SchedulerConfig(**{**small, **fields})


def faults(engine: ModelEngine, answers: dict[str, Any]) -> list[str]:
    found = [compare(name, engine.output(name), answers[name]) for name in answers]
    return [line for line in found if line.startswith("fault")]


def run(family: str, kind: str, page_size: int, options: MemoryOptions, **fields: Any) -> ModelEngine:
    model, answers = model_and_answers(family)
    policy = fields.pop("policy", "vllm")
    allocator = make_allocator({"kind": kind, "page_size": page_size}, num_pages=POOL // page_size)
    engine = ModelEngine(model, allocator, policy=policy, limits=limits(**fields), options=options)
    for name, prompt in ragged_prompts().items():
        engine.add(name, prompt, NUM_TOKENS)
    engine.run()
    assert faults(engine, answers) == []
    return engine


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "table"), [("block", "req_to_token"), ("token", "block_table")])
def test_families_answer_as_their_own_generate(family: str, kind: str, table: Any) -> None:
    engine = run(family, kind, 4, MemoryOptions(table=table))
    assert sum(request.hits[0] for request in engine.requests.values()) > 0


@pytest.mark.parametrize("policy", ["vllm", "sglang"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("host_pages", [0, 20])
@pytest.mark.parametrize("kind", ["block", "token"])
def test_both_policies_with_lag_and_preemption(policy: str, lag: int, host_pages: int, kind: str) -> None:
    engine = run("llama", kind, 16, MemoryOptions(), policy=policy, result_lag=lag, host_pages=host_pages)
    requests = engine.requests.values()
    assert sum(request.num_preemptions for request in requests) > 0
    assert (sum(request.swapped_tokens for request in requests) > 0) == (host_pages > 0)
    assert (engine.executor.memory.moved_pages > 0) == (host_pages > 0)


@pytest.mark.parametrize("layout", ["fused", "hnd", "page_major"])
def test_every_pool_layout(layout: str) -> None:
    run("llama", "block", 4, MemoryOptions(layout=layout), host_pages=40)


def test_contiguous_runs_through_torchs_own_attention() -> None:
    """Backend sdpa reads no table; runs that are outgrown move, and their KV with them."""
    model, answers = model_and_answers("llama")
    spec = {"kind": "contiguous", "page_size": 1, "sizing": "pow2"}
    engine = ModelEngine(
        model, make_allocator(spec, num_pages=512), limits=limits(), options=MemoryOptions(backend="sdpa")
    )
    copied = []
    copy = engine.executor.memory.copy
    engine.executor.memory.copy = lambda moves: (copied.extend(moves), copy(copied[-len(moves) :] if moves else []))
    for name, prompt in ragged_prompts().items():
        engine.add(name, prompt, NUM_TOKENS)
    engine.run()
    assert faults(engine, answers) == []
    assert copied


def test_sdpa_refuses_scattered_pages() -> None:
    model, _ = model_and_answers("llama")
    allocator = make_allocator({"kind": "token", "page_size": 1}, num_pages=POOL)
    engine = ModelEngine(model, allocator, limits=limits(), options=MemoryOptions(backend="sdpa"))
    for name, prompt in ragged_prompts().items():
        engine.add(name, prompt, NUM_TOKENS)
    with pytest.raises(ValueError, match="backend sdpa reads no page table"):
        engine.run()


@pytest.mark.parametrize("kind", ["block", "token"])
@pytest.mark.parametrize("table", ["block_table", "req_to_token"])
def test_triton_kernels_in_the_interpreter(kind: str, table: Any) -> None:
    """A thin slice: three prompts, three tokens, pages of 4."""
    pytest.importorskip("triton", reason="the kernels need triton")
    model, answers = model_and_answers("llama")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        pytest.skip("the random model of this test lies on the CPU")
    allocator = make_allocator({"kind": kind, "page_size": 4}, num_pages=40)
    options = MemoryOptions(backend="triton", table=table)
    engine = ModelEngine(model, allocator, limits=limits(), options=options)
    names = ["r1", "r3", "r0"]
    for name in names:
        engine.add(name, ragged_prompts()[name], 3)
    engine.run()
    assert [engine.output(name) for name in names] == [answers[name].tokens[:3] for name in names]
    assert engine.requests["r3"].hits[0] > 0


def decisions(engine: Engine, requests: dict[str, Any]) -> list[Any]:
    """What each step decided, to the page."""
    log = []
    while engine.has_work:
        record = engine.step()
        requests.update((child.id, child) for child in record.children)
        plan, allocator = record.plan, engine.scheduler.allocator
        live = list(engine.scheduler.running_requests)
        log.append(
            (
                plan.kind,
                [(entry.request.id, entry.num_before, entry.num_new, entry.samples) for entry in plan.batch],
                [request.id for request in plan.admitted],
                [request.id for request in plan.preempted],
                [(direction, [(move.src, move.dst) for move in moves]) for direction, moves in plan.moves],
                [request.id for request in record.finished],
                {request.id: allocator.page_ids(request.seq).tolist() for request in live},
                allocator.room(),
                {name: list(request.hits) for name, request in requests.items()},
            )
        )
    return log


@pytest.mark.parametrize(("policy", "kind"), [("vllm", "block"), ("sglang", "token"), ("vllm", "token")])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("host_pages", [0, 20])
def test_all_executors_decide_the_same(policy: str, kind: str, lag: int, host_pages: int) -> None:
    """Simulated, kernels and model: one scheduler code, the same log of decisions down to page ids."""
    model, answers = model_and_answers("llama")
    config = limits(result_lag=lag, host_pages=host_pages)
    outputs = HiddenOutputs()
    for name, answer in answers.items():
        outputs.add(name, answer.tokens)
    logs = []
    for executor in ("simulated", "kernels", "model"):
        allocator = make_allocator({"kind": kind, "page_size": 16}, num_pages=POOL // 16)
        if executor == "model":
            behind = ModelEngine(model, allocator, policy=policy, limits=config)
            engine = behind.engine
        else:
            run: Any = ScriptedExecutor(outputs)
            if executor == "kernels":
                run = KernelExecutor(allocator, outputs, kv_shape(model), 4, config)
                allocator = run.allocator
            engine = Engine(make_scheduler(policy, allocator, config), run)
        requests = {name: make_request(name, prompt, NUM_TOKENS) for name, prompt in ragged_prompts().items()}
        for request in requests.values():
            engine.add(request)
        logs.append(decisions(engine, requests))
        assert sum(request.num_preemptions for request in requests.values()) > 0
        if executor == "kernels":
            assert len(run.times.kernels_s) == sum(bool(step[1]) for step in logs[-1])
            assert torch.isfinite(run.last_output).all()
    assert logs[0] == logs[1] == logs[2]


class RecordedBeams:
    """The candidates that a model gave, for executors that have none."""

    def __init__(self) -> None:
        self.candidates: dict[tuple[Any, ...], Any] = {}

    def watch(self, executor: Any) -> None:
        collect = executor.collect

        def collected(plan: Any) -> Any:
            samples = collect(plan)
            for entry, sample in zip(plan.batch, samples, strict=True):
                if sample is not None and sample.candidates:
                    self.candidates[self.key(entry.request)] = sample.candidates
            return samples

        executor.collect = collected

    def key(self, request: Any) -> tuple[Any, ...]:
        return request.id.split("^")[0], tuple(request.seq.token_ids[request.seq.num_prompt_tokens :])

    def __call__(self, root: str, generated: tuple[int, ...], width: int) -> Any:
        return self.candidates[root, generated]


def branching_requests(policy: str) -> dict[str, Any]:
    beams = {"r3": 3, "r4": 2} if policy == "vllm" else {}
    samples = {"r0": 3, "r1": 2}
    return {
        name: make_request(name, prompt, NUM_TOKENS, samples=samples.get(name, 1), beam_width=beams.get(name, 0))
        for name, prompt in ragged_prompts().items()
    }


@pytest.mark.parametrize(("policy", "kind"), [("vllm", "block"), ("sglang", "token"), ("vllm", "token")])
@pytest.mark.parametrize(("lag", "drafts"), [(0, 0), (1, 0), (0, 3)])
def test_all_executors_decide_the_same_with_samples_beams_and_drafts(
    policy: str, kind: str, lag: int, drafts: int
) -> None:
    model, answers = model_and_answers("llama")
    config, recorded = limits(result_lag=lag, host_pages=6), RecordedBeams()
    outputs, logs = HiddenOutputs(recorded), []
    for executor in ("model", "simulated", "kernels"):
        allocator = make_allocator({"kind": kind, "page_size": 16}, num_pages=POOL // 16 + 4)
        if executor == "model":
            behind = ModelEngine(model, allocator, policy=policy, limits=config)
            recorded.watch(behind.executor)
            engine = behind.engine
        else:
            run: Any = ScriptedExecutor(outputs)
            if executor == "kernels":
                run = KernelExecutor(allocator, outputs, kv_shape(model), 4, config)
                allocator = run.allocator
            engine = Engine(make_scheduler(policy, allocator, config), run)
        if drafts:
            engine.scheduler.speculate(half_right(answers), drafts)
        requests = branching_requests(policy)
        for request in requests.values():
            engine.add(request)
        logs.append(decisions(engine, requests))
        assert engine.scheduler.forks > 0
        if executor == "model":
            assert behind.ties == []
            assert_own_samples(model, requests, answers)
            for request in requests.values():
                if request.beams is None:
                    outputs.add(request.id, request.seq.token_ids[request.seq.num_prompt_tokens :])
    assert logs[0] == logs[1] == logs[2]


def half_right(answers: dict[str, Any]) -> Any:
    """Guesses of which every other one is the model's own."""

    def draft(request: Any, count: int) -> list[int]:
        tokens, start = answers[request.id.split("/")[0]].tokens, request.num_output
        return [(token + at % 2) % 256 for at, token in enumerate(tokens[start : start + count], start)]

    return draft


def assert_own_samples(model: Any, requests: dict[str, Any], answers: dict[str, Any]) -> None:
    """Each sample is what the model says behind its first token; the first one is its greedy answer."""
    for name, request in requests.items():
        if request.beams is not None:
            continue
        output = request.seq.token_ids[request.seq.num_prompt_tokens :].tolist()
        if request.parent is None:
            assert compare(name, output, answers[name]) == ""
        else:
            own = [*request.seq.token_ids[: request.seq.num_prompt_tokens], output[0]]
            assert compare(name, output[1:], own_answers(model, [own], NUM_TOKENS - 1)[0]) == ""


def test_beams_are_those_of_the_models_whole_passes() -> None:
    """The best hypotheses against a beam search that computes every beam from the start, without cache or pages."""
    model, _ = model_and_answers("llama")
    prompt, width, steps = ragged_prompts()["r1"], 3, 6
    live: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(steps):
        with torch.no_grad():
            passes = [model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].log_softmax(-1) for tokens, _ in live]
        every = [
            ([*tokens, int(token)], score + float(logprob))
            for (tokens, score), row in zip(live, passes, strict=True)
            for logprob, token in zip(*row.topk(width), strict=True)
        ]
        live = sorted(every, key=lambda each: -each[1])[:width]
    for kind in ("block", "token"):
        allocator = make_allocator({"kind": kind, "page_size": 16}, num_pages=20)
        engine = ModelEngine(model, allocator, limits=limits())
        beams = engine.add("r1", prompt, steps, beam_width=width).beams
        engine.run()
        assert beams is not None
        assert [list(each.tokens) for each in beams.best()] == [tokens for tokens, _ in live]
        assert [each.score for each in beams.best()] == pytest.approx([score for _, score in live], abs=1e-4)


def test_a_fork_goes_on_from_the_shared_past() -> None:
    """Parent and child write different tokens behind a shared, partly filled page: each reads its own."""
    model, answers = model_and_answers("llama")
    prompt = ragged_prompts()["r1"]
    first = answers["r1"].tokens[:4]
    other = [*prompt, *first[:3], (first[3] + 1) % 256]
    wanted = own_answers(model, [other], 5)[0]
    for kind in ("block", "token"):
        allocator = make_allocator({"kind": kind, "page_size": 16}, num_pages=20)
        engine = ModelEngine(model, allocator, limits=limits())
        engine.add("r1", prompt, NUM_TOKENS)
        while engine.requests["r1"].num_output < 4:
            engine.step()
        assert engine.fork("r1", "child", [other[-1]], 5) is not None
        engine.run()
        assert compare("r1", engine.output("r1"), answers["r1"]) == ""
        assert compare("child", engine.output("child"), wanted) == ""
        assert sum(allocator.room()) == allocator.num_pages


def test_a_step_whose_best_logits_are_equal_is_listed_as_a_tie() -> None:
    """The head's rows 3 and 7 are equal, and the opposite of 4 and 8: one of the pairs is the best at any step."""
    model = random_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        row = 10 * model.lm_head.weight.abs().max() * torch.ones(64)
        for token, sign in ((3, 1), (7, 1), (4, -1), (8, -1)):
            model.lm_head.weight[token] = sign * row
    engine = ModelEngine(model, make_allocator({"kind": "block", "page_size": 4}, num_pages=20), limits=limits())
    engine.add("a", [5, 6, 7, 8], 2)
    engine.run()
    assert [(tie.request_id, tie.position, tie.gap) for tie in engine.ties] == [("a", 4, 0.0), ("a", 5, 0.0)]
    assert all(set(tie.tokens) in ({3, 7}, {4, 8}) for tie in engine.ties)


def test_paged_attention_outside_of_a_step_is_refused() -> None:
    model, _ = model_and_answers("llama")
    engine = ModelEngine(model, make_allocator({"kind": "block", "page_size": 4}, num_pages=20), limits=limits())
    with pytest.raises(ValueError, match="call paged_forward"):
        engine.executor.model(input_ids=torch.tensor([[1, 2]]))


def test_doctests() -> None:
    assert doctest.testmod(generate).failed == 0
