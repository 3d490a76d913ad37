"""Training on the simulated device is the CPU's training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import Mixed, near
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

Make = Callable[..., Optimizer]


def train(device: str, make: Make, *, steps: int = 4, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """The losses on the way, and the parameters in the end."""
    torch.manual_seed(0)
    model = Mixed(dropout)
    tokens, labels = torch.randint(50, (8, 12)), torch.randint(7, (8,))
    model.to(device)
    optimizer = make(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens.to(device)), labels.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (AdamW, {"lr": 1e-3}),
    "fused": (AdamW, {"lr": 1e-3, "fused": True}),
    "single": (AdamW, {"lr": 1e-3, "foreach": False}),
    "capturable": (Adam, {"lr": 1e-3, "capturable": True}),
    "rmsprop": (RMSprop, {"lr": 1e-3}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_parameters_are_the_cpus(name: str) -> None:
    make, settings = OPTIMIZERS[name]
    losses, weights = train("cuda", lambda p: make(p, **settings))
    on_the_host = {key: value for key, value in settings.items() if key != "capturable"}
    expected, same = train("cpu", lambda p: make(p, **on_the_host))
    near(losses, expected)
    near(weights, same, 2e-5)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(8, 8, 2, bidirectional=True),
    "gru": lambda: nn.GRU(8, 8),
    "lstm cell": lambda: nn.LSTMCell(8, 8),
    "gru cell": lambda: nn.GRUCell(8, 8),
}


@pytest.mark.parametrize("name", CELLS)
def test_recurrent_cells(name: str) -> None:
    torch.manual_seed(1)
    here = CELLS[name]()
    there = copy.deepcopy(here).cuda()
    x = torch.randn(3, 8) if "cell" in name else torch.randn(5, 3, 8)
    for model, given in ((here, x), (there, x.cuda())):
        out = model(given)
        (out[0] if isinstance(out, tuple) else out).pow(2).sum().backward()
    for mine, its in zip(there.parameters(), here.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        near(mine.grad, its.grad, 1e-5)


def test_gpt2_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 97, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    torch.manual_seed(0)
    here = transformers.GPT2LMHeadModel(config)
    there = copy.deepcopy(here).to("cuda")
    tokens = torch.randint(97, (4, 16))
    losses = []
    for model, x in ((here, tokens), (there, tokens.cuda())):
        optimizer = AdamW(model.parameters(), 1e-3)
        for _ in range(3):
            loss = model(input_ids=x, labels=x, attention_mask=torch.ones_like(x)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
    near(losses[0], losses[1], 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_scaler(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Mixed().cuda()
    optimizer, scaler = AdamW(model.parameters(), 1e-3), torch.amp.GradScaler("cuda")
    x, y = torch.randint(50, (8, 12), device="cuda"), torch.randint(7, (8,), device="cuda")
    losses = []
    for _ in range(4):
        with torch.autocast("cuda", dtype=dtype):
            out = model(x)
            assert out.dtype == dtype
            loss = F.cross_entropy(out, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and scaler.get_scale() == 65536
    next(iter(model.parameters())).grad = torch.full((50, 32), float("inf"), device="cuda")
    scaler.scale(torch.ones((), device="cuda"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32768


def test_softmax_takes_halves_to_floats() -> None:
    half = torch.randn(3, 5, device="cuda", dtype=torch.float16)
    assert half.softmax(1, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_again_what_was_drawn(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU()).cuda()
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    state = torch.cuda.get_rng_state()
    layer(x).sum().backward()
    assert x.grad is not None
    plain, x.grad = x.grad.clone(), None
    torch.cuda.set_rng_state(state)
    out = checkpoint(layer, x, use_reentrant=reentrant)
    torch.rand(3, device="cuda")
    out.sum().backward()
    near(x.grad, plain)


def test_dropout_draws_from_the_device() -> None:
    x, host, state = torch.ones(1000, device="cuda"), torch.get_rng_state(), torch.cuda.get_rng_state()
    assert state.shape == (16,)
    first, second = F.dropout(x), F.dropout(x)
    assert not first.equal(second) and torch.get_rng_state().equal(host)
    torch.cuda.set_rng_state(state)
    assert F.dropout(x).equal(first) and F.dropout(x).equal(second)
    losses, _ = train("cuda", lambda p: SGD(p, 0.1), dropout=0.3)
    again, _ = train("cuda", lambda p: SGD(p, 0.1), dropout=0.3)
    assert losses.equal(again)


def test_generators_and_seeds() -> None:
    torch.manual_seed(3)
    a = torch.randn(4, device="cuda"), torch.randn(4, device="cuda:1")
    torch.cuda.manual_seed_all(3)
    assert torch.randn(4, device="cuda").equal(a[0]) and torch.randn(4, device="cuda:1").equal(a[1])
    g = torch.Generator("cuda").manual_seed(5)
    one = torch.randperm(10, generator=g, device="cuda")
    assert torch.randperm(10, generator=g.manual_seed(5), device="cuda").equal(one) and torch.cuda.initial_seed() == 3
    before = torch.cuda.get_rng_state()
    with torch.random.fork_rng(devices=[0]):
        torch.rand(3, device="cuda")
    assert torch.cuda.get_rng_state().equal(before)
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())


def test_vmap_and_functional_gradients() -> None:
    from torch.func import functional_call, grad, vmap

    model = nn.Linear(3, 2).cuda()
    params = dict(model.named_parameters())
    x, y = torch.randn(5, 3, device="cuda"), torch.randint(2, (5,), device="cuda")

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, x[None]), y[None])

    each = vmap(grad(loss), (None, 0, 0))(params, x, y)
    F.cross_entropy(model(x), y, reduction="sum").backward()
    assert model.weight.grad is not None
    near(each["weight"].sum(0), model.weight.grad, 1e-5)
