"""Random training scripts, each run plain and with the line: what they leave behind is the same, or it is refused by name.

The grammar is in `tests/fuzz`; `python benchmarks/fuzz_scripts.py --show SEED` prints a script and what it comes to.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from fuzz import running
from fuzz.grammar import OPTIONS, SIMPLEST, Choices, alone, drawn, others, settled
from fuzz.offenders import offenders, told
from fuzz.outcomes import DIFFERENT, FREE, INVALID, Outcome, outcome
from fuzz.pool import outcomes_of
from fuzz.script import MARK, source_of, steps_by_itself
from fuzz.shrinking import shrunk
from fuzz.snapshot import apart

SLICE = range(16)


def test_scripts_out_of_the_grammar_train_as_without_memfit() -> None:
    found = offenders(SLICE)
    assert not found, told(found)


FOUND = (
    {"state": "momentum_encoder", "calls": "siamese"},
    {"state": "momentum_encoder", "calls": "triplet", "metrics": "list_of_preds"},
    {"state": "spectral", "calls": "trades"},
    {"state": "running_used", "calls": "triplet_norm"},
    {"state": "running_mean", "calls": "trades"},
    {"state": "ema_data", "calls": "trades"},
    {"state": "spectral", "between": "buffers_data"},
    {"state": "running_used", "pack": "loss_out", "metrics": "other_loss"},
    {"body": "causal", "pack": "loss_out", "arithmetic": "divided_by_itself", "metrics": "set_item"},
    {"state": "running_used", "calls": "baseline", "batch": "5", "lever": "block"},
    {"state": "hidden", "pack": "losses"},
    {"state": "hidden", "pack": "loss"},
    {"state": "hidden", "pack": "loss", "micro": "5"},
    {"outside": "cycle_weights", "reach": "partial"},
    {"body": "encoder", "between": "parameter_data_early"},
    {"body": "encoder", "metrics": "norm", "between": "parameter_data"},
    {"body": "time_major", "between": "input_data_early"},
    {"calls": "features", "between": "labels_written"},
    {"calls": "evaluated_first", "outside": "centre_buffer"},
    {"loss": "if_max", "arithmetic": "minus_detached"},
    {"pack": "list", "loss": "penalty", "gradients": "hooks"},
    {"pack": "list", "loss": "penalty", "gradients": "post_hooks_step"},
    {"pack": "list", "gradients": "post_hooks_step"},
    {"pack": "list", "gradients": "hooks"},
    {"twist": "reentrant", "loss": "two_losses_two_means"},
    {"outside": "loader_goals"},
    {"outside": "generator_weights"},
    {"calls": "in_two_by_hand", "state": "counter"},
    {"calls": "in_two_by_hand", "batch": "6"},
    {"state": "aux_loss"},
    {"twist": "by_batch"},
    {"loss": "first_marked"},
    {"loss": "scripted", "between": "output_hook"},
    {"state": "max_norm"},
    {"state": "clipped_weight", "calls": "catenated"},
    {"state": "clipped_weight", "calls": "self_training", "parts": "frozen_head", "metrics": "copy_"},
    {"twist": "cached_mask", "metrics": "max_metric", "evaluation": "with_graph", "samples": "12", "batch": "5", "epochs": "1"},
    {"body": "causal", "twist": "weight_norm", "pack": "loss", "arithmetic": "scripted_scale", "parts": "averaged"},
    {"state": "max_norm", "calls": "sum_of_two"},
    {"pack": "loss_out", "terms": "l1_parameters", "arithmetic": "divided_in_place", "parts": "added_group"},
    {"body": "conv", "state": "max_norm", "calls": "evaluated_first", "fault": "backward 4", "target": "double"},
    {"state": "samples_seen", "calls": "triplet", "lever": "block", "micro": "off"},
    {"outside": "static_count", "reach": "bound", "micro": "auto"},
    {"body": "bag", "state": "kept_graph", "loader": "ragged", "calls": "baseline"},
    {"body": "gru", "pack": "loss_out", "arithmetic": "own_function", "gradients": "hook_counts"},
    {"calls": "adversarial", "setting": "split"},
    {"calls": "catenated", "setting": "split"},
    {"twist": "by_max_item", "setting": "weight", "micro": "2"},
    {"twist": "batchnorm", "micro": "auto", "fault": "forward 1"},
    {"body": "encoder", "twist": "cached_mask", "state": "ema_data", "evaluation": "inference", "micro": "1"},
    {"twist": "weight_norm", "between": "all_data"},
    {"body": "bag", "pack": "rare_mean", "target": "double", "samples": "12", "micro": "1"},
    {
        "body": "causal", "state": "class_counter", "pack": "rare_mean", "arithmetic": "divided",
        "target": "same", "samples": "12", "setting": "split", "fault": "backward 1",
    },
    {
        "state": "ema_data", "between": "cast_to_and_fro", "evaluation": "with_graph", "batch": "5", "micro": "off",
        "lever": "block",
    },
    {"state": "clipped_weight", "terms": "l1_parameters", "calls": "evaluated_first", "loss": "mse_sum", "micro": "1"},
)
"""What differed silently, crashed or did not end once, by what it takes."""


@pytest.mark.parametrize("made", FOUND, ids=lambda made: "-".join(made.values()))
def test_what_was_found_once(made: Choices) -> None:
    choices = settled({**SIMPLEST, **made})
    assert others(choices) == made
    found = [(mode, one.kind, one.what, one.detail) for mode, one in outcomes_of(choices) if one.bad]
    assert not found, found


def test_every_option_can_be_written_and_runs_plain() -> None:
    """Each by itself, in both modes: as chosen, and without an error."""
    failed = []
    for name, options in OPTIONS.items():
        for option in options:
            choices = alone(name, option)
            if choices[name] != option:
                failed.append(f"{name}={option} falls back to {choices[name]}")
                continue
            for step in (False, True) if steps_by_itself(choices) else (False,):
                ran = running.plain(source_of(choices, step=step))
                if ran.error is not None:
                    failed.append(f"{name}={option}: {ran.trace[-300:]}")
    assert not failed, "\n".join(failed)


KINDS = {
    "in place on a loss": (alone("arithmetic", "divided_in_place"), r"loss /= 4"),
    "in place on a sum of losses": (alone("arithmetic", "sum_then_div_"), r"loss = loss \+ .*\n.*loss\.div_\(4\)"),
    "a plain tensor and an output": (alone("metrics", "total_add_"), r"total\.add_\(out\.detach\(\)\.mean\(\)\)"),
    "counted hits": (alone("metrics", "correct"), r"correct \+= \(out\.argmax\(-1\) == y\)\.sum\(\)"),
    "a penalty added in place": (alone("arithmetic", "added_in_place"), r"loss \+= .*sum\(p\.pow\(2\)"),
    "one loss of two calls": (alone("calls", "siamese"), r"F\.mse_loss\(out, other\.detach\(\)\) \+ F\.mse_loss\(other"),
    "a norm of two calls": (alone("calls", "triplet_norm"), r"\(out - positive\)\.norm\(dim=1\)"),
    "means beside other terms": (alone("loss", "two_denominators"), r"masked_fill\(y == 1, -100\)\) \+ 0\.3"),
    "another loss kept in the loop": (alone("loss", "temperature"), r"out / \(1\.0 \+ 0\.1 \* step\)"),
    "data written between": (alone("between", "parameter_data_early"), r"\.data\.add_"),
    "input written between": (alone("between", "input_data_early"), r"x\.data\.add_"),
    "a batch that cannot be cut": (alone("twist", "fixed_size"), r"expand\(BATCH"),
    "an assert on the batch": (alone("twist", "divides"), r"assert 256 % len\(x\) == 0"),
    "hidden state on the module": (alone("state", "hidden"), r"self\.hidden = mixed\.detach\(\)"),
    "a scripted loss": (alone("loss", "scripted"), r"torch\.jit\.script"),
    "vmap": (alone("loss", "vmap"), r"torch\.vmap"),
    "a distribution": (alone("pack", "distribution"), r"return Categorical"),
    "added parameters": (alone("parts", "added_group"), r"add_param_group"),
    "a new head": (alone("parts", "new_head"), r"model\.head = nn\.Linear"),
    "batches from the loader": (alone("loader", "whole_batches"), r"batch_size=None"),
    "no length": (alone("loader", "length_raises"), r"raise NotImplementedError"),
    "the hardest samples": (alone("loss", "top4"), r"topk\(4\)"),
    "a reentrant checkpoint on data": (alone("calls", "checkpointed_data"), r"use_reentrant=True"),
    "values of the batch decide": (alone("twist", "by_value"), r"if h\.abs\(\)\.max\(\) > 0\.8"),
    "the loss decides": (alone("loss", "if_item"), r"if loss\.item\(\) > 1\.1"),
    "a running centre in the loss": (alone("outside", "centre_buffer"), r"self\.centre\.mul_"),
    "a memory bank": (alone("outside", "bank"), r"self\.bank\[rows\]"),
    "a queue": (alone("outside", "queue"), r"deque\(maxlen=5\)"),
    "a counter in the loss": (alone("outside", "counted"), r"self\.calls \+= 1"),
    "by closure": (alone("reach", "closure"), r"def made\(criterion\)"),
    "by a bound method": (alone("reach", "bound"), r"task\.objective"),
    "by partial": (alone("reach", "partial"), r"functools\.partial"),
    "a learned temperature": (alone("outside", "temperature"), r"self\.log_t = nn\.Parameter"),
    "learned weights, an optimizer of their own": (
        settled({**SIMPLEST, "outside": "uncertainty", "optimised": "own"}), r"beside = torch\.optim"
    ),
    "ArcFace": (alone("outside", "arcface"), r"torch\.acos"),
    "a prompt": (alone("outside", "prompt"), r"x = x \+ prompt"),
    "a momentum encoder": (alone("state", "momentum_encoder"), r"slow\.mul_\(0\.9\)"),
    "saved-tensor hooks": (alone("calls", "saved_hooks"), r"saved_tensors_hooks"),
    "checkpoint around the call": (alone("calls", "checkpointed"), r"checkpoint\(lambda x: model\(x\)"),
    "checkpoint around the loss": (alone("loss", "checkpointed"), r"checkpoint\(lambda out, y"),
    "batch statistics": (alone("twist", "batchnorm"), r"BatchNorm1d"),
}  # fmt: skip
"""The kinds of faults that were seen in scripts that nobody had thought of, as they are written."""


def test_the_kinds_of_faults_that_were_seen_can_be_written() -> None:
    missing = [kind for kind, (choices, pattern) in KINDS.items() if not re.search(pattern, source_of(choices))]
    assert not missing


def test_a_seed_is_one_script() -> None:
    assert [source_of(drawn(seed)) for seed in range(20)] == [source_of(drawn(seed)) for seed in range(20)]
    assert len({source_of(drawn(seed)) for seed in range(200)}) > 190


def test_scripts_run_the_same_each_time() -> None:
    """What is compared does not differ by itself."""
    for seed in range(12):
        source = source_of(drawn(seed))
        assert apart(running.plain(source).left, running.plain(source).left) == {}


def test_rounding_is_seen() -> None:
    """The script from other last digits, which tells what rounding makes of it, differs, and hardly."""
    source = source_of(SIMPLEST)
    drift = running.drift(source, running.plain(source))
    assert 0 < max(drift.values(), default=0.0) < 1e-12


@pytest.mark.parametrize(
    "fault",
    ["loss = loss * 1.000001", "next(model.parameters()).grad = None", "print(0.5)", "torch.rand(())", "model.extra = 1"],
)
def test_what_differs_is_seen(fault: str) -> None:
    """A line that memfit's side runs and the plain side does not."""
    source = source_of(SIMPLEST).replace("        loss.backward()\n", f"        #: {fault}\n        loss.backward()\n")
    assert apart(running.plain(source).left, running.with_memfit(source).left)


def test_a_finding_is_shrunk_to_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(choices: Choices, *, step: bool) -> Outcome:
        return Outcome(DIFFERENT if choices["loss"] == "pow" and choices["clip"] == "norm" else FREE)

    monkeypatch.setattr("fuzz.shrinking.outcome", found)
    choices = settled({**SIMPLEST, "body": "gru", "loss": "pow", "clip": "norm", "optimizer": "adam", "epochs": "1"})
    assert others(shrunk(choices, Outcome(DIFFERENT), step=False)[0]) == {"loss": "pow", "clip": "norm"}


def test_a_script_that_torch_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = source_of(SIMPLEST).replace(MARK, f"{MARK}\nraise ValueError")
    monkeypatch.setattr("fuzz.outcomes.source_of", lambda choices, step: broken)
    assert outcome(SIMPLEST, step=False).kind == INVALID


def test_every_fault_of_the_past_can_be_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark that asks what the grammar is worth replaces functions of memfit by their names."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    worth = import_module("fuzz_worth")
    for name in worth.FAULTS:
        with worth.put_back(name):
            pass
