"""The allocators of a comparison: each with a short name, a legend label and a way to build it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from kvarena.allocators.config import PRESETS, Design, design, label, make_allocator
from kvarena.allocators.interface import KVAllocator

KINDS = ("block", "token", "contiguous", "exact")
ID_PAGE = 1  # page_size where a trace is replayed by its ids: it counts ids then


@dataclass(frozen=True)
class AllocatorEntry:
    """One allocator of a run.

    name    short and unique in the run: the key in every table
    label   legend text: the rules, behind a name of the user's own that says something else
    kind    "block", "token", "contiguous", "exact", or "custom" for somebody else's
    design  its rules; None for a custom one
    source  what `make_allocator` is given for a custom one: a class, an instance or an entry point's name
    """

    name: str
    label: str
    kind: str
    page_size: int
    design: Design | None = None
    source: Any = None

    def build(self, num_pages: int) -> KVAllocator:
        """A fresh allocator of `num_pages` pages. An instance is used as it is, after `reset`."""
        if isinstance(self.source, KVAllocator):
            return _reused(self.source, num_pages)
        return make_allocator(self.source if self.design is None else self.design, num_pages=num_pages)

    @property
    def last_token_rule(self) -> bool:
        return self.design is None or self.design.last_token_rule

    @property
    def hit_grain(self) -> int:
        """Tokens to which a hit is rounded down at most: a page, or a unit of it where hits may end inside pages."""
        return self.page_size if self.design is None else self.design.hash_unit or self.page_size

    @property
    def shares_prefixes(self) -> bool:
        """Whether the infinite-cache ceiling applies: prefixes are cached and outlive their last user."""
        if self.design is None:
            return True
        return self.kind in ("block", "token") and self.design.prefix_cache

    def serves_last_tokens(self, result_lag: int) -> bool:
        """Whether a reply's last token can be served later: a step that ran ahead wrote its KV. A design that publishes
        what it reserves does not know that token then, unless it publishes once more at the end."""
        if self.design is None or not result_lag:
            return bool(result_lag)
        return (self.design.publish, self.design.publish_generated) != ("reserve", "filled")

    def as_toml(self) -> dict[str, Any]:
        """All fields, for the resolved config. None is left out, or is "none" where None is not the default."""
        if self.design is None:
            text = self.source if isinstance(self.source, str) else _class_name(self.source)
            return {"name": self.name, "custom": text, "page_size": self.page_size}
        return {"name": self.name, **_plain(self.design)}


def allocator_entries(specs: Iterable[Any], unit: str = "tokens") -> list[AllocatorEntry]:
    """Resolve what the user named. ValueError for unknown names, keys or values, and for two equal names."""
    entries = [allocator_entry(spec, unit) for spec in specs]
    if not entries:
        raise ValueError("allocators: at least one is needed")
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise ValueError(f"allocators: {entry.name!r} is named twice; give one of them another name")
        seen.add(entry.name)
    return entries


def allocator_entry(spec: Any, unit: str = "tokens") -> AllocatorEntry:
    """One allocator from a preset name, `kind:field=value:...`, a mapping, a `Design`, a class or an instance.

    unit  of the workload; with "ids" a design whose page size is not stated has an id a page: counted in ids, the
          presets' own page sizes would be pages of unlike tokens
    """
    if isinstance(spec, Mapping) and isinstance(spec.get("source"), type | KVAllocator):
        spec = spec["source"]
    if isinstance(spec, KVAllocator) or (isinstance(spec, type) and issubclass(spec, KVAllocator)):
        return _of_object(spec)
    if isinstance(spec, str):
        return allocator_entry(parse_spec(spec), unit)
    if not isinstance(spec, Mapping | Design):
        raise ValueError(f"allocators: expected a name, a table, a Design or a KVAllocator, found {spec!r}")
    entry = _of_design(spec, None) if isinstance(spec, Design) else _of_mapping(spec)
    stated = spec.model_fields_set if isinstance(spec, Design) else spec
    return entry if unit == "tokens" or "page_size" in stated else an_id_a_page(entry)


def an_id_a_page(entry: AllocatorEntry) -> AllocatorEntry:
    """The same rules at one id a page; an allocator of the user's own as it is. ValueError for rules that need a larger
    page."""
    own = entry.design
    if own is None or own.page_size == ID_PAGE:
        return entry
    try:
        chosen = design({**own.model_dump(), "gate": own.gate, "page_size": ID_PAGE})
    except ValueError as error:
        wrong = str(error).removeprefix("allocator: ").split(", found {")[0]
        raise ValueError(
            f"allocators: {entry.name}: with unit = 'ids' and no page_size an id is a page: {wrong}"
        ) from None
    derived = bool(_differences(own)) and entry.name == short_name(own)
    return _of_design(chosen, short_name(chosen) if derived else entry.name)


def parse_spec(text: str) -> dict[str, Any]:
    """The command line's short form.

    >>> parse_spec("block:page_size=64")
    {'kind': 'block', 'page_size': 64}
    >>> parse_spec("vllm")
    {'name': 'vllm'}
    """
    from kvarena.experiments.config import toml_value

    name, *fields = text.split(":")
    spec: dict[str, Any] = {"kind": name} if name in KINDS else {"name": name}
    for item in fields:
        key, separator, raw = item.partition("=")
        if not separator:
            raise ValueError(f"allocators: {text!r}: expected NAME:FIELD=VALUE, found {item!r}")
        spec[key] = toml_value(raw)
    return spec


def _of_mapping(spec: Mapping[str, Any]) -> AllocatorEntry:
    fields = {key: _from_toml(key, value) for key, value in spec.items() if key not in ("name", "custom")}
    name = spec.get("name")
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError(f"allocators: name: expected text, found {name!r}")
    if "custom" in spec:
        raise ValueError(f"allocators: {name!r} is an allocator of your own: pass its class to kv.compare")
    if "kind" in fields:
        return _of_design(design(fields), name)
    if name is None:
        raise ValueError("allocators: expected a name or a kind")
    if name in PRESETS or name in KINDS:
        return _of_design(design({**design(name).model_dump(), "gate": design(name).gate, **fields}), None, base=name)
    return _of_entry_point(name, fields)


def _of_design(chosen: Design, name: str | None, base: str | None = None) -> AllocatorEntry:
    text = display_label(chosen)
    told = (None, _preset_name(chosen), short_name(chosen), chosen.kind, f"{chosen.kind}-{chosen.page_size}")
    shown = text if name in told else f"{name}: {text}"
    return AllocatorEntry(name or short_name(chosen), shown, chosen.kind, chosen.page_size, chosen)


def _of_entry_point(name: str, fields: Mapping[str, Any]) -> AllocatorEntry:
    if fields:
        raise ValueError(f"allocators: {name!r} takes no fields here, found {', '.join(fields)}")
    built = make_allocator(name, num_pages=1)  # ValueError lists the known names
    return AllocatorEntry(name, name, "custom", built.page_size, None, name)


def _of_object(source: Any) -> AllocatorEntry:
    built = make_allocator(source, num_pages=1)
    name = _class_name(source)
    return AllocatorEntry(name, name, "custom", built.page_size, None, source)


def _class_name(source: Any) -> str:
    return source.__name__ if isinstance(source, type) else type(source).__name__


def _reused(allocator: KVAllocator, num_pages: int) -> KVAllocator:
    if allocator.num_pages != num_pages:
        raise ValueError(
            f"pool: the given {type(allocator).__name__} has {allocator.num_pages} pages, the pool {num_pages}; "
            "pass its class, or this page count"
        )
    if not allocator.reset():
        raise ValueError(f"allocators: the given {type(allocator).__name__} has live requests")
    return allocator


def _preset_name(chosen: Design) -> str | None:
    return {"block": "vllm", "token": "sglang"}.get(chosen.kind)


def _differences(chosen: Design) -> dict[str, Any]:
    """Fields at other values than the kind's own default."""
    own = design(_preset_name(chosen) or chosen.kind)
    return {name: getattr(chosen, name) for name in Design.model_fields if getattr(chosen, name) != getattr(own, name)}


def short_name(chosen: Design) -> str:
    """The preset's name, or kind and what differs from it.

    >>> from kvarena.allocators.config import design
    >>> short_name(design("vllm")), short_name(design({"kind": "block", "page_size": 64}))
    ('vllm', 'block-page_size=64')
    """
    fields = _differences(chosen)
    if not fields:
        return _preset_name(chosen) or chosen.kind
    return "-".join([chosen.kind, *(f"{name}={_text(value)}" for name, value in fields.items())])


def display_label(chosen: Design) -> str:
    """Legend text: the design, and every field that is not its preset's (those that `label` tells are left out)."""
    told = ("page_size", "sizing", "placement")
    fields = {name: value for name, value in _differences(chosen).items() if name not in told}
    extra = [f"{name.replace('_', ' ')} {_text(value)}" for name, value in fields.items()]
    return ", ".join([label(chosen), *extra])


def _text(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        return "(" + " ".join(f"{k}={_text(v)}" for k, v in _table(value).items()) + ")"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _plain(chosen: Design) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in Design.model_fields.items():
        value = getattr(chosen, name)
        if value is None:
            if field.default is not None:
                values[name] = "none"
        else:
            values[name] = _table(value) if is_dataclass(value) and not isinstance(value, type) else value
    return values


def _table(value: Any) -> dict[str, Any]:
    """Fields of a dataclass; what is None is left out, since TOML has no null."""
    return {name: part for name, part in asdict(value).items() if part is not None}


def _from_toml(key: str, value: Any) -> Any:
    field = Design.model_fields.get(key)
    return None if value == "none" and field is not None and field.default is not None else value
