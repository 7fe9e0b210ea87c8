"""Verdicts that cannot be had for nothing: noise, vacuous runs, open choices, quoted statements."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import cifar10, comparison, energy, low_rank, other_architectures, violation
from experiments.cifar import RESNET_10
from experiments.experiment import PAPERS, SIZES
from experiments.findings import Finding
from experiments.page import _counted
from experiments.paper import HIGH, LOW
from experiments.registry import EXPERIMENTS
from experiments.rotated import Comparison
from experiments.verdicts import (
    VERDICTS,
    Claim,
    Quote,
    depends,
    holds,
    ordered,
    unlearned,
    untested,
)

SEEDS = (11, 13, 21, 33, 55)


def values(*numbers):
    return dict(zip(SEEDS, numbers, strict=False))


def test_an_order_beyond_its_spread_agrees_or_disagrees_and_counts_the_seeds():
    low, high = values(1.0, 1.1, 0.9, 1.0, 1.0), values(2.0, 2.2, 1.9, 2.1, 0.95)
    claim = ordered("an order", [(low, high)])
    assert claim.verdict == "agree"
    assert claim.measured == "1 < 1.83; the order claimed in 4 of 5 seeds"
    other = ordered("an order", [(high, low)])
    assert other.verdict == "disagree"
    assert other.measured == "1.83 ≥ 1; the order claimed in 1 of 5 seeds"


def test_an_order_within_its_spread_is_undecided_and_so_is_one_seed():
    low, high = values(1.0, 2.0, 3.0, 4.0, 5.0), values(2.0, 1.5, 4.0, 3.0, 5.6)
    assert ordered("an order", [(low, high)]).verdict == "undecided"
    assert ordered("an order", [(values(1.0), values(100.0))]).verdict == "undecided"
    assert ordered("an order", [({}, values(1.0))]).verdict == "not tested"


def test_of_several_orders_one_that_is_reversed_decides():
    low, high, near = values(1.0, 1.1), values(2.0, 2.2), values(0.9, 1.3)
    assert ordered("orders", [(low, high), (low, near)]).verdict == "undecided"
    assert ordered("orders", [(low, high), (high, low), (low, near)]).verdict == "disagree"


def test_readings_that_disagree_decide_nothing():
    says = Quote("Section 1", "it holds")
    yes, no = (holds(says, [x], lambda x: x > 0) for x in (1.0, -1.0))
    assert depends(says, {"one": yes, "other": yes}).verdict == "agree"
    both = depends(says, {"one": yes, "other": no})
    assert both.verdict == "undecided"
    assert "one: agree, 1; other: disagree, -1" in both.measured
    assert depends(says, {"one": yes, "other": untested(says, "not run")}).verdict == "undecided"


def test_what_was_not_measured_is_not_tested():
    assert holds("it holds", [float("nan")], lambda _: True).verdict == "not tested"
    assert holds("it holds", [], lambda: True).verdict == "not tested"
    assert holds("it holds", [1.0], lambda _: True, guard="vacuous").measured == "vacuous"


def run(learned, frozen=(0.97, 0.86, 0.49, 0.21, 0.12), lost=0.01):
    """A run of five tasks with accuracies ``learned`` after each, all old ones less by ``lost``."""
    rows = [[a - lost * (t - o) for o, a in enumerate(learned[: t + 1])]
            for t in range(len(learned))]  # fmt: skip
    return {"accuracy": rows, "loss": [[1 - a for a in row] for row in rows], "kept": 1,
            "frozen": list(frozen)}  # fmt: skip


FROZEN = (0.969, 0.861, 0.491, 0.217, 0.136)  # GPM at the low rate: it learned nothing
TAUGHT = (0.97, 0.95, 0.94, 0.93, 0.93)


def test_a_network_that_only_kept_what_it_knew_has_nothing_to_forget():
    assert unlearned("GPM", [run(TAUGHT)]) == ""
    assert "task 3: 0.49 against 0.49" in unlearned("GPM", [run(FROZEN)])
    half = (*TAUGHT[:3], *FROZEN[3:])
    assert "task 4" in unlearned("GPM", [run(half)]), "each task counts, not their mean"
    assert "was not run" in unlearned("GPM", [])
    old = {key: value for key, value in run(TAUGHT).items() if key != "frozen"}
    assert "not measured" in unlearned("GPM", [old])


def of_all(learners, accuracy, **more):
    return {name: run(accuracy, **more) for name in learners}


def test_a_learner_that_learns_nothing_never_agrees_in_a_comparison():
    metrics = {
        seed: {rate: of_all(("SGD", "SGD-dagger", "OGD"), TAUGHT, lost=0.1)
               | of_all(("GPM",), FROZEN, lost=0.0) for rate in (LOW, HIGH)}
        for seed in SEEDS
    }  # fmt: skip
    config = Comparison()
    claims = comparison.claims(config, metrics, comparison.tables(config, metrics))
    about_gpm = [c for c in claims if c.says in (*comparison.GPM_LOW, comparison.EQUIVALENT)]
    assert [claim.verdict for claim in about_gpm] == ["not tested"] * 3
    taught = {seed: {rate: of_all(comparison.LEARNERS, TAUGHT, lost=0.1)
                     | of_all(("GPM",), TAUGHT, lost=0.01 + 0.001 * seed / 55)
                     for rate in (LOW, HIGH)} for seed in SEEDS}  # fmt: skip
    claims = comparison.claims(config, taught, comparison.tables(config, taught))
    assert next(c for c in claims if c.says == comparison.GPM_LOW[0]).verdict == "agree"


def test_curves_that_differ_by_a_quarter_at_every_t_are_not_alike():
    def judged(lost):
        metrics = {
            seed: {rate: of_all(("SGD", "SGD-dagger", "GPM"), TAUGHT, lost=0.1)
                   | of_all(("OGD",), TAUGHT, lost=lost) for rate in (LOW, HIGH)}
            for seed in SEEDS
        }  # fmt: skip
        found = comparison.claims(Comparison(), metrics, [])
        return next(claim for claim in found if claim.says == comparison.SIMILAR[1])

    assert judged(0.077).verdict == "disagree"
    assert judged(0.095).verdict == "agree"


def test_a_violation_of_a_learner_that_learns_nothing_is_not_tested():
    def scored(accuracy, score, own=None):
        more = {} if own is None else {"violation on own": [own] * 4}
        return run(accuracy) | {"violation": [score] * 4} | more

    def metrics(gpm, own):
        return {seed: {rate: {"SGD": scored(TAUGHT, 0.4), "GPM": scored(gpm, 0.1 + seed / 1e4),
                              "OGD": scored(TAUGHT, 0.2 + seed / 1e4, own)}
                       for rate in (LOW, HIGH)} for seed in SEEDS}  # fmt: skip

    def verdicts(found):
        return {(c.says.about or c.says.place): c.verdict
                for c in violation.claims(Comparison(), found, [])}  # fmt: skip

    vacuous = verdicts(metrics(FROZEN, 0.01))
    assert {vacuous["GPM, low rate"], vacuous["tab:VOC, bold"]} == {"not tested"}
    assert vacuous["OGD, high rate"] == "agree"
    open_choice = violation.claims(Comparison(), metrics(TAUGHT, 0.01), [])
    assert open_choice[-1].verdict == "undecided", "own samples put OGD below GPM, others above"


def test_published_violations_are_over_one_task_less():
    metrics = {11: {rate: {name: run(TAUGHT) | {"violation": [0.5, 2 / 3, 0.75, 0.8]}
                           for name in violation.LEARNERS} for rate in (LOW, HIGH)}}  # fmt: skip
    [table] = violation.tables(Comparison(), metrics)
    assert table.rows[f"{LOW}, SGD"]["VNC"].samples == pytest.approx((1.0, 1.0, 1.0, 1.0))
    assert table.mean(f"{LOW}, SGD", "VNC with 1/t") == pytest.approx(0.6791666)


@pytest.mark.parametrize("module", [cifar10, other_architectures])
def test_a_resnet_that_learns_nothing_new_is_never_counted_as_forgetting_less(module):
    frozen = (0.95, 0.55, 0.5, 0.52, 0.5)
    plain, *daggers = RESNET_10.rows()
    rows = {plain: run((0.95, 0.8, 0.7, 0.8, 0.9), frozen, lost=0.05)}
    rows |= {row: run(frozen, frozen, lost=0.0) for row in daggers}
    metrics = {seed: rows if module is cifar10 else {"cifar10": rows} for seed in SEEDS}
    config = module.EXPERIMENT.sizes["few"]
    claims = module.claims(config, metrics, [])
    of_dagger = [
        claim for claim in claims if "SGD†" in str(claim.says) or "stronger" in str(claim.says)
    ]
    assert of_dagger
    assert {claim.verdict for claim in of_dagger} == {"not tested"}


def test_a_rank_that_holds_nearly_all_cannot_show_that_more_helps():
    def metrics(held):
        errors = {f"r = {r}": {term: [1.0 / r] for term in (*low_rank.TAYLOR, "recursion")}
                  | {"held": held} for r in (10, 20, 30, 40)}  # fmt: skip
        errors["r = inf"] = errors["r = 40"]
        one = {"errors": errors, "E_o": [1.0], "E": [1.0], "distance": [1.0], "a_tt": [0.9],
               "parameters": 1}  # fmt: skip
        return dict.fromkeys(SEEDS, one)

    config = low_rank.FEW
    for held, verdict in ((0.3, "agree"), (0.82, "not tested")):
        found = low_rank.claims(config, metrics(held), low_rank.tables(config, metrics(held)))
        assert [claim.verdict for claim in found if not claim.ours] == [verdict] * 2


def test_what_is_set_by_hand_is_no_agreement_with_the_paper():
    one = {f"{eps:g}": run(TAUGHT, lost=eps / 10) | {"kept": 1, "is SGD": True, "still": True}
           for eps in (0.0, 0.01, 0.1, 0.5, 1.0)}  # fmt: skip
    config = energy.EXPERIMENT.sizes["few"]
    metrics = dict.fromkeys(SEEDS, one)
    claims = energy.claims(config, metrics, energy.tables(config, metrics))
    assert [claim.ours for claim in claims if "by construction" in str(claim.says)] == [True, True]


def test_every_statement_is_quoted_with_its_place_and_belongs_to_one_label():
    quotes = [quote for one in EXPERIMENTS for quote in one.quotes]
    assert len(set(quotes)) == len(quotes)
    labels = {label for one in EXPERIMENTS for label in one.labels}
    for quote in quotes:
        place = quote.place.removeprefix("caption of ").removesuffix(", bold")
        assert re.fullmatch(r"Section \d(\.\d)?|Appendix [A-C]", place) or place in labels, quote
        assert len(quote.words.split()) >= 4
    named = {one.label for one in EXPERIMENTS if one.quotes}
    assert named == {one.label for one in EXPERIMENTS} - {
        "extension", "extension CIFAR-10", "20 rotations", "ViT in bfloat16", "fine-tuning",
    }, "what the paper does not have states nothing of it"  # fmt: skip


def test_cifar_100_is_ten_statements_that_are_counted_before_any_run():
    about = [str(quote) for one in EXPERIMENTS for quote in one.quotes]
    rows = [text for text in about if "cifar100" in text]
    own = next(one for one in EXPERIMENTS if one.label == "Table:acc-C100").quotes
    assert len(rows) + len(own) == 10


def test_a_statement_without_a_verdict_is_not_tested():
    one = next(one for one in EXPERIMENTS if one.label == "random baselines")
    silent = replace(one, claims=lambda *_: [Claim("a check", "agree", "1")], tables=lambda *_: [])
    _, claims = silent.judged("demo", {})
    assert [(claim.ours, claim.verdict) for claim in claims] == [
        (True, "agree"), (False, "not tested"), (False, "not tested"),
    ]  # fmt: skip
    assert {claim.verdict for claim in claims} <= set(VERDICTS)


def test_only_the_papers_sizes_count():
    assert set(PAPERS) < set(SIZES)
    assert not {"demo", "scaled", "tenth"} & set(PAPERS)


def finding(experiment, size, verdict):
    claims = [Claim(quote, verdict, size) for quote in experiment.quotes]
    return Finding(experiment, size, {}, [], claims, None)


def test_a_statement_counts_at_the_largest_size_that_tests_it():
    one = next(one for one in EXPERIMENTS if one.label == "Table:forg-C10-extended")
    cases = {
        ("full", "agree", "half", "disagree"): "agree",
        ("few", "not tested", "half", "disagree"): "disagree",
        ("few", "not tested", "scaled", "agree"): "not tested",
        ("few", "undecided", "half", "agree"): "undecided",
    }
    for (size, verdict, smaller, other), counts in cases.items():
        found = _counted(one, [finding(one, size, verdict), finding(one, smaller, other)])
        assert [claim.verdict for claim in found] == [counts] * len(one.quotes)


def literal(text: str) -> str:
    """The words of LaTeX or of a quotation, in lower case, without commands and references."""
    text = re.sub(r"(?m)(?<!\\)%.*$", " ", text)
    text = re.sub(r"\\(?:cite|ref|label)\w*\{[^}]*\}", " ", text)
    text = re.sub(r"\$?\^?\{?\\dagger\}?\$?", "†", text)
    text = re.sub(r"\\[a-zA-Z]+\*?", " ", text)
    return " ".join(re.findall(r"[a-z0-9†]+", text.lower()))


@pytest.mark.skipif("CURVLAB_PAPER" not in os.environ, reason="set CURVLAB_PAPER to paper.tex")
def test_what_is_quoted_stands_in_the_paper():
    paper = literal(Path(os.environ["CURVLAB_PAPER"]).read_text(encoding="utf-8"))
    quoted = {
        quote.words for one in EXPERIMENTS for quote in one.quotes
        if not quote.place.endswith(", bold")
    }  # fmt: skip
    assert len(quoted) > 30
    for words in quoted:
        for part in re.split(r"\[[^\]]*\]", words):
            assert literal(part) in paper, words
