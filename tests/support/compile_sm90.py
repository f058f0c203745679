"""Compile every kernel for sm_90 as the launchers launch it, on a machine without a GPU.

Run as a script, in a process of its own without TRITON_INTERPRET. Triton is given a driver that only names the
target, and launches stop after compilation, so the real launchers choose tiles, constants and alignment.
Prints one JSON line a compiled kernel: variant, kernel, registers, spill and stack bytes, shared memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from kvarena.kernels import _launch
from kvarena.kernels.copy import copy_pages, gather_pages, scatter_pages
from kvarena.kernels.decode import paged_decode
from kvarena.kernels.extend import paged_extend
from kvarena.kernels.merge import merge_states
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.pool import KVPool
from kvarena.kernels.slots import compute_slot_mapping
from kvarena.kernels.step import StepBuffers, apply_decode, apply_step, gather_rows
from kvarena.kernels.store import store_kv
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

BF16, FP16, FP32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class TargetOnly:
    """A driver for a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def record_compilations() -> list[tuple[str, dict, bytes]]:
    """Make every launch compile only; the list fills with (kernel, metadata, cubin)."""
    compiled: list[tuple[str, dict, bytes]] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.fn.__name__, kernel.metadata._asdict(), kernel.asm["cubin"]))

    JITFunction.run = compile_only
    driver.set_active(TargetOnly())
    _launch.INTERPRETED = True  # lets CPU tensors pass: nothing runs
    return compiled


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local bytes of a cubin, as cuobjdump reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}
    found["spills"] = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    patterns = {"hgmma": "HGMMA", "hmma": "HMMA", "utmaldg": "UTMALDG", "ldgsts128": r"LDGSTS\.E\.BYPASS\S*\.128"}
    for name, mnemonic in patterns.items():
        found[name] = len(re.findall(mnemonic, sass))
    return found


def table_of(batch: int, width: int, tokens_per_entry: int) -> PageTable:
    return PageTable(
        torch.zeros((batch, width // tokens_per_entry), dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        tokens_per_entry,
    )


def attention_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Decode and extend: head dims, page sizes and tables, dtypes, group sizes, options."""
    options = {
        "plain": {},
        "lse": {"return_lse": True},
        "window": {"window": 64},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": True},
        "all": {"window": 64, "softcap": 30.0, "alibi_slopes": True, "return_lse": True},
        "scales": {"k_scale": True, "v_scale": True},
    }
    rows = [
        # q, kv, D, Dv, HQ, HKV, S, entry, B, width, layout, options
        (BF16, BF16, 128, 128, 32, 8, 16, 16, 32, 4096, "split", "plain"),
        (BF16, BF16, 128, 128, 32, 8, 16, 1, 256, 4096, "fused", "plain"),
        (BF16, BF16, 128, 128, 32, 8, 1, 1, 64, 16384, "split", "lse"),
        (BF16, BF16, 128, 128, 32, 8, 64, 64, 1, 8192, "hnd", "plain"),
        (FP16, FP16, 128, 128, 64, 8, 256, 256, 8, 8192, "page_major", "all"),
        (BF16, BF16, 64, 64, 32, 32, 16, 16, 32, 4096, "split", "window"),
        (FP16, FP16, 80, 64, 7, 1, 4, 16, 2, 1024, "fused", "softcap"),
        (BF16, BF16, 96, 96, 16, 1, 32, 32, 32, 4096, "split", "alibi"),
        (BF16, BF16, 192, 128, 16, 16, 16, 16, 32, 4096, "split", "lse"),
        (BF16, BF16, 256, 256, 24, 8, 16, 16, 256, 4096, "split", "plain"),
        (FP32, FP32, 128, 128, 32, 8, 16, 16, 2, 1024, "split", "all"),
        (FP32, FP32, 256, 256, 3, 1, 1, 1, 2, 1024, "split", "plain"),
        (BF16, E4M3, 128, 128, 32, 8, 16, 16, 64, 16384, "split", "scales"),
        (FP16, E5M2, 128, 128, 32, 8, 1, 1, 64, 1024, "split", "scales"),
        (BF16, INT8, 128, 128, 32, 8, 16, 16, 64, 16384, "fused", "scales"),
        (FP32, E4M3, 64, 64, 2, 1, 4, 4, 2, 64, "split", "scales"),
    ]
    for number, row in enumerate(rows):
        q_dtype, kv_dtype, dim, dim_v, heads, kv_heads, page, entry, batch, width, layout, option = row
        pool = KVPool(1, 4, page, kv_heads, dim, dim_v, dtype=kv_dtype, layout=layout)
        table = table_of(batch, width, entry)
        arguments = dict(options[option])
        if "alibi_slopes" in arguments:
            arguments["alibi_slopes"] = torch.zeros(heads)
        if "k_scale" in arguments:
            arguments |= {"k_scale": torch.ones(kv_heads), "v_scale": torch.ones(1)}
        name = f"{q_dtype}-{kv_dtype}-D{dim}-{dim_v}-H{heads}-{kv_heads}-S{page}-E{entry}-{layout}-{option}"
        name = name.replace("torch.", "")
        caches = (pool.key(0), pool.value(0), table)
        q = torch.zeros((batch, heads, dim), dtype=q_dtype)
        yield f"decode-{name}", lambda q=q, c=caches, a=arguments: paged_decode(q, *c, **a)
        tokens = 16 if number % 3 == 2 else 512
        q = torch.zeros((batch * tokens, heads, dim), dtype=q_dtype)
        starts = torch.zeros(batch + 1, dtype=torch.int32)
        yield f"extend{tokens}-{name}", lambda q=q, c=caches, s=starts, a=arguments: paged_extend(q, *c, s, **a)


def other_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Writes, copies, slots, merge."""
    for dtype, layout in ((BF16, "split"), (FP32, "fused"), (E4M3, "page_major"), (E5M2, "split"), (INT8, "hnd")):
        pool = KVPool(2, 4, 16, 8, 128, dtype=dtype, layout=layout)
        k = torch.zeros((4, 8, 128), dtype=dtype if dtype in (BF16, FP32) else BF16)
        caches = (pool.key(1), pool.value(1))
        slots = torch.zeros(4, dtype=torch.int64)
        yield f"store-{dtype}-{layout}", lambda k=k, c=caches, s=slots: store_kv(k, k, *c, s)
        yield f"copy-{dtype}-{layout}", lambda p=pool: copy_pages(p.layers, [1, 2], [2, 3])
    pool = KVPool(1, 4, 16, 8, 128, dtype=BF16)
    packed = torch.zeros((1, pool.bytes_per_page), dtype=torch.uint8)
    yield "gather", lambda: gather_pages(pool.layers, [1])
    yield "scatter", lambda: scatter_pages(packed, pool.layers, [1])
    for entry, size in ((16, 1), (1, 1), (16, 2)):
        positions = torch.zeros(512, dtype=torch.int64)
        starts = torch.zeros(5, dtype=torch.int32)
        table = table_of(4, 64, entry)
        yield (
            f"slots-E{entry}-cp{size}",
            lambda t=table, s=starts, p=positions, c=size: compute_slot_mapping(t, s, p, p.clone(), cp_size=c),
        )
    for size, expand in ((16, 1), (16, 16), (1, 1), (3, 3)):
        packed, entries = torch.zeros(4096, dtype=torch.int32), torch.zeros((5, 64 * expand), dtype=torch.int32)
        gathered = torch.zeros_like(entries[1:]) if expand == 1 else None
        numbers = (torch.zeros(512, dtype=torch.int64) for _ in range(2))
        step = StepBuffers(packed, entries, gathered, *numbers, 4, size, expand)
        yield f"step-S{size}-{expand}", lambda s=step: apply_step(s, 3, 8, 1, 2, 40)
        yield f"step-decode-S{size}-{expand}", lambda s=step: apply_decode(s, s.packed[:12], 3, 4)
        if expand == 1:
            yield f"step-gather-S{size}", lambda s=step: gather_rows(s, 3, 8, 4)
    out, lse = torch.zeros((4, 32, 128), dtype=BF16), torch.zeros((4, 32))
    yield "merge", lambda: merge_states(out, lse, out, lse)


def main(filters: list[str]) -> None:
    compiled = record_compilations()
    for cases in (other_cases, attention_cases):
        for name, launch in cases():
            if filters and not any(word in name for word in filters):
                continue
            launch()
            for kernel, metadata, cubin in compiled:
                line = {"variant": name, "kernel": kernel, "warps": metadata["num_warps"]}
                line |= {"stages": metadata["num_stages"], "shared_bytes": metadata["shared"], **resources(cubin)}
                print(json.dumps(line), flush=True)
            compiled.clear()


if __name__ == "__main__":
    main(sys.argv[1:])
