"""The comparison with the real packages: stand-ins, random operations, first differences, the command.

The real packages themselves are driven where KVARENA_PEERS names folders of unpacked wheels, each in a process of its
own: their recorded decisions first, which proves the drivers, then random operations.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvarena.experiments.cli import app
from kvarena.experiments.scenarios import ScenarioRunner
from kvarena.experiments.upstream import compare, report
from kvarena.experiments.upstream.compare import Difference, OurRunner, Setting, Upstream
from kvarena.experiments.upstream.ops import RandomRequests
from kvarena.experiments.upstream.stubs import Finder, Struct, install, stand_in, version_of
from typer.testing import CliRunner

HEADER = {"page_size": 4, "num_slots": 96, "max_model_len": 192}
SETTINGS = [Setting("page 4", HEADER, keys=True), Setting("page 4 in batches", HEADER, keys=True, batches=True)]


# --- stand-ins ---


@pytest.fixture
def wheel(tmp_path: Path) -> Iterator[Path]:
    """An unpacked package whose `core` is real and whose other modules must not run."""
    package = tmp_path / "bigserver"
    for folder in ("core", "gpu"):
        (package / folder).mkdir(parents=True)
        (package / folder / "__init__.py").write_text("")
    poison = "raise RuntimeError('this module must not run')"
    (package / "__init__.py").write_text(poison)
    (package / "gpu" / "kernels.py").write_text(poison)
    (package / "core" / "pool.py").write_text(
        "import absent_codec\n"
        "from absent_codec import Struct\n"
        "from bigserver.config import Config, depth\n"
        "from bigserver.gpu.kernels import fast, Layout\n"
        "class Pool(Layout):\n"
        "    config: Config | None = None\n"
        "    table: dict[Config, Layout] = {}\n"
        "    @fast\n"
        "    def take(self, n: int) -> int:\n"
        "        return n + 1\n"
        "class Item(Struct, frozen=True):\n"
        "    size: int\n"
        "def late():\n"
        "    from bigserver.config import other\n"
        "    return other\n"
        "def decide():\n"
        "    return 1 if depth else 2\n"
    )
    (tmp_path / "bigserver-1.2.3.dist-info").mkdir()
    (tmp_path / "bigserver-1.2.3.dist-info" / "METADATA").write_text("Name: bigserver\nVersion: 1.2.3\n")
    before = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] in ("bigserver", "absent_codec")]:
        del sys.modules[name]


def finder(wheel: Path) -> Finder:
    given = {"bigserver.config": {"given": 7}}
    return Finder(wheel, "bigserver", lambda name: name.startswith("bigserver.core"), given, ["absent_codec", "json"])


def test_real_modules_run_and_all_others_are_stand_ins(wheel: Path) -> None:
    found = finder(wheel)
    install(found)
    pool = importlib.import_module("bigserver.core.pool")
    assert pool.Pool().take(4) == 5
    assert pool.late() is not None  # imports inside of functions are served too
    assert importlib.import_module("bigserver.config").given == 7
    assert "bigserver.gpu.kernels" in found.stood_in
    assert "bigserver.core.pool" not in found.stood_in
    assert found.absent == {"absent_codec"}  # json is there
    install(finder(wheel))  # the same again changes nothing


def test_what_decides_has_no_stand_in_where_it_is_missing(wheel: Path) -> None:
    (wheel / "bigserver" / "core" / "pool.py").unlink()
    install(finder(wheel))
    with pytest.raises(ModuleNotFoundError, match=r"bigserver\.core\.pool"):
        importlib.import_module("bigserver.core.pool")


def test_a_stand_in_that_would_decide_something_raises(wheel: Path) -> None:
    install(finder(wheel))
    pool = importlib.import_module("bigserver.core.pool")
    with pytest.raises(TypeError, match=r"bigserver\.config\.depth.*was used as a value \(bool\)"):
        pool.decide()


@pytest.mark.parametrize("use", [bool, len, int, float, iter, lambda x: x + 1, lambda x: x < 1, lambda x: x * 2])
def test_no_stand_in_is_a_value(use: Any) -> None:
    for thing in (stand_in("a.b"), stand_in("a.b")(), stand_in("a").c):
        with pytest.raises(TypeError):
            use(thing)


def test_one_package_comes_from_one_place_in_a_process(wheel: Path, tmp_path: Path) -> None:
    install(finder(wheel))
    with pytest.raises(ValueError, match="bigserver comes from"):
        install(finder(tmp_path / "other"))
    sys.meta_path.pop(0)
    sys.modules["bigserver"] = sys
    with pytest.raises(ValueError, match="was imported before"):
        install(finder(wheel))


def test_the_version_is_the_wheels(wheel: Path, tmp_path: Path) -> None:
    assert version_of("bigserver", wheel) == "1.2.3"
    assert version_of("smallserver", wheel) == "unknown"


def test_the_struct_stand_in_has_fields_and_fresh_defaults() -> None:
    class Item(Struct, kw_only=True, frozen=True):
        size: int
        tags: list = []  # noqa: RUF012

    one, two = Item(size=1), Item(size=2)
    one.tags.append("x")
    assert (one.size, two.tags) == (1, [])


# --- operations ---


def run(requests: RandomRequests, runner: Any, ops: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    taken = []
    for _ in range(ops):
        op = requests.next()
        answer = runner.decide(op)
        requests.learn(op, answer)
        taken.append((op, answer))
    return taken


def our_runner(header: dict[str, Any] = HEADER, kind: str = "token") -> ScenarioRunner:
    return OurRunner.for_scenario(header, kind)


def test_operations_follow_from_the_seed_and_meet_every_corner() -> None:
    first = run(RandomRequests(5, HEADER, keys=True, batches=True), our_runner(), 1500)
    second = run(RandomRequests(5, HEADER, keys=True, batches=True), our_runner(), 1500)
    assert first == second
    assert run(RandomRequests(6, HEADER, keys=True, batches=True), our_runner(), 50) != first[:50]
    verbs = Counter(op["op"] for op, _ in first)
    assert set(verbs) == {"arrive", "decode", "step", "finish", "preempt", "reset"}
    assert {name for op, _ in first for name in op.get("key", {})} == {"lora", "salt", "mm"}
    answers = [answer for _, answer in first]
    assert sum(answer["hit"] > 0 for answer in answers) > 20
    assert sum(bool(answer["evicted"]) for answer in answers) > 20
    refused = {op["op"] for op, answer in first if not answer["ok"] and "skipped" not in answer}
    assert refused >= {"arrive", "decode", "step"}
    assert any(answer.get("skipped") for answer in answers)


def test_no_request_outgrows_the_model() -> None:
    header = {**HEADER, "max_model_len": 24}
    lengths = {}
    for op, answer in run(RandomRequests(1, header, keys=False), our_runner(header), 1500):
        if op["op"] == "arrive" and answer["ok"]:
            lengths[op["id"]] = len(op["tokens"])
        if op["op"] == "decode" and answer["ok"]:
            lengths[op["id"]] += 1
            assert lengths[op["id"]] < 24


# --- comparison ---


class Mistaken:
    """Ours with a fault from some op on."""

    def __init__(self, runner: ScenarioRunner, at: int, change: Any) -> None:
        self.runner, self.at, self.change = runner, at, change

    def decide(self, op: dict[str, Any]) -> dict[str, Any]:
        answer = self.runner.decide(op)
        self.at -= 1
        return self.change(answer) if self.at < 0 else answer


def upstream(at: int = 10**9, change: Any = None, settings: list[Setting] = SETTINGS) -> Upstream:
    return Upstream("sglang", "9.9", settings, lambda header: Mistaken(our_runner(header), at, change), "token")


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_equal_allocators_agree_over_several_seeds(setting: Setting) -> None:
    outcome = compare.compare(upstream(), setting, compare.OPS_A_SEED + 300)
    assert (outcome.difference, outcome.ops) == (None, compare.OPS_A_SEED + 300)
    assert min(outcome.hits, outcome.evicted, outcome.refused) > 0


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("free", lambda answer: answer | {"free": answer["free"] + 1}),
        ("evictable", lambda answer: answer | {"evictable": -1}),
        ("ok", lambda answer: answer | {"ok": not answer["ok"]}),
        ("hit", lambda answer: answer | {"hit": answer["hit"] + 4}),
        ("evicted", lambda answer: answer | {"evicted": [*answer["evicted"], 1]}),
    ],
)
def test_the_first_difference_is_found_at_its_op(what: str, change: Any) -> None:
    outcome = compare.compare(upstream(123, change), SETTINGS[0], 1000)
    assert outcome.ops == 124
    assert isinstance(outcome.difference, Difference)
    assert (outcome.difference.number, outcome.difference.what) == (124, what)
    assert f"op 124 {{'op': '{outcome.difference.op['op']}'" in str(outcome.difference)


def test_pages_that_differ_are_a_difference() -> None:
    def other_page(answer: dict[str, Any]) -> dict[str, Any]:
        return answer | ({"pages": [*answer["pages"][:-1], 99]} if answer.get("pages") else {})

    outcome = compare.compare(upstream(50, other_page), SETTINGS[0], 1000)
    assert outcome.difference is not None
    assert outcome.difference.what == "pages"


def test_what_the_real_one_raises_is_the_difference() -> None:
    def broken(answer: dict[str, Any]) -> dict[str, Any]:
        raise AttributeError("the method has another name now")

    outcome = compare.compare(upstream(40, broken), SETTINGS[0], 1000)
    assert outcome.ops == 41
    assert "AttributeError: the method has another name now" in str(outcome.difference)


def test_one_that_cannot_be_built_differs_before_the_first_op() -> None:
    def unbuildable(header: dict[str, Any]) -> Any:
        raise TypeError("an unexpected argument")

    outcome = compare.compare(Upstream("sglang", "0.1", SETTINGS, unbuildable, "token"), SETTINGS[0], 100)
    assert outcome.ops == 0
    assert "op 0 {'op': 'build'}" in str(outcome.difference)
    assert "TypeError: an unexpected argument" in str(outcome.difference)


# --- where the package is ---


def test_the_folder_is_found_and_the_named_version_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.31.0", "0.32.0", "0.33.0"):
        (tmp_path / f"vllm-{version}" / "vllm").mkdir(parents=True)
    monkeypatch.setenv(compare.ENVIRONMENT, f"{tmp_path / 'nothing'}{os.pathsep}{tmp_path}")
    assert compare.find("vllm", None) == tmp_path / "vllm-0.32.0"
    assert compare.find("sglang", None) is None
    assert compare.find("vllm", tmp_path / "vllm-0.33.0") == tmp_path / "vllm-0.33.0"
    monkeypatch.setenv(compare.ENVIRONMENT, str(tmp_path / "vllm-0.31.0"))
    assert compare.find("vllm", None) == tmp_path / "vllm-0.31.0"
    with pytest.raises(ValueError, match=r"--path: expected a folder that holds vllm/"):
        compare.find("vllm", tmp_path)


# --- the command ---


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verify", "upstream", *arguments])


def test_the_command_reports_agreement_and_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "load", lambda package, path: upstream())
    result = invoke("sglang", "--ops", "600", "--out", str(tmp_path / "deep" / "out.json"))
    assert result.exit_code == 0, result.output
    assert "sglang 9.9 against the decisions of sglang 0.5.22" in result.output
    assert "600 operations, every decision agrees" in result.output
    whole = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert (whole["version"], whole["ops"], whole["differences"]) == ("9.9", 600, 0)
    assert [setting["ops"] for setting in whole["settings"]] == [300, 300]


def test_the_command_fails_on_a_difference_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = upstream(20, lambda answer: answer | {"free": 77})
    monkeypatch.setattr(report, "load", lambda package, path: wrong)
    result = invoke("sglang", "--only", "batches", "--out", str(tmp_path / "out.json"))
    assert result.exit_code == 1
    assert "1 of 1 settings differ" in result.output
    assert "op 21" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["settings"][0]["difference"]["number"] == 21


@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_the_command_skips_with_a_reason_when_the_package_is_absent(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(compare.ENVIRONMENT, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    result = invoke(package)
    assert result.exit_code == 3, result.output
    assert f"skipped: {package} cannot be imported" in result.output
    assert "KVARENA_PEERS" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tgi"], "package: expected one of vllm, sglang"),
        (["vllm", "--path", "/nowhere"], "--path: expected a folder that holds vllm/"),
        (["vllm", "--out", "x.csv"], "--out: expected a file .json"),
    ],
)
def test_a_bad_argument_is_named(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_a_word_that_names_no_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "load", lambda package, path: upstream())
    result = invoke("sglang", "--only", "nothing")
    assert isinstance(result.exception, ValueError)
    assert "--only: expected a part of 'page 4'" in str(result.exception)


# --- the real packages ---

LIVE = pytest.mark.skipif(
    compare.ENVIRONMENT not in os.environ, reason="needs KVARENA_PEERS: folders of unpacked wheels of vllm and sglang"
)
GOLDEN = Path(__file__).parents[1] / "golden"
REPLAY = Path(__file__).parents[1] / "support" / "replay_upstream.py"


def live(*command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", *command], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@LIVE
@pytest.mark.parametrize(("package", "decisions"), [("vllm", 10_657), ("sglang", 22_610)])
def test_the_driver_reproduces_the_recorded_decisions(package: str, decisions: int) -> None:
    assert live(str(REPLAY), package, str(GOLDEN)).splitlines()[-1] == f"{decisions} decisions as recorded"


@LIVE
@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_the_real_package_decides_as_ours(package: str) -> None:
    said = live("-m", "kvarena", "verify", "upstream", package, "--ops", "6000")
    assert f"{package} {compare.VERSIONS[package]}: " in said
    assert "every decision agrees" in said


# --- what was saved ---

SAVED = sorted((Path(__file__).parents[2] / "results" / "upstream").glob("*.json"))


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_a_saved_outcome_is_whole_and_the_documents_name_it(path: Path) -> None:
    whole = json.loads(path.read_text())
    assert path.stem == f"{whole['package']}-{whole['version']}"
    assert whole["ops"] == sum(setting["ops"] for setting in whole["settings"]) >= 100_000
    assert whole["differences"] == sum(setting["difference"] is not None for setting in whole["settings"])
    assert len(whole["settings"]) == {"vllm": 15, "sglang": 14}[whole["package"]]
    text = (path.parents[2] / "docs" / "upstream.md").read_text()
    assert whole["version"] in text
    if whole["version"] == compare.VERSIONS[whole["package"]]:
        assert whole["differences"] == 0
