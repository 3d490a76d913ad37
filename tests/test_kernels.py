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


def efficient_backward(rows: int, columns: int, head: int, dtype: torch.dtype, heads: int = 8) -> int:
    q, k = fake(2, heads, rows, head, dtype=dtype), fake(2, heads, columns, head, dtype=dtype)
    return scratch(aten._scaled_dot_product_efficient_attention_backward.default, (q, q, k, k), None)


def test_efficient_attention_gathers_query_gradients_by_tile() -> None:
    sums, tile = 4 * 2 * 8 * 100, 4 * 64 * 64 + 16
    assert efficient_backward(100, 64, 64, HALF) == sums + 2 * 8 * 2 * tile
    sums, tile = 4 * 2 * 8 * 200, 4 * 128 * 128 + 16
    assert efficient_backward(200, 64, 128, HALF) == sums + 2 * 8 * 2 * tile


@pytest.mark.parametrize("head", [64, 128, 256])
def test_efficient_attention_in_float_multiplies_gradient_and_output_first(head: int) -> None:
    sums, product = 4 * 2 * 8 * 1024, 4 * 2 * 8 * 1024 * head
    assert efficient_backward(1024, 64, head, FLOAT) == product + 2 * sums  # the tiles come to less
    rows = 2 * 8 * 1 * (head // 64) * (4 * (64 if head == 64 else 128) * 64 + 16)
    assert efficient_backward(1, 64, head, FLOAT) == 4 * 2 * 8 + rows


def test_efficient_attention_with_large_heads_gathers_keys_and_values_too() -> None:
    queries = 4 * (4 * 128 * 64 + 16)
    each = 4 * 3 * 64 * (256 + 256)  # the keys come in three pieces
    assert efficient_backward(64, 130, 256, HALF) == 4 * 2 * 8 * 64 + 2 * 8 * (queries + each)
    each = 4 * 64 * (256 + 256)  # many heads: in one
    assert efficient_backward(64, 130, 256, HALF, heads=128) == 4 * 2 * 128 * 64 + 2 * 128 * (queries + each)


@pytest.mark.parametrize(("head", "dtype", "held"), [(128, HALF, 0), (136, HALF, 4 * 2 * 8 * 64 * 136), (136, FLOAT, 0)])
def test_efficient_attention_with_large_heads_gathers_its_output_in_float(head: int, dtype: torch.dtype, held: int) -> None:
    q = fake(2, 8, 64, head, dtype=dtype)
    assert scratch(aten._scaled_dot_product_efficient_attention.default, (q, q, q, None, True), None) == held


def test_layer_norm_backward_of_many_short_rows_sums_in_blocks() -> None:
    def held(rows: int, width: int, mask: list[bool], dtype: torch.dtype = FLOAT) -> int:
        x, statistics, weight = fake(rows, width, dtype=dtype), fake(rows, 1), fake(width, dtype=dtype)
        args = (x, x, [width], statistics, statistics, weight, weight, mask)
        return scratch(aten.native_layer_norm_backward.default, args, None)

    assert held(1 << 16, 96, [True] * 3) == held(1 << 17, 1728, [True] * 3) == 0
    assert held(1 << 17, 96, [True] * 3) == 2 * 4 * 4096 * 96
    assert held(1 << 17, 96, [True, True, False], HALF) == 2 * 4096 * 96
    assert held(1 << 20, 1024, [True] * 3) == 2 * 4 * 1024 * 1024  # no more than 32,768 blocks
    assert held(1 << 17, 96, [True, False, False]) == 0


@pytest.mark.parametrize("dtype", [FLOAT, HALF, torch.float64])
def test_group_norm_holds_factors_per_channel(dtype: torch.dtype) -> None:
    size = 8 if dtype is torch.float64 else 4
    x, weight, statistics = fake(2, 32, 4, 4, dtype=dtype), fake(32, dtype=dtype), fake(2, 8)
    shape = (2, 32, 16, 8)
    assert scratch(aten.native_group_norm.default, (x, weight, weight, *shape, 1e-5), None) == size * 2 * 2 * 32
    assert scratch(aten.native_group_norm.default, (x, None, None, *shape, 1e-5), None) == 0
    backward = aten.native_group_norm_backward.default
    given = (x, x, statistics, statistics)
    assert scratch(backward, (*given, weight, *shape, [True] * 3), None) == size * 2 * (3 * 32 + 2 * 8)
    assert scratch(backward, (*given, None, *shape, [True] * 3), None) == size * 2 * (2 * 32 + 2 * 8)
    assert scratch(backward, (*given, weight, *shape, [False, True, True]), None) == size * 2 * 2 * 32


def test_sorting_takes_buffers_where_it_is_not_in_place() -> None:
    def held(*shape: int, dim: int = -1, dtype: torch.dtype = FLOAT) -> int:
        return scratch(aten.sort.default, (fake(*shape, dtype=dtype), dim), None)

    assert held(1000, 4096) == 0
    assert held(5000) == 5000 * (8 + 4 + 8)
    assert held(2, 5000) == 10000 * (8 + 8 + 4 + 4 + 8)
    assert held(200, 5000, dtype=HALF) == 200 * 5000 * (8 + 2 + 8)
    assert held(5000, 200, dim=0) == held(200, 5000) + 200 * 5000 * (4 + 4 + 8)  # laid out anew
    stable = (fake(5000),)
    assert scratch(aten.sort.stable, stable, None) == held(5000)


def test_accumulating_by_index_sorts_and_spreads_the_values() -> None:
    rows, ids = fake(100, 8), fake(30, dtype=torch.int64)
    values = fake(30, 8)
    assert scratch(aten.index_put_.default, (rows, [ids], values, True), None) == 6 * 8 * 30
    assert scratch(aten.index_put_.default, (rows, [ids], values, False), None) == 0
    assert scratch(aten.index_put_.default, (rows, [ids], fake(8), True), None) == 6 * 8 * 30 + 30 * 8 * 4
    pair = [fake(5, 1, dtype=torch.int64), fake(6, dtype=torch.int64)]
    assert scratch(aten.index_put.default, (rows, pair, fake(5, 6), True), None) == 6 * 8 * 30


def test_embedding_backward_sorts_many_indices_and_adds_few_directly() -> None:
    backward = aten.embedding_dense_backward.default
    grad, many = fake(4096, 32), fake(4096, dtype=torch.int64)
    segments, runs = 1000, 409 + 1000
    assert scratch(backward, (grad, many, 1000, -1, False), None) == 8 * (2 * 4096 + 3 * segments + runs) + runs * 32 * 4
    few = fake(3072, dtype=torch.int64)
    assert scratch(backward, (fake(3072, 32), few, 1000, -1, False), None) == 0
    assert scratch(backward, (fake(3072, 32), few, 1000, 0, False), None) > 0  # padding is skipped by sorting


def test_convolutions_are_transposed_into_a_workspace() -> None:
    def held(channels: int, window: int, groups: int = 1, last: bool = False) -> tuple[int, int]:
        x, w = fake(2, channels, 8, 8), fake(16, channels // groups, window, window)
        x = x.to(memory_format=torch.channels_last) if last else x
        out = fake(2, 16, 8, 8)
        rest = (None, [1], [0], [1], False, [0], groups)
        forward = scratch(aten.convolution.default, (x, w, *rest), out)
        backward = scratch(aten.convolution_backward.default, (out, x, w, *rest, [True] * 3), None)
        return forward, backward

    operands = 4 * 2 * 64 * (32 + 16)
    assert held(32, 3) == held(32, 3, groups=4) == (operands, int(1.5 * operands))
    assert held(32, 1) == held(16, 3, groups=16) == held(32, 3, last=True) == (0, 0)


def test_softmax_of_rows_that_may_be_masked_holds_what_the_profiler_sees() -> None:
    x = torch.randn(4, 8, 512)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = aten._safe_softmax.default(x, -1)
    events: list[Any] = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    freed = -sum(size for event in events if event.name() == "[memory]" and (size := event.nbytes()) < 0)
    held = scratch(aten._safe_softmax.default, (x, -1), out)
    assert held == x.numel() + x.numel() // 512
    assert 0 <= freed - held <= 8  # a scalar or two


def test_what_has_no_rule_holds_nothing_and_is_named() -> None:
    assert scratch(aten.mm.default, (fake(8, 8), fake(8, 8)), None) == 0
    assert is_unknown(aten.convolution.default) and not is_unknown(aten.mm.default)
    library = torch.library.Library("memfit_test", "DEF")
    library.define("op(Tensor x) -> Tensor")
    assert is_unknown(torch.ops.memfit_test.op.default)
