"""Models and optimizers whose training peaks others published, written from their descriptions: for prediction_published.py.

They compute what the originals compute, with the same tensors kept and freed; they are never trained. Not covered: generation,
checkpoints, weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CHUNK = 128
"""Tokens whose logits lit-gpt computes at once while fine-tuning."""


@dataclass(frozen=True)
class Shape:
    """A model of lit-gpt, as its config.py describes it."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    rotary: float
    hidden: int
    longest: int
    """Tokens of the longest Alpaca sample in its tokenizer."""
    parallel: bool = True
    """Attention and MLP see the same input."""
    shared_norm: bool = False
    bias: bool = True
    head_bias: bool = False
    gated: bool = False
    """SiLU-gated MLP and RMSNorm, as Llama."""
    wide_norm: bool = False
    """RMSNorm computes in float32, as it does from 2023-10-24 on."""

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    def norm(self) -> nn.Module:
        """A new norm."""
        return RMSNorm(self.width, self.wide_norm) if self.gated else nn.LayerNorm(self.width)


SHAPES = {
    "phi-1.5 (1.3B)": Shape(24, 32, 2048, 51200, 0.5, 8192, 1044, shared_norm=True, head_bias=True),
    "StableLM-alpha-3B": Shape(16, 32, 4096, 50688, 0.25, 16384, 1034),
    "Llama-2-7B": Shape(32, 32, 4096, 32000, 1.0, 11008, 1304, parallel=False, bias=False, gated=True),
    "Llama-2-13B": Shape(40, 40, 5120, 32000, 1.0, 13824, 1304, parallel=False, bias=False, gated=True),
}


class RMSNorm(nn.Module):
    """Root mean square norm of single operations; `wide`: in float32."""

    def __init__(self, width: int, wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.float() if self.wide else x
        mean = torch.mean(given * given, dim=-1, keepdim=True)
        scaled = given * torch.rsqrt(mean + 1e-5)
        return (self.weight * scaled).to(x.dtype)


class LoRA(nn.Module):
    """A linear layer for queries, keys and values with low-rank updates of queries and values."""

    RANK, SCALE, DROPOUT = 8, 2.0, 0.05

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3 * width, bias=bias)
        self.lora_A = nn.Parameter(torch.zeros(2 * self.RANK, width))
        self.lora_B = nn.Parameter(torch.zeros(2 * width, self.RANK))
        self.places = [*range(width), *range(2 * width, 3 * width)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = self.linear(x)
        low = F.linear(F.dropout(x, self.DROPOUT, self.training), self.lora_A)
        high = F.conv1d(low.transpose(-2, -1), self.lora_B.unsqueeze(-1), groups=2).transpose(-2, -1)
        return plain + self.padded(high) * self.SCALE

    def padded(self, update: torch.Tensor) -> torch.Tensor:
        """Zeros where keys are."""
        update = update.transpose(0, 1)
        shape = (*update.shape[:-1], self.linear.out_features)
        flat = update.new_zeros(shape).view(-1, shape[-1])
        places = torch.tensor(self.places, device=flat.device)
        return flat.index_copy(1, places, update.reshape(-1, len(self.places))).view(shape).transpose(0, 1)


class Scaled(nn.Module):
    """A linear layer with a trained bias and scale of its outputs (Adapter v2)."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.adapter_bias = nn.Parameter(torch.zeros(outputs))
        self.adapter_scale = nn.Parameter(torch.ones(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter_scale * (self.linear(x) + self.adapter_bias)


@dataclass(frozen=True)
class Method:
    """How lit-gpt fine-tunes."""

    linear: Callable[[int, int, bool], nn.Module]
    """Makes a linear layer."""
    qkv: Callable[[int, bool], nn.Module]
    """Makes the layer of queries, keys and values."""
    trained: tuple[str, ...]
    """Parts of the names of parameters that are trained."""
    prompt: int = 0
    """Tokens of a learnt prompt that layers from the third on attend to, too."""


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=bias)


def _scaled(inputs: int, outputs: int, bias: bool) -> nn.Module:
    return Scaled(inputs, outputs, bias)


METHODS = {
    "LoRA": Method(_linear, LoRA, ("lora_",)),
    "Adapter": Method(_linear, lambda w, bias: _linear(w, 3 * w, bias), ("adapter_wte", "gating"), 10),
    "Adapter v2": Method(
        _scaled,
        lambda w, bias: _scaled(w, 3 * w, bias),
        ("adapter_wte", "gating", "adapter_bias", "adapter_scale", "norm_1", "norm_2", "ln_f"),
        10,
    ),
}


class Attention(nn.Module):
    """Causal attention with rotated positions, and to a learnt prompt where the method has one."""

    def __init__(self, shape: Shape, method: Method, index: int) -> None:
        super().__init__()
        self.attn = method.qkv(shape.width, shape.bias)
        self.proj = method.linear(shape.width, shape.width, shape.bias)
        self.shape, self.prompt = shape, method.prompt if index >= 2 else 0
        if self.prompt:
            self.adapter_wte = nn.Embedding(method.prompt, shape.width)
            self.gating = nn.Parameter(torch.zeros(1, 1, shape.heads, 1))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        rotated = int(self.shape.rotary * self.shape.head)
        q, k, v = self.parts(x)
        q_rotated, k_rotated = (rotate(t[..., :rotated], cos, sin) for t in (q, k))
        q = torch.cat((q_rotated, q[..., rotated:]), dim=-1)
        k = torch.cat((k_rotated, k[..., rotated:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.prompt:
            y = y + self.gating * self.to_prompt(q)
        return self.proj(y.reshape(batch, tokens, width))

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values by head."""
        batch, tokens, _ = x.shape
        qkv = self.attn(x).view(batch, tokens, self.shape.heads, 3, self.shape.head).permute(0, 2, 3, 1, 4)
        return tuple(t.reshape(batch, -1, tokens, self.shape.head) for t in qkv.split((1, 1, 1), dim=2))

    def to_prompt(self, q: torch.Tensor) -> torch.Tensor:
        """As for a micro-batch of one: with more, the script's call broadcasts, which fused attention does not take."""
        _, k, v = self.parts(self.adapter_wte.weight.reshape(1, self.prompt, -1))
        mask = torch.ones(q.shape[2], self.prompt, dtype=torch.bool, device=q.device)
        k, v = (t.expand(q.shape[0], -1, -1, -1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).type_as(x)


class MLP(nn.Module):
    def __init__(self, shape: Shape, method: Method) -> None:
        super().__init__()
        self.fc = method.linear(shape.width, shape.hidden, shape.bias)
        self.gate = method.linear(shape.width, shape.hidden, shape.bias) if shape.gated else None
        self.proj = method.linear(shape.hidden, shape.width, shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.fc(x)
        if self.gate is None:
            first = F.gelu(first)
            return self.proj(first)
        second = self.gate(x)
        first = F.silu(first) * second
        return self.proj(first)


class Block(nn.Module):
    def __init__(self, shape: Shape, method: Method, index: int) -> None:
        super().__init__()
        self.norm_1 = shape.norm()
        self.attn = Attention(shape, method, index)
        self.norm_2 = None if shape.shared_norm else shape.norm()
        self.mlp = MLP(shape, method)
        self.parallel = shape.parallel

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first = self.norm_1(x)
        attended = self.attn(first, cos, sin)
        if self.parallel:
            second = first if self.norm_2 is None else self.norm_2(x)
            return x + attended + self.mlp(second)
        x = x + attended
        assert self.norm_2 is not None
        return x + self.mlp(self.norm_2(x))


class LitGPT(nn.Module):
    """lit-gpt's model as its fine-tuning scripts run it: in bfloat16, its logits in chunks, and these returned in float32."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: Shape, method: Method) -> None:
        super().__init__()
        self.head = method.linear(shape.width, shape.vocabulary, shape.head_bias)
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, method, i) for i in range(shape.layers))
        self.ln_f = shape.norm()
        self.to(torch.bfloat16)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in method.trained))
        rotated = int(shape.rotary * shape.head)
        self.register_buffer("cos", torch.zeros(shape.longest, rotated))  # float32: set outside the model's precision
        self.register_buffer("sin", torch.zeros(shape.longest, rotated))

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        logits = self.chunks(ids)
        return [chunk.to(torch.float32) for chunk in logits]

    def chunks(self, ids: torch.Tensor) -> list[torch.Tensor]:
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        return [self.head(part) for part in x.split(CHUNK, dim=1)]


def chunked_loss(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of the next token, chunk by chunk."""
    ids, labels = batch
    logits = model(ids)
    logits[-1] = logits[-1][..., :-1, :]
    targets = labels[..., 1:].split(CHUNK, dim=1)
    flat = [chunk.reshape(-1, chunk.shape[-1]) for chunk in logits]
    wanted = [chunk.reshape(-1) for chunk in targets]
    losses = [F.cross_entropy(a, b, ignore_index=-1, reduction="none") for a, b in zip(flat, wanted)]
    return Holding.apply(torch.cat(losses).mean(), logits)  # pyright: ignore[reportReturnType]


class Holding(torch.autograd.Function):
    """The loss as it is; what else it is given stays as long as it does, as a variable of the script's loop would."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, held: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.held = held
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class FeedForward(nn.Module):
    """Three linear layers, gated (Lightning's example of tensor parallelism)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DemoTransformer(nn.Module):
    """Lightning's demo: an encoder-decoder with the vocabulary of WikiText2."""

    VOCABULARY, WIDTH = 33278, 1024

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.transformer = nn.Transformer(self.WIDTH, 64, 32, 32, 4096, 0.2, batch_first=True)
        self.decoder = nn.Linear(self.WIDTH, self.VOCABULARY)

    def forward(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        tokens = inputs.shape[1]
        kept = torch.tril(torch.ones(tokens, tokens, device=inputs.device)) == 1
        mask = kept.float().masked_fill(kept == 0, float("-inf")).masked_fill(kept == 1, 0.0)
        source, wanted = (self.dropout(self.embedding(ids) * math.sqrt(self.WIDTH)) for ids in (inputs, target))
        out = self.decoder(self.transformer(source, wanted, tgt_mask=mask))
        return F.log_softmax(out, dim=-1).view(-1, self.VOCABULARY)


class LoopAdamW(torch.optim.Optimizer):
    """AdamW as Hugging Face wrote it: parameter by parameter, one temporary of a parameter's size."""

    def __init__(self, parameters: Any, lr: float = 5e-5) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                denominator = state["exp_avg_sq"].sqrt().add_(1e-8)
                p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"])


class TwoTemporariesAdam(torch.optim.Optimizer):
    """Adam over lists of tensors as torch wrote it up to 2.0: the root and the denominator are there at once
    (github.com/pytorch/pytorch/issues/97712)."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        lists: Any = torch  # these functions are not exported
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in parameters]
            for p in parameters:
                if not self.state[p]:
                    self.state[p] |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            first, second = ([self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq"))
            lists._foreach_lerp_(first, gradients, 0.1)
            lists._foreach_mul_(second, 0.999)
            lists._foreach_addcmul_(second, gradients, gradients, 0.001)
            root = lists._foreach_sqrt(second)
            denominator = lists._foreach_add(root, 1e-8)
            lists._foreach_addcdiv_(parameters, first, denominator, -group["lr"])


class SoftmaxWithInput(torch.autograd.Function):
    """Softmax that keeps its input for backward, too, as torch's did up to 1.10 (`_softmax_backward_data` took it for its
    dtype)."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = torch.softmax(input, -1)
        ctx.save_for_backward(input, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, out = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(grad, out, -1, input.dtype)
