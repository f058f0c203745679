"""Factors of the attention covers, and the batch that a row of a cover stands for."""

from __future__ import annotations

from typing import Any

import torch
from support.attention import DEVICE, Batch, make_batch

FP32, FP16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

FACTORS = {
    "dtype": (FP32, FP16),
    "kv_dtype": (None, E4M3, E5M2, INT8),
    "group": (1, 3, 4, 7, 8, 16),
    "kv_heads": (1, 2),
    "head_dim": (64, 80, 96, 128, 192, 256),
    "head_dim_v": (None, 64),
    "page_size": (1, 4, 16, 64),
    "entry": ("page", "token", "wide"),
    "layout": ("split", "fused", "hnd", "page_major"),
    "order": ("random", "reverse"),
    "lens": ("borders", "multiples"),
    "option": ("plain", "window", "softcap", "alibi", "scale", "all"),
}


def lengths(kind: str, page_size: int) -> list[int]:
    """At most 65 tokens: around one page, or full last pages."""
    if kind == "borders":
        return [min(n, 65) for n in (page_size + 1, 0, page_size - 1, 1, page_size)]
    return [64 // page_size * page_size, 65, 2 * page_size if page_size <= 32 else 33]


def options(kind: str, num_heads: int) -> dict[str, Any]:
    """Keyword arguments of an attention call."""
    slopes = torch.linspace(0.02, 0.5, num_heads, device=DEVICE)
    return {
        "plain": {},
        "window": {"window": 9},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": slopes},
        "scale": {"scale": 0.31},
        "all": {"window": 33, "softcap": 2.0, "alibi_slopes": slopes, "scale": 0.2},
    }[kind]


def extend_lengths(kind: str, seq_lens: list[int]) -> list[int]:
    """New tokens of each request: all, one, about a third, or a mixture of these."""
    one = [min(n, 1) for n in seq_lens]
    part = [-(-n // 3) for n in seq_lens]
    mixed = [(n, min(n, 1), -(-n // 2))[i % 3] for i, n in enumerate(seq_lens)]
    return {"all": list(seq_lens), "one": one, "part": part, "mixed": mixed}[kind]


def batch_of(row: dict[str, Any], **changes: Any) -> Batch:
    """The batch that a row of a cover stands for; a row with `extend` has new tokens, one each otherwise."""
    row = row | changes
    chosen = options(row["option"], row["group"] * row["kv_heads"])
    if row["kv_dtype"] in (E4M3, E5M2):
        chosen |= {"k_scale": 0.5, "v_scale": torch.full((row["kv_heads"],), 2.0, device=DEVICE)}
    seq_lens = lengths(row["lens"], row["page_size"])
    return make_batch(
        seq_lens=seq_lens,
        extend_lens=extend_lengths(row["extend"], seq_lens) if "extend" in row else None,
        padding=row.get("padding", 0),
        page_size=row["page_size"],
        tokens_per_entry={"page": row["page_size"], "token": 1, "wide": 4 * row["page_size"]}[row["entry"]],
        group=row["group"],
        kv_heads=row["kv_heads"],
        head_dim=row["head_dim"],
        head_dim_v=row["head_dim_v"],
        dtype=row["dtype"],
        kv_dtype=row["kv_dtype"],
        layout=row["layout"],
        order=row["order"],
        options=chosen,
    )


def name_of(row: dict[str, Any]) -> str:
    return "-".join(str(value).replace("torch.", "") for value in row.values())
