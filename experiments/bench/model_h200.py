"""How much of a decode step is allocator and adapter? An 8B-shaped Llama with random weights, bf16, CUDA graphs.

Regime: decode at batch 1 to 256, every sequence with the same context; the ceiling is memory bandwidth (16 GB of
weights a step, plus KV). For each allocator and batch, one graph holds the whole forward pass with the argmax; a step
is reserve, page table and upload, replay, the sampled tokens back on the host, commit. Printed and written for each:
tokens a second, milliseconds of the GPU alone (replays without a host in between), and milliseconds of allocator and
adapter as measured in the loop, with their share of the step.

    python -m kvarena.experiments.bench.model_h200 --out results/h200/model.json            # one GPU
    python -m kvarena.experiments.bench.model_h200 --match --out results/h200/parallel.json # two GPUs against one
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import KVAllocator, Sequence
from kvarena.experiments.engine.backends import Step, load_backend
from kvarena.experiments.engine.paged_memory import MemoryOptions
from kvarena.experiments.engine.scheduler import SchedulerConfig
from kvarena.experiments.model.attention import PagedCache, kv_shape, paged_forward, use_paged_attention
from kvarena.experiments.model.generate import ModelEngine
from kvarena.experiments.model.loading import random_model
from kvarena.experiments.model.parallel import init_ranks, shard_model
from kvarena.kernels.pool import KVPool

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}
# The upstreams' designs with the table that each of them gives its kernels.
DESIGNS: dict[str, tuple[dict[str, Any], Any]] = {
    "block, 16": ({"kind": "block", "page_size": 16}, BlockTableAdapter),
    "token, 1": ({"kind": "token", "page_size": 1}, ReqToTokenAdapter),
    "token, 16": ({"kind": "token", "page_size": 16}, ReqToTokenAdapter),
}
WARM_UP = 3


@dataclass(frozen=True)
class Cell:
    """One allocator at one batch. Times are medians of the measured steps, milliseconds."""

    design: str
    batch: int
    context: int
    steps: int
    step_ms: float
    gpu_ms: float
    allocator_ms: float
    adapter_ms: float
    tokens_per_s: float
    host_share: float


class Decoder:
    """`batch` live sequences of `context` tokens of random KV, and the captured graph of one decode step.

    On a CPU, where the tests run it with the torch backend, the step runs as it is instead of from a graph.
    """

    def __init__(self, model: Any, design: str, batch: int, context: int, steps: int, backend: str = "triton") -> None:
        spec, make_adapter = DESIGNS[design]
        self.model = model
        self.backend = load_backend(backend)
        weights = next(model.parameters())
        device, tokens = weights.device, context + steps + WARM_UP + 1
        size = spec["page_size"]
        self.allocator: KVAllocator = make_allocator(spec, num_pages=batch * (-(-tokens // size) + 1))
        shape = kv_shape(model)
        self.pool = KVPool(
            shape.num_layers,
            self.allocator.num_pages,
            size,
            shape.num_kv_heads,
            shape.head_dim,
            dtype=weights.dtype,
            device=device,
        )
        self.cache: PagedCache = use_paged_attention(model, self.pool)
        self.adapter = make_adapter(
            self.allocator,
            max_requests=batch,
            max_tokens=tokens + size,
            max_batch_tokens=batch,
            device=device,
            slots_by=self.backend.slots_by,
        )
        self.seqs = [self._admitted(number, context) for number in range(batch)]
        self.members = self.allocator.decode_batch(self.seqs)
        self.ids = torch.full((batch,), 17, dtype=torch.int64, device=device)
        self.allocator_ms: list[float] = []
        self.adapter_ms: list[float] = []
        self.replay: Callable[[], None] = self.capture

    def _admitted(self, number: int, context: int) -> Sequence:
        """A sequence whose prompt is computed, but for one token: nobody shares, so that the batch is what it says."""
        first = 1 + number * context
        seq = Sequence(f"r{number}", range(first, first + context))
        if self.allocator.admit(seq) is None:
            raise ValueError(f"the pool of {self.allocator.num_pages} pages is too small for request {number}")
        self._fill(seq, context, number)
        self.adapter.add(seq)
        self.adapter.update_all(self.allocator.commit([(seq, context)]))
        return seq

    def _fill(self, seq: Sequence, context: int, seed: int) -> None:
        """Random KV for the prompt, the same for a request in every design."""
        device, size = self.pool.device, self.pool.page_size
        positions = torch.arange(context, device=device)
        pages = torch.tensor(self.allocator.page_ids(seq), device=device)[positions // size]
        generator = torch.Generator(device).manual_seed(seed)
        shape = (2, context, self.pool.num_kv_heads, self.pool.head_dim)
        for layer in range(self.pool.num_layers):
            k, v = torch.randn(shape, generator=generator, device=device).to(self.pool.dtype)
            self.pool.key(layer)[pages, positions % size] = k
            self.pool.value(layer)[pages, positions % size] = v

    def prepare(self) -> Step:
        """Slots and page table of the next step, timed."""
        start = time.perf_counter()
        for seq in self.seqs:
            seq.append(17)
        reserved = self.members.reserve()
        if reserved is None:
            raise ValueError("no room for a decode step")
        middle = time.perf_counter()
        self.adapter.update_step(reserved)
        batch = self.adapter.batch(self.seqs, [1] * len(self.seqs))
        end = time.perf_counter()
        self.allocator_ms.append(1e3 * (middle - start))
        self.adapter_ms.append(1e3 * (end - middle))
        return Step(self.backend, batch)

    def finish(self) -> None:
        """Sampled tokens to the host, KV committed."""
        tokens = self.ids.tolist()
        start = time.perf_counter()
        for seq, token in zip(self.seqs, tokens, strict=True):
            seq.token_ids[-1] = token % 100_000
        self.members.commit()
        self.allocator_ms[-1] += 1e3 * (time.perf_counter() - start)

    def forward(self, step: Step) -> None:
        hidden = paged_forward(self.model, self.cache, self.ids, step)
        self.ids.copy_(self.model.lm_head(hidden).argmax(-1))

    @torch.inference_mode()
    def capture(self) -> None:
        """The first step: warm up outside of a graph, then record it. Buffers keep their addresses from here on."""
        step = self.prepare()
        if self.pool.device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self.forward(step)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.forward(step)
            self.replay = graph.replay
        else:
            self.forward(step)
            # Tensors of a batch stay where they are, so that one step serves all; what it plans does not.
            self.replay = lambda: self.forward(Step(self.backend, step.batch))
        self.finish()

    def run(self, steps: int) -> list[float]:
        """Decode `steps` tokens each; returns milliseconds a step."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self.prepare()
            with torch.inference_mode():
                self.replay()
            self.finish()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def gpu_ms(self, replays: int) -> float:
        """Milliseconds of the graph alone."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            self.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / replays


def measure(model: Any, design: str, batch: int, context: int, steps: int) -> Cell:
    """One cell."""
    decoder = Decoder(model, design, batch, context, steps)
    decoder.capture()
    times = decoder.run(steps)
    host = [statistics.median(each[-steps:]) for each in (decoder.allocator_ms, decoder.adapter_ms)]
    step = statistics.median(times)
    return Cell(
        design=design,
        batch=batch,
        context=context,
        steps=steps,
        step_ms=step,
        gpu_ms=decoder.gpu_ms(steps),
        allocator_ms=host[0],
        adapter_ms=host[1],
        tokens_per_s=1e3 * batch / step,
        host_share=sum(host) / step,
    )


def build(layers: int) -> Any:
    """The model on the GPU; weights are drawn there, so that it takes seconds."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return random_model("llama", **{**LLAMA_8B, "num_hidden_layers": layers})
    finally:
        torch.set_default_dtype(default)


def gate(model: Any, context: int = 64, backend: str = "triton") -> dict[str, list[int]]:
    """Before anything is timed: from the same random KV all designs must sample the same tokens, batch 4, 8 steps.

    Returns them. Raises ValueError where they differ.
    """
    sampled = {}
    for design in DESIGNS:
        decoder = Decoder(model, design, 4, context, 8, backend)
        decoder.capture()
        decoder.run(8)
        sampled[design] = [token for seq in decoder.seqs for token in seq.token_ids[-8:]]
    if len({tuple(tokens) for tokens in sampled.values()}) > 1:
        raise ValueError(f"the designs do not sample the same tokens: {sampled}")
    return sampled


def run_cells(arguments: argparse.Namespace) -> dict[str, Any]:
    """Gate, then every cell."""
    model = build(arguments.layers)
    gate(model)
    cells = []
    for batch in arguments.batches:
        for design in DESIGNS:
            cell = measure(model, design, batch, arguments.context, arguments.steps)
            cells.append(asdict(cell))
            print(
                f"{design:>10} batch {batch:3d}: {cell.tokens_per_s:9.0f} tokens/s, step {cell.step_ms:6.2f} ms, GPU "
                f"{cell.gpu_ms:6.2f}, allocator {cell.allocator_ms:6.3f}, adapter {cell.adapter_ms:6.3f}, host share "
                f"{cell.host_share:.1%}",
                flush=True,
            )
            torch.cuda.empty_cache()
    return {"cells": cells, "layers": arguments.layers}


def match_rank(rank: int, size: int, folder: str) -> None:
    """One rank of the two-GPU run, float32, 4 layers: outputs and page tables to a file."""
    init_ranks(rank, size, f"{folder}/store{size}", "nccl")
    torch.cuda.set_device(rank)
    with torch.device("cuda", rank):
        shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "head_dim": 128}
        model = random_model("llama", **shape, num_attention_heads=8, num_key_value_heads=8, vocab_size=4096)
    model = shard_model(model, rank, size)
    limits = SchedulerConfig(max_num_batched_tokens=128, max_num_seqs=16, max_model_len=256)
    logs = {}
    for kind in ("block", "token"):
        allocator = make_allocator({"kind": kind, "page_size": 16}, num_pages=128)
        options = MemoryOptions(backend="triton", device=f"cuda:{rank}")
        engine = ModelEngine(model, allocator, limits=limits, options=options)
        for number in range(12):
            prompt = [*range(1, 40), *range(100 * number + 41, 100 * number + 50 + 3 * number)]
            engine.add(f"r{number}", prompt, 32)
        tables = []
        while engine.engine.has_work:
            engine.step()
            tables.append(engine.executor.memory.adapter.entries.tolist())
        outputs = {name: engine.output(name) for name in engine.requests}
        logs[kind] = {"outputs": outputs, "tables": tables, "ties": [asdict(tie) for tie in engine.ties]}
    Path(folder, f"{rank}of{size}.json").write_text(json.dumps(logs))
    torch.distributed.destroy_process_group()


def run_match() -> dict[str, Any]:
    """Two GPUs against one. Raises ValueError when they differ."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 2):
            torch.multiprocessing.spawn(match_rank, args=(size, folder), nprocs=size)
        logs = [json.loads(Path(folder, f"{name}.json").read_text()) for name in ("0of1", "0of2", "1of2")]
    found = {}
    for kind in logs[0]:
        tables = [log[kind]["tables"] for log in logs]
        outputs = [log[kind]["outputs"] for log in logs]
        ties = sum(len(log[kind]["ties"]) for log in logs)
        found[kind] = {
            "page_tables_equal": tables[0] == tables[1] == tables[2],
            "outputs_equal": outputs[0] == outputs[1] == outputs[2],
            "ties": ties,
            "tokens": sum(map(len, outputs[0].values())),
        }
        print(kind, found[kind], flush=True)
        if not found[kind]["page_tables_equal"] or not (found[kind]["outputs_equal"] or ties):
            raise ValueError(f"two GPUs differ from one: {found[kind]}")
    return {"match": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, default=32, help="measured decode steps a cell")
    parser.add_argument("--match", action="store_true", help="two GPUs against one, through NCCL")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise ValueError("model_h200 needs a CUDA device")
    result = run_match() if arguments.match else run_cells(arguments)
    import transformers
    import triton

    result |= {
        "schema_version": 1,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
