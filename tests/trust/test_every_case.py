"""Which test stands for which reported fault: every case of `tests/cases/cases.jsonl` as given, and its kind beside it.

The table is the documentation; the tests below hold it to the truth: no case without an entry, no entry without a case,
no name of a test that is not there, and the case's input is really read by the first test's file.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CASES = {row["id"]: row for row in map(json.loads, (TESTS / "cases" / "cases.jsonl").read_text().splitlines())}

BLOCK = "allocators/test_block_cases.py::test_case"
TOKEN = "allocators/test_golden_token.py::test_the_reported_fault_is_absent"
MACHINE = "trust/test_state_machines.py::test_random_verbs_in_tight_pools_decide_as_the_slow_model"
KERNEL = "kernels/test_cases.py::test_"
ATTENTION = "kernels/test_decode.py::test_decode_equals_the_oracle"
EXTEND = "kernels/test_extend.py::test_extend_equals_the_oracle"
TRACE = "experiments/test_traces_cases.py::test_"
LIMITS = "experiments/engine/test_limits.py::test_"
METRICS = "experiments/test_metrics.py::test_"

# id -> (tests of the very input, tests of its kind)
TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "block-02": (
        (BLOCK, TOKEN),
        (
            "allocators/test_block_cases.py::test_a_fully_cached_prompt_hits_whole_pages_and_leaves_a_token",
            "allocators/test_token.py::test_a_hit_is_whole_pages_and_never_the_last_token",
            MACHINE,
        ),
    ),
    "block-06": ((BLOCK, TOKEN), ("allocators/test_block_cases.py::test_a_request_is_evicted_from_its_tail", MACHINE)),
    "block-08": (
        (BLOCK,),
        (
            "allocators/test_block_cases.py::test_without_a_prefix_cache_nothing_is_hashed_kept_or_evicted",
            "allocators/test_block_cases.py::test_without_a_prefix_cache_the_last_freed_page_is_reused_first",
            MACHINE,
        ),
    ),
    "block-09": (
        (BLOCK, TOKEN),
        (
            "allocators/test_block_cases.py::test_requests_whose_keys_differ_share_nothing",
            "prefix/test_hash_chain.py::test_encodings_of_different_values_differ",
        ),
    ),
    "block-10": (
        (BLOCK,),
        (
            "allocators/test_block_cases.py::test_another_picture_is_shared_up_to_the_page_it_begins_in",
            "allocators/test_token.py::test_pages_are_shared_up_to_the_first_other_image",
        ),
    ),
    "block-11": (
        (BLOCK, TOKEN),
        ("allocators/test_block_random.py::test_a_hash_that_always_collides_changes_no_decision",),
    ),
    "radix-03": (
        (TOKEN,),
        ("allocators/test_token.py::test_equal_prompts_in_flight_end_on_the_first_writers_pages", MACHINE),
    ),
    "radix-04": (
        (TOKEN,),
        ("prefix/test_radix_tree.py::test_a_lock_keeps_the_node_and_all_above_it_and_nothing_below", MACHINE),
    ),
    "radix-05": (
        (TOKEN,),
        ("allocators/test_token.py::test_a_finish_frees_duplicates_then_tail_in_one_group", MACHINE),
    ),
    "radix-06": (
        (TOKEN,),
        ("prefix/test_radix_tree.py::test_a_match_inside_an_edge_splits_it_and_changes_no_count", MACHINE),
    ),
    "radix-07": (
        (TOKEN,),
        (
            "prefix/test_radix_tree.py::test_the_cut_off_rest_of_a_split_is_as_fresh_as_the_design_says",
            "allocators/test_token_random.py::test_decides_as_the_oracle_under_every_eviction_order",
        ),
    ),
    "kernel-03": ((f"{KERNEL}decode_cases",), (ATTENTION, EXTEND)),
    "kernel-05": (
        (f"{KERNEL}decode_cases",),
        (
            "kernels/test_decode.py::test_an_empty_request_gives_zeros_and_minus_infinity_over_a_poisoned_output",
            "kernels/test_extend.py::test_a_padded_row_with_a_token_but_no_length_is_zero",
        ),
    ),
    "kernel-06": ((f"{KERNEL}decode_cases",), (f"{KERNEL}empty_splits_equal_one_split",)),
    "kernel-09": ((f"{KERNEL}kernel_09_tiles_masked_before_the_first_visible_key",), (ATTENTION, EXTEND)),
    "kernel-10": ((f"{KERNEL}kernel_10_softcap_neither_overflows_nor_unmasks",), (ATTENTION, EXTEND)),
    "kernel-11": (
        (f"{KERNEL}kernel_11_alibi_counts_from_the_query_and_takes_any_number_of_heads",),
        (ATTENTION, EXTEND),
    ),
    "kernel-13": (
        (f"{KERNEL}kernel_13_slot_minus_one_writes_nothing",),
        ("kernels/test_store.py::test_store_equals_the_reference_bit_for_bit",),
    ),
    "kernel-16": ((f"{KERNEL}kernel_16_scales_of_a_quantised_cache_reach_cached_and_new_tokens",), (ATTENTION, EXTEND)),
    "kernel-18": (
        (f"{KERNEL}kernel_18_sums_of_a_long_context_do_not_stall",),
        ("kernels/test_extend.py::test_long_ragged_batches_equal_the_oracle",),
    ),
    "kernel-20": (
        (f"{KERNEL}kernel_20_copies_are_simultaneous_and_targets_distinct",),
        (
            "kernels/test_copy.py::test_random_lists_equal_the_reference",
            "kernels/test_copy.py::test_a_copy_that_is_not_well_defined_is_refused_before_anything_is_written",
        ),
    ),
    "adapter-03": (
        ("kernels/test_page_table.py::test_case_adapter_03_last_page_lengths",),
        ("allocators/test_adapter.py::test_csr_counts_pages_and_full_last_pages",),
    ),
    "adapter-04": (
        (f"{KERNEL}adapter_04_a_position_past_the_row_gets_no_slot",),
        (
            "allocators/test_adapter.py::test_a_position_past_the_row_raises_and_never_names_the_next_row",
            "kernels/test_slots.py::test_a_position_past_the_row_never_reads_the_next_request",
        ),
    ),
    "adapter-06": (
        ("allocators/test_adapter_cases.py::test_case_adapter_06_no_row_is_left_behind_by_a_preemption",),
        (
            "allocators/test_adapter.py::test_no_page_of_a_row_outlives_a_preemption",
            "trust/test_batch_members.py::test_every_order_of_members_after_every_other_shows_their_own_slots",
        ),
    ),
    "engine-01": (
        (BLOCK, TOKEN, f"{LIMITS}case_engine_01_a_pool_full_of_cached_pages_admits"),
        ("allocators/test_block_cases.py::test_a_pool_full_of_idle_content_admits_whatever_fits_the_pool",),
    ),
    "engine-02": (
        (BLOCK, TOKEN, f"{LIMITS}case_engine_02_a_lone_request_that_outgrows_the_pool_ends_and_leaves_its_pages"),
        (
            "allocators/test_block_cases.py::test_the_last_request_out_of_room_is_refused_and_can_still_leave",
            "trust/test_no_starvation.py::test_every_request_ends_and_one_that_fits_is_served_whole",
        ),
    ),
    "engine-05": (
        (f"{LIMITS}case_engine_05_prompt_and_output_may_reach_the_limit_and_not_pass_it",),
        (f"{LIMITS}output_is_cut_exactly_at_max_model_len", f"{LIMITS}nothing_hangs_whatever_the_prompt_length"),
    ),
    "trace-02": (
        (f"{TRACE}trace_02_ids_that_differ_in_the_upper_half",),
        ("experiments/test_traces_readers.py::test_ids_that_agree_in_their_lower_bits_are_different_blocks",),
    ),
    "trace-04": (
        (f"{TRACE}trace_04_order_and_origin_of_times",),
        (f"{TRACE}any_order_of_times_is_sorted_stably_and_counted",),
    ),
    "trace-05": (
        (f"{TRACE}trace_05_unit_of_time_and_block_size_belong_to_the_format",),
        (f"{TRACE}the_size_of_the_numbers_never_changes_the_unit",),
    ),
    "trace-06": (
        (f"{TRACE}trace_06_turns_are_whole_requests",),
        ("experiments/test_traces_readers.py::test_every_pass_reads_the_same",),
    ),
    "trace-08": (
        (f"{TRACE}trace_08_failed_calls",),
        ("trust/test_hostile_files.py::test_a_wrong_missing_or_doubled_value_in_any_place_is_read_or_is_one_error",),
    ),
    "trace-09": (
        (f"{TRACE}trace_09_byte_order_mark_and_carriage_returns",),
        (
            f"{TRACE}marks_line_ends_and_blank_lines_change_no_row",
            "trust/test_hostile_files.py::test_encodings_and_line_ends",
        ),
    ),
    "metrics-01": (
        (f"{METRICS}own_pages_found_after_a_preemption_are_no_hits",),
        ("trust/test_metrics_by_hand.py::test_a_counter_over_a_preemption_and_a_stranger",),
    ),
    "metrics-02": (
        (f"{METRICS}refused_tries_are_not_counted",),
        ("allocators/test_block_cases.py::test_a_refused_arrival_that_comes_back_hits_once_it_is_admitted",),
    ),
    "metrics-04": (
        (f"{METRICS}usage_by_pages_by_slots_and_idle_cache",),
        ("trust/test_metrics_by_hand.py::test_every_column_of_a_summary_of_steps",),
    ),
    "plot-03": (
        ("experiments/test_plots.py::test_page_sizes_are_categories_in_numeric_order",),
        ("experiments/test_plots.py::test_page_sizes_of_a_kind_are_shades_and_equal_ones_are_dashes",),
    ),
    "plot-04": (
        ("experiments/test_plots.py::test_gaps_stay_gaps_and_an_empty_series_keeps_its_colour_and_says_so",),
        (
            "experiments/test_plots.py::test_an_empty_table_says_no_data_and_does_not_fail",
            "experiments/test_plots.py::test_a_missing_rate_is_a_gap_in_the_curve_and_not_zero",
        ),
    ),
}


@cache
def names(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_case_is_in_the_table_and_nothing_else():
    assert TABLE.keys() == CASES.keys()
    assert len(CASES) == 38


@pytest.mark.parametrize("case", TABLE)
def test_a_case_has_a_test_of_its_input_and_of_its_kind(case):
    own, kind = TABLE[case]
    for test in (*own, *kind):
        file, _, name = test.partition("::")
        assert name in names(file), test
    assert own
    assert kind
    assert set(own).isdisjoint(kind)


def test_every_case_is_counted_once_with_its_input_and_once_with_its_kind():
    assert (sum(bool(own) for own, _ in TABLE.values()), sum(bool(kind) for _, kind in TABLE.values())) == (38, 38)


@pytest.mark.parametrize("case", TABLE)
def test_the_input_of_a_case_is_read_and_not_copied(case):
    text = (TESTS / TABLE[case][0][0].partition("::")[0]).read_text(encoding="utf-8")
    assert "CASES" in text or "load_cases" in text
    by_area = 'load_cases("block"' in text or "load_cases(area)" in text
    assert case in text or by_area or f'"{case.partition("-")[0]}"' in text
