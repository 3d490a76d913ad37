"""The source of a script, put together from its choices."""

from __future__ import annotations

import re

from fuzz import loaders, models, outside, training
from fuzz.grammar import Choices, kind, owner, the
from fuzz.on_device import on_device
from fuzz.pieces import SECTIONS, indented, together

HEAD = """
import copy
import functools
import itertools
import random
from collections import deque, namedtuple
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.utils.data import DataLoader, TensorDataset
"""
MARK = "# the line stands here"
KEEP = "slopes.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])"
CALL = re.compile(r"(\w*)«(!?)([^»]*)»")


def source_of(choices: Choices, *, step: bool = False, micro: int | str | None = None) -> str:
    """A script that runs by itself. Lines behind `#: ` are memfit's; those that end in `#-` go where memfit's come.

    `step` writes the loss as a function that step mode can be given.
    """
    return on_device(_Writer(choices, step, micro).text())


def steps_by_itself(choices: Choices) -> bool:
    """Whether a script's loop does no more than step mode does."""
    simple = {"metrics": "none", "between": "none", "backward": "once", "zero": "first", "accumulation": "none"}
    if any(choices[name] != option for name, option in simple.items()) or "own" == choices["optimised"] or choices["optimizers"] != "one":
        return False
    if choices["calls"] in ("input_gradient", "each_backward", "gan_of_two") or "rand" in the(choices, "calls").lines.get("call", ""):  # draws of a batch that is cut are others
        return False
    if "stepped" in the(choices, "arithmetic").lines:  # which reads what the loop computed
        return False
    gradients = choices["gradients"] in ("none", "hooks", "module_hook", "module_hook_replaces", "backward_hook", "scaled", "printed")
    return gradients and choices["logging"] in ("none", "item", "tensor_total", "formatted")


SPLIT = """
#: from torch.utils._pytree import tree_flatten, tree_unflatten
#: def pieces_of(batch, sizes):
#:     leaves, spec = tree_flatten(batch)
#:     cut = [leaf.split(sizes) if isinstance(leaf, torch.Tensor) and leaf.dim() else [leaf] * len(sizes) for leaf in leaves]
#:     return [tree_unflatten(list(piece), spec) for piece in zip(*cut)]
""".strip().splitlines()


class _Writer:
    def __init__(self, choices: Choices, step: bool, micro: int | str | None) -> None:
        self.c, self.step = choices, step
        self.micro = choices["micro"] if micro is None else str(micro)
        self.kind = kind(choices)
        self.tokens = "tokens" in the(choices, "body").tags
        self.two = "two" in the(choices, "inputs").tags
        self.owns = "owns" in the(choices, "pack").tags
        self.classes = 7 if self.tokens else 3
        self.sections = {name: self._section(name) for name in SECTIONS}
        self._place_metrics()
        self._place_loss()
        if "aux" in the(choices, "terms").tags:
            first, second = (the(choices, "pack").lines["suffix"], models.AUX[choices["pack"]])
            self.sections["call"] = f"found = «!x»\nout, aux = found{first}, found{second}"

    def _section(self, name: str) -> str:
        parts = ("calls", "loss", "outside", "terms", "arithmetic", "metrics", "logging", "between", "backward", "zero", "gradients",
                 "clip", "scheduler", "parts", "evaluation")  # fmt: skip
        found = []
        for part in parts:
            if name == "loss" and part != owner(self.c):
                continue
            if (name, part) != ("setup", "scheduler"):  # it needs the optimizer
                found.append(the(self.c, part).lines.get(name, ""))
        for part in ("body", "twist", "state", "pack"):
            if name in ("imports", "terms", "classes", "before"):
                found.append(the(self.c, part).lines.get(name, ""))
        return together(found)

    def _place_metrics(self) -> None:
        lines = the(self.c, "metrics").lines.get("metrics", "")
        where = self.c["where"]
        if lines and where != "before":
            to = "between" if where == "after" else "stepped"
            self.sections["metrics"] = together([the(self.c, "between").lines.get("metrics", "")])
            self.sections[to] = together([self.sections[to], lines])

    def _place_loss(self) -> None:
        self.objective = ""
        if self.owns:
            lines = {"loss": "loss = «x»", "loss_out": "loss, out = «x»", "losses": 'losses = «x»\nloss = losses["ce"] + 0.1 * losses["l2"]'}
            self.sections["call"] = lines.get(self.c["pack"], lines["loss"])
            self.sections["loss"] = ""
        else:
            holds = the(self.c, owner(self.c)).holds
            self.objective, self.sections["loss"] = outside.reached(self.sections["loss"], holds, self.c["reach"])

    # ---- parts of the script

    def text(self) -> str:
        return self._filled(together([
            HEAD, self.sections["imports"], self._constants(), "\n" + self.sections["classes"], the(self.c, "loader").lines.get("classes", ""),
            "\n" + self._model(), "\n" + self._setup(), self._data(), self.objective, self._optimizer(),
            *self._line(), self._loop(), self.sections["end"],
        ])) + "\n"  # fmt: skip

    def _constants(self) -> str:
        names = ["x", "z", "y"] if self.two else ["x", "y"]
        lines = [f"N, BATCH, CLASSES = {self.c['samples']}, {self.c['batch']}, {self.classes}", f"NAMES = {names!r}", "step = 0"]
        if self.c["target"] == "double":
            lines.append("BATCH = 2 * BATCH  #-")
        return "\n".join([*lines, "torch.manual_seed(0), random.seed(0), np.random.seed(0)"])

    def _model(self) -> str:
        parts = [the(self.c, name).lines for name in ("body", "twist", "state", "pack")]
        pair = "pair" in the(self.c, "pack").tags
        classes = models.model_source(*parts, inputs=self.c["inputs"], owns=self.owns, pair=pair, classes=self.classes,
                                      block=self.c["lever"] == "block")  # fmt: skip
        return f"{classes}\n\n\nmodel = Net().double()"

    def _setup(self) -> str:
        return self.sections["setup"]

    def _data(self) -> str:
        lines = ["source = torch.Generator().manual_seed(1)", loaders.DATA[self.kind].strip("\n")]
        shape = loaders.SHAPES[self.kind]
        if self.two:
            lines.append(f"zs = torch.randn(N, {shape}, generator=source).double()")
        labels = "torch.randint(0, 7, (N, 5), generator=source).masked_fill(xs == 0, -100)" if self.tokens else "torch.randint(0, 3, (N,), generator=source)"
        lines += [f"ys = {labels}", f"dataset = TensorDataset(xs, {'zs, ' if self.two else ''}ys)"]
        if "held" in self.sections["end_step"] + self.sections["end_epoch"]:
            lines.append("held = xs[:5].clone()" + ("\nheld_z = zs[:5].clone()" if self.two else ""))
        return together([*lines, the(self.c, "loader").lines["loader"]])

    def _optimizer(self) -> str:
        made = training.OPTIMIZERS[self.c["optimizer"]]
        more = self.sections["params"]
        trained = "model.parameters()"
        own = self.c["optimised"] == "own"
        if more and not own:
            trained = f"[*model.parameters(), {more}]"
        if self.c["optimizer"] == "groups":
            trained = f"*model.parameters(), {more}" if more and not own else "*model.parameters()"
        lines = [f"optimizer = {made.format(trained)}"]
        if self.c["optimizers"] != "one":
            heads = "[p for name, p in model.named_parameters() if name.startswith('head')]"
            rest = "[p for name, p in model.named_parameters() if not name.startswith('head')]"
            lines = [f"optimizer = {made.format(rest + (f' + [{more}]' if more and not own else ''))}", f"second_optimizer = {made.format(heads)}"]
        if own:
            lines.append(f"beside = torch.optim.SGD([{more}], lr=0.05)")
        around = training.OUTER_OPTIMIZERS.get(self.c["optimizer"])
        classes = [] if around is None else [f"\n{around}\n"]
        return together([*classes, *lines, the(self.c, "scheduler").lines.get("setup", "")])

    def _line(self) -> list[str]:
        micro = self.micro if self.micro.isdigit() else repr(self.micro)
        settings = f"micro_batch={micro}" + (", checkpoint=['inner']" if self.c["lever"] == "block" else "")
        if self.c["target"] != "none":
            several = self.c["accumulation"] != "none"
            settings += f", target_batch={'2 * ' if several or self.c['target'] == 'double' else ''}BATCH"
            settings += ", script_accumulation=2" if several else ""
        before = together([self.sections["gradients"], self.sections["clip"]])
        lines = [MARK, "#: import memfit"]
        if self.c["setting"] == "split":
            lines += SPLIT
            settings += ", split=pieces_of"
        if self.c["setting"] == "weight" and self.step:
            settings += ", weight=lambda piece: len(next(leaf for leaf in tree_flatten(piece)[0] if isinstance(leaf, torch.Tensor)))"
            lines.append("#: from torch.utils._pytree import tree_flatten")
        if self.step:
            before = together([KEEP, before])
            lines = [self._loss_fn(), "slopes = []", f"\n\ndef before_step():\n{indented(before, 4)}\n\n", *lines]
            settings += ", loss_fn=loss_fn, before_step=before_step"
        several = self.c["optimizers"] == "halves"
        optimizer = "[optimizer, second_optimizer]" if several else "optimizer"
        names = "model, (optimizer, second_optimizer), loader" if several else "model, optimizer, loader"
        wrapped = [f"#: run = memfit.wrap(model, {optimizer}, loader, {settings})", f"#: {names} = run"]
        place, _, number = self.c["fault"].partition(" ")
        return [*lines, *wrapped, *([f"#: runs_out_of_memory(model, {place!r}, {number})"] if number else [])]

    def _loss_fn(self) -> str:
        body = together([self._unpack(), self._before(), self._flat("call"), *(self.sections[n] for n in ("loss", "terms", "arithmetic"))])
        return f"\n\ndef loss_fn(model, batch):\n{indented(body, 4)}\n    return loss\n\n"

    def _before(self) -> str:
        return together([the(self.c, name).lines.get("before", "") for name in ("outside", "body")])

    def _unpack(self) -> str:
        fields = "x, z, y" if self.two else "x, y"
        unpack = the(self.c, "loader").lines.get("unpack", "FIELDS = batch").replace("FIELDS", fields)
        used = " ".join(self.sections[n] for n in ("call", "loss", "terms", "arithmetic", "metrics", "between", "backward"))
        goal = "None" if self.tokens else "F.one_hot(y, CLASSES).double()"
        return unpack + (f"\ngoal = {goal}" if "goal" in used else "")

    def _flat(self, name: str) -> str:
        text = self.sections[name]
        if self.tokens and "out" in text and not self.owns and "unflat" not in the(self.c, "loss").tags:
            text += "\nout, y = out.reshape(-1, CLASSES), y.reshape(-1)"
        return text

    def _loop(self) -> str:
        body = self._stepping() if self.step else self._scripted()
        get_batch = self.c["loader"] == "get_batch"
        batches = {"get_batch": "range(2)", "function": "batches_of()"}.get(self.c["loader"], "loader")
        lines = [f"for epoch in range({self.c['epochs']}):"]
        if get_batch:
            body = "batch = get_batch(number)\n" + body
        lines.append(f"    for {'number' if get_batch else 'batch'} in {batches}:")
        lines += [indented(body, 8), "        step += 1"]
        return "\n".join([*lines, indented(self.sections["end_epoch"], 4)] if self.sections["end_epoch"] else lines)

    def _scripted(self) -> str:
        s = self.sections
        zeroed = the(self.c, "zero").lines.get("before", "")
        before = s["before"].replace(zeroed, "", 1) if zeroed else s["before"]
        before = together([before])
        update = together([s["gradients"], s["clip"], "optimizer.step()"])
        if self.c["optimizers"] != "one":
            update += "\nsecond_optimizer.step()\nsecond_optimizer.zero_grad()"
        if self.c["optimised"] == "own":
            update += "\nbeside.step()\nbeside.zero_grad()"
        if self.c["accumulation"] == "none":
            last = together([zeroed, update])
        else:
            zero = zeroed or the(self.c, "zero").lines.get("end_step", "")
            end = "" if self.c["accumulation"] == "by_hand_short" else " or step == 3"
            update = f"if step % 2 == 1{end}:\n{indented(update, 4)}\n    {zero}"
            zeroed, last = "", update
            s["arithmetic"] = together([s["arithmetic"], "loss = loss / 2"])
            s["end_step"] = s["end_step"].replace(zero, "", 1)
        first = "" if self.c["accumulation"] != "none" else zeroed
        last = update
        return together([self._unpack(), first, before, self._flat("call"), s["metrics"], s["loss"], s["terms"], s["arithmetic"],
                         s["between"], s["backward"], last, s["stepped"], s["end_step"]])  # fmt: skip

    def _stepping(self) -> str:
        s = self.sections
        lines = together(["optimizer.zero_grad()", "loss = loss_fn(model, batch)", "loss.backward()", "before_step()", "optimizer.step()"])
        gone = "\n".join(f"{line}  #-" for line in lines.splitlines() if line.strip())
        rest = s["before"].replace("optimizer.zero_grad()", "", 1).replace(self._before() or "\0", "", 1)
        return together([rest, gone, "#: loss = run.step(batch)", s["stepped"], s["end_step"]])

    def _filled(self, text: str) -> str:
        suffix = the(self.c, "pack").lines["suffix"] if not self.owns else ""

        def call(match: re.Match[str]) -> str:
            name, whole, given = match.groups()
            more = ""
            if self.two:
                beside = "held_z" if given == "held" else "z"
                more = f", z={beside}" if self.c["inputs"] == "keyword" else f", {beside}"
            if self.c["inputs"] == "same":
                given, more = f"same := {given}", ", same"
            if self.c["inputs"] == "entries":
                given = f'given := {{"x": {given}}}'
            more += ", y" if self.owns else ""
            return f"{name or 'model'}({given}{more}){'' if whole else suffix}"

        text = text.replace("DATASET", "dataset").replace("INPUT", loaders.SHAPES[self.kind])
        return CALL.sub(call, text)
