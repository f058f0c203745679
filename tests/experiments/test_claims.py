"""Claims: verdicts follow from ranges, files are checked, findings stay tied to the file that was tested."""

import json
import re

import pytest
from kvarena.experiments import claims, claims_commands
from kvarena.experiments.claims import Claim, Expectation, Finding, NotHereError, allocation, recorded, serving
from typer.testing import CliRunner

FILE = b"""
claim = "x"
source = "s"
known = "seen"
experiment = "shared_prompt"
[options]
requests = 4
system = 20
question = 10
[[expect]]
measure = "saved_16"
when = "w"
unit = "share"
claimed = [0.0, 1.0]
predicted = [0.0, 0.1]
"""


def finding(*held: bool | None, value: float = 1.0) -> Finding:
    """One measure a flag: inside the claimed range, outside it, or (None) without one."""
    rows = [
        Expectation(
            measure=f"m{i}",
            when="",
            unit="share",
            claimed={True: (1, 2), False: (3, 4), None: None}[flag],
            predicted=(1, 1),
        )
        for i, flag in enumerate(held)
    ]
    claim = Claim(id="c", claim="c", source="s", known="seen", experiment="e", expect=rows, sha256="0")
    return Finding(claim, {row.measure: value for row in rows})


@pytest.mark.parametrize(
    ("held", "verdict"),
    [
        ((True,), "reproduced"),
        ((True, True), "reproduced"),
        ((False, False), "refuted"),
        ((True, False), "depends"),
        ((True, None), "reproduced"),
        ((False, None, None), "refuted"),
    ],
)
def test_the_verdict_is_how_many_measures_lie_in_the_claimed_range(held, verdict):
    assert finding(*held).verdict == verdict


@pytest.mark.parametrize(
    ("low", "value", "high", "verdict"),
    [
        (0.9, 1.0, 1.1, "depends"),
        (0.9, 0.99, 1.1, "depends"),  # the median alone would refute
        (1.0, 1.05, 1.1, "reproduced"),
        (0.8, 0.85, 0.9, "refuted"),
        (0.8, 1.5, 2.1, "depends"),
    ],
)
def test_repeats_on_both_sides_of_the_claim_are_said_to_be_noise_and_decide_nothing(low, value, high, verdict):
    claim = finding(True).claim
    [row] = claim.expect  # claimed: 1 to 2
    found = Finding(claim, {"m0": value, "m0.low": low, "m0.high": high})
    assert found.verdict == verdict
    assert ("within noise of the claim" in claims.measured(found, row)) == (verdict == "depends")


def test_a_ratio_near_one_is_shown_to_a_thousandth():
    assert [claims.shown(x, "times") for x in (0.9934, 1.0, 1.05, 1.0134, 3.1416)] == [
        "0.993x",
        "1.00x",
        "1.05x",
        "1.013x",
        "3.14x",
    ]


@pytest.mark.parametrize("lengths", ["sharegpt-like", "alpaca-like"])
def test_the_best_block_size_is_one_of_those_tried(lengths):
    found = serving.best_block_size(lengths, (16, 256), 40, 0)
    assert min(found.values()) == 1.0
    assert found["latency_256"] > 1.05  # the pool holds fewer requests


def test_what_a_cache_gains_is_near_the_closed_form_where_replies_are_one_token():
    [gain] = serving.gain_at_hits(0.49, [1], 200, 0).values()
    assert 1.6 < gain < 1 / (1 - 0.49)


def test_a_shared_prompt_beats_contiguous_runs_that_share_nothing():
    found = serving.over_contiguous([80, 341], 40, 40, 200)
    assert 1 < found["gain_80"] < found["gain_341"]


def test_the_order_of_freeing_changes_nothing_where_nothing_is_reused():
    [gain] = serving.free_order(["no_reuse"], 60, 0).values()
    assert gain == pytest.approx(1.0, abs=0.01)


def test_operations_beside_the_real_packages_that_differed_are_counted(tmp_path, monkeypatch):
    (tmp_path / "p.json").write_text('{"ops": 1000, "differences": 3}')
    monkeypatch.setattr(recorded, "UPSTREAM", tmp_path)
    assert recorded.beside_upstream(["p"]) == {"differ_p": 0.003}
    with pytest.raises(NotHereError, match=r"q\.json is not here"):
        recorded.beside_upstream(["q"])


def test_ends_of_a_range_belong_to_it_and_predictions_are_counted_apart():
    assert finding(True, value=2.0).verdict == "reproduced"
    assert finding(True, value=2.000001).verdict == "refuted"
    assert finding(True, True).predictions == (2, 2)
    assert finding(True, value=2.0).predictions == (0, 1)


def test_every_claim_names_an_experiment_that_exists_or_says_why_not():
    found = claims.load_claims()
    assert len(found) >= 30
    for claim in found:
        if claim.experiment is None:
            assert len(claim.not_tested) > 10
            assert not claim.expect
        else:
            assert callable(claims.experiment(claim.experiment))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ((b"claimed = [0.0, 1.0]", b"claimed = [1.0, 0.0]"), "expected .low, high."),
        ((b"claimed = [0.0, 1.0]\n", b""), "at least one measure"),
        ((b'known = "seen"', b'known = "rumour"'), "known"),
        (
            (b'experiment = "shared_prompt"', b'experiment = "shared_prompt"\nnot_tested = "no"'),
            "takes no claimed range",
        ),
        ((b'experiment = "shared_prompt"', b'not_tested = "no"'), "takes no claimed range"),
        ((b'experiment = "shared_prompt"\n', b""), "either an experiment"),
        ((b'unit = "share"', b'unit = "parsecs"'), "unit"),
        ((b'when = "w"', b'whence = "w"'), "whence|when"),
        ((b'claim = "x"', b"claim = "), "claims/c.toml"),
        ((b'claim = "x"', b"id = 'd'\nclaim = 'x'"), "claims/c.toml"),
        ((b'claim = "x"', b'claim = "\xff"'), "claims/c.toml"),
    ],
)
def test_a_bad_claim_file_is_refused_with_its_name_and_field(change, text):
    assert FILE.count(change[0]) == 1
    with pytest.raises(ValueError, match=text):
        claims.parse_claim("c", FILE.replace(*change))


def test_an_experiment_that_does_not_measure_what_is_expected_is_an_error_not_a_verdict():
    claim = claims.parse_claim("c", FILE.replace(b"saved_16", b"saved_17"))
    with pytest.raises(ValueError, match="does not measure 'saved_17'"):
        claims.test_claim(claim)


def test_what_is_measured_beside_an_untested_claim_is_shown_and_gives_no_verdict(capsys):
    content = FILE.replace(b"claimed = [0.0, 1.0]\n", b"").replace(
        b"[options]", b'not_tested = "another thing"\n[options]'
    )
    found = claims.test_claim(claims.parse_claim("c", content))
    assert (found.verdict, found.reason, set(found.values)) == ("not tested", "another thing", {"saved_16"})
    page = claims.markdown([found])
    assert "another thing" in page
    assert "| w | – | " in page
    claims_commands._print([found], False)
    assert "another thing" in (shown := capsys.readouterr().out)
    assert "beside it" in shown


def test_measures_without_an_experiment_are_refused():
    content = FILE.replace(b"claimed = [0.0, 1.0]\n", b"").replace(
        b'experiment = "shared_prompt"', b'not_tested = "no"'
    )
    with pytest.raises(ValueError, match="need an experiment"):
        claims.parse_claim("c", content)


def test_a_claim_that_lists_numbers_has_a_claimed_range_for_each():
    listed = {}
    for claim in claims.load_claims():
        rows = re.findall(r"0\.\d+(?:, 0\.\d+){2,}", claim.claim)
        if rows and claim.not_tested is None:
            numbers = [float(text) for text in re.findall(r"(?<![\d,])0\.\d+", claim.claim)]
            ranges = [e.claimed for e in claim.expect if e.claimed is not None]
            free = [number for number in numbers if not any(low <= number <= high for low, high in ranges)]
            listed[claim.id] = (len(numbers), len(ranges), free)
    assert set(listed) == {"mooncake_conversation_curve", "mooncake_table_1"}
    assert all(count == ranges and not free for count, ranges, free in listed.values()), listed


def test_the_worst_of_the_paging_costs_is_over_all_points_and_the_claims_say_over_how_many():
    from kvarena.experiments.bench.kernel_plots import COSTS, load_kernels

    values, result = recorded.kernel_paging(), load_kernels(recorded.SAVED)
    points = {str(row["point"]) for part in result["parts"].values() for row in part["rows"] if "point" in row}
    for name, (_, cost) in COSTS.items():
        known = [value for point in points if (value := cost(result, point)) == value]
        assert (values[name], values[f"{name}_points"]) == (max(known) / 100, len(known))
    for claim in claims.load_claims():
        for row in claim.expect if claim.experiment == "kernel_paging" else ():
            assert f"worst of {values[f'{row.measure}_points']} points" in row.when


def test_an_input_that_is_not_at_hand_is_not_tested_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "SAVED", tmp_path / "kernels.json")
    [claim] = claims.load_claims(["page_size_decode_identical"])
    found = claims.test_claim(claim)
    assert found.verdict == "not tested"
    assert "kernels.json is not here" in found.reason


def test_the_201_page_layout_cannot_come_out_and_page_size_1_saves_what_arithmetic_says():
    values = allocation.shared_prompt(100, 9, 30)
    assert (values["pages_shared_16"], values["slots_shared_1"], values["slots_apart_1"]) == (300, 3009, 3900)


@pytest.mark.parametrize(("requests", "system", "question"), [(2, 16, 1), (7, 33, 5), (5, 64, 16)])
def test_pages_behind_one_prompt_are_its_whole_pages_once_and_the_rest_each(requests, system, question):
    values = allocation.shared_prompt(requests, system, question)
    whole = system // 16
    assert values["pages_shared_16"] == whole + requests * (-(-(system + question) // 16) - whole)
    assert values["slots_shared_1"] == system + requests * question


@pytest.mark.parametrize(("requests", "system", "question"), [(4, 100, 20), (9, 50, 3)])
def test_prefill_gain_is_the_closed_form(requests, system, question):
    [gain] = allocation.prefill_gain([requests], system, [question]).values()
    assert gain == pytest.approx((system + question) / (system / requests + question))


def test_findings_read_back_and_are_refused_when_their_claim_was_edited(tmp_path):
    chosen = claims.load_claims(["shared_prompt_201_pages", "tpu_page_1"])
    found = [claims.test_claim(claim) for claim in chosen]
    claims.save_findings(found, tmp_path)
    assert claims.load_findings(tmp_path) == found
    data = json.loads((tmp_path / "claims.json").read_text())
    data["findings"][0]["sha256"] = "0" * 64
    (tmp_path / "claims.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="another file"):
        claims.load_findings(tmp_path)


def test_testing_one_claim_again_keeps_the_findings_of_the_others(tmp_path):
    every = [claims.test_claim(claim) for claim in claims.load_claims(["shared_prompt_201_pages", "tpu_page_1"])]
    claims.save_findings(every, tmp_path)
    claims.save_findings(every[:1], tmp_path)
    assert claims.load_findings(tmp_path) == every


def test_a_finding_whose_claim_was_edited_is_dropped_when_others_are_saved(tmp_path):
    every = [claims.test_claim(claim) for claim in claims.load_claims(["shared_prompt_201_pages", "tpu_page_1"])]
    claims.save_findings(every, tmp_path)
    text = (tmp_path / "claims.json").read_text()
    (tmp_path / "claims.json").write_text(text.replace(every[1].claim.sha256, "0" * 64))
    claims.save_findings(every[:1], tmp_path)
    assert claims.load_findings(tmp_path) == every[:1]


@pytest.mark.parametrize("content", ["", "{}", '{"findings": [1]}', '{"findings": [{"id": "tpu_page_1"}]}'])
def test_findings_that_are_damaged_are_refused(tmp_path, content):
    (tmp_path / "claims.json").write_text(content)
    with pytest.raises(ValueError, match="cannot be read as findings"):
        claims.load_findings(tmp_path)


def test_the_command_prints_the_verdict_and_writes_the_page(tmp_path):
    from kvarena.experiments.cli import app

    done = CliRunner().invoke(app, ["claims", "shared_prompt_201_pages", "--quiet", "--out", str(tmp_path)])
    assert done.exit_code == 0
    assert "refuted" in done.output
    assert "300 pages" in done.output
    assert "**refuted**" in (tmp_path / "claims.md").read_text()
    shown = CliRunner().invoke(app, ["claims", "shared_prompt_201_pages", "--saved", str(tmp_path)])
    assert "refuted" in shown.output


def test_an_unknown_claim_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match=r"unknown claim 'nope': expected one of .*shared_prompt_201_pages"):
        claims.load_claims(["nope"])


def test_not_here_is_no_value_error():
    """A wrong argument must never be taken for a missing input."""
    assert not issubclass(NotHereError, ValueError)


def test_a_time_comes_with_the_range_of_its_repeats_and_the_cpu_time_is_the_allocators():
    (claim,) = claims.load_claims(["zero_hit_cost"])
    quick = claim.model_copy(update={"options": {"requests": 12, "seed": 0}})
    finding = claims.test_claim(quick)
    for expectation in finding.claim.expect:
        values = [finding.values[f"{expectation.measure}{end}"] for end in (".low", "", ".high")]
        assert values[0] <= values[1] or values[1] == 0.0
        assert values[1] <= max(values[2], 0.0)
        assert " to " in claims.measured(finding, expectation)
    assert 0 < finding.values["cost_block.high"] < 0.5
