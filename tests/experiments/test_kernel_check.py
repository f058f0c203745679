"""The kernel check agrees where it must, and says so when a table, a page or a kernel is wrong."""

import doctest
import subprocess
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need triton")

from kvarena.experiments import kernel_check, kernel_runs  # noqa: E402
from kvarena.experiments.kernel_check import (  # noqa: E402
    BatchSample,
    HeadShape,
    check_batches,
    content_leaders,
    cut,
    kernel_pages,
    summary,
)

# Two requests that share 32 tokens under block and 35 under token, and one of its own.
SHARED = BatchSample(
    contexts=[40, 37, 7],
    tables={
        "block": (16, [[9, 3, 5], [9, 3, 8], [4]]),
        "token": (1, [[*range(60, 20, -1)], [*range(60, 25, -1), 90, 91], [*range(1, 8)]]),
    },
    step=12,
)


def test_doctests():
    result = doctest.testmod(kernel_check)
    assert result.attempted
    assert not result.failed


def test_two_allocators_agree_through_every_table():
    report = check_batches([SHARED])
    assert (report["status"], report["samples"], report["requests"], report["tokens"]) == ("agreed", 1, 3, 84)
    rows = {(row["op"], row["label"], row["table"], row["against"]): row for row in report["comparisons"]}
    assert len(rows) == 2 * (4 + 3)  # two ops: four tables against the oracle, three against the first table
    assert {row["rows"] for row in report["comparisons"] if row["op"] == "decode"} == {3}
    assert {row["rows"] for row in report["comparisons"] if row["op"] == "extend"} == {1 + 2 + 3}
    for row in report["comparisons"]:
        assert row["max_abs_error"] < 1e-5
        assert row["bound"] > 0
    for row in report["comparisons"]:
        if row["against"] != kernel_check.ORACLE:
            assert row["bitwise_rows"] == row["rows"]  # same tiles, same order, whatever the pages
    assert summary(report).startswith("kernel outputs agreed: 27 of 27 rows bitwise equal across tables")


@pytest.mark.parametrize("page_size", [3, 48, 512])
def test_page_sizes_that_no_kernel_takes_are_split(page_size):
    pages = -(-40 // page_size)
    sample = BatchSample([40, 2], {"odd": (page_size, [list(range(pages + 1, 1, -1)), [1]])})
    assert check_batches([sample], tables={"odd": "block_table"})["status"] == "agreed"


def test_chosen_tables_only():
    report = check_batches([SHARED], tables={"block": "block_table", "token": "req_to_token"})
    tables = {(row["label"], row["table"]) for row in report["comparisons"]}
    assert tables == {("block", "block_table"), ("token", "req_to_token")}
    for tables, message in (({"block": "block_table"}, "found none for"), (dict.fromkeys(SHARED.tables, "csr"), "csr")):
        with pytest.raises(ValueError, match=message):
            check_batches([SHARED], tables=tables)


def test_contexts_requests_and_pages_are_cut_together():
    sample = BatchSample([100, 20, 3], {"a": (16, [list(range(1, 8)), [8, 9], [10]])})
    assert cut(sample, 33, 2) == BatchSample([33, 20], {"a": (16, [[1, 2, 3], [8, 9]])})


def test_kernel_pages_keep_the_order_of_ids():
    assert kernel_pages(1, [[70, 5], [9]]) == (1, [[3, 1], [2]])
    assert kernel_pages(512, [[3]]) == (256, [[2, 3]])


def test_content_is_shared_over_chains_of_requests():
    sample = BatchSample(
        [4, 4, 4],
        {"x": (2, [[1, 2], [1, 3], [4, 5]]), "y": (1, [[1, 2, 3, 4], [5, 6, 7, 8], [5, 9, 10, 11]])},
    )
    assert content_leaders(sample).tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 2, 2, 2]]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (BatchSample([], {"a": (1, [])}), "contexts: expected lengths >= 1"),
        (BatchSample([0], {"a": (1, [[1]])}), "contexts: expected lengths >= 1"),
        (BatchSample([1], {}), "at least one allocator"),
        (BatchSample([1], {"a": (0, [[1]])}), "page_size >= 1"),
        (BatchSample([1], {"a": (1, [])}), "expected page_size >= 1 and 1 rows"),
        (BatchSample([17], {"a": (16, [[1]])}), "request 0 has 1 pages of 16 for 17 tokens"),
        (BatchSample([2], {"a": (1, [[1, -1]])}), "names page -1"),
        (BatchSample([2, 2], {"a": (1, [[1, 2], [2, 3]])}), "page 2 holds positions of page 1 and of page 0"),
    ],
)
def test_a_malformed_sample_names_step_and_allocator(sample, message):
    with pytest.raises(ValueError, match=f"sample of step 5.*{message}"):
        check_batches([replace(sample, step=5)])


# A wrong page table shows only when it is applied after filling, as a stale row would be.
def stale_row(monkeypatch):
    through = kernel_runs._Run.batch

    def stale(run, new_tokens):
        if new_tokens != [seq.num_tokens for seq in run.seqs]:
            rows = run.adapter.host.source.rows
            rows["r0"][-1] = rows["r2"][0]
            run.adapter.refresh(run.seqs[0])
        return through(run, new_tokens)

    monkeypatch.setattr(kernel_runs._Run, "batch", stale)


def skipped_store(monkeypatch):
    monkeypatch.setattr(kernel_runs, "store_kv", lambda *args: None)  # the pool's NaN stays


def store_one_slot_on(monkeypatch):
    store = kernel_runs.store_kv
    monkeypatch.setattr(kernel_runs, "store_kv", lambda k, v, kc, vc, slots: store(k, v, kc, vc, slots - 1))


def last_token_unseen(monkeypatch):
    decode = kernel_runs.paged_decode

    def short(q, key, value, table):
        return decode(q, key, value, replace(table, seq_lens=table.seq_lens - 1))

    monkeypatch.setattr(kernel_runs, "paged_decode", short)


def values_in_half(monkeypatch):
    extend = kernel_runs.paged_extend
    monkeypatch.setattr(kernel_runs, "paged_extend", lambda *args: extend(*args).bfloat16().float())


FAULTS = [stale_row, skipped_store, store_one_slot_on, last_token_unseen, values_in_half]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault, monkeypatch):
    fault(monkeypatch)
    report = check_batches([SHARED], tables={"block": "block_table", "token": "req_to_token"})
    assert report["status"] == "differed"
    wrong = [row for row in report["comparisons"] if not row["agreed"]]
    assert any(row["against"] == kernel_check.ORACLE for row in wrong)  # found though both tables are wrong alike
    assert all(row["worst"]["step"] == 12 and row["worst"]["share_of_bound"] > 1 for row in wrong)
    assert summary(report).startswith("kernel outputs differed")


def test_the_bound_holds_on_hard_rows_and_is_not_loose():
    """Float32 attention by torch stays within the bound; an output off by one part in a thousand does not."""
    torch.manual_seed(0)
    for scale in (1.0, 30.0):
        q, k, v = scale * torch.randn(2, 64), torch.randn(300, 1, 64), torch.randn(300, 1, 64)
        bound, exact = kernel_runs.attend(q, k, v)
        out = torch.softmax(q @ k[:, 0].T / 8, dim=-1) @ v[:, 0]
        assert (out - exact).abs().max() <= bound
    bound, exact = kernel_runs.attend(q / 30, k, v)
    assert bound < 1e-3 * v.abs().max()


def test_without_torch_the_report_says_not_run(monkeypatch):
    monkeypatch.setattr(kernel_check.importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    report = check_batches([SHARED])
    assert (report["status"], report["reason"]) == ("not run", "torch not installed")
    assert summary(report) == "kernel check not run: torch not installed"


def test_what_cannot_be_checked_says_why():
    windowed = BatchSample([40], {"block": (16, [[0, 7, 8]])})
    assert check_batches([windowed])["reason"].startswith("block: a sliding window left pages behind")
    assert check_batches([])["reason"] == "no batch was sampled"


def test_the_module_imports_neither_torch_nor_triton():
    script = "import sys, kvarena.experiments.kernel_check; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device nothing is interpreted")
def test_a_process_with_compiled_triton_hands_the_check_to_one_of_its_own(monkeypatch):
    small = BatchSample([5], {"block": (16, [[2]])})
    here = check_batches([small], model=HeadShape(head_dim=64), seed=3)
    monkeypatch.setattr(kernel_check, "_can_run_here", lambda device: False)
    assert check_batches([small], model=HeadShape(head_dim=64), seed=3) == here


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_asking_for_a_missing_device_is_an_error():
    with pytest.raises(ValueError, match="device: expected one that is there, found 'cuda'"):
        check_batches([SHARED], device="cuda")


def test_the_same_seed_gives_the_same_report():
    small = BatchSample([9, 3], {"block": (4, [[2, 5, 1], [7]])})
    first, again, other = (check_batches([small], tables={"block": "block_table"}, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first["comparisons"] != other["comparisons"]
