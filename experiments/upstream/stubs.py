"""Import a few files of a large package from an unpacked wheel, with stand-ins for all that they merely mention.

An allocator is a dozen plain Python files of a server that needs a GPU, compiled kernels and a hundred packages. Here
the named modules are the real files; any other module of the package, and any third-party module that cannot be
imported, is a stand-in: every name in it exists, can be subclassed, called, subscripted and put into annotations, and
does nothing. A package's own `__init__` is not run.

A stand-in that decides something would falsify the comparison, so a stand-in's value is never a number, a string or
a collection: arithmetic, iteration, comparison, equality and truth of one raise TypeError that names it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


class _StandInType(type):
    """The class of stand-ins, which are classes themselves, so that they can be subclassed."""

    def __new__(mcs, name: str, bases: tuple[type, ...], names: dict[str, Any], **_: Any) -> _StandInType:
        return super().__new__(mcs, name, bases, names)

    def __init__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, names)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "stands_for" not in vars(cls):
            return super().__call__(*args, **kwargs)
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], _StandInType):
            return args[0]  # used as a decorator
        return stand_in(f"{cls.__name__}()")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __mro_entries__(cls, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (cls,)

    def __repr__(cls) -> str:
        return f"<stand-in for {cls.__name__}>"

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *exception: object) -> None:
        return None


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(cls: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{cls!r} was used as a value ({name}); the real one is needed here")

    return refuse


_VALUES = ("bool", "iter", "len", "int", "float", "index", "contains", "eq", "ne", "lt", "le", "gt", "ge")
_SUMS = ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "truediv", "mod", "neg", "and", "invert")
for _name in (*_VALUES, *_SUMS):
    setattr(_StandInType, f"__{_name}__", _refuse(_name))
_StandInType.__hash__ = type.__hash__  # type: ignore[method-assign]


def stand_in(name: str) -> Any:
    """A stand-in that says `name`."""
    return _StandInType(name, (), {"stands_for": name})


class Struct:
    """Stands in for msgspec's where that is not installed: a plain dataclass of the annotated fields."""

    def __init_subclass__(cls, kw_only: bool = False, **_: Any) -> None:
        for name in vars(cls).get("__annotations__", {}):
            default = vars(cls).get(name)
            if isinstance(default, list | dict | set):
                setattr(cls, name, dataclasses.field(default_factory=default.copy))
        dataclasses.dataclass(kw_only=kw_only)(cls)


# What stand-ins of third-party packages are given; two packages in one process share them.
THIRD_PARTY: dict[str, dict[str, Any]] = {"msgspec": {"Struct": Struct, "field": dataclasses.field}}


class _StandInModule(ModuleType):
    """Any name is there; `attributes` are given ones."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = stand_in(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Loader(importlib.abc.Loader):
    """Makes stand-ins, and bare packages whose submodules are found in a folder."""

    def __init__(self, folder: Path | None, given: dict[str, Any]) -> None:
        self.folder = folder
        self.given = given

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = [] if self.folder is None else [str(self.folder)]
        vars(module).update(self.given)


class Finder(importlib.abc.MetaPathFinder):
    """Finds `package` in `root`: modules for which `is_real` holds as they are, others as stand-ins.

    given    names that modules are given, by module: what stand-ins cannot stand in for
    absent   third-party packages that get stand-ins where they cannot be imported
    """

    def __init__(
        self,
        root: Path,
        package: str,
        is_real: Callable[[str], bool],
        given: dict[str, dict[str, Any]],
        absent: Iterable[str] = (),
    ) -> None:
        self.root, self.package, self.is_real, self.given = root, package, is_real, THIRD_PARTY | given
        self.absent = {name for name in absent if not _importable(name)}
        self.stood_in: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if top in self.absent:
            return self._stand_in(name, None)
        if top != self.package:
            return None
        file = self.root.joinpath(*name.split("."))
        if self.is_real(name):
            # Where it is missing, its importer hears of it: what decides has no stand-in.
            return importlib.machinery.PathFinder.find_spec(name, [str(file.parent)])
        return self._stand_in(name, file if file.is_dir() else None)

    def _stand_in(self, name: str, folder: Path | None) -> importlib.machinery.ModuleSpec:
        self.stood_in.append(name)
        loader = _Loader(folder, self.given.get(name, {}))
        return importlib.machinery.ModuleSpec(name, loader, is_package=True)


def _importable(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def install(finder: Finder) -> None:
    """From now on imports of the package go through `finder`, those inside its functions too. Once a process and
    package: ValueError when it was imported already, from elsewhere."""
    for other in sys.meta_path:
        if isinstance(other, Finder) and other.package == finder.package:
            if other.root == finder.root:
                return
            raise ValueError(f"{finder.package} comes from {other.root} in this process; {finder.root} needs another")
    if finder.package in sys.modules:
        raise ValueError(f"{finder.package} was imported before {finder.root} was asked for; use another process")
    sys.meta_path.insert(0, finder)


def version_of(package: str, root: Path | None) -> str:
    """From the metadata of the installation, or of the unpacked wheel."""
    if root is None:
        from importlib.metadata import version

        return version(package)
    for file in sorted(root.glob(f"{package}-*.dist-info/METADATA")):
        match = re.search(r"^Version: (\S+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if match:
            return match[1]
    return "unknown"


def names_of(modules: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """The named objects of these modules. ImportError: a version has no such module or name."""
    found: dict[str, Any] = {}
    for module, names in modules.items():
        loaded = importlib.import_module(module)
        missing = [name for name in names if isinstance(getattr(loaded, name, None), _StandInType | None)]
        if missing:
            raise ImportError(f"{module} has no {', '.join(missing)}")
        found |= {name: getattr(loaded, name) for name in names}
    return found
