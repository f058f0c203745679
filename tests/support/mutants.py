"""Faulty copies of kernel modules: a tolerance counts only if a planted fault exceeds it."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

_numbers = itertools.count()


def mutate(folder: Path, module: str, *replacements: tuple[str, str], helper: str | None = None) -> ModuleType:
    """Import a copy of kvarena.kernels.<module> with each (old, new) replaced; old must occur exactly once.

    With `helper`, the replacements are made in that module instead, and the copy imports the faulty helper.
    """
    number = next(_numbers)
    sources = {name: _source(name) for name in (module, helper) if name is not None}
    target = helper or module
    for old, new in replacements:
        found = sources[target].count(old)
        if found != 1:
            raise ValueError(f"mutant of {target}: expected one occurrence of {old!r}, found {found}")
        sources[target] = sources[target].replace(old, new)
    if helper is not None:
        _write(folder, f"mutant_{number}_{helper}", sources[helper])
        sources[module] = sources[module].replace(f"kvarena.kernels.{helper} ", f"mutant_{number}_{helper} ")
    return _write(folder, f"mutant_{number}_{module}", sources[module])


def _source(module: str) -> str:
    found = importlib.util.find_spec(f"kvarena.kernels.{module}")
    if found is None or found.origin is None:
        raise ValueError(f"mutant: no module kvarena.kernels.{module}")
    return Path(found.origin).read_text()


def _write(folder: Path, name: str, source: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
