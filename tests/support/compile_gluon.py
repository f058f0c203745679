"""Compile the Gluon extend kernel for sm_90 as its launcher launches it, on a machine without a GPU.

Run as a script under Triton 3.6, in a process of its own. One JSON line a variant: registers, spills, shared memory,
and the instructions that say which hardware is used: HGMMA, UTMALDG (TMA), LDGSTS (cp.async).
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from kvarena.kernels import extend_gluon
from kvarena.kernels.pool import KVPool
from support.compile_sm90 import record_compilations, table_of

VARIANTS = [
    # page, tokens an entry, layout, HQ, HKV, dtype, lse
    (1, 1, "split", 32, 8, torch.bfloat16, False),
    (1, 1, "fused", 16, 1, torch.bfloat16, True),
    (4, 4, "split", 32, 8, torch.float16, False),
    (8, 8, "split", 32, 8, torch.bfloat16, False),
    (16, 16, "split", 32, 8, torch.bfloat16, False),
    (16, 1, "fused", 64, 8, torch.bfloat16, True),
    (64, 64, "hnd", 32, 32, torch.bfloat16, False),
    (128, 128, "split", 32, 8, torch.float16, True),
    (256, 1, "page_major", 32, 8, torch.bfloat16, False),
]


def instructions(cubin: bytes) -> dict[str, int]:
    """How often some mnemonics stand in the machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout
    counts = {name.lower(): len(re.findall(rf"\b{name}\b", text)) for name in ("HGMMA", "UTMALDG", "LDGSTS")}
    return counts | {"spills": len(re.findall(r"\b(?:LDL|STL)\b", text))}


def main() -> None:
    compiled = record_compilations()
    for page, entry, layout, heads, kv_heads, dtype, with_lse in VARIANTS:
        pool = KVPool(1, 4, page, kv_heads, 128, dtype=dtype, layout=layout)
        table = table_of(4, 512, entry)
        q, starts = torch.zeros((64, heads, 128), dtype=dtype), torch.zeros(5, dtype=torch.int32)
        lse = torch.zeros((64, heads)) if with_lse else None
        plan = extend_gluon.plan_extend(table, starts, 64, heads, kv_heads)
        extend_gluon.launch(q, pool.key(0), pool.value(0), table, plan, 0.1, torch.zeros_like(q), lse, {})
        for kernel, metadata, cubin in compiled:
            line = {"variant": f"S{page}-E{entry}-{layout}-H{heads}-{kv_heads}", "kernel": kernel}
            print(json.dumps({**line, "page": page, "shared_bytes": metadata["shared"], **instructions(cubin)}))
        compiled.clear()


if __name__ == "__main__":
    main()
