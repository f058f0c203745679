"""Imports run downwards only, the face is light, and what needs no torch runs without it."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"prefix": "prefix", "kernels": "kernels", "allocators": "allocators", "experiments": "experiments"}
FACE = "kvarena"
# What each room may import of ours, its own modules included.
ALLOWED = {
    "prefix": {"prefix"},
    "kernels": {"kernels"},
    "allocators": {"allocators", "prefix"},
    "experiments": {"experiments", "allocators", "prefix", "kernels", FACE},
    FACE: {FACE, "experiments", "allocators"},
}
ADAPTER = "kvarena.allocators.adapter"
HEAVY = {"torch", "triton"}


def sources():
    """(module name, room, file) of every source file of the package."""
    for room in [FACE, *ROOMS]:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if room == FACE else (FACE, *parts)).removesuffix(".__init__")
            yield name, room, path


def imports(path, *, eager=False):
    """Absolute names that a file imports (those inside functions too, unless `eager`), with their lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in _walk(tree, eager):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _walk(node, eager):
    for child in ast.iter_child_nodes(node):
        if eager and (isinstance(child, ast.FunctionDef) or _type_checking(child)):
            continue
        yield child
        yield from _walk(child, eager)


def _type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


MODULES = {name: (room, path) for name, room, path in sources()}


def room_of(name):
    """The room that an imported name belongs to; None for the standard library and other packages."""
    parts = name.split(".")
    if parts[0] != FACE:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else FACE


def allowed(module, room):
    """The adapter alone may reach the kernels."""
    return ALLOWED[room] | {"kernels"} if module == ADAPTER else ALLOWED[room]


def test_the_walk_sees_every_room():
    rooms = [room for room, _ in MODULES.values()]
    assert {room: rooms.count(room) > 1 for room in ALLOWED} == dict.fromkeys(ALLOWED, True)
    assert ADAPTER in MODULES


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_run_downwards_only(room):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for module, (own, path) in MODULES.items()
        if own == room
        for name, line in imports(path)
        if room_of(name) is not None and room_of(name) not in allowed(module, room)
    ]
    assert not wrong


def test_nothing_is_imported_by_a_bare_folder_name():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for _, path in MODULES.values()
        for name, line in imports(path)
        if name.split(".")[0] in ROOMS
    ]
    assert not wrong


def test_only_the_adapter_brings_torch_and_kernels_into_allocators():
    found = {
        module
        for module, (room, path) in MODULES.items()
        if room in ("allocators", "prefix")
        for name, _ in imports(path)
        if name.split(".")[0] in HEAVY or room_of(name) == "kernels"
    }
    assert found == {ADAPTER}


def test_no_allocator_imports_the_adapter():
    importers = {
        module
        for module, (room, path) in MODULES.items()
        if room in ("allocators", "prefix", "kernels", FACE)
        for name, _ in imports(path)
        if name.startswith(ADAPTER)
    }
    assert not importers


def test_no_module_imports_itself_in_a_circle():
    graph = {
        module: {name for name, _ in imports(path, eager=True) if name in MODULES and name != module}
        for module, (_, path) in MODULES.items()
    }
    state = {}

    def visit(module, trail):
        assert state.get(module) != "open", " -> ".join([*trail, module])
        if module in state:
            return
        state[module] = "open"
        for name in sorted(graph[module]):
            visit(name, [*trail, module])
        state[module] = "done"

    for module in graph:
        visit(module, [])


def python(script, *arguments, blocked=()):
    """Run a script in a fresh process in which importing `blocked` packages fails as if they were absent."""
    block = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {set(blocked)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""
    command = [sys.executable, "-c", block + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def loaded(script):
    """Top-level packages in sys.modules after a script."""
    done = python(f"{script}\nimport json; print(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_kvarena_loads_neither_numpy_nor_torch():
    assert not loaded("import kvarena") & {"numpy", "torch", "triton", "pandas", "matplotlib", "pydantic"}


def test_the_command_line_waits_with_what_only_its_commands_need():
    assert not loaded("import kvarena.experiments.cli") & {"numpy", "torch", "pandas", "matplotlib", "pydantic"}


def test_making_and_using_allocators_loads_no_torch():
    script = """
import kvarena as kv
for spec in ("vllm", "sglang", "exact", {"kind": "contiguous", "sizing": "pow2"}):
    pool = kv.make_allocator(spec, num_pages=9)
    seq = kv.Sequence("a", [1, 2, 3])
    assert pool.admit(seq) is not None
    pool.commit([(seq, 3)])
    pool.check()
"""
    assert not loaded(script) & HEAVY


@pytest.mark.parametrize("allocator", ["block", "token"])
def test_a_scenario_runs_where_torch_is_absent(allocator, tmp_path):
    script = """
import sys
from kvarena.__main__ import main
sys.argv = ["kvarena", *sys.argv[1:]]
main()
"""
    scenario = ROOT / "tests/golden/scenarios/full_hit.jsonl"
    out = tmp_path / "log.jsonl"
    arguments = ["scenario", str(scenario), "--allocator", allocator, "--out", str(out)]
    done = python(script, *arguments, blocked=HEAVY)
    assert done.returncode == 0, done.stderr
    assert len(out.read_text().splitlines()) > 1


@pytest.mark.parametrize("name", ["scenarios", "replay", "compare", "plots", "conformance", "kernel_check", "traces"])
def test_what_needs_no_torch_imports_without_it(name):
    done = python(f"import kvarena.experiments.{name}", blocked=HEAVY)
    assert done.returncode == 0, done.stderr


def test_no_module_changes_the_users_matplotlib_backend():
    """Saving a result in a notebook must not stop its later figures from showing; the command line sets its own."""
    changed = [
        f"{path.relative_to(ROOT)}:{number}"
        for _, _, path in sources()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "switch_backend(" in line or "mpl.use(" in line or "matplotlib.use(" in line
    ]
    assert not changed


def test_saving_a_result_leaves_the_backend_as_it_was(tmp_path):
    script = """
import matplotlib.pyplot as plt
plt.switch_backend("svg")
import kvarena as kv
result = kv.compare([[1, 2, 3, 4]] * 3, allocators=["vllm", "sglang"], pool="10 MiB", kernel_batches=0)
result.save(sys.argv[1])
assert plt.get_backend() == "svg", plt.get_backend()
"""
    done = python("import sys\n" + script, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr


def test_no_name_of_a_test_case_holds_an_address(request: pytest.FixtureRequest) -> None:
    # Two processes that share the tests between them would not find the same ones.
    assert [item.nodeid for item in request.session.items if " at 0x" in item.nodeid] == []
