"""The design of an allocator as data, presets, the registry, and `make_allocator`.

Every point where the two upstream designs differ is a field of `Design`. The presets are the upstreams'
(vLLM 0.32.0, SGLang 0.5.22): allocator rules only. Each of the two kinds has fast forms for its own rules; where a
field stands at a value that they do not honour, `make_allocator` takes the general form, which honours all of them.
What no form honours raises with the reason, so a config never means less than it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from inspect import signature
from typing import Any, Literal

from kvarena.allocators.interface import Gate, KVAllocator
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

Kind = Literal["block", "token", "contiguous", "exact"]
ENTRY_POINT_GROUP = "kvarena.allocators"


class Design(BaseModel):
    """One allocator's rules.

    page_size             tokens a page, >= 1
    prefix_cache          False: nothing is ever shared or kept
    publish               when full prompt pages enter the cache: at `reserve` (vLLM: when the step is
                          scheduled) or at `commit` (SGLang: the checkpoint after the prefill)
    publish_generated     when pages of generated tokens enter it: as they fill, or at the finish
    duplicates            keep equal pages side by side, or merge them and rewrite the row
    eviction_unit         what goes at once: one page, or a whole leaf of the tree
    eviction_order        which unused content goes first
    index                 queue: one queue of all pages nobody holds, cached or not, is what pages are taken from
                          (vLLM); tree: free pages apart, and when they run out ends of the prefix tree go (SGLang)
    recency               when content counts as used: at its release (vLLM), or at each access: match, publication,
                          finish (SGLang)
    split_touches_suffix  a match that splits an edge refreshes the cut-off rest too (SGLang)
    demand_slack          pages asked for on top of the need, a request, when evicting (SGLang at page > 1: 1)
    preempt_keeps         what stays cached after a preemption: all that was published, or only what was
                          checkpointed (the prompt's whole pages)
    refused_evicts        a reserve that is refused has evicted what it could before (SGLang); else it changes nothing
    unhashed_to_head      freed pages without content go to the head of the free queue; else behind all that is in it,
                          cached pages too. With index = tree they are apart anyway, and False stands for SGLang's
                          order: behind the free ones at page_size 1, before them above
    reversed_release      a released sequence frees its last page first
    page_keys             what makes pages equal where images stand: their tokens, and beside them the images (hash,
                          vLLM), or tokens replaced by ids of the images' content (tokens, SGLang)
    hash_unit             tokens; a hit may end inside a page, at a prompt's end rounded down to this unit (vLLM 0.32.0,
                          hybrid models); None: hits are whole pages
    gate                  admission test
    last_token_rule       a hit never covers the last token, so one token is left to compute
    sliding_window        tokens a query sees, the current one included (block only; None: all)
    retention_interval    with a window: 0 publishes the prompt's tail, None every page, k also every k tokens
    hash_fn               page hash of the block design: "xxh3_64", "xxh3_128" or "sha256". It decides nothing but time:
                          a hit is confirmed by its tokens
    form                  block: "runs" keeps pages by the run (no windows, no chosen hash), "hashed" page by page;
                          they decide alike, and "auto" takes runs where it can. block and token: "general" honours
                          every field above; "auto" takes it where nothing faster does
    need_sort             token only: freed pages wait and are merged sorted (prefill/decode disaggregation)
    sizing, placement     contiguous only: how long a run is reserved, and where
    max_model_len         contiguous only, for sizing = "max": tokens
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    kind: Kind = "block"
    page_size: int = Field(16, ge=1)
    prefix_cache: bool = True
    publish: Literal["reserve", "commit"] = "reserve"
    publish_generated: Literal["filled", "finish"] = "filled"
    duplicates: Literal["keep", "merge"] = "keep"
    eviction_unit: Literal["page", "leaf"] = "page"
    eviction_order: Literal["lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "random", "sieve"] = "lru"
    index: Literal["queue", "tree"] = "queue"
    recency: Literal["release", "access"] = "release"
    split_touches_suffix: bool = False
    demand_slack: int = Field(0, ge=0)
    preempt_keeps: Literal["all", "checkpointed"] = "all"
    refused_evicts: bool = False
    unhashed_to_head: bool = True
    reversed_release: bool = True
    page_keys: Literal["hash", "tokens"] = "hash"
    hash_unit: int | None = Field(None, ge=1)
    gate: Gate = Gate()
    last_token_rule: bool = True
    sliding_window: int | None = Field(None, ge=1)
    retention_interval: int | None = Field(0, ge=0)
    hash_fn: Literal["xxh3_64", "xxh3_128", "sha256"] = "xxh3_64"
    form: Literal["auto", "hashed", "runs", "general"] = "auto"
    need_sort: bool = False
    sizing: Literal["max", "pow2", "declared", "oracle"] = "max"
    placement: Literal["first_fit", "buddy"] = "first_fit"
    max_model_len: int | None = Field(None, ge=1)

    @field_validator(
        *("page_size", "demand_slack", "hash_unit", "sliding_window", "retention_interval", "max_model_len"),
        mode="before",
    )
    @classmethod
    def _whole(cls, value: Any) -> Any:
        """Any integer type, NumPy's too; true, "16" and 16.0 are none."""
        if value is None:
            return value
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ValueError("expected a whole number")
        return value.__index__()

    @field_validator(
        *("prefix_cache", "split_touches_suffix", "refused_evicts", "unhashed_to_head", "reversed_release"),
        *("last_token_rule", "need_sort"),
        mode="before",
    )
    @classmethod
    def _true_or_false(cls, value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
        return value

    @model_validator(mode="after")
    def _legal(self) -> Design:
        switched = self.switched
        honoured = _SWITCHABLE[self.kind] | (GENERAL if self.is_general else frozenset())
        for name, value in self._differing().items():
            if name not in honoured or (self.is_general and name in _FAST_ONLY and name != "form"):
                general = self.form == "general" and name != "form"
                beside = switched or (("form = 'general'",) if general else ())
                raise ValueError(_not_honoured(self.kind, name, value, beside, honoured))
        if switched and self.form in ("runs", "hashed"):
            raise ValueError(f"form = {self.form!r} does not honour {', '.join(switched)}; use 'general' or 'auto'")
        if self.form == "general" and self.kind not in ("block", "token"):
            raise ValueError(f"form = 'general' serves the kinds block and token, not {self.kind!r}")
        if self.form in ("runs", "hashed") and self.kind != "block":
            raise ValueError(f"form = {self.form!r} is one of kind 'block', not of {self.kind!r}")
        for wrong, reason in _conflicts(self):
            if wrong:
                raise ValueError(reason)
        return self

    def _differing(self) -> dict[str, Any]:
        """Fields at other values than the kind's own."""
        base, fields = _DEFAULTS[self.kind], type(self).model_fields
        values = {name: getattr(self, name) for name in fields}
        return {name: value for name, value in values.items() if value != base.get(name, fields[name].default)}

    @property
    def switched(self) -> tuple[str, ...]:
        """Fields at values that only the general form honours."""
        if self.kind not in ("block", "token"):
            return ()
        return tuple(name for name in self._differing() if name in GENERAL and name not in _SWITCHABLE[self.kind])

    @property
    def is_general(self) -> bool:
        """Whether the general form carries this design out."""
        return self.form == "general" or bool(self.switched)


def _conflicts(chosen: Design) -> list[tuple[bool, str]]:
    """Fields that make no sense together: (do they stand so?, why not)."""
    unit, size = chosen.hash_unit, chosen.page_size
    in_queue = chosen.index == "queue" and chosen.kind == "block"
    return [
        (
            chosen.sliding_window is not None and chosen.eviction_unit != "page",
            "sliding_window needs eviction_unit = 'page'",
        ),
        (
            chosen.index == "queue" and chosen.eviction_order in ("mru", "filo"),
            f"eviction_order = {chosen.eviction_order!r} needs index = 'tree': in a flat queue the newest page is the "
            "start of a chain, and what follows it would stay cached and never be found",
        ),
        (
            in_queue and not chosen.unhashed_to_head and chosen.eviction_order != "lru",
            "unhashed_to_head = False puts pages without content among cached ones by time, which is eviction_order "
            f"= 'lru'; found {chosen.eviction_order!r}",
        ),
        (
            unit is not None and (unit >= size or size % unit > 0),
            f"hash_unit = {unit}: expected a divisor of the page size {size} below it; None for whole pages",
        ),
        (
            unit is not None and not chosen.prefix_cache,
            "hash_unit needs prefix_cache = True: nothing is found otherwise",
        ),
    ]


def _not_honoured(kind: str, name: str, value: Any, switched: tuple[str, ...], honoured: frozenset[str]) -> str:
    if switched and name in _FAST_ONLY:
        return (
            f"{name} = {value!r} is not honoured together with {', '.join(switched)}: only kind {kind!r} by itself is"
        )
    return f"{name} = {value!r} is not honoured by kind {kind!r}; fields that it honours: {', '.join(sorted(honoured))}"


# What each kind does by default, and which fields it honours at other values.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "block": {"kind": "block"},
    "token": {
        "kind": "token",
        "page_size": 1,
        "publish": "commit",
        "publish_generated": "finish",
        "duplicates": "merge",
        "eviction_unit": "leaf",
        "split_touches_suffix": True,
        "demand_slack": 1,
        "preempt_keeps": "checkpointed",
        "index": "tree",
        "recency": "access",
        "refused_evicts": True,
        "unhashed_to_head": False,
        "reversed_release": False,
        "page_keys": "tokens",
    },
    "contiguous": {"kind": "contiguous", "page_size": 1, "prefix_cache": False},
    "exact": {"kind": "exact", "page_size": 1, "publish": "commit"},
}
_SWITCHABLE: dict[str, frozenset[str]] = {
    "block": frozenset(
        {
            "kind",
            "page_size",
            "prefix_cache",
            "gate",
            "last_token_rule",
            "sliding_window",
            "retention_interval",
        }
        | {"hash_fn", "form"}
    ),
    "token": frozenset(
        {"kind", "page_size", "prefix_cache", "gate", "last_token_rule", "need_sort", "form"}
        | {"eviction_unit", "eviction_order", "split_touches_suffix", "demand_slack"}
    ),
    "contiguous": frozenset({"kind", "page_size", "gate", "sizing", "placement", "max_model_len"}),
    "exact": frozenset({"kind", "page_size", "gate"}),
}
GENERAL = frozenset(  # fields by which block and token differ, or may: the general form honours all of them
    {"publish", "publish_generated", "duplicates", "eviction_unit", "eviction_order", "index", "recency", "page_keys"}
    | {"split_touches_suffix", "demand_slack", "preempt_keeps", "refused_evicts", "unhashed_to_head"}
    | {"reversed_release", "hash_unit"}
)
_FAST_ONLY = frozenset({"sliding_window", "retention_interval", "hash_fn", "need_sort", "form"})
_CLASSES = {
    "block": ("kvarena.allocators.block", "BlockAllocator"),
    "token": ("kvarena.allocators.token", "TokenAllocator"),
    "contiguous": ("kvarena.allocators.contiguous", "ContiguousAllocator"),
    "exact": ("kvarena.allocators.exact", "ExactAllocator"),
    "general": ("kvarena.allocators.general", "GeneralAllocator"),
}
PRESETS: dict[str, dict[str, Any]] = {
    "vllm": {"kind": "block", "page_size": 16},
    "sglang": {"kind": "token", "page_size": 1},
}
LABELS = {
    "block": "block (vLLM 0.32.0 rules)",
    "token": "token (SGLang 0.5.22 rules)",
    "contiguous": "contiguous",
    "exact": "exact prompts",
}

AllocatorSpec = str | Mapping[str, Any] | Design | type[KVAllocator] | KVAllocator


def design(spec: str | Mapping[str, Any] | Design) -> Design:
    """Resolve a preset name or a mapping with `kind` into a full `Design`; ValueError lists what is allowed."""
    if isinstance(spec, Design):
        return spec
    if isinstance(spec, str):
        if spec in PRESETS:
            spec = PRESETS[spec]
        elif spec in _DEFAULTS:
            spec = {"kind": spec}
        else:
            allowed = ", ".join([*PRESETS, *_DEFAULTS, *_entry_points()])
            raise ValueError(f"allocator {spec!r} is unknown; known: {allowed}")
    if not isinstance(spec, Mapping):
        raise ValueError(f"allocator: expected a name, a table with `kind` or a Design, found {spec!r}")
    kind = spec.get("kind")
    if kind not in _DEFAULTS:
        raise ValueError(f"allocator kind: expected one of {', '.join(_DEFAULTS)}, found {kind!r}")
    try:
        return Design(**{**_DEFAULTS[kind], **spec})
    except ValidationError as error:
        raise ValueError(_readable(error)) from None


def make_allocator(spec: AllocatorSpec, *, num_pages: int, **overrides: Any) -> KVAllocator:
    """Build an allocator of `num_pages` pages (the padding page is on top).

    spec: "vllm", "sglang", a kind, a mapping or `Design`, the name of an entry point in group
    `kvarena.allocators`, or a KVAllocator class, called as `spec(num_pages=num_pages, **overrides)`: ValueError when
    its constructor needs anything else, or takes no such override.
    """
    if isinstance(spec, KVAllocator):
        return spec
    if isinstance(num_pages, bool) or not hasattr(num_pages, "__index__") or not 1 <= num_pages < 2**31:
        raise ValueError(
            f"num_pages: expected a whole number from 1 to 2^31 - 1, page ids being int32; found {num_pages!r}"
        )
    num_pages = int(num_pages)
    if isinstance(spec, type):
        return _built(_of_class(spec), num_pages, overrides)
    if isinstance(spec, str) and spec in (plugins := _entry_points()):
        return _built(plugins[spec](), num_pages, overrides)
    chosen = design(spec)
    # `hash_fn` may be a callable, which is no config value: it goes to the constructor.
    extra = {"hash_fn": overrides.pop("hash_fn")} if callable(overrides.get("hash_fn")) else {}
    if overrides:
        chosen = design({**chosen.model_dump(), "gate": chosen.gate, **overrides})
    module, name = _CLASSES["general" if chosen.is_general else chosen.kind]
    return getattr(import_module(module), name)(num_pages, chosen, **extra)


def _of_class(given: type) -> Callable[..., KVAllocator]:
    if not issubclass(given, KVAllocator):
        raise ValueError(f"allocator: expected a subclass of KVAllocator, found {given!r}")
    if missing := sorted(getattr(given, "__abstractmethods__", ())):
        raise ValueError(f"allocator: {given.__name__} lacks {', '.join(missing)}")
    return given


def _built(made_by: Callable[..., KVAllocator], num_pages: int, overrides: Mapping[str, Any]) -> KVAllocator:
    check_constructor(made_by, num_pages=num_pages, **overrides)
    return made_by(num_pages=num_pages, **overrides)


def check_constructor(made_by: Callable[..., KVAllocator], **given: Any) -> None:
    """Raise ValueError, naming both, unless a constructor that is not ours takes `given`, all by name, and needs no
    more."""
    try:
        found = signature(made_by)
    except ValueError:  # of code that is not Python's nobody knows it
        return
    try:
        found.bind(**given)
    except TypeError as error:
        name = getattr(made_by, "__name__", repr(made_by))
        call = ", ".join(f"{field}={value!r}" for field, value in given.items())
        raise ValueError(
            f"allocator: {name}: expected a constructor that takes {name}({call}), found {name}{found}: {error}"
        ) from None


def label(spec: Design) -> str:
    """Legend text of a design: never plain "vLLM" or "SGLang", and the page size where it is not the preset's."""
    text = LABELS[spec.kind]
    if spec.kind == "contiguous":
        # "oracle" must be read in every legend: no server knows a reply's length.
        text += f" ({spec.sizing} sizing, {spec.placement.replace('_', ' ')})"
    own = PRESETS["vllm" if spec.kind == "block" else "sglang"]["page_size"]
    return text if spec.page_size == own else f"{text}, page {spec.page_size}"


def block(**fields: Any) -> Design:
    """A block design (vLLM 0.32.0 rules), with fields replaced: `kv.block(page_size=64)`."""
    return design({"kind": "block", **fields})  # page_size set only where it is stated: `unit = "ids"` goes by that


def token(**fields: Any) -> Design:
    """A token design (SGLang 0.5.22 rules), with fields replaced."""
    return design({**PRESETS["sglang"], **fields})


def contiguous(**fields: Any) -> Design:
    """The baseline from before paging: one reserved run a request."""
    return design({"kind": "contiguous", **fields})


def exact(**fields: Any) -> Design:
    """The textbook prefix cache: whole prompts, freed with their last user."""
    return design({"kind": "exact", **fields})


def _entry_points() -> dict[str, Callable[[], Any]]:
    return {point.name: point.load for point in entry_points(group=ENTRY_POINT_GROUP)}


def _readable(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "allocator"
        if item["type"] == "extra_forbidden":
            lines.append(f"{name}: unknown key; known: {', '.join(Design.model_fields)}")
        else:
            lines.append(f"{name}: {item['msg'].removeprefix('Value error, ')}, found {item['input']!r}"[:400])
    return "; ".join(lines)
