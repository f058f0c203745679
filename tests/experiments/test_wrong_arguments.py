"""The public names refuse what they cannot use with one clear error, before anything runs."""

from __future__ import annotations

from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from support.small import shared

import kvarena as kv


class Nothing:
    """An object of no known kind, whose text is the same in every process."""

    def __str__(self) -> str:
        return "object"


NOTHING = Nothing()
NOT_A_RESULT = [None, 5, "out/chat", [], {}, NOTHING]
PLOTS = ["hit_rate", "occupancy", "waste", "evictions", "allocator_time", "difference", "hit_rate_by_page_size"]


@pytest.mark.parametrize("given", NOT_A_RESULT, ids=str)
@pytest.mark.parametrize("name", ["explain", "bounds", *PLOTS])
def test_what_is_no_result_is_named(name, given):
    call = getattr(kv, name) if name in ("explain", "bounds") else getattr(kv.plots, name)
    with pytest.raises(ValueError, match=f"expected .*found {type(given).__name__}"):
        call(given)


@pytest.mark.parametrize("name", PLOTS)
def test_what_are_no_axes_is_named(name):
    with pytest.raises(ValueError, match="ax: expected axes of matplotlib, found int"):
        getattr(kv.plots, name)(shared(), ax=5)


@pytest.mark.parametrize("ax", [None, "given"])
def test_occupancy_draws_the_allocator_that_is_asked_for_or_says_which_there_are(ax):
    axes = kv.plots.occupancy(shared(), ax=plt.subplots()[1] if ax else None, allocator="sglang")
    assert "SGLang" in axes.get_title(loc="left")
    assert len(axes.figure.axes) == 1
    with pytest.raises(ValueError, match="expected one of vllm, sglang, found 'nobody'"):
        kv.plots.occupancy(shared(), ax=plt.subplots()[1] if ax else None, allocator="nobody")
    plt.close("all")


@pytest.mark.parametrize("given", [None, 5, b"x", NOTHING, SimpleNamespace()], ids=str)
def test_what_is_no_path_is_named(given):
    with pytest.raises(ValueError, match="path: expected a path"):
        kv.load_result(given)
    with pytest.raises(ValueError, match="out: expected a path"):
        shared().save(given)
    with pytest.raises(ValueError, match="out: expected a path"):
        kv.sweep({"sweep": {"live": [1]}}, given)


@pytest.mark.parametrize("given", [None, 5, [], [None], ["out/chat"], "out/chat"], ids=str)
def test_what_are_no_results_to_lay_over_each_other_is_named(given):
    with pytest.raises(ValueError, match="expected one Result or more in a list"):
        kv.merge_results(given)
    with pytest.raises(ValueError, match="expected one Result or more in a list"):
        kv.merge_results(shared())


@pytest.mark.parametrize("jobs", [0, -1, 1.5, "2", True])
def test_a_sweep_has_a_whole_number_of_jobs(jobs, tmp_path):
    with pytest.raises(ValueError, match="jobs: expected a whole number from 1"):
        kv.sweep({"sweep": {"live": [1]}}, tmp_path, jobs=jobs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("config", [None, 5, [], {"sweep": {}}, {"sweep": {"live": []}}, {"sweep": 5}], ids=str)
def test_a_sweep_of_nothing_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match=r"sweep|config"):
        kv.sweep(config, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("spec", [None, 5, "nobody", {}, int], ids=str)
def test_conformance_of_what_is_no_allocator_is_refused(spec):
    with pytest.raises(ValueError, match="allocator"):
        kv.testing.conformance(spec)
