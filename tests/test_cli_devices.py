"""The command line for GPUs that are not here: one, many, and models that exist as a configuration alone."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import memfit
from memfit._units import GiB, MiB
from memfit.cli.cards import named_cards
from memfit.cli.commands import app
from memfit.cli.configs import ConfigOptions, built, own_loss
from memfit.kernels.alike import STEPS, step_of
from memfit.kernels.attention import kernel_of
from memfit.kernels.target import Target
from memfit.planning.search import Demand, Prices, search
from memfit.reporting.cards import LACKING, Comparison, DeviceRow, in_order

FUNCTIONS = """
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

def parts(model):
    data = TensorDataset(torch.randn(64, 256), torch.randint(0, 4, (64,)))
    return model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=16)

def layers(width=256):
    return torch.nn.Sequential(torch.nn.Linear(256, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))

def make():
    return *parts(layers()), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])

def on_meta():
    with torch.device("meta"):
        model = layers(1 << 20)
    return *parts(model), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])

def nothing():
    return *parts(layers())[:2], [], lambda model, batch: model(batch)
"""

SCRIPT = """
import torch, torch.nn.functional as F
from made import layers, parts
import memfit

model, optimizer, loader = memfit.wrap(*parts(layers()), target_batch=32{wrap})
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    print("STEPPED")
"""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
    "vocab_size": 96,
}


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in a directory of its own, with functions, scripts and a configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("made", "memfit_given_made"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "made.py").write_text(FUNCTIONS)
    (tmp_path / "script.py").write_text(SCRIPT.format(wrap=""))
    (tmp_path / "steps.py").write_text(SCRIPT.format(wrap=", loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1])"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def planned(*arguments: str) -> str:
    """What `memfit plan` prints on stdout."""
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def refused(*arguments: str) -> str:
    """What `memfit plan` says, in three parts, where it refuses; nothing is on stdout."""
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code == 2, (done.output, done.exception)
    assert not done.stdout and "Traceback" not in done.stderr
    assert "\n  found: " in done.stderr and "\n  next:  " in done.stderr
    return done.stderr


def assert_not_measured(said: str) -> None:
    """A report for a card that is not here claims nothing that would have to be measured on it."""
    assert "which is not here" in said and "modelled from its data sheet, not measured" in said
    assert not re.search(r"measured", said.replace("not measured", ""))


# ---- one card


@pytest.mark.parametrize("target", ["made.py:make", "script.py", "steps.py"])
def test_a_plan_for_a_card(target: str) -> None:
    said = planned(target, "--device", "a100-40gb", "--target-batch", "48")
    assert "48 whole" in said and "NVIDIA A100 SXM4 40 GB" in said and "STEPPED" not in said
    assert_not_measured(said)


@pytest.mark.parametrize("name", ["html", "md"])
def test_other_views_of_it(name: str) -> None:
    planned("made.py:make", "--device", "a100-40gb", "--save", "plan.json")
    done = CliRunner().invoke(app, ["report", "plan.json", "--save", f"plan.{name}"])
    assert done.exit_code == 0 and "which is not here" in Path(f"plan.{name}").read_text()
    assert_not_measured(done.stdout)


def test_a_model_on_the_meta_device() -> None:
    said = planned("made.py:on_meta", "--device", "rtx-4090", "--target-batch", "4096")
    assert "274 M parameters" in said
    assert_not_measured(said)


def test_half_precision_gradients_gather_as_asked() -> None:
    """On a card that holds weights and gradients of bfloat16, but not gradients of float32."""
    large = json.dumps(LLAMA | {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 8})
    Path("large.json").write_text(large)
    asked = ("--hf-config", "large.json", "--target-batch", "4096", "--optimizer", "sgd", "--device")
    assert "--accumulate-in param" in refused(*asked, "rtx-3060")
    planned(*asked, "rtx-3060", "--accumulate-in", "param", "--save", "plan.json")
    assert memfit.Plan.load("plan.json").accumulate_in == "param"
    assert "float32, param" in refused(*asked, "rtx-3060", "--accumulate-in", "float64")
    assert "accumulate_in='param'" in refused("script.py", "--accumulate-in", "param")


def test_a_fused_optimizer_takes_no_copy_of_the_parameters() -> None:
    large = config("large.json", hidden_size=512, intermediate_size=2048)

    def profiled(name: str) -> memfit.Profile:
        found = built(ConfigOptions(Path(large), seq_len=8, optimizer=name))
        parts = found.model, found.optimizer, found.sample
        return memfit.profile(*parts, loss_fn=own_loss, device="h100-80gb", accumulate_in="param")

    by_lists, fused = profiled("adamw"), profiled("adamw-fused")
    copy = by_lists.model.gradient_bytes
    assert dict(by_lists.explain(1).holds)["transient"] >= copy and by_lists.explain(1).moment.phase == "optimizer"
    assert dict(fused.explain(1).holds)["transient"] < copy // 4


FOR_CUDA = """
import torch, memfit
from torch import nn
from torch.nn import functional as F
device = torch.device("cuda", 0)
{first}
model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
weight = torch.ones(10, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.ones(64), 1)] * 64
loader = torch.utils.data.DataLoader(data, batch_size=16)
model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=48)
model.to(device)
for x, y in loader:
    x, y = x.to("cuda:0", non_blocking=True), y.to(0)
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x), y.cuda(), weight=weight.to(device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="scripts for CUDA run as they are where there is CUDA")
def test_a_script_for_cuda_is_planned_without_cuda() -> None:
    text = FOR_CUDA.format(first="")
    texts = {
        "cuda": text,
        "without": text.replace("bfloat16)", "bfloat16, enabled=False)"),
        "cpu": re.sub(r"\bcuda(:0)?\b(?!\()", "cpu", text),
    }
    peaks = {}
    for name, own in texts.items():
        Path(f"{name}.py").write_text(own)
        assert_not_measured(planned(f"{name}.py", "--device", "a100-40gb", "--save", "plan.json"))
        peaks[name] = memfit.Plan.load("plan.json").predicted.peak
    assert peaks["cuda"] == peaks["cpu"] != peaks["without"], "its autocast counts"
    assert "line 7, uses CUDA" in refused("cuda.py") and "--device a100-40gb" in refused("cuda.py")
    Path("cuda.py").write_text(FOR_CUDA.format(first="torch.cuda.set_device(0)"))
    assert "line 6, asks the CUDA driver" in refused("cuda.py", "--device", "a100-40gb")


def test_an_unnamed_card_has_no_seconds() -> None:
    said = planned("made.py:make", "--device", "24GiB")
    assert "a card of 24.0 GiB, which is not here" in said
    assert "per step        -" in said and "measured" not in said


def test_the_budget_is_the_cards() -> None:
    Path("small.py").write_text(SCRIPT.format(wrap=", budget='300MiB'"))  # what the script allows itself here
    assert "of 39.4 GiB" in planned("small.py", "--device", "a100-40gb")
    assert "of 1.00 GiB" in planned("made.py:make", "--device", "t4", "--budget", "1GiB")
    said = refused("made.py:on_meta", "--device", "gtx-1650")
    assert "held by its context" in said and "take a device with" in said and "--devices all" in said
    assert "give it budget=" in refused("made.py:on_meta", "--device", "a100-40gb", "--budget", "2GiB")


def test_what_is_exported_and_saved() -> None:
    assert "per_device_train_batch_size=16" in planned("made.py:make", "--device", "t4", "--export", "transformers")
    planned("made.py:make", "--device", "t4", "--save", "plan.json")
    assert any("which is not here" in note for note in memfit.Plan.load("plan.json").notes)


# ---- many cards


def test_cards_are_compared() -> None:
    names = "gtx-1650,h100-80gb,a100-40gb,64GiB"
    said = planned("made.py:on_meta", "--devices", names, "--target-batch", "4096", "--save", "all.json")
    rows = [line.split() for line in said.splitlines()[3:7]]
    assert [row[0] for row in rows] == ["h100-80gb", "a100-40gb", "64.0GiB", "gtx-1650"]
    assert "no, needs" in said.splitlines()[6] and "fits on 3 of 4 devices" in said
    assert "not measured" in said
    data = json.loads(Path("all.json").read_text())
    assert [row["fits"] for row in data["rows"]] == [True, True, True, False]
    assert data["rows"][2]["seconds"] is None and data["rows"][0]["bottleneck"] in ("arithmetic", "memory traffic", "launches")
    again = CliRunner().invoke(app, ["report", "all.json"])
    assert again.stdout == said


def test_a_row_is_what_a_plan_for_that_card_says() -> None:
    names = ("h100-80gb", "rtx-4090", "t4")
    planned("made.py:on_meta", "--devices", ",".join(names), "--target-batch", "30000", "--save", "all.json")
    rows = {row["device"]: row for row in json.loads(Path("all.json").read_text())["rows"]}
    for name in names:
        planned("made.py:on_meta", "--device", name, "--target-batch", "30000", "--save", "one.json")
        plan = memfit.Plan.load("one.json")
        row = rows[name]
        assert (row["micro_batch"], row["accumulation"], row["checkpoint"]) == (plan.micro_batch, plan.accumulation, 0)
        assert row["seconds"] == plan.predicted.seconds and row["needs"] == plan.held + plan.predicted.upper


def test_what_a_card_lacks_is_what_would_do() -> None:
    """As large a budget as is suggested does, and one a fiftieth smaller does not: nothing is held there but the context."""
    asked = ("made.py:on_meta", "--target-batch", "4096", "--device", "a100-80gb", "--budget")
    said = re.search(r"give it budget='([\d.]+) ?GiB'", refused(*asked, "2GiB"))
    assert said is not None
    needs = float(said.group(1))
    assert "fits" in planned(*asked, f"{needs}GiB")
    assert "give it budget=" in refused(*asked, f"{0.98 * needs:.3f}GiB")


def test_all_cards() -> None:
    said = planned("--hf-config", "config.json", "--target-batch", "8", "--devices", "all")
    assert "fits on 147 of 147 devices" in said and "bfloat16" in said and "128 tokens per sample" in said


def test_rows_are_in_order() -> None:
    def row(name: str, fits: bool, seconds: float | None, needs: int = 0) -> DeviceRow:
        return DeviceRow(name, name, 8, 8, fits, needs, seconds=seconds)

    fitting = [row("slow", True, 2.0), row("?", True, None), row("fast", True, 1.0)]
    lacking = [row("far", False, None, 20), row("near", False, None, 9)]
    assert [r.device for r in in_order([*lacking, *fitting])] == ["fast", "slow", "?", "near", "far"]


def test_of_what_lacks_much_only_some_is_shown() -> None:
    rows = in_order([DeviceRow(f"c{i}", "", 8 * GiB, 8 * GiB, i == 0, i * GiB, 1, 1) for i in range(40)])
    found = Comparison("M", 5, "SGD", 8, "", rows, "today")
    assert len(found.shown()) == 1 + LACKING and f"{39 - LACKING} more" in str(found)
    assert Comparison.from_json(found.to_json()) == found


def test_lists_of_cards() -> None:
    assert [c.name for c in named_cards(" t4 , rtx-4090,t4")] == ["t4", "rtx-4090"]
    assert len(named_cards("24GiB,all")) == 148


@pytest.mark.parametrize("head", [8, 20, 64, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_capabilities_stand_for_those_up_to_the_next(head: int, dtype: torch.dtype) -> None:
    q = torch.empty(1, 2, 16, head, dtype=dtype, device="meta", requires_grad=True)
    there = [(major, minor) for major, minor in itertools.product(range(5, 13), range(10))]
    for capability, dropout, causal in itertools.product(there, (0.0, 0.1), (True, False)):
        took = [kernel_of(q, q, q, None, dropout, causal, False, Target(c)) for c in (capability, step_of(capability))]
        assert took[0] == took[1], capability
    assert STEPS == tuple(sorted(STEPS))


def test_shared_prices_change_no_plan() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters())
    profile = memfit.profile(model, optimizer, torch.ones(5, 64), loss_fn=lambda m, x: m(x).sum(), device="a100-40gb")
    prices = Prices()
    for size in (620, 700, 900):
        budget = memfit.probe(device="a100-40gb", budget=size * MiB)
        demand = Demand(60_000, sizes=(1_000, 10_000, 20_000, 30_000))
        assert search([profile], budget, demand, prices) == search([profile], budget, demand)


# ---- configurations

OTHERS: dict[str, dict[str, Any]] = {
    "bert": {
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 96,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 64,
        "num_heads": 4,
        "num_layers": 2,
        "vocab_size": 96,
        "n_positions": 64,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    },
    "gpt2": {
        "architectures": ["GPT2ForSequenceClassification"],
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "vocab_size": 96,
    },
}


def config(name: str = "config.json", **changes: Any) -> str:
    """Write a configuration with these entries changed, those that are None left out; its name."""
    data = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    Path(name).write_text(json.dumps(data))
    return name


@pytest.mark.parametrize("kind", OTHERS)
def test_kinds_of_models(kind: str) -> None:
    Path("other.json").write_text(json.dumps({"model_type": kind, **OTHERS[kind]}))
    said = planned("--hf-config", "other.json", "--target-batch", "64", "--device", "rtx-4090", "--optimizer", "sgd")
    assert OTHERS[kind]["architectures"][0] in said and "SGD" in said and "float32" in said
    assert_not_measured(said)


def test_a_configuration_says_what_is_trained() -> None:
    found = built(ConfigOptions(Path("config.json"), seq_len=32))
    assert type(found.model).__name__ == "LlamaForCausalLM" and found.model.training
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in found.model.parameters())
    assert found.sample["input_ids"].shape == found.sample["labels"].shape == (5, 32)
    assert not found.model.config.use_cache
    assert built(ConfigOptions(Path(), precision="float32")).model.dtype is torch.float32  # a directory, too
    assert built(ConfigOptions(Path("config.json"))).sample["input_ids"].shape[1] == 128  # its positions
    other = built(ConfigOptions(Path("config.json"), task="sequence-classification"))
    assert own_loss.__module__ in sys.modules and "ForSequenceClassification" in type(other.model).__name__


def test_a_task_where_the_architecture_has_no_head() -> None:
    found = built(ConfigOptions(Path(config("bare.json", architectures=["LlamaModel"]))))
    assert type(found.model).__name__ == "LlamaForCausalLM"


def test_a_model_too_large_to_be_allocated() -> None:
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "vocab_size": 128256}
    large = config("large.json", **wide)
    said = planned("--hf-config", large, "--seq-len", "64", "--target-batch", "8", "--device", "b200")
    assert "3.79 B parameters" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "lama"}, "the nearest it knows: llama"),
        ({"architectures": ["LlamaForTokenClassification"]}, "pass --task, one of causal-lm"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": -3}, "vocab_size is -3"),
        ({"hidden_size": "wide"}, "transformers refuses it"),
        ({"hidden_size": 63}, "transformers refuses it"),
        ({"model_type": "musicgen"}, "transformers refuses it"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_configurations_that_cannot_be_built(changes: dict[str, Any], said: str) -> None:
    assert said in refused("--hf-config", config("bad.json", **changes), "--target-batch", "8", "--device", "t4")


@pytest.mark.parametrize(
    ("text", "said"), [("{not json", "it is not JSON"), ("[1]", "names no model_type"), (None, "No such file")]
)
def test_files_that_are_no_configuration(text: str | None, said: str) -> None:
    if text is not None:
        Path("bad.json").write_text(text)
    assert said in refused("--hf-config", "bad.json", "--target-batch", "8", "--device", "t4")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in refused("--hf-config", "config.json", "--target-batch", "8", "--device", "t4")


# ---- options that cannot be meant

HF = ("--hf-config", "config.json", "--target-batch", "8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "it names no training"),
        (("script.py", *HF, "--device", "t4"), "these are two trainings"),
        (("script.py", "--seq-len", "8"), "it belongs to --hf-config"),
        (HF, "it names no device"),
        (("--hf-config", "config.json", "--device", "t4"), "pass --target-batch"),
        ((*HF, "--device", "t4", "--seq-len", "129"), "the model has 128 positions"),
        ((*HF, "--device", "t4", "--seq-len", "0"), "seq_len"),
        ((*HF, "--device", "t4", "--seq-len", "-3"), "seq_len"),
        ((*HF, "--device", "t4", "--precision", "int8"), "use one of float32, bfloat16, float16"),
        ((*HF, "--device", "t4", "--optimizer", "lion"), "use one of adamw, adamw-fused, sgd"),
        ((*HF, "--device", "t4", "--task", "poetry"), "use one of seq2seq-lm"),
        ((*HF, "--device", "t4", "--task", "image-classification"), "has no model of type llama for image-classification"),
        (("--hf-config", "config.json", "--target-batch", "0", "--device", "t4"), "target_batch"),
        (("made.py:make", "--device", "t4", "--devices", "all"), "omit one of them"),
        (("made.py:make", "--device", "rtx-409"), "rtx-4090"),
        (("made.py:make", "--device", "a100"), "a100-80gb"),
        (("made.py:make", "--device", "cuda:0"), "a device of this machine"),
        (("made.py:make", "--devices", "t4,rtx-409"), "rtx-4090"),
        (("made.py:make", "--devices", " , "), "it names none"),
        (("made.py:make", "--devices", "all", "--export", "torch"), "none is chosen"),
        (("script.py", "--devices", "all"), "a script runs until its wrap has a plan"),
        (("made.py:nothing", "--device", "t4"), "its loader yields nothing"),
        (("made.py:make", "--device", "t4", "--budget", "6"), "bytes"),
        (("made.py:make", "--device", "t4", "--", "--lr", "3"), "a function is called without arguments"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(*arguments)


def test_a_configurations_samples_take_no_memory_however_large(tmp_path: Path) -> None:
    """Five images of 16384 pixels a side would be 16 GB in float32."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    kind = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 16384, "patch_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(kind | sizes))
    sample = built(ConfigOptions(tmp_path)).sample
    assert sample["pixel_values"].shape == (5, 3, 16384, 16384)
    assert sum(t.untyped_storage().nbytes() for t in sample.values()) < 1 << 10
