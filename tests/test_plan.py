"""The plan as a value: frozen, printable, comparable, saved and loaded without loss."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from handmade import plan
from hypothesis import given, settings, strategies as st

from memfit import Plan, PlanFileError, UsageError
from memfit.planning.export import EXPORTS, equal_micro_batches
from memfit.planning.plan import VERSION, Cost, Option

OPTIONS = (
    Option(8, 64, "off", 0, Cost(3 << 30, 4 << 30, 1.5), True),
    Option(16, 32, "off", 0, Cost(5 << 30, 7 << 30, 1.4), False, "needs up to 7.00 GiB, 5.75 GiB allowed"),
    Option(16, 32, "off", 3, Cost(2 << 30, 3 << 30, 1.9), True, "27% slower"),
    Option(16, 32, "bfloat16", 0, Cost(2 << 30, 3 << 30, 0.9), True, "another precision"),
)


def rich_plan(**fields: Any) -> Plan:
    given = {"options": OPTIONS, "notes": ("samples differ",), "checkpoint": ("h.0", "h.1"), "overhead": 0.25}
    return plan(**(given | fields))


def test_it_is_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().micro_batch = 4  # type: ignore[misc]
    assert len({rich_plan(), rich_plan(), plan()}) == 2


def test_it_prints_what_runs_and_what_does_not() -> None:
    text = str(rich_plan())
    assert "memfit plan for GPT with AdamW on EPYC" in text
    assert "512 in 64 micro-batches of 8" in text and "2 blocks checkpointed" in text and "1.50 s per step" in text
    assert "not taken (micro-batch x accumulation steps):" in text
    assert re.search(r"16 x 32: .* expected, .* at most; needs up to \S+ \wiB, \S+ \wiB allowed", text)
    assert re.search(r"16 x 32, 3 blocks checkpointed: .*; 27 % slower", text)
    assert re.search(r"16 x 32, bfloat16: .*; another precision", text)
    assert "note: samples differ" in text
    assert "whole" in plan(accumulation=1, micro_batch=512, mode="whole").summary()
    assert "two passes" in plan(mode="replay").summary()
    assert "512 in 5 micro-batches of at most 103:" in plan(micro_batch=103, accumulation=5).summary()


@pytest.mark.parametrize(
    ("expected", "upper", "words"),
    [
        (3 << 30, 3 << 30, ": 3.00 GiB of "),
        (3000 << 20, 3100 << 20, ": 2.93 GiB of "),
        (3 << 30, 4 << 30, ": 3.00 to 4.00 GiB of "),
        (1000 << 20, 2 << 30, ": 1000 MiB to 2.00 GiB of "),
    ],
)
def test_what_a_step_may_come_to_is_said_where_it_is_much_more(expected: int, upper: int, words: str) -> None:
    assert words in plan(predicted=Cost(expected, upper), held=0).summary()


def test_what_was_rejected_has_a_reason() -> None:
    assert [option.micro_batch for option in rich_plan().rejected] == [16, 16, 16]
    assert all(option.reason for option in rich_plan().rejected)


def test_the_difference_of_two_plans_is_what_differs() -> None:
    assert plan().diff(plan()) == {}
    difference = plan().diff(plan(micro_batch=4, accumulation=128, predicted=Cost(1, 2)))
    assert difference == {
        "micro_batch": (8, 4),
        "accumulation": (64, 128),
        "predicted": (Cost(3 << 30, 4 << 30, 1.5), Cost(1, 2)),
    }


def test_room_is_what_is_left() -> None:
    assert plan().room == (6 << 30) - (1 << 28) - (4 << 30)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"target_batch": None},
        {"by_size": ((100, 8, 9), (200, 4, 4)), "median": 120},
        {"mode": "replay", "keep": 3},
        {"mode": "whole", "micro_batch": 512, "accumulation": 1},
        {"precision": "bfloat16", "notes": ('"quoted", é, \n',)},
        {"predicted": Cost(1, 2, None), "overhead": 1e-7},
    ],
)
def test_saved_and_loaded_it_is_the_same(tmp_path: Path, fields: dict[str, Any]) -> None:
    before = rich_plan(**fields)
    before.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == before
    assert Plan.from_json(before.to_json()) == before


names = st.text(max_size=8)
costs = st.builds(Cost, st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.none() | st.floats(0, 1e6))
options = st.builds(
    Option, st.integers(1, 99), st.integers(1, 99), st.sampled_from(["off", "bfloat16"]), st.integers(0, 9), costs,
    st.booleans(), names,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 999), st.integers(1, 99), costs, st.lists(options, max_size=3), st.lists(names, max_size=2), names
)
def test_any_plan_survives_json(
    share: int, micro_batch: int, cost: Cost, tried: list[Option], blocks: list[str], name: str
) -> None:
    before = plan(
        share=share,
        micro_batch=micro_batch,
        accumulation=-(-share // micro_batch),
        mode="accumulate" if micro_batch < share else "whole",
        predicted=cost,
        options=tuple(tried),
        checkpoint=tuple(blocks),
        model=name,
    )
    assert Plan.from_json(before.to_json()) == before


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([f.name for f in dataclasses.fields(Plan)]),
    st.sampled_from([None, -1, "x", [], {}, 1e400, [[]], True]),
)
def test_no_field_takes_everything(name: str, value: Any) -> None:
    """Whatever a field is replaced with, loading gives a plan or says that the file is wrong."""
    data = json.loads(rich_plan().to_json())
    data[name] = value
    try:
        loaded = Plan.from_json(json.dumps(data))
    except PlanFileError as error:
        assert error.found and error.next_move
    else:
        assert isinstance(str(loaded), str)


@pytest.mark.parametrize(
    "change", [{"limit": -5}, {"held": -1}, {"micro_batch": 10**30}, {"predicted": {"peak": -1, "upper": 1, "seconds": None}}]
)
def test_sizes_that_nothing_has_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PlanFileError, match="the field"):
        Plan.from_json(json.dumps(json.loads(rich_plan().to_json()) | change))


def test_how_gradients_gather_is_part_of_a_plan() -> None:
    assert Plan.from_json(plan(accumulate_in="param").to_json()).accumulate_in == "param"
    without = {key: value for key, value in json.loads(plan().to_json()).items() if key != "accumulate_in"}
    assert Plan.from_json(json.dumps(without)).accumulate_in == "float32"  # as files were before it was
    with pytest.raises(PlanFileError, match="accumulate_in"):
        Plan.from_json(json.dumps(without | {"accumulate_in": "float64"}))


def test_files_of_other_versions() -> None:
    data = json.loads(plan().to_json())
    assert data["version"] == VERSION
    with pytest.raises(PlanFileError, match="version"):
        Plan.from_json(json.dumps(data | {"version": VERSION + 1}))


def test_measured_sizes_replace_what_was_predicted() -> None:
    before = rich_plan(checkpoint=(), micro_batch=8, share=512, overhead=0.5)
    after = before.measured(8, {8: 0.001, 16: 0.002})
    assert after.predicted.seconds == pytest.approx(0.001 * 512 + 0.5)
    assert [o.cost.seconds for o in after.options[:1]] == [pytest.approx(0.001 * 512 + 0.5)]
    assert after.micro_batch == 8 and after.accumulation == 64
    assert before.measured(3, {}).accumulation == 171


def test_reasons_go_with_what_was_measured() -> None:
    def option(micro_batch: int, seconds: float, reason: str, checkpoint: int = 0) -> Option:
        return Option(micro_batch, 64 // micro_batch, "off", checkpoint, Cost(1, 1, seconds), True, reason)

    options = (
        option(4, 8.0, "100% slower"),
        option(8, 4.0, ""),
        option(16, 4.4, "10% slower"),
        option(8, 5.0, "25% slower", checkpoint=2),
    )
    before = rich_plan(checkpoint=(), micro_batch=8, share=64, overhead=0.0, precision="off", options=options, by_size=())
    # Steps take about a tenth of what was timed while planning.
    after = before.measured(16, {8: 0.5 / 64, 16: 0.4 / 64})
    assert [o.reason for o in after.options] == [
        "82% slower, estimated",
        "25% slower, measured while training",
        "",
        "14% slower, estimated",
    ]
    assert [o.cost.seconds for o in after.options] == [8.0, pytest.approx(0.5), pytest.approx(0.4), 5.0]


# ---- export

PLANS = {
    "plain": plan(),
    "whole": plan(mode="whole", micro_batch=512, accumulation=1),
    "replay": plan(mode="replay", keep=2),
    "checkpointed": plan(checkpoint=tuple(f"transformer.h.{i}" for i in range(12))),
    "one block": plan(checkpoint=("h.0",)),
    "bfloat16": plan(precision="bfloat16"),
    "float16": plan(precision="float16", checkpoint=("h.0",)),
    "ragged": plan(by_size=((100, 32, 40), (400, 4, 5)), median=120, micro_batch=24),
    "uneven": plan(share=509, target_batch=509, micro_batch=8),
    "several processes": plan(target_batch=2048),
    "hostile": plan(model='X"\nimport os; os.abort()\n#', checkpoint=('h"]\nimport os\n', "b")),
}


@pytest.mark.parametrize("tool", EXPORTS)
@pytest.mark.parametrize("name", PLANS)
def test_exports_are_python_with_the_plans_numbers(name: str, tool: str) -> None:
    text = PLANS[name].export(tool)
    tree = ast.parse(text)
    imported = {
        getattr(node, "module", None) or node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    assert imported <= {
        "torch",
        "functools",
        "torch.utils.checkpoint",
        "accelerate",
        "transformers",
        "lightning.pytorch",
    }
    assert "# Not the same as with memfit:" in text
    assert all(line.startswith("#") for line in text.split("# Not the same as with memfit:")[1].splitlines()[1:])


def arguments_of(text: str, function: str) -> dict[str, Any]:
    """The keyword arguments of the one call of `function`."""
    calls = [
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and getattr(n.func, "id", None) == function
    ]
    assert len(calls) == 1
    return {str(k.arg): ast.literal_eval(k.value) for k in calls[0].keywords}


def test_what_each_tool_is_told() -> None:
    half = plan(precision="bfloat16", checkpoint=("h.0",))
    assert arguments_of(half.export("transformers"), "TrainingArguments") == {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 64,
        "bf16": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    assert arguments_of(half.export("accelerate"), "Accelerator") == {
        "gradient_accumulation_steps": 64,
        "mixed_precision": "bf16",
    }
    assert arguments_of(half.export("lightning"), "Trainer") == {
        "accumulate_grad_batches": 64,
        "precision": "bf16-mixed",
    }
    assert arguments_of(plan(precision="float16").export("lightning"), "Trainer")["precision"] == "16-mixed"


@pytest.mark.parametrize(
    ("name", "tool", "text"),
    [
        ("plain", "accelerate", "divides every loss by 64"),
        ("plain", "lightning", "divides every loss by 64"),
        ("plain", "transformers", "num_items_in_batch"),
        ("replay", "accelerate", "sees 8 at a time"),
        ("checkpointed", "lightning", "Trainer has no argument for that"),
        ("checkpointed", "transformers", "checkpoints every layer"),
        ("ragged", "torch", "samples differ in size"),
        ("uneven", "accelerate", "unequal size"),
        ("several processes", "torch", "4 processes"),
        ("float16", "accelerate", "refuses"),
        ("plain", "torch", "where memory runs out"),
    ],
)
def test_what_the_tool_cannot_express_is_said(name: str, tool: str, text: str) -> None:
    said = " ".join(PLANS[name].export(tool).replace("#", " ").split())
    assert text in said


@pytest.mark.parametrize("name", ["plain", "whole", "checkpointed", "bfloat16", "replay"])
def test_the_exported_loop_trains_as_the_whole_batch_does(name: str) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    changes: dict[str, Any] = {"share": 10, "target_batch": 10, "micro_batch": 4, "accumulation": 3}
    if name == "whole":
        changes |= {"micro_batch": 10, "accumulation": 1}
    if name == "checkpointed":
        changes |= {"checkpoint": ("0", "2")}
    text = dataclasses.replace(PLANS[name], **changes).export("torch")
    x, y = torch.randn(10, 3), torch.arange(10) % 2
    loss_fn = torch.nn.functional.cross_entropy
    want = torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exec(
        compile(text, "exported", "exec"),
        {"model": model, "loss_fn": loss_fn, "loader": [(x, y)], "optimizer": optimizer},
    )
    tolerance = 0.05 if name == "bfloat16" else 1e-6
    for p, wanted in zip(model.parameters(), want):
        torch.testing.assert_close(p.grad, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("share", "micro_batch", "expected"),
    [(512, 8, (8, 64)), (10, 4, (4, 3)), (12, 5, (4, 3)), (509, 8, (8, 64)), (6, 6, (6, 1))],
)
def test_equal_micro_batches_are_never_larger_than_the_plans(
    share: int, micro_batch: int, expected: tuple[int, int]
) -> None:
    size, steps = equal_micro_batches(plan(share=share, micro_batch=micro_batch, accumulation=-(-share // micro_batch)))
    assert size <= micro_batch and abs(size * steps - share) < steps
    assert (size, steps) == expected


def test_an_unknown_tool() -> None:
    with pytest.raises(UsageError, match=r"torch, accelerate, transformers, lightning"):
        plan().export("keras")


@pytest.mark.parametrize("tool", EXPORTS)
def test_an_export_says_that_memfit_adds_in_float32_only_where_it_does(tool: str) -> None:
    assert "memfit adds them in float32" in plan().export(tool)
    assert "memfit adds them in float32" not in plan(accumulate_in="param").export(tool)
