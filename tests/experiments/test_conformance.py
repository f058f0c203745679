"""`kv.testing.conformance`: right allocators pass, each fault is named, whoever wrote the allocator."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kvarena.allocators import config
from kvarena.allocators.block import BlockAllocator
from kvarena.allocators.config import PRESETS, make_allocator
from kvarena.allocators.interface import SupportsFork
from kvarena.experiments.conformance import conformance
from support import third_party
from support.broken_allocators import BROKEN
from support.third_party import StackAllocator

import kvarena as kv

DESIGNS = {
    **{name: name for name in PRESETS},
    "exact": "exact",
    "block-window": {"kind": "block", "page_size": 4, "sliding_window": 7},
    "block-window-dense": {"kind": "block", "page_size": 1, "sliding_window": 3, "retention_interval": None},
    "block-nocache": {"kind": "block", "prefix_cache": False},
    "token-nocache": {"kind": "token", "prefix_cache": False},
    "token-page-4": {"kind": "token", "page_size": 4},
    "token-need-sort": {"kind": "token", "page_size": 4, "need_sort": True},
    "token-page-eviction": {
        "kind": "token",
        "eviction_unit": "page",
        "split_touches_suffix": False,
        "demand_slack": 0,
    },
    "contiguous-max": {"kind": "contiguous", "page_size": 4, "sizing": "max", "max_model_len": 36},
    "contiguous-pow2": {"kind": "contiguous", "sizing": "pow2"},
    "contiguous-declared": {"kind": "contiguous", "sizing": "declared", "placement": "buddy"},
    "contiguous-oracle": {"kind": "contiguous", "sizing": "oracle", "page_size": 16},
}


@pytest.mark.parametrize("spec", DESIGNS.values(), ids=DESIGNS)
def test_every_design_of_ours_conforms(spec):
    report = conformance(spec, seeds=range(3), ops=120)
    report.raise_if_failed()
    forks = isinstance(make_allocator(spec, num_pages=8), SupportsFork)
    assert len(report.findings) == 9 + forks
    assert ("forks share, writes do not" in [finding.law for finding in report.findings]) == forks


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_third_party_allocator_of_under_60_lines_conforms(page_size):
    source = inspect.getsource(third_party).splitlines()
    assert sum(bool(line.strip()) for line in source) < 60
    report = kv.testing.conformance(StackAllocator, page_size=page_size)
    report.raise_if_failed()
    assert str(report).startswith("StackAllocator: 9 of 9 laws passed")


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_each_fault_is_found_and_named(broken):
    page_size = 4 if broken.__name__ == "HitAcrossTenants" else 16
    report = conformance(broken, page_size=page_size)
    assert not report
    assert BROKEN[broken] in str(report), report
    with pytest.raises(AssertionError, match=f"{broken.__name__}: "):
        report.raise_if_failed()


def test_a_random_failure_names_its_seed_and_operation():
    report = conformance(next(b for b in BROKEN if b.__name__ == "ForgottenMove"))
    detail = {finding.law: finding.detail for finding in report.failures}["random operations"]
    assert detail.startswith("seed 0, op ")


def test_an_instance_is_refused_since_laws_need_fresh_pools():
    with pytest.raises(ValueError, match="found an instance"):
        conformance(StackAllocator(8))
    with pytest.raises(ValueError, match="num_pages: expected at least 8"):
        conformance(StackAllocator, num_pages=2)


def test_a_constructor_that_fails_is_a_finding_of_every_law():
    class Unbuildable(StackAllocator):
        def __init__(self, num_pages):
            raise RuntimeError("no device")

    report = conformance(Unbuildable)
    assert len(report.failures) == len(report.findings)
    assert "raised RuntimeError: no device" in str(report)


class NeedsRules(BlockAllocator):
    """Inherits a constructor that needs a design."""


class SizedByOtherName(StackAllocator):
    def __init__(self, pages):
        super().__init__(pages)


class PositionalOnly(StackAllocator):
    def __init__(self, num_pages, /):
        super().__init__(num_pages)


@pytest.mark.parametrize("wrong", [NeedsRules, SizedByOtherName, PositionalOnly], ids=lambda one: one.__name__)
def test_a_constructor_that_cannot_be_called_names_what_is_called_and_what_was_found(wrong, monkeypatch):
    name = wrong.__name__
    said = rf"{name}: expected a constructor that takes {name}\(num_pages=.*\), found {name}\({{}}"
    found = {"NeedsRules": "num_pages: .*design", "SizedByOtherName": "pages", "PositionalOnly": "num_pages, /"}[name]
    with pytest.raises(ValueError, match=said.format(found)):
        kv.compare("chat", requests=2, pool="1 GiB", allocators=["vllm", wrong])
    with pytest.raises(ValueError, match=said.format(found)):
        kv.make_allocator(wrong, num_pages=8)
    with pytest.raises(ValueError, match=said.format(found)):
        conformance(wrong)
    monkeypatch.setattr(config, "_entry_points", lambda: {"theirs": lambda: wrong})
    with pytest.raises(ValueError, match=said.format(found)):
        kv.make_allocator("theirs", num_pages=8)


def test_an_override_that_a_class_does_not_take_is_named():
    with pytest.raises(ValueError, match=r"takes StackAllocator\(num_pages=8, colour='red'\), found .*'colour'"):
        kv.make_allocator(StackAllocator, num_pages=8, colour="red")


def test_an_error_inside_a_constructor_stays_what_it_is():
    class Faulty(StackAllocator):
        def __init__(self, num_pages):
            super().__init__(num_pages, nonsense=1)

    with pytest.raises(TypeError, match="nonsense"):
        kv.make_allocator(Faulty, num_pages=8)


def test_the_allocator_in_contributing_conforms_and_is_compared():
    page = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict = {}
    exec(compile(example, "CONTRIBUTING.md", "exec"), found)
    assert found["result"].allocators == ["vllm", "WideBlocks"]
    hits = found["result"].summary.set_index("allocator")["token_hit_rate"]
    assert hits["WideBlocks"] < hits["vllm"]


def test_without_torch_the_adapters_are_skipped_with_the_reason():
    script = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, NoTorch())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else real(name, package)
import kvarena as kv
report = kv.testing.conformance("sglang", seeds=[0], ops=40)
report.raise_if_failed()
print(report.findings[-1])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "status='skipped', detail='torch is not installed'" in done.stdout
