"""From a card's memory to pages, line by line.

Two ways. At equal bytes every design gets what vLLM 0.32.0's rule leaves, and pays its own tables out of it. As
deployed, each upstream sizes itself:

    vLLM 0.32.0     ceil(total x 0.92) - weights - workspace - page table - slot_mapping, divided by the bytes of a
                    page; the null block is inside
    SGLang 0.5.22   total x mem_fraction - weights, divided by the bytes of a token, whole pages; what is left of the
                    card (1 - mem_fraction) has to hold req_to_token and the workspace, which the rule does not count.
                    mem_fraction = 1 - (512 + 1.5 x chunked prefill + 2 x largest captured batch + 128) MiB / total;
                    rows = pool tokens / context x 512, at least 2,048 and at most 4,096
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from kvarena.experiments.budget import Budget, Tables, fit_pool, format_bytes, table_bytes
from kvarena.experiments.models import ITEMSIZE, ModelShape, model_shape

MIB = 2**20
GIB = 2**30
UTILISATION = 0.92
EXTRA_CONTEXT = 4  # SGLang 0.5.22: columns of req_to_token beyond the model's context

# Parameters of whole models, embeddings included, from their public configuration files.
WEIGHTS: dict[str, float] = {
    "llama-2-7b": 6.74e9,
    "llama-3-8b": 8.03e9,
    "llama-3-70b": 70.6e9,
    "mistral-7b": 7.25e9,
    "qwen-2.5-7b": 7.62e9,
    "qwen-2.5-72b": 72.7e9,
    "qwen-3-8b": 8.19e9,
    "qwen-3-32b": 32.8e9,
    "smollm2-135m": 0.135e9,
    "deepseek-v2-lite": 15.7e9,
    "deepseek-v3": 671e9,
}


@dataclass(frozen=True)
class Card:
    """One GPU and what is on it beside KV.

    total_bytes      of the card, as its driver says
    weights_bytes    of the model on this card
    workspace_bytes  activations of the largest step and captured graphs: vLLM measures them by a profile run; here an
                     assumption unless a measured result says otherwise
    """

    name: str
    total_bytes: int
    weights_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class Server:
    """Sizes that fix the tables. `step_tokens`: the largest step; `captured_batch`: the largest captured batch."""

    rows: int = 2048
    max_model_len: int = 131_072
    step_tokens: int = 8192
    chunk_tokens: int = 8192
    captured_batch: int = 256


@dataclass(frozen=True)
class Sizing:
    """Where a card's bytes go, for one design. The lines from `weights_bytes` on add up to `total_bytes`.

    headroom_bytes  kept free by the rule: 8 % (vLLM), or what is left of 1 - mem_fraction behind the tables (SGLang;
                    below 0 the rule does not hold what it promised)
    """

    rule: str
    num_pages: int
    page_size: int
    rows: int
    total_bytes: int
    weights_bytes: int
    workspace_bytes: int
    kv_bytes: int
    padding_page_bytes: int
    table_bytes: int
    slot_mapping_bytes: int
    unused_bytes: int
    headroom_bytes: int

    def lines(self) -> dict[str, int | str]:
        """Field names and values, in order."""
        return asdict(self)

    @property
    def budget_bytes(self) -> int:
        """What the design was given: KV, padding page, tables and the rest too small for a page."""
        return self.kv_bytes + self.padding_page_bytes + self.table_bytes + self.slot_mapping_bytes + self.unused_bytes


def card(
    model: str, total_bytes: int = 143_771 * MIB, workspace_bytes: int = 2 * GIB, name: str = "NVIDIA H200"
) -> Card:
    """A card with one model of the table on it, in bfloat16. Raises ValueError when the weights do not fit."""
    if model not in WEIGHTS:
        raise ValueError(f"model: {model!r} has no weights in the table; known: {', '.join(WEIGHTS)}")
    weights = round(WEIGHTS[model] * ITEMSIZE["bfloat16"])
    if weights + workspace_bytes >= UTILISATION * total_bytes:
        most = UTILISATION * total_bytes
        least = (weights + workspace_bytes) / UTILISATION
        size, share, own, work, enough = _sizes(total_bytes, most, weights, workspace_bytes, least)
        raise ValueError(
            f"memory: {name} with {size} is too small for {model}: {UTILISATION:.0%} of it are {share}, the weights "
            f"take {own} and the workspace {work}; expected more than {enough}"
        )
    return Card(name, total_bytes, weights, workspace_bytes)


def equal_bytes(on: Card, kind: str, page_size: int, shape: ModelShape, server: Server) -> Sizing:
    """Pages at equal bytes: what vLLM's rule leaves behind weights and workspace, for every design."""
    tables = Tables(server.rows, _columns(kind, server), server.step_tokens)
    return _sizing("equal bytes", on, _fit(on, kind, page_size, shape, tables), server.rows)


def deployed_vllm(on: Card, kind: str, page_size: int, shape: ModelShape, server: Server) -> Sizing:
    """vLLM 0.32.0's own sizing, with its 1,024 rows."""
    tables = Tables(server.rows, server.max_model_len, server.step_tokens)
    return _sizing("vLLM 0.32.0", on, _fit(on, kind, page_size, shape, tables), server.rows)


def _fit(on: Card, kind: str, page_size: int, shape: ModelShape, tables: Tables) -> Budget:
    given = math.ceil(on.total_bytes * UTILISATION) - on.weights_bytes - on.workspace_bytes
    try:
        return fit_pool(given, kind, page_size, shape, tables)
    except ValueError as error:
        size, weights, workspace, left = _sizes(on.total_bytes, on.weights_bytes, on.workspace_bytes, max(given, 0))
        raise ValueError(
            f"memory: {on.name} with {size} is too small: behind weights ({weights}) and workspace ({workspace}) "
            f"{left} are left, and {str(error).removeprefix('pool: ')}; fewer rows ({tables.max_rows}) or shorter ones "
            f"({tables.max_tokens} tokens) take less"
        ) from None


def _sizes(*numbers: float) -> list[str]:
    return [format_bytes(number) for number in numbers]


def mem_fraction(total_bytes: int, server: Server) -> float:
    """SGLang 0.5.22's default share of the card for weights and KV, three digits.

    >>> mem_fraction(143_771 * 2**20, Server())
    0.907
    """
    return round(1 - _kept_mib(server) * MIB / total_bytes, 3)


def _kept_mib(server: Server) -> float:
    return 512 + 1.5 * max(server.chunk_tokens, 2048) + 2 * server.captured_batch + 128


def deployed_sglang(on: Card, page_size: int, shape: ModelShape, server: Server) -> Sizing:
    """SGLang 0.5.22's own sizing, with the number of rows that it derives from the pool."""
    fraction = mem_fraction(on.total_bytes, server)
    static = math.floor(on.total_bytes * fraction) - on.weights_bytes
    page = shape.bytes_per_page(page_size)
    pages = static // page
    if pages < 1:
        kept = _kept_mib(server) * MIB
        size, held, rest = _sizes(on.total_bytes, kept, max(on.total_bytes - kept, 0))
        weights, one = _sizes(on.weights_bytes, page)
        raise ValueError(
            f"memory: {on.name} with {size} is too small for SGLang 0.5.22's own sizing: it keeps {held} of a card "
            f"beside weights and KV, which leaves {rest} for {weights} of weights and at least one page ({one}); the "
            "panel of equal bytes does not go by that rule"
        )
    rows = min(max(pages * page_size * 512 // server.max_model_len, 2048), 4096)
    table = table_bytes("token", page_size, Tables(rows, server.max_model_len + EXTRA_CONTEXT))
    mapping = server.step_tokens * 8
    left = on.total_bytes - on.weights_bytes - on.workspace_bytes - (pages + 1) * page - table - mapping
    return Sizing(
        "SGLang 0.5.22",
        pages,
        page_size,
        rows,
        on.total_bytes,
        on.weights_bytes,
        on.workspace_bytes,
        pages * page,
        page,
        table,
        mapping,
        static - pages * page,
        left - (static - pages * page),
    )


def preset_pages(preset: str, kind: str, page_size: int, model: str | ModelShape, server: Server) -> int:
    """Pages of the pool of a server as it comes ("vllm-0.32.0" or "sglang-0.5.22"), on one H200 with this model in
    bfloat16. Raises ValueError for a model without known weights."""
    if not isinstance(model, str):
        raise ValueError(f"pool.pool: preset {preset} sizes its pool by a model's weights, which numbers do not tell")
    on, shape = card(model), model_shape(model)
    if preset.startswith("sglang"):
        return deployed_sglang(on, page_size, shape, server).num_pages
    return deployed_vllm(on, kind, page_size, shape, server).num_pages


def _columns(kind: str, server: Server) -> int:
    return server.max_model_len + (EXTRA_CONTEXT if kind == "token" else 0)


def _sizing(rule: str, on: Card, budget: Budget, rows: int) -> Sizing:
    return Sizing(
        rule,
        budget.num_pages,
        budget.page_size,
        rows,
        on.total_bytes,
        on.weights_bytes,
        on.workspace_bytes,
        budget.kv_bytes,
        budget.padding_page_bytes,
        budget.table_bytes,
        budget.slot_mapping_bytes,
        budget.unused_bytes,
        on.total_bytes - on.weights_bytes - on.workspace_bytes - budget.pool_bytes,
    )
