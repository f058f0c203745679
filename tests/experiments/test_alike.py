"""By ids every design has one id a page unless it says otherwise, and what makes two numbers unlike is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kvarena.allocators.config import Design, block, contiguous, exact, token
from kvarena.experiments import ladder_ablations
from kvarena.experiments.alike import UNLIKE, page_notes, unlike_requests
from kvarena.experiments.compare import compare
from kvarena.experiments.config import config_from_mapping, load_config
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.explain import explain, summarise
from kvarena.experiments.foreign import read_toml
from kvarena.experiments.ladder_plan import plan_ladder
from kvarena.experiments.ladder_tables import ablation_tables
from kvarena.experiments.results import Result, merge_results
from kvarena.experiments.specs import allocator_entry
from kvarena.experiments.study import bounds_table, explanation_table, sweep_reasons_table
from kvarena.experiments.sweep_plan import sweep_cells
from kvarena.experiments.tables import budget_table, result_tables
from kvarena.experiments.traces.base import Visible
from rich.console import Console
from support.third_party import StackAllocator

CONFIGS = Path(__file__).parents[2] / "experiments" / "configs"
HASHED = Visible(grain=512, publish_time=True, outputs="none", sessions=False)
# Six prompts of 20 ids, the first 17 of them shared: at pages of 16 ids a hit ends after 16, at single ids after 17.
ROWS = [
    {"timestamp": 0, "input_length": 20 * 512, "output_length": 1, "hash_ids": [*range(17), *range(3 * i, 3 * i + 3)]}
    for i in range(6, 12)
]


def by_ids(*allocators: Any, **fields: Any) -> Result:
    chosen = {"format": "mooncake", "unit": "ids", "pool": "8 GiB", "kernel_batches": 0, **fields}
    return compare(ROWS, **chosen, **({"allocators": allocators} if allocators else {}))


def printed(*things: Any) -> str:
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(*things)
    return console.export_text()


def named(spec: Any) -> str:
    return f"a {allocator_entry(spec).label}" if isinstance(spec, Design) else str(spec)


# --- one id a page ---

UNSTATED = ["vllm", "sglang", "block", "token", "exact", "block:duplicates=merge", {"name": "mine", "kind": "block"},
            {"name": "vllm"}, {"kind": "block", "prefix_cache": False}, block(), token(), exact(),
            block(eviction_order="filo", index="tree"), contiguous(max_model_len=64)]  # fmt: skip
STATED = ["block:page_size=16", "vllm:page_size=16", {"name": "vllm", "page_size": 16}, block(page_size=16),
          {"kind": "token", "page_size": 16}, token(page_size=16)]  # fmt: skip


@pytest.mark.parametrize("spec", UNSTATED, ids=named)
def test_by_ids_an_allocator_that_states_no_page_size_has_one_id_a_page(spec: Any) -> None:
    entry, plain = allocator_entry(spec, "ids"), allocator_entry(spec)
    assert entry.page_size == 1
    assert plain.design is not None
    assert entry.design == plain.design.model_copy(update={"page_size": 1})
    assert allocator_entry(entry.as_toml(), "ids") == entry == allocator_entry(entry.as_toml())


@pytest.mark.parametrize("spec", STATED, ids=named)
def test_by_ids_a_stated_page_size_stays(spec: Any) -> None:
    assert allocator_entry(spec, "ids") == allocator_entry(spec)
    assert allocator_entry(spec, "ids").page_size == 16


def test_by_ids_an_allocator_of_ones_own_keeps_its_page_size() -> None:
    assert allocator_entry(StackAllocator, "ids") == allocator_entry(StackAllocator)


def test_by_ids_rules_that_need_a_larger_page_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="block-hash_unit=4: with unit = 'ids' and no page_size an id is a page"):
        allocator_entry("block:hash_unit=4", "ids")
    assert allocator_entry("block:hash_unit=4:page_size=16", "ids").page_size == 16


@pytest.mark.parametrize(
    "given",
    [(), ("vllm", "sglang"), (block(), token()), ("block", {"kind": "token"})],
    ids=["default", "names", "designs", "kinds"],
)
def test_by_ids_both_designs_round_alike_and_the_result_says_what_a_page_is(given: tuple[Any, ...]) -> None:
    result = by_ids(*given)
    assert result.summary["page_size"].tolist() == [1, 1]
    assert result.summary["token_hit_rate_ceiling"].nunique() == 1
    assert result.summary["hit_tokens"].tolist() == [5 * 17, 5 * 17]
    assert "one id (512 tokens) is a page in both designs" in result.warnings
    assert budget_table(result).title.endswith("64 MiB an id")
    assert "one id (512 tokens) is a page in both designs" in printed(*result_tables(result))
    again = config_from_mapping(result.config)
    assert [entry.as_toml() for entry in again.entries()] == result.config["allocators"]


def test_by_ids_pages_of_unlike_tokens_are_said_in_tokens() -> None:
    result = by_ids("block:page_size=16", "sglang")
    assert result.summary["hit_tokens"].tolist() == [5 * 16, 5 * 17]
    assert any("a page holds 8,192 (vllm), 512 (sglang)" in text for text in result.warnings)
    alike = by_ids("block:page_size=16", "token:page_size=16")
    assert "16 ids (8,192 tokens) are a page in both designs" in alike.warnings


def test_by_tokens_nothing_is_said_of_pages_and_the_budget_is_a_token_s() -> None:
    result = compare([[1, 2, 3]], pool="1 GiB", kernel_batches=0)
    assert not any("page in" in text or "unlike" in text for text in result.warnings)
    assert budget_table(result).title.endswith("a token")
    assert result.summary["page_size"].tolist() == [16, 1]


def test_a_config_saved_with_pages_of_16_ids_gives_what_it_gave() -> None:
    saved = by_ids("vllm").config
    saved["allocators"][0]["page_size"] = 16
    assert compare(ROWS, config=config_from_mapping(saved)).summary["hit_tokens"].tolist() == [5 * 16]


def test_committed_configs_by_ids_state_every_page_size() -> None:
    by_ids = [c.config for c in sweep_cells(read_toml(CONFIGS / "study.toml")) if c.config["workload"]["unit"] == "ids"]
    assert len(by_ids) == 2
    stated = {tuple(one["page_size"] for one in config["allocators"]) for config in by_ids}
    assert stated == {(1, 1)}
    others = [path for path in CONFIGS.glob("*.toml") if '"ids"' in path.read_text() and path.name != "study.toml"]
    assert [path.name for path in others] == ["chat.toml"]  # names it in a comment
    assert load_config(others[0]).workload.unit == "tokens"


def test_a_run_by_ids_has_one_id_a_page_too() -> None:
    base = {"workload": {"trace": "mooncake_like", "unit": "ids"}}
    assert run_config(base).entry().page_size == 1
    assert run_config({**base, "allocator": {"name": "vllm", "page_size": 16}}).entry().page_size == 16
    assert run_config({"workload": {"trace": "mooncake_like"}}).entry().page_size == 16


@pytest.mark.parametrize(
    ("lower", "upper", "size"),
    [
        ("vllm", "sglang", 1),
        ("vllm", "block:duplicates=merge", 1),
        ("block:page_size=16", "block:page_size=16:duplicates=merge", 16),
        ("block:page_size=16", "block:duplicates=merge", 1),
    ],
)
def test_a_ladder_by_ids_has_the_page_of_a_comparison(lower: str, upper: str, size: int) -> None:
    from kvarena.experiments.specs import parse_spec

    base = {"workload": {"trace": "mooncake_like", "unit": "ids"}}
    plan = plan_ladder(base, HASHED, lower=parse_spec(lower), upper=parse_spec(upper))
    every = (*plan.cells, *plan.ends.values())
    assert {one["page_size"] for cell in every for one in cell.config["allocators"]} == {size}


def test_ablations_by_ids_have_one_id_a_page_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_ablations, "save", lambda made, folder: None)  # figures take seconds
    workload = {"trace": "mooncake_like", "unit": "ids", "requests": 12}
    made = ladder_ablations.ablations(
        {"workload": workload, "pool": {"pool": "100 %"}}, tmp_path / "out", lengths=[100]
    )
    assert {one["page_size"] for one in made.manifest["config"]["allocators"]} == {1}
    assert "pages of 1 id (512 tokens)" in printed(*ablation_tables(made))


def test_what_a_page_is_in_words() -> None:
    assert page_notes({"a": 1}, 512) == ["one id (512 tokens) is a page in the design"]
    assert page_notes({"a": 1, "b": 1, "c": 1}, 1) == ["one id (1 token) is a page in all 3 designs"]
    assert "a page holds 32 (a), 16 (b)" in page_notes({"a": 2, "b": 1}, 16)[0]


# --- the same requests ---

PROMPTS = [list(range(500)), list(range(1580))] * 3
UNLIKE_POOL = "200 MiB"  # room for 98 pages of 16, and for 1,598 of 1


def rejecting(**fields: Any) -> Result:
    return compare(PROMPTS, **{"pool": UNLIKE_POOL, "too_long": "reject", "kernel_batches": 0, **fields})


def test_rates_over_unlike_requests_are_warned_of_in_print() -> None:
    result = rejecting()
    assert result.summary["rejected"].tolist() == [3, 0]
    assert any(f"{UNLIKE} (vllm 3, sglang 0 at 200 MiB)" in text for text in result.warnings)
    assert f"{UNLIKE} (vllm 3, sglang 0 at 200 MiB)" in printed(*result_tables(result))


def test_rates_over_the_same_requests_are_not_warned_of() -> None:
    for result in (rejecting(pool="1 GiB"), rejecting(pool="100 MiB"), rejecting(allocators=["vllm"])):
        assert not any("reject" in text for text in result.warnings)
    assert (rejecting(pool="100 MiB").summary["rejected"] == 3).all()


def test_results_laid_over_each_other_are_warned_of_too() -> None:
    merged = merge_results([rejecting(allocators=["vllm"]), rejecting(allocators=["sglang"])])
    assert any(text.startswith(UNLIKE) for text in merged.warnings)


def rows(seed: int, pool: int, allocator: str, admitted: list[bool]) -> pd.DataFrame:
    keys = {"seed": seed, "pool_bytes": pool, "allocator": allocator}
    return pd.DataFrame([{**keys, "index": index, "admitted": ok} for index, ok in enumerate(admitted)])


def test_as_many_rejected_requests_need_not_be_the_same_ones() -> None:
    assert not unlike_requests([rows(0, 1024, "a", [True, False]), rows(0, 1024, "b", [True, False])])
    (text,) = unlike_requests([rows(0, 1024, "a", [True, False]), rows(0, 1024, "b", [False, True])])
    assert "(a 1, b 1 at 1 KiB)" in text


def test_unlike_requests_are_told_by_pool_and_seeds_of_one_pool_are_one() -> None:
    keys = [(seed, pool, name) for seed in (0, 1) for pool in (1024, 2048, 4096) for name in "ab"]
    cells = [rows(seed, pool, name, [name == "a" or pool == 4096]) for seed, pool, name in keys]
    (text,) = unlike_requests(cells)
    assert "(a 0, b 1 at 1 KiB, and at 2 of 3 pool sizes in all)" in text


def test_what_is_explained_as_served_is_the_hit_rate_and_rejected_prompts_are_in_no_share() -> None:
    result = rejecting()
    found = explain(result, source=PROMPTS)
    table = summarise(found)
    for one, rate in zip(found, result.summary["token_hit_rate"], strict=True):
        shares = table[f"{one.entry.name} share"]
        assert shares["served"] == pytest.approx(rate, abs=1e-12)
        assert shares.drop("refused").sum() == pytest.approx(1)
        assert pd.isna(shares["refused"])
        assert table[one.entry.name].sum() == 3 * (500 + 1580)
    text = printed(explanation_table(found))
    assert "was never admitted: in no share" in text
    assert "4,740" in text
    assert "1,500  100.00 %" in text


def test_a_sweep_explained_leaves_rejected_prompts_out_of_its_shares() -> None:
    from kvarena.experiments.explain import REASONS

    row = {"cell": "k", "trace": "t", "pool_bytes": 1024, "allocator": "a", "prompt_tokens": 100, "hit_tokens": 40,
           **dict.fromkeys(REASONS, 0), "first_seen": 40, "refused": 20}  # fmt: skip
    text = printed(sweep_reasons_table(pd.DataFrame([row])))
    assert "refused, % of all" in text
    assert [text.count(number) for number in ("50.00", "20.00")] == [2, 1]


def test_numbers_of_one_seed_name_it_and_means_say_of_how_many() -> None:
    from kvarena.experiments.bounds import bounds

    result = compare("chat", requests=8, seeds=[3, 4], pool="400 MiB", kernel_batches=0, options={"num_sessions": 3})
    assert "requests went, pool 400 MiB, seed 3" in printed(explanation_table(explain(result)))
    assert "requests went, pool 400 MiB, seed 4" in printed(explanation_table(explain(result, seed=4)))
    assert "means of 2 seeds" in printed(bounds_table(result, bounds(result)))
    one = compare("chat", requests=8, seeds=[3], pool="400 MiB", kernel_batches=0, options={"num_sessions": 3})
    assert "means" not in printed(bounds_table(one, bounds(one)))


def test_bounds_over_unlike_requests_are_warned_of() -> None:
    from kvarena.experiments.bounds import bounds

    result = rejecting()
    assert UNLIKE in printed(bounds_table(result, bounds(result, source=PROMPTS)))
