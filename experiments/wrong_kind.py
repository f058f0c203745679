"""A result of another kind than a command reads is said to be one, in place of naming the first field that it lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvarena.experiments.foreign import MAX_JSON_BYTES

Given = ParamSpec("Given")
Found = TypeVar("Found")


def reads(*kinds: str) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """For a function that reads what stands at its first argument, a path: when it raises ValueError and a result of
    none of `kinds` (names of `verify_kinds.KINDS`) stands there, the error is that. Costs nothing while all is well.

    >>> load_rate("results/capacity")                                                         # doctest: +SKIP
    ValueError: results/capacity: is a result of another kind, capacity (`kvarena capacity`); expected rate
    """

    def decorated(load: Callable[Given, Found]) -> Callable[Given, Found]:
        @functools.wraps(load)
        def loaded(*given: Given.args, **named: Given.kwargs) -> Found:
            try:
                return load(*given, **named)
            except ValueError as error:
                path = next(iter((*given, *named.values())))
                other = _other_kind(path, kinds)
                if other is None:
                    raise
                raise ValueError(f"{path}: {other}; expected {' or '.join(kinds)}") from error

        return loaded

    return decorated


def _other_kind(path: object, kinds: tuple[str, ...]) -> str | None:
    from kvarena.experiments.verify_kinds import KINDS, kind_name

    if not isinstance(path, str | Path) or _too_long(Path(path)):
        return None
    found = kind_name(Path(path))
    if found is None or found in (*kinds, "partial"):  # what is partial says so itself
        return None
    command = next(kind.command for kind in KINDS if kind.name == found)
    by = command if command.startswith(("python", "pytest")) else f"kvarena {command}"
    return f"is a result of another kind, {found} (`{by}`)"


def _too_long(path: Path) -> bool:
    """Whether no reader would take it: what was read of it in vain is still held while an error is looked into."""
    document = path / "result.json" if path.is_dir() else path
    return document.is_file() and document.stat().st_size > MAX_JSON_BYTES
