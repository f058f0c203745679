"""The same sweep on a real Ray cluster, one node of which is killed half-way."""

from __future__ import annotations

import sys

import pytest
from kvarena.experiments.sweep import sweep
from kvarena.experiments.sweep_plan import sweep_cells
from kvarena.experiments.sweep_workers import RayWorkers
from support.sweeps import BASE, config_file, wait_for, written

try:
    import ray
except ImportError:
    ray = None

needs_ray = pytest.mark.skipif(ray is None, reason="needs Ray: pip install 'kvarena[ray]'")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"ray: is not installed; .* pip install 'kvarena\[ray\]'"):
        sweep({**BASE, "sweep": {"live": [1]}}, "unused", ray="local")


@needs_ray
def test_ray_on_this_machine_gives_the_results_of_processes(tmp_path):
    config = config_file(tmp_path / "sweep.toml", sweep={"live": [1, 2], "pool": ["500 MiB", "1 MiB"]})
    sweep(config, tmp_path / "processes", jobs=1)
    done = sweep(config, tmp_path / "ray", ray="local", jobs=1)
    assert [cell["state"] for cell in done.cells] == ["finished", "failed"] * 2
    ours, theirs = written(tmp_path / "processes"), written(tmp_path / "ray")
    assert {p: c for p, c in ours.items() if "failed/" not in p} == {
        p: c for p, c in theirs.items() if "failed/" not in p
    }
    assert not ray.is_initialized()


@needs_ray
def test_a_node_that_is_killed_half_way_costs_nothing(tmp_path):
    from ray.cluster_utils import Cluster

    data = {**BASE, "sweep": {"live": [1, 2, 3, 4, 5, 6, 7, 8]}}
    sweep(data, tmp_path / "processes", jobs=1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes()
        assert sum(node["Alive"] for node in ray.nodes()) == 2
        workers = RayWorkers(cluster.address)
        whole = workers.outcomes

        def interrupted(cells):
            for number, pair in enumerate(whole(cells)):
                if number == 3:
                    cluster.remove_node(second, allow_graceful=False)
                yield pair

        workers.outcomes = interrupted
        _sweep_with(workers, data, tmp_path / "ray")
        # Ray takes its time to notice.
        wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert written(tmp_path / "ray") == written(tmp_path / "processes")


def _sweep_with(workers, data, out):
    """What `sweep` does, over these workers."""
    from kvarena.experiments import sweep as module

    cells = sweep_cells(data)
    with module._locked(out):
        module._carry_out(out, cells, workers, False)
        module._write_index(out, cells)
        module._write_table(out, cells)


@needs_ray
def test_no_cluster_at_an_address_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"ray: no cluster at '127\.0\.0\.1:1'"):
        sweep({**BASE, "sweep": {"live": [1]}}, tmp_path / "out", ray="127.0.0.1:1")
