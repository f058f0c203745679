"""The committed faults still fit the sources: every patch applies once, and its tests are there. `make mutants` plants
them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def runner():
    """The module of `make mutants`, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests" / "mutants" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


RUN = runner()
FAULTS = RUN.faults()


def test_there_are_many_faults_in_every_part():
    assert len(FAULTS) >= 60
    files = [fault.file for fault in FAULTS]
    for part in ("allocators/", "prefix/", "kernels/", "experiments/engine/", "experiments/metrics.py"):
        assert sum(file.startswith(part) for file in files) >= 5, part


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_patch_applies_and_its_tests_are_there(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert fault.plant(text) != text
    compile(fault.plant(text), fault.file, "exec")
    named = [argument for argument in fault.tests if argument.endswith(".py")]
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_a_patch_that_no_longer_applies_is_an_error():
    fault = RUN.Fault("x", "f.py", "a = 1", "a = 2", ())
    with pytest.raises(ValueError, match="found it 0 times"):
        fault.plant("b = 1")
    with pytest.raises(ValueError, match="found it 2 times"):
        fault.plant("a = 1; a = 1")
    with pytest.raises(ValueError, match="changes nothing"):
        RUN.Fault("x", "f.py", "a", "a", ()).plant("a")
