"""`import kvarena`: every public name, loaded when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kvarena.allocators.interface import KVAllocator

import kvarena as kv


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_costs_neither_numpy_nor_torch():
    found = python(
        "import sys; before = set(sys.modules); import kvarena; "
        "print(len({'numpy', 'torch', 'pandas', 'pydantic', 'typer', 'rich'} & (set(sys.modules) - before)))"
    )
    assert found.strip() == "0"


def test_importing_is_quick():
    code = "import time; start = time.process_time(); import kvarena; print(time.process_time() - start)"
    assert float(python(code)) < 0.08


@pytest.mark.parametrize("name", kv.__all__)
def test_every_public_name_is_there_without_torch(name):
    code = f"import sys; sys.modules['torch'] = None; import kvarena; assert kvarena.{name} is not None"
    python(code)


def test_names_are_listed_and_unknown_ones_are_attribute_errors():
    assert set(kv.__all__) <= set(dir(kv))
    with pytest.raises(AttributeError, match="no attribute 'compere'"):
        kv.compere  # noqa: B018


def test_the_example_of_the_design():
    r = kv.compare(
        "chat",
        allocators=["vllm", "sglang", kv.block(page_size=64)],
        pool="1 GiB",
        model="llama-3-8b",
        seeds=2,
        options={"num_sessions": 6},
        kernel_batches=0,
    )
    assert list(r.summary["allocator"].unique()) == ["vllm", "sglang", "block-page_size=64"]
    assert len(r.requests)
    assert len(r.steps)
    assert "token_hit_rate" in r.summary
    assert "<table>" in r._repr_html_()
    assert kv.plots.hit_rate(r).get_ylabel() == "token hit rate (%)"
    assert r.why("token_hit_rate").loc["hit", "vllm"] > 0
    assert "tokens hit" in str(r.first_divergence())


def test_results_show_themselves_on_a_terminal():
    from rich.console import Console
    from support.small import shared

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(shared())
    text = console.export_text()
    assert "Token hit rate over first admissions, chat" in text
    assert "infinite cache" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("pages", [0, -1, 2**31, 1.5, "12", None, True])
def test_a_page_count_that_is_none_is_refused(pages):
    with pytest.raises(ValueError, match=r"num_pages: expected a whole number from 1 to 2\^31 - 1"):
        kv.make_allocator("vllm", num_pages=pages)


@pytest.mark.parametrize("spec", [3, None, ["vllm"], 1.5])
def test_an_allocator_of_no_kind_of_spec_is_refused(spec):
    with pytest.raises(ValueError, match="allocator: expected a name, a table with `kind` or a Design"):
        kv.make_allocator(spec, num_pages=3)


@pytest.mark.parametrize("value", [True, "16", 16.0, None, [16]])
@pytest.mark.parametrize("field", ["page_size", "demand_slack"])
def test_a_count_of_a_design_is_an_integer_of_any_type_and_nothing_else(field, value):
    import numpy as np

    with pytest.raises(ValueError, match=rf"{field}: .*(whole number|integer)"):
        kv.block(**{field: value})
    assert kv.block(page_size=np.int64(4)).page_size == 4


@pytest.mark.parametrize("value", [1, "yes", None, 0])
@pytest.mark.parametrize("field", ["prefix_cache", "reversed_release", "need_sort"])
def test_a_switch_of_a_design_is_true_or_false_and_nothing_else(field, value):
    with pytest.raises(ValueError, match=f"{field}: expected true or false"):
        kv.block(**{field: value})


@pytest.mark.parametrize("given", [int, KVAllocator, type("Half", (KVAllocator,), {"pin": lambda *a: None})])
def test_a_class_that_is_no_whole_allocator_is_refused(given):
    said = "expected a subclass of KVAllocator|lacks .*reserve"
    with pytest.raises(ValueError, match=said):
        kv.make_allocator(given, num_pages=3)
    if given is not int:
        with pytest.raises(ValueError, match=said):
            kv.compare([[1, 2, 3]], allocators=["vllm", given], kernel_batches=0)


@pytest.mark.parametrize("fields", [{"allocators": 5}, {"allocators": lambda pages: 1}, {"out": 5}, {"out": b"x"}])
def test_what_is_no_argument_of_compare_is_named(fields):
    with pytest.raises(ValueError, match=r"^(allocators|out): expected"):
        kv.compare([[1, 2, 3]], kernel_batches=0, **fields)


def test_an_allocator_shows_its_pages():
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for name in ("vllm", "sglang"):
        allocator = kv.make_allocator(name, num_pages=12)
        seq = kv.Sequence("r7", range(8))
        allocator.admit(seq)
        allocator.commit([(seq, 8)])
        console.print(allocator)
        assert "r7" in console.export_text()
