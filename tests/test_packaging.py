"""A wheel built from the tree, installed in a fresh environment, works from another folder and shadows nobody."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kvarena", "prefix", "allocators", "kernels", "experiments")
FILES = ("pyproject.toml", "README.md", "LICENSE")

pytest.importorskip("setuptools", reason="building a wheel without network needs setuptools here")


def attempt(*command, cwd, **options):
    texts = [str(part) for part in command]
    return subprocess.run(texts, cwd=cwd, capture_output=True, text=True, check=False, timeout=240, **options)


def run(*command, cwd, **options):
    done = attempt(*command, cwd=cwd, **options)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the tree, so that no build folder is left in it."""
    work = tmp_path_factory.mktemp("build")
    tree = work / "tree"
    tree.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, tree / file)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--no-index", "-w", work, tree, cwd=work)
    (built,) = work.glob("kvarena-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A fresh environment with the wheel, and the dependencies of this one minus its own kvarena."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=home)
    # sitecustomize runs no .pth file of that folder, so the editable install there stays out.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (site / "sitecustomize.py").write_text(f"import sys\nsys.path += {list(paths)!r}\n")
    return python


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvarena"}
    sources = {
        f"{'' if folder == 'kvarena' else 'kvarena/'}{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert sources - set(names) == set(), "a folder is missing from [tool.setuptools] packages"
    assert "kvarena/py.typed" in names
    assert not [name for name in names if "test" in name.split("/")[1:2]]


def test_the_installed_copy_is_used_and_bare_folder_names_are_free(environment, tmp_path):
    script = """
import importlib.util, kvarena, kvarena.allocators.config as config
print(kvarena.__file__)
print([name for name in ("prefix", "allocators", "kernels", "experiments") if importlib.util.find_spec(name)])
print(kvarena.make_allocator("sglang", num_pages=12).page_size, config.__file__)
"""
    where, bare, made = run(environment, "-c", script, cwd=tmp_path).splitlines()
    home = environment.parent.parent
    assert Path(where).is_relative_to(home)
    assert bare == "[]"
    assert made.startswith("1 ")
    assert Path(made[2:]).is_relative_to(home)
    failed = attempt(environment, "-c", "import kernels", cwd=tmp_path)
    assert "No module named 'kernels'" in failed.stderr


def test_the_command_runs_from_another_folder(environment, tmp_path):
    script = environment.parent / "kvarena"
    assert "scenario" in run(script, "--help", cwd=tmp_path)
    log = ROOT / "tests/golden/scenarios/full_hit.jsonl"
    out = tmp_path / "log.jsonl"
    run(script, "scenario", log, "--allocator", "token", "--out", out, cwd=tmp_path)
    assert out.read_text().count("\n") == log.read_text().count("\n")


def test_the_demo_runs_from_another_folder_without_torch(environment, tmp_path):
    block = tmp_path / "block" / "torch"
    block.mkdir(parents=True)
    (block / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    script = environment.parent / "kvarena"
    out = tmp_path / "elsewhere"
    out.mkdir()
    variables = {"PYTHONPATH": str(block.parent), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    text = run(script, "demo", cwd=out, env=variables)
    assert "block" in text
    assert "token" in text
    assert [*out.rglob("*.png"), *out.rglob("*.pdf"), *out.rglob("*.svg")], "the demo writes a figure"
