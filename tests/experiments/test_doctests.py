"""The examples in docstrings run."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = ("bench.tables", "budget", "ceilings", "config", "metrics", "models", "specs", "sweep_points", "walk")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(import_module(f"kvarena.experiments.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
