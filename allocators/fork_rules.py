"""What both designs ask of a fork and of a write, before they do their own part."""

from __future__ import annotations

from typing import cast

from kvarena.allocators.interface import Sequence


def shared_tokens(parent: Sequence, computed: int, num_tokens: int | None) -> int:
    """How many tokens a child takes over: all `computed` ones, or so many of them as were asked for."""
    if num_tokens is None:
        return computed
    if not 1 <= num_tokens <= computed:
        raise ValueError(f"num_tokens: expected 1 to {computed}, computed of {parent.request_id!r}, found {num_tokens}")
    return num_tokens


def check_child(parent: Sequence, child: Sequence, num_tokens: int, live: bool) -> None:
    """Raise ValueError unless `child` can go on from the first `num_tokens` tokens of `parent`; `live`: its id is."""
    if live:
        raise ValueError(f"request {child.request_id!r} is already live")
    if num_tokens < 1:
        raise ValueError(f"request {parent.request_id!r}: nothing of it is computed, so a fork has nothing to share")
    if child.num_tokens < num_tokens or not _same_content(parent, child, num_tokens):
        raise ValueError(
            f"request {child.request_id!r}: expected the {num_tokens} computed tokens of {parent.request_id!r} at its "
            "front, and the same namespace and items"
        )


def _same_content(parent: Sequence, child: Sequence, num_tokens: int) -> bool:
    if (parent.namespace, _items(parent, num_tokens)) != (child.namespace, _items(child, num_tokens)):
        return False
    if parent.page_hashes is None or child.page_hashes is None:
        same_kind = parent.page_hashes is child.page_hashes
        return same_kind and parent.token_ids[:num_tokens] == child.token_ids[:num_tokens]
    # A trace names whole pages of the prompt; what was generated has no name that could differ.
    return parent.num_prompt_tokens == child.num_prompt_tokens and parent.page_hashes == child.page_hashes


def _items(seq: Sequence, num_tokens: int) -> list[object]:
    return [item for item in seq.extra_keys if cast("int", item[0]) < num_tokens]


def start_child(child: Sequence, num_tokens: int) -> None:
    """The child starts with `num_tokens` computed; once its prompt is among them, all that follows is decoded."""
    child.num_computed_tokens = num_tokens
    if child.num_prompt_tokens <= num_tokens:
        child.num_prefill_tokens = num_tokens


def check_range(seq: Sequence, start: int, end: int) -> None:
    """Raise ValueError unless [start, end) lies behind the computed tokens: what is computed is never overwritten."""
    if not seq.num_computed_tokens <= start <= end:
        raise ValueError(
            f"request {seq.request_id!r}: prepares to write [{start}, {end}), {seq.num_computed_tokens} tokens are "
            "computed and stay as they are"
        )
