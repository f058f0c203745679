"""Shapes of models, as far as their KV cache goes: how many bytes a token takes.

Numbers are from the models' public configuration files. A shape of one's own is a mapping with the fields of
`ModelShape`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

DType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"]
ITEMSIZE: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


class ModelShape(BaseModel):
    """What a KV cache needs to know of a model.

    num_layers    attention layers that keep KV
    num_kv_heads  KV heads a layer
    head_dim      elements of a key
    head_dim_v    elements of a value; head_dim when left out
    dtype         of the cache
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    num_layers: int = Field(ge=1, strict=True)
    num_kv_heads: int = Field(ge=1, strict=True)
    head_dim: int = Field(ge=1, strict=True)
    head_dim_v: int | None = Field(default=None, ge=0, strict=True)
    dtype: DType = "bfloat16"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers.

        >>> SHAPES["llama-3-8b"].bytes_per_token == 128 * 1024
        True
        """
        value_dim = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return self.num_layers * self.num_kv_heads * (self.head_dim + value_dim) * ITEMSIZE[self.dtype]

    def bytes_per_page(self, page_size: int) -> int:
        """layers x HKV x S x (D + Dv) x itemsize."""
        return page_size * self.bytes_per_token


SHAPES: dict[str, ModelShape] = {
    "llama-2-7b": ModelShape(num_layers=32, num_kv_heads=32, head_dim=128),
    "llama-3-8b": ModelShape(num_layers=32, num_kv_heads=8, head_dim=128),
    "llama-3-70b": ModelShape(num_layers=80, num_kv_heads=8, head_dim=128),
    "mistral-7b": ModelShape(num_layers=32, num_kv_heads=8, head_dim=128),
    "qwen-2.5-7b": ModelShape(num_layers=28, num_kv_heads=4, head_dim=128),
    "qwen-2.5-72b": ModelShape(num_layers=80, num_kv_heads=8, head_dim=128),
    "qwen-3-8b": ModelShape(num_layers=36, num_kv_heads=8, head_dim=128),
    "qwen-3-32b": ModelShape(num_layers=64, num_kv_heads=8, head_dim=128),
    "smollm2-135m": ModelShape(num_layers=30, num_kv_heads=3, head_dim=64),
    # Multi-head latent attention: one head of 512 latent and 64 rotary numbers a token, and no values beside it.
    "deepseek-v2-lite": ModelShape(num_layers=27, num_kv_heads=1, head_dim=576, head_dim_v=0),
    "deepseek-v3": ModelShape(num_layers=61, num_kv_heads=1, head_dim=576, head_dim_v=0),
}


def model_shape(model: str | Mapping[str, Any] | ModelShape) -> ModelShape:
    """Resolve a name of the table, or the numbers. ValueError lists what is allowed."""
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, str):
        if model not in SHAPES:
            raise ValueError(f"model: {model!r} is unknown; known: {', '.join(SHAPES)}, or the numbers of a shape")
        return SHAPES[model]
    try:
        return ModelShape(**model)
    except (ValidationError, TypeError) as error:
        detail = "; ".join(_lines(error)) if isinstance(error, ValidationError) else str(error)
        raise ValueError(f"model: {detail}") from None


def _lines(error: ValidationError) -> Iterator[str]:
    """Fields that are missing, together; then each other fault."""
    missing = [str(item["loc"][-1]) for item in error.errors() if item["type"] == "missing"]
    if missing:
        yield f"expected a shape's {', '.join(missing)}, found none"
    yield from (_line(item) for item in error.errors() if item["type"] != "missing")


def _line(item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{name}: unknown key; known: {', '.join(ModelShape.model_fields)}"
    return f"{name}: {item['msg']}, found {item['input']!r}"
