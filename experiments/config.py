"""What a comparison is asked to do, as data: TOML in, the resolved TOML out.

Sections [workload], [pool], [engine] and one [[allocators]] table each. Field names are unique over the sections,
so every field is a keyword of `kv.compare` too, and `--set live=8` means the same as `--set engine.live=8`.
Nothing writes back into a config: what was asked stays what is saved.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from kvarena.experiments.budget import check_size
from kvarena.experiments.foreign import MAX_TOML_BYTES, parse_toml, read_text
from kvarena.experiments.models import ModelShape, model_shape
from kvarena.experiments.specs import AllocatorEntry, allocator_entries
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, field_validator

SCHEMA_VERSION = 1

PositiveInt = Annotated[StrictInt, Field(ge=1, lt=2**63)]
PoolSize = PositiveInt | StrictStr


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class WorkloadConfig(_Section):
    """Which requests.

    trace     name of a built-in workload or a held trace, or the path of a file
    format    of the file; None: told by its contents
    seeds     how many seeds (0, 1, ...), or a list of them; a trace without randomness has one run
    requests  only the first so many; None: all
    unit      "tokens", or "ids": each id of a hashed trace is one token. page_size then counts ids, and where it is not
              stated an id is a page
    resample  k >= 1: the k-th draw of the trace's sessions or prefix families (`families.py`); None: as it is
    replies   what is assumed of replies: "trace" (as the trace has them), "none", "unreachable", "inferred" or
              "recorded" (see `traces/outputs.py`); "band" replays prompts alone and, for the lower edge of the rate,
              once more with unreachable replies
    options   parameters of a built-in workload or of a recording, reader options of a file's format
    """

    trace: StrictStr = "chat"
    format: StrictStr | None = None
    seeds: PositiveInt | Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1)] = 1
    requests: PositiveInt | None = None
    unit: Literal["tokens", "ids"] = "tokens"
    replies: Literal["trace", "none", "unreachable", "inferred", "recorded", "band"] = "trace"
    resample: PositiveInt | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def seed_list(self) -> list[int]:
        """The seeds themselves."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: int | list[int]) -> int | list[int]:
        if isinstance(seeds, list) and len(set(seeds)) < len(seeds):
            raise ValueError("a seed is named twice")
        return seeds

    @field_validator("options")
    @classmethod
    def _names_no_code(cls, options: dict[str, Any]) -> dict[str, Any]:
        # A config may come from anybody, and in a result folder too: loading it must not import what it names.
        if "tokenizer" in options:
            raise ValueError("tokenizer: a config names no code; convert the trace first (kvarena trace convert)")
        return options


class PoolConfig(_Section):
    """How much memory, the same for every allocator.

    pool    "16 GiB"; "10 %" of the bytes that the trace's distinct tokens take; a page count (an integer: only
            where all allocators share one page size); a list of these; or "sweep": 8 sizes up to 100 %
    model   name of a model shape, or its numbers
    """

    pool: PoolSize | Annotated[list[PoolSize], Field(min_length=1)] = "sweep"
    model: StrictStr | ModelShape = "llama-3-8b"

    @property
    def sizes(self) -> list[int | str]:
        """The sizes as a list."""
        return list(self.pool) if isinstance(self.pool, list) else [self.pool]

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return model_shape(self.model)

    @field_validator("pool")
    @classmethod
    def _sizes(cls, pool: PoolSize | list[PoolSize]) -> PoolSize | list[PoolSize]:
        for size in pool if isinstance(pool, list) else [pool]:
            if isinstance(size, str):
                check_size(size)
        return pool

    @field_validator("model", mode="before")
    @classmethod
    def _numbers(cls, model: Any) -> Any:
        # By itself, so that a fault is told by its own fields and not by each branch of the union.
        return model_shape(model) if isinstance(model, dict) else model

    @field_validator("model")
    @classmethod
    def _known(cls, model: str | ModelShape) -> str | ModelShape:
        model_shape(model)
        return model


class EngineConfig(_Section):
    """How requests pass through an allocator when no engine runs.

    live            requests that overlap; 1: each is released before the next arrives
    outputs         "none": prompts only; "replay": the trace's replies are appended too
    reply_chunk     reply tokens reserved and committed at once; None: a request's share of a step in one go
    declared_max_tokens  reply tokens that a client allows for (only `contiguous` with sizing "declared" reserves them)
    too_long        a request longer than the pool: "error", or "reject" and count it
    steps_every     a row of steps.parquet every so many steps
    kernel_batches  batches of the replay pushed through the real kernels (needs torch; 0: none)
    """

    live: PositiveInt = 1
    outputs: Literal["none", "replay"] = "none"
    reply_chunk: PositiveInt | None = None
    declared_max_tokens: PositiveInt = 4096
    too_long: Literal["error", "reject"] = "error"
    steps_every: PositiveInt = 1
    kernel_batches: Annotated[StrictInt, Field(ge=0)] = 2


class Config(_Section):
    """One comparison."""

    schema_version: Literal[1] = 1
    workload: WorkloadConfig = WorkloadConfig()
    pool: PoolConfig = PoolConfig()
    engine: EngineConfig = EngineConfig()
    allocators: tuple[dict[str, Any], ...] = ({"name": "vllm"}, {"name": "sglang"})

    def entries(self) -> list[AllocatorEntry]:
        """The allocators, resolved. Raises ValueError for an unknown name, key or value."""
        return allocator_entries(self.allocators, self.workload.unit)

    def resolved(self) -> dict[str, Any]:
        """Every field with its value, ready for TOML; what is None is left out."""
        data = self.model_dump(exclude={"allocators"}, exclude_none=True)
        return {**data, "allocators": [entry.as_toml() for entry in self.entries()]}


SECTIONS: dict[str, type[_Section]] = {"workload": WorkloadConfig, "pool": PoolConfig, "engine": EngineConfig}
SECTION_OF = {field: name for name, section in SECTIONS.items() for field in section.model_fields}


def load_config(path: Path, sets: Iterable[str] = ()) -> Config:
    """Read a TOML config. Raises ValueError naming file, line and field, with what is allowed."""
    text, sets = read_text(path, MAX_TOML_BYTES, "a config"), list(sets)
    data = parse_toml(text, path)
    try:
        return config_from_mapping(apply_sets(data, sets))
    except ConfigError as error:
        if sets:  # the field may come from --set
            raise ValueError(f"{path} with --set: {error}") from None
        raise ValueError(f"{path}:{_line_of(text, error.field)}: {error}") from None


class ConfigError(ValueError):
    """A config says something that is not allowed; `field` is the dotted name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def config_from_mapping(data: Mapping[str, Any]) -> Config:
    """Validate sections and allocators. Raises ConfigError for the first fault found."""
    try:
        given = dict(data)
        if isinstance(given.get("allocators"), list | tuple):
            given["allocators"] = tuple(
                {"name": item} if isinstance(item, str) else item for item in given["allocators"]
            )
        config = Config(**given)
    except ValidationError as error:
        raise _first_fault(error) from None
    try:
        config.entries()
    except ValueError as error:
        raise ConfigError("allocators", str(error).removeprefix("allocators: ")) from None
    return config


def config_from_keywords(keywords: Mapping[str, Any], base: Config | None = None) -> Config:
    """A config from flat field names, on top of `base`. None leaves a field as it is."""
    data = (base or Config()).model_dump()
    for name, value in keywords.items():
        if value is None:
            continue
        if name == "allocators":
            data["allocators"] = value
        elif name in SECTION_OF:
            data[SECTION_OF[name]][name] = value
        else:
            raise ConfigError(name, f"unknown field; known: {', '.join([*SECTION_OF, 'allocators'])}")
    return config_from_mapping(data)


def apply_sets(data: Mapping[str, Any], sets: Iterable[str]) -> dict[str, Any]:
    """`key=value` pairs on top of a config. Keys are field names, alone or with their section, or
    `allocators.N.FIELD`; values are TOML literals, anything else is text."""
    out: dict[str, Any] = copied(dict(data))  # the caller's tables, nested ones too, stay as they are
    for item in sets:
        key, separator, raw = item.partition("=")
        if not separator:
            raise ConfigError(key, f"--set expects key=value, found {item!r}")
        _set(out, key.strip(), toml_value(raw))
    return out


def copied(value: Any) -> Any:
    """Tables and lists anew, what is in them as it is."""
    if isinstance(value, Mapping):
        return {name: copied(part) for name, part in value.items()}
    return [copied(part) for part in value] if isinstance(value, list) else value


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    parts = key.split(".")
    if parts[0] == "allocators":
        _set_allocator(data, key, parts[1:], value)
        return
    if parts[0] in SECTION_OF and (len(parts) == 1 or parts[0] not in SECTIONS):
        parts = [SECTION_OF[parts[0]], *parts]
    if len(parts) < 2 or parts[0] not in SECTIONS:
        known = f"known: {', '.join([*SECTION_OF, 'allocators.N.FIELD'])}"
        raise ConfigError(key, f"unknown field; {known}; a parameter of a workload is options.{key}")
    target = data
    for part in parts[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ConfigError(key, f"{part} is no table")
    target[parts[-1]] = value


def _set_allocator(data: dict[str, Any], key: str, parts: list[str], value: Any) -> None:
    if not parts:
        data["allocators"] = value
        return
    entries = [{"name": e} if isinstance(e, str) else dict(e) for e in data.get("allocators", Config().allocators)]
    if len(parts) != 2 or not parts[0].isdigit() or int(parts[0]) >= len(entries):
        raise ConfigError(key, f"expected allocators.N.FIELD with N from 0 to {len(entries) - 1}")
    entries[int(parts[0])][parts[1]] = value
    data["allocators"] = entries


def toml_value(raw: str) -> Any:
    """A TOML literal, or the text itself.

    >>> toml_value("8"), toml_value("[1, 2]"), toml_value("16 GiB")
    (8, [1, 2], '16 GiB')
    """
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return raw.strip()


def dump_toml(config: Config) -> str:
    """The resolved config as TOML; loading it gives the same comparison."""
    import tomli_w

    return tomli_w.dumps(config.resolved())


def template() -> str:
    """The commented config that ships with the package."""
    from importlib.resources import files

    return (files("kvarena.experiments.configs") / "chat.toml").read_text(encoding="utf-8")


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted field names and their values; list items by index."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def config_diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields that differ between two resolved configs, with both values; None where one lacks the field."""
    left, right = flatten(a), flatten(b)
    names = [*left, *(name for name in right if name not in left)]
    pairs = {name: (left.get(name), right.get(name)) for name in names}
    # An empty table says nothing: what the other has in it is told field by field.
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and not all(v in (None, {}) for v in pair)}


def _first_fault(error: ValidationError) -> ConfigError:
    item = error.errors()[0]
    loc = [str(part) for part in item["loc"]]
    if item["type"] == "extra_forbidden":
        known = SECTIONS[loc[0]].model_fields if len(loc) > 1 and loc[0] in SECTIONS else Config.model_fields
        return ConfigError(".".join(loc), f"unknown key; known: {', '.join(known)}")
    section = SECTIONS.get(loc[0])
    if section is not None and len(loc) > 1:
        # A union reports one fault a branch; the field says which values it takes.
        messages = {i["msg"].removeprefix("Value error, ") for i in error.errors() if i["loc"][:2] == item["loc"][:2]}
        return ConfigError(".".join(loc[:2]), f"{'; or '.join(sorted(messages))}; found {item['input']!r}"[:400])
    return ConfigError(".".join(loc), f"{item['msg'].removeprefix('Value error, ')}; found {item['input']!r}"[:400])


def _line_of(text: str, field: str) -> int:
    """The line of a TOML text that sets `field`, as well as it can be told; else the line of its table; else 1."""
    *tables, key = field.split(".")
    table, best = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            table = stripped.split("#")[0].strip("[] ")
            if table == ".".join(tables) or table == field:
                best = number
        elif stripped.split("=")[0].strip() in (key, field) and table in ("", ".".join(tables)):
            return number
    return best
