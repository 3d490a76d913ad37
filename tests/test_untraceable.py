"""Models whose forward runs on real tensors and fails on fake ones are measured, and the reason is said."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points
from stepping import sgd
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import UsageError
from memfit.tracing.failures import TraceFailed
from memfit.tracing.fake_twins import on_twins

Inner = Callable[[Tensor], Tensor]


class Inside(nn.Module):
    """Two layers with something between them that fake tensors cannot do."""

    def __init__(self, inner: Inner) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.inner = nn.Linear(7, 16), nn.Linear(16, 4), inner
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


@torch.library.custom_op("memfit_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """An operator without a function for shapes."""
    return x * 2


doubled.register_autograd(lambda context, gradient: gradient * 2)


def through_numpy(x: Tensor) -> Tensor:
    return x * (1 + 0 * float(x.detach().numpy().sum()))


def copied(x: Tensor) -> Tensor:
    return x + copy.deepcopy(x.detach())


def jagged(x: Tensor) -> Tensor:
    rows = [x[at : at + 1] for at in range(len(x))]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).values() * 1.0


def lower_right(x: Tensor) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    parts = x.view(-1, 1, 4, 4)
    return F.scaled_dot_product_attention(parts, parts, parts, attn_mask=causal_lower_right(4, 4)).reshape(-1, 16)


def through_dlpack(x: Tensor) -> Tensor:
    return x + torch.from_dlpack(x.detach())


def through_a_capsule(x: Tensor) -> Tensor:
    from torch.utils.dlpack import from_dlpack, to_dlpack

    return x + from_dlpack(to_dlpack(x.detach()))


def dlpack_to_numpy(x: Tensor) -> Tensor:
    import numpy as np

    return x * (1 + 0 * float(np.isfinite(np.from_dlpack(x.detach())).mean()))


def looking(x: Tensor) -> Tensor:
    """An assertion of the user's that holds for every real tensor."""
    if type(x) is not Tensor:
        raise TypeError("plain tensors only, please")
    return x


UNTRACEABLE = {
    inner.__name__: inner
    for inner in (through_numpy, copied, jagged, lower_right, through_dlpack, through_a_capsule, dlpack_to_numpy, looking)
} | {"unshaped": lambda x: doubled(x)}


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def profile_of(model: nn.Module, device: str | None = None) -> memfit.Profile:
    return memfit.profile(model, sgd(model), points(), loss_fn=cross_entropy, device=device)


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_fails_on_fake_tensors_alone_is_measured_and_the_reason_said(name: str) -> None:
    found = profile_of(Inside(UNTRACEABLE[name]))
    assert found.source == "measured" and found.peak(4).upper > 0
    assert any("tracing failed" in note and "(at " in note for note in found.notes), found.notes


# torch makes no CausalBias under any dispatch mode, and proofs run under one.
@pytest.mark.parametrize("name", sorted(UNTRACEABLE.keys() - {"lower_right"}))
def test_script_mode_cuts_it_all_the_same(name: str) -> None:
    model, (x, y) = Inside(UNTRACEABLE[name]), points()
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(x), y).backward()
    run = memfit.wrap(model, sgd(model), micro_batch=5)
    F.cross_entropy(model(x), y).backward()
    assert run.plan is not None and run.plan.accumulation == 3
    assert relative_error(gradients_of(model), gradients_of(plain)) < 1e-6
    run.undo()


def checkpoint_as_before_2_13(function: Inner, x: Tensor) -> Tensor:
    """Where a function that fails leaves the hooks enabled until its exception is gone."""

    def hooked() -> Iterator[None]:
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            yield

    around = hooked()
    next(around)
    out = function(x)
    next(around, None)
    return out


def test_a_trace_that_fails_inside_a_checkpoint_leaves_none_of_its_hooks() -> None:
    model = nn.Linear(3, 3)
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        before = top(False)
        with pytest.raises(TraceFailed) as failed, on_twins(model, torch.device("cpu")) as world:
            x = world.twin(torch.randn(2, 3, requires_grad=True))
            with world.entered():
                checkpoint_as_before_2_13(lambda x: model(x).numpy(), x)
        assert top(False) == before and failed.value.reason  # (the exception and its frames still live)
        del failed
        gc.collect()
        assert top(False) == before
    assert top(False) is None


def test_the_reason_names_the_line_it_happened_at() -> None:
    (note,) = (note for note in profile_of(Inside(looking)).notes if "tracing failed" in note)
    assert "TypeError: plain tensors only, please" in note and "test_untraceable.py" in note


@pytest.mark.parametrize("name", ["through_numpy", "through_dlpack", "unshaped"])
def test_for_a_card_that_is_not_here_the_error_says_what_stood_in_the_way(name: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)NVIDIA A100.*on fake tensors.*\(at ") as caught:
        profile_of(Inside(UNTRACEABLE[name]), "a100-40gb")
    assert caught.value.__cause__ is not None


def test_on_the_meta_device_too() -> None:
    model = Inside(through_numpy).to("meta")
    with pytest.raises(UsageError, match=r"(?s)meta device.*on fake tensors.*numpy"):
        profile_of(model)


@pytest.mark.parametrize("device", [None, "a100-40gb"])
def test_an_exception_of_the_users_own_surfaces_as_itself(device: str | None) -> None:
    def broken(x: Tensor) -> Tensor:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        profile_of(Inside(broken), device)


def test_shapes_that_do_not_match_surface_as_torch_says_it() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        profile_of(nn.Sequential(mlp(), nn.Linear(3, 3)).double())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
def test_what_is_compiled_inside_a_forward_stays_compiled() -> None:
    """Compiling it while tracing would give up and run it eagerly for good."""
    ran = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        def run(*args: Tensor) -> object:
            ran.append(len(args))
            return graph(*args)

        return run

    torch.compiler.reset()
    model = Inside(torch.compile(lambda x: torch.relu(x) + 1, backend=backend, dynamic=True))
    assert profile_of(model).source == "traced"
    ran.clear()
    model(points()[0]).sum().backward()
    assert ran


class Uneven(nn.Module):
    """Computes otherwise for even and for odd numbers of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 1024), nn.Linear(1024, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden if len(x) % 2 else hidden.exp().sin())


def many(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 7), torch.randint(0, 4, (count,))


def test_what_no_line_tells_for_all_sizes_is_measured() -> None:
    model = Uneven()
    found = memfit.profile(model, sgd(model), many(4096), loss_fn=cross_entropy)
    assert found.source == "measured" and any("differently for other micro-batch sizes" in note for note in found.notes)
    assert found.peak(4096).upper > 3 * 4 * 1024 * 4096


def test_for_a_card_that_is_not_here_it_is_traced_at_sizes_up_to_the_whole_sample() -> None:
    model = Uneven()
    found = memfit.profile(model, sgd(model), many(4096), loss_fn=cross_entropy, device="a100-40gb")
    assert found.source == "traced at single sizes" and found.points[-1][0] == 4096
    assert found.peak(4096).allocated > 3 * 4 * 1024 * 4096


@pytest.mark.parametrize("kept_by", ["hook", "model"])
def test_what_is_kept_until_the_next_forward_is_traced_with_the_size_it_has(kept_by: str) -> None:
    """In a dict that a hook fills, or an attribute of the model."""
    model = nn.Sequential(nn.Linear(7, 1024), nn.Tanh(), nn.Linear(1024, 4))
    kept: dict[str, object] = {}
    model[1].register_forward_hook(lambda module, _, output: setattr(module, "kept", output) if kept_by == "model" else None)
    model[1].register_forward_hook(lambda module, _, output: kept.update(features=output) if kept_by == "hook" else None)
    found = memfit.profile(model, sgd(model), many(64), loss_fn=cross_entropy)
    bare = nn.Sequential(nn.Linear(7, 1024), nn.Tanh(), nn.Linear(1024, 4))
    without = memfit.profile(bare, sgd(bare), many(64), loss_fn=cross_entropy)
    assert found.source == "traced" and found.timeline is not None and without.timeline is not None
    before, of_bare = (one.curve(64)[one.phases[1].start - 1] for one in (found.timeline, without.timeline))
    assert before == of_bare + 64 * 1024 * 4
