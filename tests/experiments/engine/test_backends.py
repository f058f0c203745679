"""A step's layers share what is the same for all of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvarena.experiments.engine.backends import Step, load_backend  # noqa: E402


def _batch(tokens: int, requests: int) -> Any:
    table = SimpleNamespace(rows=torch.arange(requests))
    return SimpleNamespace(
        max_query_len=-(-tokens // requests), positions=torch.arange(tokens), table=table, query_start_loc=None
    )


def _recording(seen: list[tuple[str, Any]], made: list[dict[str, Any]]) -> Any:
    def share(q: Any, key_cache: Any, value_cache: Any, batch: Any, options: dict[str, Any]) -> Any:
        made.append(dict(options))
        return None if options.get("window") else f"list {len(made)}"

    return replace(
        load_backend("triton"),
        extend=lambda *_, **options: seen.append(("extend", options.get("plan"))),
        decode=lambda *_, **options: seen.append(("decode", options.get("plan"))),
        share=share,
    )


def test_the_work_list_of_a_step_is_made_once_for_all_layers() -> None:
    seen: list[tuple[str, Any]] = []
    made: list[dict[str, Any]] = []
    step = Step(_recording(seen, made), _batch(5, 2))
    for _ in range(4):
        step.attend(torch.zeros(5, 4, 8), None, None)
    assert seen == [("extend", "list 1")] * 4
    assert len(made) == 1


def test_a_layer_whose_options_have_no_work_list_leaves_it_to_the_next() -> None:
    seen: list[tuple[str, Any]] = []
    made: list[dict[str, Any]] = []
    step = Step(_recording(seen, made), _batch(5, 2))
    for window in (16, None, None):
        step.attend(torch.zeros(5, 4, 8), None, None, window=window)
    assert seen == [("extend", None), ("extend", "list 2"), ("extend", "list 2")]


def test_decode_steps_make_no_work_list() -> None:
    seen: list[tuple[str, Any]] = []
    made: list[dict[str, Any]] = []
    Step(_recording(seen, made), _batch(3, 3)).attend(torch.zeros(3, 4, 8), None, None)
    assert seen == [("decode", None)]
    assert made == []
