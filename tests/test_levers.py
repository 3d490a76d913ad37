"""The levers: names, types and numbers stay what they were; only what is held changes."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import wrapped
from stepping import plain, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import FAMILIES, first_batch
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import UsageError
from memfit.engine.intercept import interception_of
from memfit.engine.version_checks import Modified
from memfit.levers.arguments import as_it_was
from memfit.levers.checkpoint import candidate_blocks, checkpoint_blocks, checkpointed
from memfit.levers.precision import lower_precisions, parse_precision, precision_applied, script_precision

CPU = torch.device("cpu")


class Blocks(nn.Module):
    """Blocks with batch norm and dropout."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._block(dropout) for _ in range(3))

    @staticmethod
    def _block(dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def blocks(dropout: float = 0.5) -> Blocks:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Blocks(dropout).double()


X = torch.linspace(-1, 1, 84, dtype=torch.float64).reshape(12, 7)
NAMES = ("blocks.0", "blocks.1", "blocks.2")


def seeded_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    torch.manual_seed(5)
    model(X).square().sum().backward()
    return gradients_of(model)


def test_names_types_and_keys_are_unchanged() -> None:
    model = blocks()
    keys, names = list(model.state_dict()), [(n, type(m)) for n, m in model.named_modules()]
    parameters = [(n, id(p)) for n, p in model.named_parameters()]
    with checkpointed(model, NAMES):
        assert list(model.state_dict()) == keys
        assert [(n, type(m)) for n, m in model.named_modules()] == names
        assert [(n, id(p)) for n, p in model.named_parameters()] == parameters
        model.load_state_dict(blocks().state_dict())
        assert model.blocks[0][0].weight.shape == (7, 7)


def test_gradients_through_dropout_are_the_same_bit_for_bit() -> None:
    model = blocks()
    want = seeded_gradients(copy.deepcopy(model))
    state = torch.get_rng_state()
    with checkpointed(model, NAMES):
        got = seeded_gradients(model)
    assert all(torch.equal(g, w) for g, w in zip(got.values(), want.values()) if g is not None and w is not None)
    assert torch.equal(torch.get_rng_state(), state)


def test_batch_statistics_are_counted_once() -> None:
    model = blocks()
    other = copy.deepcopy(model)
    seeded_gradients(other)
    with checkpointed(model, NAMES):
        seeded_gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers()))
    assert int(model.blocks[0][1].num_batches_tracked) == 1


def shifting() -> Any:
    number = 0.0
    while True:
        yield number
        number += 0.25


class Moving(nn.Module):
    """A block that reads what it moves, wherever that is."""

    counted, shared = 0, {"calls": 0}

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(7, 7).double(), kind
        self.register_buffer("centre", torch.zeros(7, dtype=torch.float64))
        self.mean, self.list, self.array, self.shifts = self.centre.clone(), [0.1], np.zeros(7), shifting()

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        mean = h.detach().mean(0)
        if self.kind == "a buffer":
            h = h * (1 + self.centre)
            self.centre.mul_(0.9).add_(mean, alpha=0.1)
        elif self.kind == "data of a buffer":
            h = h * (1 + self.centre)
            self.centre.data.mul_(0.9).add_(mean, alpha=0.1)
        elif self.kind == "new data of a buffer":
            h = h * (1 + self.centre)
            self.centre.data = 0.9 * self.centre.data + 0.1 * mean
        elif self.kind == "an attribute":
            h = h * (1 + self.mean)
            self.mean = 0.9 * self.mean + 0.1 * mean
        elif self.kind == "a list":
            h = h * (1 + self.list[-1])
            self.list.append(float(mean.sum()))
        elif self.kind == "an array":
            h = h * (1 + torch.from_numpy(self.array.copy()))
            self.array[:] = 0.9 * self.array + 0.1 * mean.numpy()
        elif self.kind == "a class":
            type(self).counted += 1
            h = h / type(self).counted
        elif self.kind == "what blocks share":
            self.shared["calls"] += 1
            h = h / self.shared["calls"]
        elif self.kind == "an iterator":
            h = h * (1 + next(self.shifts))
        return torch.tanh(h)


IN_BUFFERS = ["a buffer", "data of a buffer", "new data of a buffer"]
STATES = [*IN_BUFFERS, "an attribute", "a list", "an array", "a class", "what blocks share", "an iterator"]


CASES = [("off", True), (5, True), (5, False), ("off", "several calls"), (5, "several calls")]


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize(("micro_batch", "known"), CASES)
def test_blocks_are_computed_again_on_the_state_that_they_began_with(kind: str, micro_batch: Any, known: Any) -> None:
    def trained(wrap: Any) -> list[Tensor]:
        Moving.counted, Moving.shared = 0, {"calls": 0}
        torch.manual_seed(0)
        model = nn.Sequential(Moving(kind), Moving(kind), nn.Linear(7, 7).double())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrap(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            out = model(X)
            more = [model(X + 0.1 * i).square().mean().sqrt() for i in range(4)] if known == "several calls" else []
            (F.mse_loss(out, X) if known is True else (out - X).square().mean().sqrt() + sum(more)).backward()
            optimizer.step()
        state = [[*b.centre, *b.mean, *b.list, *b.array, b.counted, b.shared["calls"], next(b.shifts)] for b in model[:2]]
        return [*(p.detach() for p in model.parameters()), torch.tensor(state)]

    want = trained(lambda *_: None)
    got = trained(lambda *objects: memfit.wrap(*objects, checkpoint=("0", "1"), micro_batch=micro_batch))
    assert all(torch.allclose(g, w, rtol=1e-12, atol=1e-14) for g, w in zip(got, want, strict=True))


class OwnCheckpoint(nn.Module):
    """Its own checkpoint is around blocks that memfit may checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("place", ["the model", "the call", "the loss"])
@pytest.mark.parametrize("lever", [("0",), ("0", "1"), ("1", "1.linear")])
def test_in_the_scripts_own_checkpoint_state_moves_as_it_does_there(kind: str, place: str, lever: tuple[str, ...]) -> None:
    """The script's recomputation moves it once more, and gradients are of what that computes."""

    def trained(wrap: Any) -> list[Tensor]:
        Moving.counted, Moving.shared = 0, {"calls": 0}
        torch.manual_seed(0)
        blocks = nn.Sequential(Moving(kind), Moving(kind), nn.Linear(7, 7).double())
        model = OwnCheckpoint(blocks) if place == "the model" else blocks
        names = tuple(f"inner.{name}" for name in lever) if place == "the model" else lever
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrap(model, optimizer, names)
        for _ in range(4):
            optimizer.zero_grad()
            if place == "the loss":
                loss = checkpoint(lambda x: (model(x) - x).square().mean().sqrt(), X, use_reentrant=False)
            else:
                out = checkpoint(model, X, use_reentrant=False) if place == "the call" else model(X)
                loss = (out - X).square().mean().sqrt()
            loss.backward()
            optimizer.step()
        state = [[*b.centre, *b.mean, *b.list, *b.array, b.counted, b.shared["calls"], next(b.shifts)] for b in blocks[:2]]
        return [*(p.detach() for p in model.parameters()), torch.tensor(state)]

    want = trained(lambda *_: None)
    got = trained(lambda model, optimizer, names: memfit.wrap(model, optimizer, checkpoint=names, micro_batch="off"))
    assert all(torch.allclose(g, w, rtol=1e-12, atol=1e-14) for g, w in zip(got, want, strict=True))


class KeepsFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7).double()
        self.features: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.linear(x)
        return torch.tanh(self.features)


def test_a_checkpointed_block_may_keep_its_features() -> None:
    def trained(wrap: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(KeepsFeatures(), nn.Linear(7, 7).double())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrap(model, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    want = trained(lambda *_: None)
    for micro_batch in ("off", 4):
        got = trained(lambda *objects, n=micro_batch: memfit.wrap(*objects, checkpoint=("0",), micro_batch=n))
        assert all(torch.allclose(g, w, rtol=1e-12, atol=1e-14) for g, w in zip(got, want, strict=True))


class FillsByHook(nn.Module):
    """A forward hook of its own fills a dictionary that the script reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.found = nn.Linear(7, 7).double(), {"features": None}
        self.linear.register_forward_hook(lambda module, args, out: self.found.update(features=out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def test_what_a_checkpointed_block_leaves_is_that_of_the_whole_batch_after_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FillsByHook(), nn.Linear(7, 7).double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    memfit.wrap(model, optimizer, checkpoint=("0",), micro_batch=4)
    for _ in range(9):  # more are looked at than the second, fourth and eighth
        optimizer.zero_grad()
        model(X).square().mean().backward()
        want = F.linear(X, *model[0].linear.parameters())
        assert torch.allclose(model[0].found["features"], want, rtol=1e-12, atol=1e-14)
        optimizer.step()


@pytest.mark.parametrize("kind", [*IN_BUFFERS, "a list", "an array"])
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("looks", [False, True])
def test_blocks_are_computed_again_on_state_that_the_script_has_replaced(kind: str, calls: int, looks: bool) -> None:
    def trained(wrap: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Moving(kind), nn.Linear(7, 7).double())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrap(model, optimizer)
        for step in range(6):
            if step == 2:
                block = model[0]
                block.list, block.array = list(block.list), block.array.copy()
                model.float().double()  # replaces buffers, as model.cpu() and model.cuda() do
            optimizer.zero_grad()
            sum(model(X + i).square().mean() for i in range(calls)).backward()
            optimizer.step()
            if looks:
                model(X).mean().item()  # its graph is never used
        state = [*model[0].centre, *model[0].list, *model[0].array]
        return [*(p.detach() for p in model.parameters()), torch.tensor(state)]

    want = trained(lambda *_: None)
    got = trained(lambda *objects: memfit.wrap(*objects, checkpoint=("0",), micro_batch="off"))
    assert all(torch.allclose(g, w, rtol=1e-12, atol=1e-14) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("write", ["assigned", "copied", "in place"])
@pytest.mark.parametrize("micro_batch", ["off", 4])
def test_blocks_are_computed_again_with_the_parameters_that_they_ran_with(micro_batch: Any, write: str) -> None:
    """Or not at all: plain backward reads some of the data that a script assigns before it. Layer norm saves its weight itself,
    and a linear layer a view of it."""

    def gradients(wrap: bool) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 7))
        model = nn.Sequential(nn.Linear(7, 7), block, nn.Tanh()).double()
        if wrap:
            memfit.wrap(model, sgd(model), micro_batch=micro_batch, checkpoint=["1"])
        loss = model(torch.randn(8, 7, generator=torch.Generator().manual_seed(0)).double()).square().mean()
        assert loss.item() > 0
        for p in model.parameters():
            if write == "in place":
                p.data.mul_(0.9)
            else:
                p.data = p.data * (0.9 if write == "assigned" else 1.0)
        loss.backward()
        return gradients_of(model)

    if write != "copied":
        with pytest.raises(Modified):
            gradients(wrap=True)
        return
    assert relative_error(gradients(wrap=True), gradients(wrap=False)) <= 1e-12


@pytest.mark.parametrize("name", ["gpt", "resnet", "t5", "convnext"])
def test_families_compute_the_same_with_every_block_checkpointed(name: str) -> None:
    family = FAMILIES[name]
    for package in family.requires:
        pytest.importorskip(package)
    model, batch = family.build(dtype=torch.float64, dropout=0.1), first_batch(family, 5, dtype=torch.float64)
    torch.manual_seed(1)
    want = plain(model, family.loss, batch)[1]
    names = candidate_blocks(model)
    ran = [0]
    model.get_submodule(names[0]).register_forward_pre_hook(lambda *_: ran.__setitem__(0, ran[0] + 1))
    with checkpointed(model, names):
        torch.manual_seed(1)
        family.loss(model, batch).backward()
    assert ran == [1]  # hooks of the block itself run with its first forward alone
    assert relative_error(gradients_of(model), want) == 0.0


def test_without_gradients_blocks_run_as_they_are() -> None:
    model = blocks(dropout=0.0)
    model.eval()
    with torch.no_grad():
        want = model(X)
        with checkpointed(model, NAMES):
            assert torch.equal(model(X), want)
    with checkpointed(model, NAMES):
        out = model(X)
    assert torch.equal(out, want) and out.requires_grad


def test_less_is_saved_for_backward() -> None:
    def saved(model: nn.Module) -> int:
        sizes = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(X)
        return sum(sizes)

    model = blocks()
    without = saved(model)
    with checkpointed(model, NAMES):
        assert saved(model) < without / 2


def test_undone_nothing_is_left_also_after_an_exception() -> None:
    model = blocks()
    before = [set(vars(m)) for m in model.modules()]
    undo = checkpoint_blocks(model, NAMES)
    assert all(interception_of(block) is not None for block in model.blocks)
    undo()
    assert [set(vars(m)) for m in model.modules()] == before
    with pytest.raises(KeyError), checkpointed(model, NAMES):
        raise KeyError
    assert [set(vars(m)) for m in model.modules()] == before


def test_a_forward_that_was_replaced_on_the_instance_comes_back() -> None:
    model = blocks()
    own = lambda x: x * 2.0  # noqa: E731
    model.blocks[1].forward = own
    with checkpointed(model, NAMES):
        assert torch.equal(model.blocks[1](X), X * 2.0)
    assert vars(model.blocks[1])["forward"] is own


def test_blocks_that_are_not_there() -> None:
    for names in (["blocks.3"], [""]):
        with pytest.raises(UsageError, match=r"blocks\.0, blocks\.1"):
            checkpoint_blocks(blocks(), names)


def test_copies_and_saved_models_are_plain() -> None:
    model = blocks()
    with checkpointed(model, NAMES):
        other = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    for plain_one in (other, torch.load(file, weights_only=False)):
        assert all(interception_of(m) is None for m in plain_one.modules())
        assert all(
            torch.equal(a, b) for a, b in zip(seeded_gradients(plain_one).values(), seeded_gradients(model).values())
        )
        model.zero_grad()


def test_a_run_applies_the_plans_blocks_and_undo_takes_them_back() -> None:
    model = blocks(dropout=0.0)
    before = [set(vars(m)) for m in model.modules()]
    run = wrapped(model, 5, fields={"checkpoint": NAMES[:2]}, loss_fn=lambda m, b: m(b).square().sum())
    assert [interception_of(b) is not None for b in model.blocks] == [True, True, False]
    run.step(X)
    run.undo()
    assert [set(vars(m)) for m in model.modules()] == before


def test_script_mode_with_checkpointed_blocks_is_transparent() -> None:
    family = FAMILIES["gpt"]
    model, batch = family.build(dtype=torch.float64), first_batch(family, 7, dtype=torch.float64)
    want = plain(model, family.script_loss, batch)[1]
    run = wrapped(model, 3, share=7, fields={"checkpoint": candidate_blocks(model)})
    family.script_loss(model, batch).backward()
    assert relative_error(gradients_of(model), want) <= 1e-12
    run.undo()


# ---- precision


def test_precisions_by_name() -> None:
    for name in ("auto", "off", "fast", "float32", "bfloat16", "float16"):
        assert parse_precision(name) == name
    with pytest.raises(UsageError, match="fp8"):
        parse_precision("fp8")


@pytest.mark.parametrize(
    ("name", "dtype"), [("off", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_what_forwards_compute_in(name: str, dtype: torch.dtype) -> None:
    with precision_applied(name, CPU):
        assert nn.Linear(3, 3)(torch.ones(2, 3)).dtype is dtype
    assert not torch.is_autocast_enabled("cpu")


def test_a_scripts_own_autocast_is_never_overridden() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for name in ("off", "float32", "float16"):
            with precision_applied(name, CPU):
                assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert lower_precisions([torch.ones(1)], CPU) == ()
        assert script_precision([torch.ones(1)], CPU) == "bfloat16"


def test_the_scripts_precision_and_what_lies_below() -> None:
    single, half, double = torch.ones(1), torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.float64)
    assert [script_precision([t], CPU) for t in (single, half, double)] == ["float32", "bfloat16", "float64"]
    assert script_precision([single, half], CPU) == "mixed"
    assert lower_precisions([single], CPU) == ("bfloat16", "float16")
    assert (
        lower_precisions([half], CPU) == lower_precisions([single, half], CPU) == lower_precisions([double], CPU) == ()
    )


def test_backward_runs_outside_of_autocast() -> None:
    """Micro-batches and the whole batch agree in bfloat16 as far as rounding of the sums goes."""
    model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 4))
    batch = (X.float(), torch.arange(12) % 4)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    enabled: list[bool] = []
    model[2].register_full_backward_hook(lambda *_: enabled.append(torch.is_autocast_enabled("cpu")))
    run = memfit.wrap(model, sgd(model), loss_fn=loss_fn, precision="bfloat16", micro_batch=12)
    run.step(batch)
    enabled.clear()
    run.step(batch)
    assert enabled == [False]


# ---- what blocks are handed beside tensors


class Cache:
    """Grows with every block that is run, as a cache of keys and values does."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []
        self.seen: dict[int, Tensor] = {}
        self.back = self


class Caching(nn.Module):
    """Attends to what the cache holds and what it adds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x: Tensor, cache: Cache, *, listed: list[Tensor]) -> Tensor:
        cache.layers.append({"key": self.inner(x)})
        cache.seen[len(cache.seen)] = x
        listed += [x * len(cache.back.seen)]
        return torch.tanh(sum(layer["key"] for layer in cache.layers)) + sum(listed) / len(listed)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache, listed = Cache(), [x]
        for block in self.blocks:
            x = block(x, cache, listed=listed)
        assert len(cache.layers) == 3 and len(listed) == 4
        return x


def test_blocks_that_write_what_they_are_handed_compute_the_same_again() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Cached().double()
    want = seeded_gradients(copy.deepcopy(model))
    for names in (NAMES, NAMES[1:2]):
        own = copy.deepcopy(model)
        with checkpointed(own, names):
            loss = own(X).square().sum()
            loss.backward(retain_graph=True)
            assert relative_error(gradients_of(own), want) <= 1e-15
            own.zero_grad()
            loss.backward()
        assert relative_error(gradients_of(own), want) <= 1e-15


def test_what_cannot_be_written_is_handed_over_as_it_is() -> None:
    class Closed:
        def __init__(self) -> None:
            self.tensor = X

        def __copy__(self) -> Any:
            raise TypeError("not to be copied")

    pair, closed, model = (X, ("a", 1.0, None)), Closed(), blocks()
    for value in (pair, closed, model, X, torch.float32, len, None):
        assert as_it_was(value) is value
    cache = Cache()
    cache.layers.append({"key": X})
    copied = as_it_was((cache, "a"))[0]
    assert copied is not cache and copied.back is copied and copied.layers[0] is not cache.layers[0]
    assert copied.layers[0]["key"] is X and type(copied.layers[0]) is dict


@pytest.mark.parametrize("mask", [None, 5], ids=["no mask", "padding"])
def test_transformers_hand_a_cache_from_block_to_block(mask: int | None) -> None:
    """They do so in training, unless they are told not to."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        off = {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
        shape = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2}
        config = GPT2Config(**shape, **off, bos_token_id=1, eos_token_id=1)
        model = GPT2LMHeadModel(config)
        text = torch.randint(0, 50, (6, 12))
    batch = {"input_ids": text, "labels": text}
    if mask is not None:
        batch["attention_mask"] = (torch.arange(12) < 12 - mask).long().expand(6, 12).contiguous()
    one = copy.deepcopy(model)
    one(**batch).loss.backward()
    want, own = gradients_of(one), copy.deepcopy(model)
    run = memfit.wrap(own, sgd(own), micro_batch=2, checkpoint="all")
    own(**batch).loss.backward()
    assert run.plan is not None and len(run.plan.checkpoint) == 3
    run.undo()
    assert relative_error(gradients_of(own), want) <= 1e-5



class Recurrent(nn.Module):
    """A recurrent network before a block. Its forward may keep what it computed."""

    def __init__(self, kind: type[nn.RNNBase], keeps: bool) -> None:
        super().__init__()
        self.body, self.block, self.head = kind(3, 4, batch_first=True), nn.Sequential(nn.Tanh()), nn.Linear(4, 3)
        self.keeps, self.last = keeps, None

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)[0][:, -1]
        if self.keeps:
            self.last = h
        return self.head(self.block(h))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("step_mode", [False, True])
@pytest.mark.parametrize("block", ["block", "body", "head"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_train_where_blocks_are_checkpointed(
    kind: type[nn.RNNBase], block: str, step_mode: bool, keeps: bool
) -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def trained(*, line: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Recurrent(kind, keeps).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options: dict[str, Any] = {"loss_fn": loss_fn} if step_mode else {}
        run = memfit.wrap(model, optimizer, micro_batch=3, checkpoint=[block], **options) if line else None
        batch = torch.randn(15, 4, 3).double(), torch.randint(0, 3, (15,))
        for _ in range(3):
            if run is not None and step_mode:
                run.step(batch)
                continue
            loss_fn(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    for found, want in zip(trained(line=True), trained(line=False)):
        assert torch.allclose(found, want, rtol=1e-12, atol=1e-14)
