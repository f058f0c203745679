"""Configs say what they mean: every fault is named with what is allowed, and the resolved file means the same."""

from __future__ import annotations

import inspect
from importlib.resources import files

import pytest
from kvarena.allocators.config import block, token
from kvarena.allocators.interface import Gate
from kvarena.experiments.compare import compare
from kvarena.experiments.config import (
    SECTION_OF,
    Config,
    ConfigError,
    apply_sets,
    config_diff,
    config_from_keywords,
    config_from_mapping,
    dump_toml,
    load_config,
    template,
)

FAULTS = [
    ({"foo": 1}, "foo", "workload, pool, engine, allocators"),
    ({"workload": {"sedes": 3}}, "workload.sedes", "seeds"),
    ({"workload": {"seeds": 2.5}}, "workload.seeds", "2.5"),
    ({"workload": {"seeds": -1}}, "workload.seeds", "-1"),
    ({"workload": {"seeds": []}}, "workload.seeds", "[]"),
    ({"workload": {"seeds": [1, 1]}}, "workload.seeds", "twice"),
    ({"workload": {"seeds": True}}, "workload.seeds", "True"),
    ({"workload": {"requests": 0}}, "workload.requests", "0"),
    ({"workload": {"unit": "words"}}, "workload.unit", "'tokens' or 'ids'"),
    ({"workload": 3}, "workload", "3"),
    ({"pool": {"pool": -1}}, "pool.pool", "-1"),
    ({"pool": {"pool": 1.5}}, "pool.pool", "1.5"),
    ({"pool": {"pool": "16 apples"}}, "pool.pool", "16 GiB"),
    ({"pool": {"pool": "0 %"}}, "pool.pool", "0 %"),
    ({"pool": {"pool": "101 %"}}, "pool.pool", "101 %"),
    ({"pool": {"pool": ["16 GiB", "nonsense"]}}, "pool.pool", "nonsense"),
    ({"pool": {"model": "gpt-9"}}, "pool.model", "llama-3-8b"),
    ({"pool": {"model": {"num_layers": 2}}}, "pool.model", ""),
    ({"engine": {"live": 0}}, "engine.live", "0"),
    ({"workload": {"requests": 10**20}}, "workload.requests", "less than"),
    ({"engine": {"live": "8"}}, "engine.live", "'8'"),
    ({"engine": {"outputs": "some"}}, "engine.outputs", "'none' or 'replay'"),
    ({"engine": {"too_long": "skip"}}, "engine.too_long", "'error' or 'reject'"),
    ({"engine": {"kernel_batches": -1}}, "engine.kernel_batches", "-1"),
    ({"allocators": []}, "allocators", "at least one"),
    ({"allocators": ["lmcache"]}, "allocators", "vllm, sglang"),
    ({"allocators": ["vllm", "vllm"]}, "allocators", "twice"),
    ({"allocators": [{"kind": "block", "pagesize": 3}]}, "allocators", "page_size"),
    ({"allocators": [{"kind": "block", "page_size": 0}]}, "allocators", "page_size"),
    ({"allocators": [{"kind": "block", "page_size": 1.5}]}, "allocators", "page_size"),
    ({"allocators": [{"page_size": 16}]}, "allocators", "name or a kind"),
    ({"schema_version": 2}, "schema_version", "2"),
]


@pytest.mark.parametrize(("data", "field", "says"), FAULTS, ids=[f"{field}-{says}" for _, field, says in FAULTS])
def test_a_fault_is_one_line_naming_the_field_and_what_is_allowed(data, field, says):
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(data)
    message = str(caught.value)
    assert message.startswith(f"{field}: ")
    assert says in message
    assert "\n" not in message
    assert "validation error" not in message


def test_the_resolved_config_loads_to_the_same_comparison(tmp_path):
    mixed = block(sliding_window=64, retention_interval=None, gate=Gate(headroom=3))
    config = config_from_keywords(
        {"allocators": ({"name": "windowed", **dict(_table(mixed))}, {"name": "sglang"}), "live": 4, "seeds": [3, 5]}
    )
    path = tmp_path / "resolved.toml"
    path.write_text(dump_toml(config))
    again = load_config(path)
    assert again.resolved() == config.resolved()
    assert [entry.design for entry in again.entries()] == [mixed, token()]


def _table(design):
    from kvarena.experiments.specs import allocator_entry

    return {name: value for name, value in allocator_entry(design).as_toml().items() if name != "name"}


def test_every_toml_field_is_a_keyword_of_compare():
    keywords = inspect.signature(compare).parameters
    assert {*SECTION_OF, "allocators"} <= set(keywords)


def test_field_names_are_unique_over_the_sections():
    config = Config()
    names = [name for part in (config.workload, config.pool, config.engine) for name in type(part).model_fields]
    assert len(names) == len(set(names)) == len(SECTION_OF)


@pytest.mark.parametrize(
    ("item", "path", "value"),
    [
        ("live=8", ("engine", "live"), 8),
        ("engine.live=8", ("engine", "live"), 8),
        ("pool=16 GiB", ("pool", "pool"), "16 GiB"),
        ("pool=['1 GiB', '50 %']", ("pool", "pool"), ["1 GiB", "50 %"]),
        ("pool.model=llama-3-70b", ("pool", "model"), "llama-3-70b"),
        ("options.num_sessions=5", ("workload", "options", "num_sessions"), 5),
        ("workload.options.num_sessions=5", ("workload", "options", "num_sessions"), 5),
        ("outputs=replay", ("engine", "outputs"), "replay"),
        ("trace=runs=1.jsonl", ("workload", "trace"), "runs=1.jsonl"),
    ],
)
def test_set_reaches_any_field_alone_or_with_its_section(item, path, value):
    found = apply_sets({}, [item])
    for part in path:
        found = found[part]
    assert found == value


def test_set_reaches_an_allocators_field():
    config = config_from_mapping(apply_sets({}, ["allocators.1.page_size=16"]))
    assert [entry.page_size for entry in config.entries()] == [16, 16]


@pytest.mark.parametrize("item", ["live", "nothing=3", "engine=3", "allocators.7.page_size=1", "allocators.x.y=1"])
def test_set_refuses_what_is_no_field(item):
    with pytest.raises(ConfigError):
        config_from_mapping(apply_sets({}, [item]))


def test_a_file_names_its_line(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[workload]\ntrace = "chat"\n\n[engine]\n# live requests\nlive = "many"\n')
    with pytest.raises(ValueError, match=r"bad\.toml:6: engine\.live: .*found 'many'"):
        load_config(path)


@pytest.mark.parametrize("content", [b"[workload", b"\xff\xfe", b"[workload]\nseeds = \n"])
def test_a_broken_file_is_a_clear_error(tmp_path, content):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.toml"):
        load_config(path)


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml")


def test_the_template_says_the_defaults(tmp_path):
    path = tmp_path / "chat.toml"
    path.write_text(template())
    assert load_config(path) == Config()


@pytest.mark.parametrize("name", ["chat.toml", "mooncake.toml", "overlap.toml"])
def test_shipped_configs_load(name, tmp_path):
    path = tmp_path / name
    path.write_text((files("kvarena.experiments.configs") / name).read_text())
    assert load_config(path).entries()


def test_diff_names_fields_and_both_values():
    a = Config().resolved()
    b = config_from_keywords({"live": 4, "allocators": ({"name": "vllm"},)}).resolved()
    differing = config_diff(a, b)
    assert differing["engine.live"] == (1, 4)
    assert differing["allocators.1.name"] == ("sglang", None)
    assert config_diff(a, a) == {}


def test_unknown_keyword_lists_what_is_known():
    with pytest.raises(ConfigError, match="known: trace, format"):
        config_from_keywords({"pools": "1 GiB"})


@pytest.mark.parametrize(
    "sets", [["options.num_sessions=9"], ["live=3"], ["allocators.0.page_size=4"], ["pool='1 GiB'"], ["options.new=1"]]
)
def test_sets_never_change_the_mapping_that_was_given(sets):
    data = {"workload": {"options": {"num_sessions": 4}}, "engine": {}, "allocators": [{"kind": "block"}]}
    before = repr(data)
    assert repr(apply_sets(data, sets)) != before
    assert repr(data) == before


def test_an_empty_table_is_no_difference_and_hides_none():
    empty, full = {"workload": {"options": {}, "seeds": 1}}, {"workload": {"options": {"a": 1}, "seeds": 1}}
    assert config_diff(empty, full) == {"workload.options.a": (None, 1)}
    assert config_diff(full, {"workload": {"seeds": 2}}) == {
        "workload.options.a": (1, None),
        "workload.seeds": (1, 2),
    }
    assert config_diff(empty, {"workload": {"seeds": 1}}) == {}
