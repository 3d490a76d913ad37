"""Which kernels CUDA would run, on fake tensors: chosen by its rules, with what they save and hold inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memfit.kernels.attention import kernel_of
from memfit.kernels.scratch import is_unknown, scratch
from memfit.kernels.substitute import cuda_kernels
from memfit.kernels.target import Target

aten = torch.ops.aten
A100, H100, T4, RTX3090, V100 = Target((8, 0)), Target((9, 0)), Target((7, 5)), Target((8, 6)), Target((7, 0))
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


class Calls(TorchDispatchMode):
    """The operations that ran, by name, and what they made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            items = out if isinstance(out, (tuple, list)) else (out,)
            self.made.append((func._overloadpacket.__name__, [t for t in items if isinstance(t, torch.Tensor)]))
        return out

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.made]


def run(function: Callable[[], Any], target: Target | None = A100) -> Calls:
    calls = Calls()
    with FakeTensorMode(), cuda_kernels(target), calls:
        function()
    return calls


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    begin, end = torch.autocast.__init__, torch.autocast.__exit__
    yield
    assert (torch.autocast.__init__, torch.autocast.__exit__) == (begin, end)
    assert not torch.is_autocast_enabled("cuda")


# ---- attention


def qkv(
    dtype: torch.dtype = BF16, heads: int = 4, kv: int = 4, rows: int = 16, columns: int = 16, size: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def one(h: int, n: int) -> torch.Tensor:
        return torch.empty(2, h, n, size, dtype=dtype, requires_grad=True)

    return one(heads, rows), one(kv, columns), one(kv, columns)


CASES = [
    (A100, {}, {}, "flash"),
    (A100, {"dtype": HALF}, {"causal": True}, "flash"),
    (H100, {}, {"dropout": 0.1}, "flash"),
    (A100, {"dtype": FLOAT}, {}, "efficient"),
    (A100, {"dtype": torch.float64}, {}, "math"),
    (T4, {"dtype": HALF}, {}, "efficient"),  # flash needs sm_80
    (T4, {}, {}, "math"),  # bfloat16 on Turing
    (V100, {"dtype": FLOAT}, {}, "efficient"),
    (A100, {}, {"mask": True}, "efficient"),  # flash takes no mask
    (A100, {"size": 264}, {}, "efficient"),  # flash's heads end at 256
    (A100, {"size": 256}, {}, "flash"),
    (RTX3090, {"size": 200}, {}, "efficient"),  # no backward with such heads on sm_86
    (RTX3090, {"size": 256}, {}, "flash"),
    (RTX3090, {"size": 256}, {"dropout": 0.1}, "efficient"),
    (A100, {"rows": 8}, {"causal": True}, "efficient"),  # flash aligns causal masks otherwise
    (A100, {"dtype": FLOAT, "size": 30}, {}, "math"),  # neither is aligned
    (A100, {"kv": 2}, {"grouped": True}, "flash"),
    (A100, {"kv": 2}, {}, "math"),
    (A100, {"dtype": FLOAT, "kv": 2}, {"grouped": True}, "math"),
]


@pytest.mark.parametrize(("target", "tensors", "how", "kernel"), CASES)
def test_attention_takes_the_kernel_that_torch_would(target: Target, tensors: Any, how: Any, kernel: str) -> None:
    query, key, value = qkv(**tensors)
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool) if how.get("mask") else None
    found = kernel_of(
        query, key, value, mask, how.get("dropout", 0.0), how.get("causal", False), how.get("grouped", False), target
    )
    assert found == kernel


def test_what_the_user_switched_off_is_not_taken() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_of(*qkv(), None, 0.0, False, False, A100) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert kernel_of(*qkv(), None, 0.0, False, False, A100) == "efficient"


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [
        (BF16, "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
        (FLOAT, "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"),
    ],
)
def test_the_chosen_kernel_is_traced_forward_and_backward(dtype: torch.dtype, forward: str, backward: str) -> None:
    calls = run(lambda: F.scaled_dot_product_attention(*qkv(dtype), is_causal=True).sum().backward())
    assert forward in calls.names and backward in calls.names
    saved = next(tensors for name, tensors in calls.made if name == forward)
    assert saved[0].shape == (2, 4, 16, 64) and saved[1].dtype is FLOAT  # the logarithm of each row's sum


@pytest.mark.parametrize("size", [20, 64])
def test_heads_that_are_no_multiple_of_eight_are_padded(size: int) -> None:
    out: list[torch.Tensor] = []
    calls = run(lambda: out.append(F.scaled_dot_product_attention(*qkv(size=size))))
    assert out[0].shape == (2, 4, 16, size)
    assert ("constant_pad_nd" in calls.names) == (size == 20)


@pytest.mark.parametrize("columns", [16, 20])
def test_a_boolean_mask_becomes_an_aligned_bias(columns: int) -> None:
    mask = torch.ones(2, 1, 16, columns, dtype=torch.bool)
    tensors = qkv(columns=columns)
    calls = Calls()
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_kernels(A100), calls:
        F.scaled_dot_product_attention(*tensors, attn_mask=mask).sum().backward()
    assert "_scaled_dot_product_efficient_attention" in calls.names
    assert ("constant_pad_nd" in calls.names) == (columns == 20)


def test_attention_inside_a_module_of_torchs_own() -> None:
    calls = run(lambda: nn.TransformerEncoderLayer(64, 4, batch_first=True)(torch.empty(2, 8, 64, requires_grad=True)))
    assert "_scaled_dot_product_efficient_attention" in calls.names
    assert calls.names.count("native_dropout") == 3


# ---- dropout, norms, softmax, recurrence


def test_dropout_keeps_a_byte_per_element() -> None:
    calls = run(lambda: nn.Dropout(0.5)(torch.empty(4, 8, requires_grad=True)))
    (made,) = [tensors for name, tensors in calls.made if name == "native_dropout"]
    assert made[1].dtype is torch.bool


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (1.0, True), (0.5, False)])
def test_dropout_without_a_mask_is_left_alone(p: float, train: bool) -> None:
    assert "native_dropout" not in run(lambda: F.dropout(torch.empty(4, 8, requires_grad=True), p, train)).names


def kept_by(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, target: Target | None) -> list[Any]:
    """(shape, dtype) of what autograd saves."""
    saved: list[tuple[Any, Any]] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append((tuple(t.shape), t.dtype))
        return t

    with FakeTensorMode(), cuda_kernels(target), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = function(torch.empty(4, 8, dtype=dtype, requires_grad=True))
        assert out.shape == (4, 8)
    return saved


def test_rms_norm_is_one_kernel() -> None:
    assert kept_by(lambda x: F.rms_norm(x, (8,)), BF16, A100) == [((4, 8), BF16), ((4, 1), FLOAT)]
    assert len(kept_by(lambda x: F.rms_norm(x, (8,)), BF16, None)) > 2


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, F.softmax, F.log_softmax, torch.Tensor.softmax])
def test_softmax_to_float_saves_only_its_output(function: Any) -> None:
    def softmax(x: torch.Tensor) -> torch.Tensor:
        return function(x, dim=-1, dtype=FLOAT)

    assert kept_by(softmax, BF16, A100) == [((4, 8), FLOAT)]
    made = [t.dtype for _, tensors in run(lambda: softmax(torch.empty(4, 8, dtype=BF16))).made for t in tensors]
    assert made == [BF16, FLOAT]  # the input, and nothing converted in between


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_are_one_call_with_a_reserve(kind: Any, batch_first: bool, bidirectional: bool) -> None:
    shapes: dict[str, Any] = {}

    def step() -> None:
        layer = kind(8, 16, 2, batch_first=batch_first, bidirectional=bidirectional)
        x = torch.empty(3, 5, 8, requires_grad=True)
        out, last = layer(x)
        out.sum().backward()
        shapes["out"], shapes["last"] = out.shape, (last[0] if kind is nn.LSTM else last).shape
        shapes["grads"] = [p.grad is not None and p.grad.shape == p.shape for p in (*layer.parameters(), x)]

    calls = run(step)
    each = 2 if bidirectional else 1
    batch = 3 if batch_first else 5
    assert shapes["out"] == (3, 5, 16 * each) and shapes["last"] == (2 * each, batch, 16) and all(shapes["grads"])
    assert "mkldnn_rnn_layer" not in calls.names and "mm" not in calls.names


# ---- autocast


def dtypes_of(module: nn.Module, dtype: torch.dtype, kind: str = "cuda") -> list[tuple[str, torch.dtype]]:
    found: list[tuple[str, torch.dtype]] = []
    for name, part in module.named_modules():
        part.register_forward_hook(lambda m, args, out, name=name: found.append((name, out.dtype)))

    def step() -> None:
        with torch.autocast(kind, dtype=dtype):
            module(torch.empty(4, 8))

    with FakeTensorMode(allow_non_fake_inputs=True), cuda_kernels(A100):
        step()
    return found


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_autocast_follows_cudas_lists(kind: str, dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1), nn.GroupNorm(2, 8))
    found = dict(dtypes_of(module, dtype, kind))
    assert found["0"] is dtype and found["1"] is FLOAT and found["2"] is FLOAT
    assert found["3"] is dtype and found["4"] is FLOAT and found["5"] is FLOAT


def test_the_copies_of_weights_last_as_long_as_the_outermost_autocast() -> None:
    def copies(times: int, nested: bool) -> int:
        layer = nn.Linear(8, 8)
        calls = Calls()
        with FakeTensorMode(allow_non_fake_inputs=True), cuda_kernels(A100), calls:
            for _ in range(2):
                with torch.autocast("cuda", dtype=BF16), torch.autocast("cuda", dtype=BF16) if nested else nullcontext():
                    for _ in range(times):
                        layer(torch.empty(4, 8, dtype=BF16))
        return calls.names.count("_to_copy")

    assert copies(1, False) == copies(3, False) == copies(3, True) == 4  # weight and bias, in each of two


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_under_autocast_makes_one_float_copy(reduction: str) -> None:
    def step() -> None:
        logits = torch.empty(4, 8, dtype=BF16, requires_grad=True)
        labels = torch.zeros(4, dtype=torch.int64)
        with torch.autocast("cuda", dtype=BF16):
            loss = F.cross_entropy(logits, labels, reduction=reduction, ignore_index=3)
        assert loss.dtype is FLOAT
        loss.sum().backward()

    large = [t.dtype for _, tensors in run(step).made for t in tensors if t.shape == (4, 8)]
    assert large == [BF16, FLOAT, FLOAT, BF16]  # logits, logarithm, its gradient, theirs


@pytest.mark.parametrize(
    "arguments",
    [{"label_smoothing": 0.1}, {"weight": True}, {"probabilities": True}, {}],
)
def test_cross_entropy_gives_the_same_as_without(arguments: dict[str, Any]) -> None:
    logits = torch.randn(4, 8, dtype=torch.float64)
    target = torch.softmax(torch.randn(4, 8, dtype=torch.float64), 1) if arguments.pop("probabilities", False) else None
    labels = torch.randint(8, (4,)) if target is None else target
    if arguments.pop("weight", False):
        arguments["weight"] = torch.rand(8, dtype=torch.float64)
    expected = F.cross_entropy(logits, labels, **arguments)
    with cuda_kernels(A100):
        found = F.cross_entropy(logits, labels, **arguments)
    assert torch.equal(found, expected)


def test_a_block_that_is_computed_again_takes_the_same_kernels() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.scaled_dot_product_attention(x, x, x), 0.5)

    def step() -> None:
        x = torch.empty(2, 4, 16, 64, dtype=BF16, requires_grad=True)
        out = checkpoint(block, x, use_reentrant=False)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()

    names = run(step).names
    assert names.count("_scaled_dot_product_flash_attention") == 2 and names.count("native_dropout") == 2


def test_functions_that_ask_in_another_way_are_left_alone() -> None:
    def step() -> None:
        layer = nn.Linear(8, 8)
        nn.init.kaiming_uniform_(layer.weight)
        x = layer(torch.empty(4, 8)).unflatten(1, (2, 4)).split(1, 1)[0]
        (x.norm() + torch.einsum("bij->b", x).sum()).backward()

    assert "addmm" in run(step).names


# ---- inside kernels


def fake(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_flash_attention_gathers_its_gradient_in_float() -> None:
    q, k = fake(2, 8, 100, 64, dtype=BF16), fake(2, 8, 100, 64, dtype=BF16)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    assert scratch(backward, (q, q, k, k), None) == 4 * 2 * 8 * 128 * (64 + 1)
    shared = fake(2, 2, 100, 64, dtype=BF16)
    assert scratch(backward, (q, q, shared, shared), None) == 4 * 2 * 8 * 128 * 65 + 2 * 2 * 8 * 100 * 64 * 2


def test_efficient_attention_holds_a_number_per_row_and_half_gradients_in_float() -> None:
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    q = fake(2, 8, 64, 32)
    assert scratch(backward, (q, q, q, q), None) == 4 * 2 * 8 * 64
    q = fake(2, 8, 64, 32, dtype=HALF)
    assert scratch(backward, (q, q, q, q), None) == 4 * 2 * 8 * 64 + 4 * 2 * 8 * (64 * 32 + 64 * 64)


def test_embedding_backward_sorts_many_indices_and_adds_few_directly() -> None:
    backward = aten.embedding_dense_backward.default
    grad, many = fake(4096, 32), fake(4096, dtype=torch.int64)
    segments, runs = 1000, 409 + 1000
    assert scratch(backward, (grad, many, 1000, -1, False), None) == 8 * (2 * 4096 + 3 * segments + runs) + runs * 32 * 4
    few = fake(3072, dtype=torch.int64)
    assert scratch(backward, (fake(3072, 32), few, 1000, -1, False), None) == 0
    assert scratch(backward, (fake(3072, 32), few, 1000, 0, False), None) > 0  # padding is skipped by sorting


def test_what_has_no_rule_holds_nothing_and_is_named() -> None:
    assert scratch(aten.mm.default, (fake(8, 8), fake(8, 8)), None) == 0
    assert is_unknown(aten.convolution.default) and not is_unknown(aten.mm.default)
    library = torch.library.Library("memfit_test", "DEF")
    library.define("op(Tensor x) -> Tensor")
    assert is_unknown(torch.ops.memfit_test.op.default)
