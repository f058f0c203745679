"""Decode of an 8B-shaped Llama under CUDA graphs, over each allocator: tokens a second, and who takes the time.

One graph holds the whole forward pass with the argmax; a step is reserve, page table and upload, replay, the sampled
tokens back on the host, commit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from kvarena.allocators.adapter import Batch, BlockTableAdapter, ReqToTokenAdapter
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import KVAllocator, Sequence
from kvarena.experiments.engine.backends import Step, load_backend
from kvarena.experiments.model.attention import PagedCache, kv_shape, paged_forward, use_paged_attention
from kvarena.experiments.model.loading import random_model
from kvarena.kernels.pool import KVPool
from torch import Tensor

# The upstreams' designs with the table that each of them gives its kernels.
DESIGNS: dict[str, tuple[dict[str, Any], Any]] = {
    "block, 16": ({"kind": "block", "page_size": 16}, BlockTableAdapter),
    "token, 1": ({"kind": "token", "page_size": 1}, ReqToTokenAdapter),
    "token, 16": ({"kind": "token", "page_size": 16}, ReqToTokenAdapter),
}
WARM_UP = 3
GATE_ERROR = {torch.bfloat16: 0.05, torch.float32: 1e-3}  # of a request's logits
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
TINY: dict[str, Any] = {  # the same code on a CPU, in seconds
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}


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
        device, tokens = weights.device, context + steps + 2 * WARM_UP + 1
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
        self.logits: Tensor | None = None
        self.ids = torch.full((batch,), 17, dtype=torch.int64, device=device)
        self._addresses: Any = None
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
        batch = self.adapter.decode(reserved)
        end = time.perf_counter()
        self._check_addresses(batch)
        self.allocator_ms.append(1e3 * (middle - start))
        self.adapter_ms.append(1e3 * (end - middle))
        return Step(self.backend, batch)

    def _check_addresses(self, batch: Batch) -> None:
        """A captured graph reads where the first step's tensors lay. Raises ValueError when another step's do not."""
        tensors = (batch.table.entries, batch.table.rows, batch.table.seq_lens, batch.slot_mapping, batch.positions)
        found = tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)
        if self._addresses not in (None, found):
            raise ValueError(f"a step's tensors moved: {found}, captured were {self._addresses}")
        self._addresses = found

    def finish(self) -> None:
        """Sampled tokens to the host, KV committed."""
        tokens = self.ids.tolist()
        start = time.perf_counter()
        for seq, token in zip(self.seqs, tokens, strict=True):
            seq.token_ids[-1] = token % 100_000
        self.members.commit()
        self.allocator_ms[-1] += 1e3 * (time.perf_counter() - start)

    def forward(self, step: Step) -> None:
        """One pass; its logits [B, vocabulary] stay at one address when it is replayed."""
        hidden = paged_forward(self.model, self.cache, self.ids, step)
        self.logits = self.model.lm_head(hidden)
        self.ids.copy_(self.logits.argmax(-1))

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
        """Milliseconds of the graph alone; on a CPU, of the forward pass."""
        with torch.inference_mode():
            if self.pool.device.type != "cuda":
                start = time.perf_counter()
                self.replay()
                return 1e3 * (time.perf_counter() - start)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(replays):
                self.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / replays


def measure(model: Any, design: str, batch: int, context: int, steps: int, backend: str = "triton") -> Cell:
    """One cell."""
    decoder = Decoder(model, design, batch, context, steps, backend)
    decoder.capture()
    decoder.run(WARM_UP)
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


def gate(model: Any, context: int = 64, backend: str = "triton") -> dict[str, float]:
    """Before anything is timed: all designs must compute the same from the same random KV, batch 4, 8 steps.

    Every design is given the tokens that the first one sampled. Returns for each design the largest relative error of
    a request's logits against the first one's, ||a - b|| / ||b||. Raises ValueError where it is more than rounding.
    """
    errors: dict[str, float] = {}
    wanted: list[Tensor] = []
    for design in DESIGNS:
        found = _forced_logits(Decoder(model, design, 4, context, 8 + WARM_UP, backend), wanted)
        wanted = wanted or found
        errors[design] = max(_row_error(a, b) for a, b in zip(found, wanted, strict=True))
    limit = GATE_ERROR[next(model.parameters()).dtype]
    if not max(errors.values()) <= limit:
        raise ValueError(f"the designs do not compute the same: relative error of logits {errors}, allowed {limit}")
    return errors


def _forced_logits(decoder: Decoder, wanted: list[Tensor]) -> list[Tensor]:
    """Logits [4, vocabulary] of 8 steps in which the tokens are those of `wanted`, or the decoder's own."""
    decoder.capture()
    decoder.ids.fill_(17)
    found = []
    for step in range(8):
        decoder.run(1)
        if decoder.logits is None:
            raise ValueError("the decoder computed no logits")
        found.append(decoder.logits.float().clone())
        decoder.ids.copy_((wanted or found)[step].argmax(-1))
    return found


def _row_error(found: Tensor, wanted: Tensor) -> float:
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def build(layers: int, device: str = "cuda", **fields: Any) -> Any:
    """The model on its device, bfloat16 on a GPU; weights are drawn there, so that it takes seconds."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device != "cpu" else torch.float32)
    try:
        with torch.device(device):
            return random_model("llama", **{**LLAMA_8B, "num_hidden_layers": layers, **fields})
    finally:
        torch.set_default_dtype(default)


def rows(model: Any, batches: list[int], context: int, steps: int, backend: str = "triton") -> Iterator[Cell]:
    """Every cell, batch by batch."""
    for batch in batches:
        for design in DESIGNS:
            yield measure(model, design, batch, context, steps, backend)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def line(cell: Cell) -> str:
    """A cell for people."""
    return (
        f"{cell.design:>10} batch {cell.batch:3d}: {cell.tokens_per_s:9.0f} tokens/s, step {cell.step_ms:6.2f} ms, GPU "
        f"{cell.gpu_ms:6.2f}, allocator {cell.allocator_ms:6.3f}, adapter {cell.adapter_ms:6.3f}, host share "
        f"{cell.host_share:.1%}"
    )
