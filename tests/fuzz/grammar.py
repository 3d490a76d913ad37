"""Choices: what may be chosen, how a seed chooses, and what goes with what."""

from __future__ import annotations

import random
from collections.abc import Callable

from fuzz import loaders, loops, losses, models, outside, states, training
from fuzz.pieces import Piece

Choices = dict[str, str]

TABLES: dict[str, dict[str, Piece]] = {
    "body": models.BODIES,
    "twist": models.TWISTS,
    "state": states.STATES,
    "pack": models.PACKS,
    "inputs": models.INPUTS,
    "calls": loops.CALLS,
    "loss": losses.LOSSES,
    "outside": outside.OUTSIDE,
    "terms": loops.TERMS,
    "arithmetic": loops.ARITHMETIC,
    "metrics": loops.METRICS,
    "logging": loops.LOGGING,
    "between": loops.BETWEEN,
    "backward": training.BACKWARD,
    "zero": training.ZERO,
    "gradients": training.GRADIENTS,
    "clip": training.CLIP,
    "scheduler": training.SCHEDULERS,
    "parts": training.PARTS,
    "evaluation": training.EVALUATION,
    "loader": loaders.LOADERS,
}
"""Dimensions whose options are pieces of source; the first option is the simplest."""

PLAIN: dict[str, tuple[str, ...]] = {
    "reach": ("inline", "global", "closure", "partial", "bound"),
    "where": loops.WHERE,
    "optimizer": tuple(training.OPTIMIZERS),
    "optimised": outside.OPTIMISED,
    "accumulation": training.ACCUMULATION,
    "optimizers": ("one", "halves", "halves_by_name"),
    "target": ("none", "same", "double"),
    "samples": ("16", "13", "12"),
    "batch": ("8", "6", "5"),
    "epochs": ("2", "1"),
    "micro": ("3", "2", "1", "5", "auto", "off"),
    "lever": ("off", "block"),
    "setting": ("none", "split", "weight"),
    "fault": ("none", "forward 1", "forward 4", "backward 1", "backward 4"),
}
"""Dimensions that other parts of the script read by name."""

OPTIONS: dict[str, tuple[str, ...]] = {**{name: tuple(table) for name, table in TABLES.items()}, **PLAIN}
SIMPLEST: Choices = {name: options[0] for name, options in OPTIONS.items()}
TWICE_AS_OFTEN = {"fault": 1.5, "lever": 1.5, "state": 1.5, "loss": 2.0, "calls": 1.2, "outside": 1.2, "body": 3.0, "micro": 3.0, "batch": 2.0, "samples": 2.0, "arithmetic": 1.2}
"""How much more often than others these dimensions take another option than the simplest."""

SELDOM, UNCUT = 0.3, frozenset(("decides", "mixes", "fixed", "writes"))
"""How often what cannot be cut is drawn, beside other options of its dimension: a script that is refused tells little more."""


def _weights(name: str) -> list[float]:
    table = TABLES.get(name)
    return [1.0 if table is None or UNCUT.isdisjoint(table[option].tags) else SELDOM for option in OPTIONS[name]]


def drawn(seed: int) -> Choices:
    """The choices that a seed stands for."""
    draw = random.Random(seed)
    often = draw.choice((0.08, 0.15, 0.3, 0.45))
    choices = dict(SIMPLEST)
    for name, options in OPTIONS.items():
        take = draw.random() < min(0.9, often * TWICE_AS_OFTEN.get(name, 1.0))
        (option,) = draw.choices(options, _weights(name))
        if take:
            choices[name] = option
    return settled(choices, keep=draw.choice(tuple(OPTIONS)))


def the(choices: Choices, name: str) -> Piece:
    """The piece that was chosen in a dimension."""
    return TABLES[name][choices[name]]


def kind(choices: Choices) -> str:
    """What samples are: rows, pictures, series or words."""
    return next(tag for tag in ("rows", "pictures", "series", "words") if tag in the(choices, "body").tags)


def _text(choices: Choices, name: str) -> str:
    return "\n".join(the(choices, name).lines.values())


def _loses(name: str, when: Callable[[Choices], bool]) -> tuple[str, Callable[[Choices], bool]]:
    return name, when


def _is(name: str, *options: str) -> Callable[[Choices], bool]:
    return lambda c: c[name] in options


def _penalises(c: Choices) -> bool:
    """Whether parameters are read beside the model."""
    return any("model.parameters()" in _text(c, name) for name in ("loss", "terms", "arithmetic"))


def _runs_whole(c: Choices) -> bool:
    return c["micro"] in ("auto", "off") or int(c["micro"]) >= int(c["batch"])


def _tokens(c: Choices) -> bool:
    return "tokens" in the(c, "body").tags


def _words(c: Choices) -> bool:
    return kind(c) == "words"


def _owned(c: Choices) -> bool:
    """Whether something else than the loss's own table brings the loss."""
    return owner(c) != "loss"


def owner(c: Choices) -> str:
    """The dimension that brings the loss."""
    for name in ("pack", "calls"):
        if "owns" in the(c, name).tags:
            return name
    return "outside" if the(c, "outside").holds else "loss"


def _shifts(c: Choices) -> bool:
    return any(part in _text(c, "calls") for part in ("«x +", "«x.", "«lam", "«given", "«torch"))


def _many_calls(c: Choices) -> bool:
    return "single" not in the(c, "calls").tags


def _fixed(c: Choices) -> bool:
    return any("fixed" in the(c, name).tags for name in ("twist", "state"))


def _owns(name: str) -> Callable[[Choices], bool]:
    return lambda c: "owns" in the(c, name).tags


def _time_major(c: Choices) -> bool:
    return "time_major" in the(c, "body").tags


RULES: tuple[tuple[str, Callable[[Choices], bool]], ...] = (
    # what needs floats, classes or whole rows
    _loses("calls", lambda c: _words(c) and _shifts(c)),
    _loses("calls", lambda c: _tokens(c) and ("goal" in _text(c, "calls") or _owns("calls")(c))),
    _loses("calls", lambda c: c["inputs"] != "one" and c["calls"] in ("catenated", "mixup")),
    _loses("calls", lambda c: _tokens(c) and c["calls"] in ("teacher", "evaluated_first", "two_models", "residual_calls")),
    _loses("backward", lambda c: c["backward"] == "scaler" and (c["gradients"] != "none" or c["optimizers"] != "one" or c["accumulation"] != "none")),
    _loses("target", lambda c: c["target"] == "double" and c["loader"] == "drop_last"),  # the data set may be smaller
    _loses("inputs", lambda c: _words(c) or _owns("pack")(c)),
    _loses("between", lambda c: "entries" in the(c, "between").tags and (c["inputs"] != "entries" or c["calls"] not in ("one", "sum_of_two"))),
    _loses("terms", lambda c: c["terms"] == "entry" and (c["inputs"] != "entries" or c["calls"] != "one")),
    _loses("between", lambda c: c["between"] == "entry_dropped" and c["terms"] == "entry"),
    _loses("inputs", lambda c: c["inputs"] in ("same", "entries") and ("lambda" in _text(c, "calls") or c["calls"] == "adversarial")),
    _loses("loss", lambda c: _tokens(c) and "tokens" not in the(c, "loss").tags),
    _loses("loss", lambda c: not _tokens(c) and "unflat" in the(c, "loss").tags),
    _loses("outside", lambda c: _words(c) and c["outside"] == "prompt"),
    _loses("outside", lambda c: _tokens(c) and c["outside"] != "none"),
    _loses("terms", lambda c: "aux" in the(c, "terms").tags and "pair" not in the(c, "pack").tags),
    _loses("terms", lambda c: "aux" in the(c, "terms").tags and (_many_calls(c) or c["calls"] != "one")),
    _loses("arithmetic", lambda c: _tokens(c) and "goal" in _text(c, "arithmetic")),
    _loses("between", lambda c: "floats" in the(c, "between").tags and _words(c)),
    _loses("loader", lambda c: "ragged" in the(c, "loader").tags and (not _words(c) or _tokens(c) or c["inputs"] != "one")),
    _loses("loader", lambda c: c["loader"] == "ragged_labels" and (not _tokens(c) or c["inputs"] != "one")),
    _loses("between", lambda c: "rows_only" in the(c, "between").tags and _tokens(c)),
    _loses("between", lambda c: c["between"] == "batch_deleted" and (c["logging"] == "total" or "len(x)" in _text(c, "backward"))),
    _loses("between", lambda c: c["between"] == "batch_deleted" and c["calls"] == "input_gradient"),
    _loses("between", lambda c: c["between"] == "labels_written" and c["metrics"] != "none"),
    _loses("calls", lambda c: c["calls"] == "reconstructs" and (kind(c) != "rows" or c["outside"] != "none")),
    _loses("calls", lambda c: _words(c) and c["calls"] in ("input_gradient", "checkpointed_reentrant")),
    _loses("metrics", lambda c: c["calls"] in ("in_two_by_hand", "in_fives_by_hand")),
    _loses("between", lambda c: c["calls"] in ("in_two_by_hand", "in_fives_by_hand") and "out" in _text(c, "between")),
    _loses("calls", lambda c: c["calls"] in ("in_two_by_hand", "in_fives_by_hand") and (c["inputs"] != "one" or _fixed(c) or _time_major(c))),
    _loses("calls", lambda c: c["calls"] == "each_backward" and ("autograd.grad" in _text(c, "backward") or c["accumulation"] != "none")),
    _loses("calls", lambda c: c["calls"] == "each_backward" and c["zero"] == "before_backward"),
    _loses("calls", lambda c: c["calls"] == "input_gradient" and ("autograd.grad" in _text(c, "backward") or c["backward"] == "inputs")),
    _loses("calls", lambda c: _time_major(c) and (c["calls"] in ("catenated", "triplet", "triplet_norm", "mixup") or "len(x)" in _text(c, "calls"))),
    _loses("inputs", _time_major),
    _loses("twist", lambda c: _time_major(c) and "len(x)" in _text(c, "twist")),
    _loses("state", lambda c: _time_major(c) and "len(x)" in _text(c, "state")),
    _loses("evaluation", _time_major),
    _loses("loss", lambda c: "eight" in the(c, "loss").tags and (c["samples"] != "16" or c["batch"] != "8")),
    _loses("optimizers", lambda c: c["optimizer"] == "groups" or c["parts"] in ("new_head", "added_group", "weights_replaced", "saved_and_loaded", "unfreezes")),
    _loses("scheduler", lambda c: c["optimizer"] == "adaptive" and c["scheduler"] not in ("none", "by_hand")),  # no torch optimizer
    _loses("optimizers", lambda c: c["scheduler"] != "none" or c["accumulation"] != "none"),
    _loses("target", lambda c: c["target"] != "none" and ("no_loader" in the(c, "loader").tags or c["loader"] in ("batch_sampler", "whole_batches"))),
    _loses("target", lambda c: c["target"] == "double" and (c["accumulation"] != "none" or _fixed(c) or "BATCH" in _text(c, "loss"))),
    _loses("arithmetic", lambda c: c["target"] == "double" and "len(x)" in _text(c, "arithmetic")),
    _loses("target", lambda c: c["target"] != "none" and c["accumulation"] != "none" and c["loader"] == "drop_last"),  # all is dropped
    # hooks of parameters run once per reentrant checkpoint: docs/guarantees.md, "State"
    _loses("gradients", lambda c: c["twist"] == "reentrant" and c["gradients"] == "post_hooks_step"),
    # an order drawn from the generator that the loop draws from, too: docs/guarantees.md, "Order of samples"
    _loses("loader", lambda c: c["loader"] == "global_shuffle" and "rand" in "".join(_text(c, n) for n in ("calls", "gradients", "between"))),
    # a model that returns its loss has no other, and one call
    _loses("calls", lambda c: _owns("pack")(c) and c["calls"] not in ("one",)),
    _loses("outside", lambda c: (_owns("pack")(c) or _owns("calls")(c)) and bool(the(c, "outside").holds)),
    _loses("terms", lambda c: c["pack"] in ("loss", "losses") and c["terms"] not in ("none", "l1_parameters")),
    _loses("loss", _owned),
    _loses("arithmetic", lambda c: c["pack"] in ("loss", "losses") and "out" in _text(c, "arithmetic")),
    _loses("metrics", lambda c: c["pack"] in ("loss", "losses")),
    _loses("between", lambda c: c["pack"] in ("loss", "losses") and "out" in _text(c, "between")),
    _loses("backward", lambda c: c["pack"] in ("loss", "losses") and "out" in _text(c, "backward")),
    _loses("evaluation", lambda c: _owns("pack")(c)),
    _loses("reach", lambda c: _owns("pack")(c) or _owns("calls")(c) or "model" in _text(c, owner(c)) or "scripted" == c["loss"]),
    # what sizes allow
    _loses("samples", lambda c: _fixed(c) and c["samples"] != "16"),
    _loses("batch", lambda c: _fixed(c) and c["batch"] != "8"),
    _loses("twist", lambda c: c["twist"] in ("fixed_size", "viewed", "divides") and c["calls"] == "catenated"),
    _loses("twist", lambda c: c["twist"] in ("fixed_size", "viewed", "divides") and c["evaluation"] != "none"),
    _loses("batch", lambda c: int(c["samples"]) % int(c["batch"]) == 1 and (c["twist"] == "batchnorm" or c["loss"] in ("hardest", "trimmed"))),
    _loses("twist", lambda c: c["twist"] == "batchnorm" and c["body"] == "tokens"),
    # what torch itself refuses
    _loses("backward", lambda c: c["twist"] == "reentrant" and c["backward"] not in ("once", "with_factor", "scaled", "autograd_backward")),
    _loses("backward", lambda c: "twice" == c["backward"] and "checkpoint" in c["calls"] + c["twist"] + c["loss"]),
    _loses("calls", lambda c: c["twist"] == "reentrant" and c["calls"] == "adversarial"),
    _loses("between", lambda c: c["between"] in ("retain_grad", "output_hook") and c["loss"] == "written_output"),
    _loses("between", lambda c: c["between"] == "retain_grad" and "autograd.grad" in _text(c, "backward")),
    _loses("between", lambda c: c["between"] == "retain_grad" and c["backward"] == "inputs"),
    _loses("arithmetic", lambda c: c["arithmetic"] == "pow_" and c["backward"] == "never"),
    _loses("backward", lambda c: "conflict" == c["backward"] and c["accumulation"] != "none"),
    _loses("accumulation", lambda c: c["zero"] not in ("first", "last")),
    _loses("gradients", lambda c: c["gradients"] in ("hooks", "hook_counts", "post_hooks") and c["parts"] in ("new_head", "averaged")),
    _loses("scheduler", lambda c: c["scheduler"] == "plateau" and c["accumulation"] != "none"),
    _loses("optimizer", lambda c: c["optimizer"] == "groups" and c["parts"] in ("new_head", "added_group")),
    _loses("scheduler", lambda c: c["parts"] in ("new_head", "added_group") and c["scheduler"] != "by_hand"),
    _loses("optimised", lambda c: not the(c, "outside").lines.get("params")),
    _loses("setting", lambda c: c["setting"] == "split" and (_time_major(c) or _owns("calls")(c) or "ragged" in the(c, "loader").tags)),
    _loses("setting", lambda c: c["setting"] == "weight" and (c["loss"] != "ce" or _owned(c) or c["arithmetic"] != "none" or _tokens(c))),
    # single samples are not tried again in smaller pieces; nor is what runs whole, once it has come to its backward
    _loses("fault", lambda c: c["micro"] in ("off", "1") or (_runs_whole(c) and c["fault"].startswith("backward"))),
    # rows whose number is the sign of what a norm makes zero
    _loses("state", lambda c: c["state"] == "max_norm" and (c["twist"] in ("layernorm", "groupnorm") or c["body"] == "encoder")),
    # a reentrant checkpoint's backward calls hooks of parameters by itself, and the penalty's once more
    _loses("gradients", lambda c: c["twist"] == "reentrant" and c["gradients"] in ("hooks", "hook_counts") and _penalises(c)),
    # a block has no head, and what leaves it by a door is not its output
    _loses("lever", lambda c: c["twist"] == c["state"] == "none" or "door" in the(c, "state").tags or c["state"] == "clipped_weight"),
)
"""A dimension, and when it falls back to its simplest option."""


def settled(choices: Choices, keep: str = "") -> Choices:
    """The choices with those put back to the simplest that do not go with others. `keep` is put back last."""
    choices = dict(choices)
    for _ in range(4):
        before = dict(choices)
        for name, when in sorted(RULES, key=lambda rule: rule[0] == keep):
            if choices[name] != SIMPLEST[name] and when(choices):
                choices[name] = SIMPLEST[name]
        if choices == before:
            break
    return choices


COMPANIONS: dict[str, Choices] = {
    "terms=entry": {"inputs": "entries"},
    "between=entry_set": {"inputs": "entries"},
    "between=entry_read": {"inputs": "entries"},
    "between=entry_dropped": {"inputs": "entries"},
    "terms=aux": {"pack": "tuple"},
    "terms=aux_ce": {"pack": "dict"},
    "loss=ce_transposed": {"body": "tokens"},
    "loader=ragged": {"body": "bag"},
    "loader=ragged_labels": {"body": "tokens"},
    "twist=batchnorm": {"samples": "16"},
    "optimised=own": {"outside": "temperature"},
    "reach=global": {"outside": "centre_buffer"},
    "reach=closure": {"outside": "centre_buffer"},
    "reach=partial": {"outside": "centre_buffer"},
    "reach=bound": {"outside": "centre_buffer"},
    "where=after": {"metrics": "accuracy"},
    "where=stepped": {"metrics": "accuracy"},
    "lever=block": {"state": "running_used"},
}
"""What an option needs beside it to be of any effect."""


def alone(name: str, option: str) -> Choices:
    """One option with everything else as simple as it goes."""
    return settled({**SIMPLEST, **COMPANIONS.get(f"{name}={option}", {}), name: option}, keep=name)


def others(choices: Choices) -> Choices:
    """What was chosen beside the simplest."""
    return {name: option for name, option in choices.items() if option != SIMPLEST[name]}
