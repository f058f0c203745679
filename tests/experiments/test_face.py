"""`import kvarena`: every public name, loaded when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
