"""The command `kvarena generate`: a real model behind either allocator. Imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

EXAMPLES = """Examples:\n
kvarena generate "What is a page table?" --allocator token --page-size 16 --max-tokens 32\n
kvarena generate "What is a page table?" "What is a page fault?"   # the second hits the first's head"""


def add_generate_command(app: typer.Typer) -> None:
    """Mount `kvarena generate`."""
    app.command(epilog=EXAMPLES)(generate)


def generate(
    prompts: Annotated[list[str], typer.Argument(help="What the user says; several run one after the other.")],
    allocator: Annotated[str, typer.Option(help="block, token, or contiguous.")] = "block",
    page_size: Annotated[int | None, typer.Option(help="Tokens a page; default: the design's own.", min=1)] = None,
    backend: Annotated[str, typer.Option(help="torch, triton (GPU, or slow), or sdpa (contiguous).")] = "torch",
    table: Annotated[str, typer.Option(help="Page table: block_table or req_to_token.")] = "block_table",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 32,
    pool: Annotated[int, typer.Option(help="Tokens the pool holds.", min=1)] = 4096,
    system: Annotated[str | None, typer.Option(help="The system prompt; default: the model's own.")] = None,
) -> None:
    """Answer prompts with SmolLM2-135M on paged attention: text, tokens a second, hits, pages."""
    from kvarena.experiments.model.loading import missing

    if reason := missing():
        raise ValueError(f"generate: {reason}")
    engine, ids, decode = _prepare(prompts, allocator, page_size, backend, table, max_tokens, pool, system)
    from kvarena.experiments.model.generate import answer

    for number, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True)):
        done = answer(engine, f"prompt{number}", tokens, max_tokens, decode)
        if number:
            print()
        print(f"> {prompt}\n{done.text or done.message}")
        print(
            f"  [{len(done.output)} tokens, {done.tokens_per_second:.1f} tokens/s; prompt {done.num_prompt_tokens} "
            f"tokens, hit {done.hit_tokens}; {done.pages} pages of {engine.allocator.page_size}]"
        )
    free, evictable = engine.allocator.room()
    print(f"pool: {free} pages free, {evictable} cached, of {engine.allocator.num_pages}", file=sys.stderr)


def _prepare(
    prompts: list[str],
    allocator: str,
    page_size: int | None,
    backend: str,
    table: str,
    max_tokens: int,
    pool: int,
    system: str | None,
) -> tuple[Any, list[list[int]], Any]:
    """(engine, prompts as token ids, ids -> text). Checks every argument before the model is loaded."""
    if backend == "triton":
        _use_interpreter_without_gpu()
    from kvarena.allocators.config import make_allocator
    from kvarena.experiments.engine.backends import load_backend
    from kvarena.experiments.engine.paged_memory import MemoryOptions
    from kvarena.experiments.engine.scheduler import SchedulerConfig
    from kvarena.experiments.model.generate import ModelEngine
    from kvarena.experiments.model.loading import chat_ids, load_smollm2, load_tokenizer

    load_backend(backend)
    options = MemoryOptions(backend=backend, table=table)  # type: ignore[arg-type]  # checks it
    spec: dict[str, Any] = {"kind": allocator} | ({} if page_size is None else {"page_size": page_size})
    size = make_allocator(spec, num_pages=1).page_size
    if pool < size:
        raise ValueError(f"--pool: expected at least one page of {size} tokens, found {pool}")
    pages = make_allocator(spec, num_pages=pool // size)
    head = [] if system is None else [{"role": "system", "content": system}]
    ids = [chat_ids([*head, {"role": "user", "content": prompt}]) for prompt in prompts]
    tokenizer = load_tokenizer()
    longest = max(len(tokens) for tokens in ids) + max_tokens
    limits = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=8, max_model_len=longest + 1)
    stop = [tokenizer.eos_token_id]
    engine = ModelEngine(load_smollm2(), pages, limits=limits, options=options, stop_tokens=stop)
    return engine, ids, lambda output: tokenizer.decode(output, skip_special_tokens=True)


def _use_interpreter_without_gpu() -> None:
    """Triton reads this when it is imported."""
    import os

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
