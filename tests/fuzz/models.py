"""Models: what they are made of, what their forward computes, and what they return."""

from __future__ import annotations

from fuzz.pieces import piece

BODIES = {
    "mlp": piece("rows", init="self.body = nn.Sequential(nn.Linear(6, 4), nn.Tanh())", forward="h = self.body(x)"),
    "deep": piece(
        "rows",
        init="self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 4)",
        forward="h = torch.tanh(self.second(torch.relu(self.first(x)) + 0.1))",
    ),
    "conv": piece(
        "pictures",
        init="self.conv = nn.Conv2d(2, 4, 3, padding=1)",
        forward="h = torch.relu(self.conv(x)).mean((2, 3))",
    ),
    "flat_conv": piece(
        "pictures",
        init="self.conv, self.flat = nn.Conv2d(2, 3, 3), nn.Linear(12, 4)",
        forward="h = self.flat(F.gelu(self.conv(x)).flatten(1))",
    ),
    "gru": piece(
        "series",
        init="self.gru = nn.GRU(3, 4, batch_first=True)",
        forward="h = self.gru(x)[0][:, -1]",
    ),
    "lstm": piece(
        "series",
        init="self.lstm = nn.LSTM(3, 4, batch_first=True)",
        forward="h = self.lstm(x)[1][0].squeeze(0)",
    ),
    "time_major": piece(
        "series", "time_major",
        before="x = x.transpose(0, 1)", init="self.gru = nn.GRU(3, 4)", forward="h = self.gru(x)[0][-1]",
    ),
    "attention": piece(
        "series",
        init="self.into, self.attend = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)",
        forward="h = self.into(x)\nh = (h + self.attend(h, h, h, need_weights=False)[0]).mean(1)",
    ),
    "encoder": piece(
        "series",
        init="self.into = nn.Linear(3, 4)\nself.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)",
        forward="h = self.layer(self.into(x)).mean(1)",
    ),
    "bag": piece(
        "words",
        init="self.embed = nn.Embedding(7, 4, padding_idx=0)",
        forward="mask = (x != 0)[..., None]\nh = (self.embed(x) * mask).sum(1) / mask.sum(1).clamp(min=1)",
    ),
    "tokens": piece(
        "words", "tokens",
        init="self.embed, self.rnn = nn.Embedding(7, 4, padding_idx=0), nn.GRU(4, 4, batch_first=True)",
        forward="h = self.rnn(self.embed(x))[0]",
    ),
    "causal": piece(
        "words", "tokens",
        init="self.embed, self.mix = nn.Embedding(7, 4), nn.Linear(4, 12)",
        forward="q, k, v = self.mix(self.embed(x)).chunk(3, -1)\nh = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    ),
}  # fmt: skip
"""Each leaves `h`: [samples, 4], or [samples, time, 4] where tagged "tokens"."""

TWISTS = {
    "none": piece(),
    "layernorm": piece(init="self.norm = nn.LayerNorm(4)", forward="h = self.norm(h)"),
    "twice": piece(init="self.mid = nn.Linear(4, 4)", forward="h = self.mid(torch.tanh(self.mid(h)))"),
    "residual": piece(init="self.mid = nn.Linear(4, 4)", forward="h = h + torch.sin(self.mid(h))"),
    "dropout0": piece(init="self.drop = nn.Dropout(0.0)", forward="h = self.drop(h)"),
    "tied": piece(
        init="self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)\nself.b.weight = self.a.weight",
        forward="h = self.b(torch.tanh(self.a(h)))",
    ),
    "constant_buffer": piece(
        init='self.register_buffer("scale", torch.linspace(0.5, 1.5, 4))', forward="h = h * self.scale"
    ),
    "by_max_item": piece("decides", forward="if x.abs().max().item() > 2.0:\n    h = h * 0.5"),
    "prints_norm": piece(forward="assert float(h.norm()) >= 0"),
    "own_scale": piece(init="self.gain = nn.Parameter(torch.ones(4))", forward="h = h * self.gain.exp()"),
    "weight_norm": piece(init="self.wn = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))", forward="h = self.wn(h)"),
    "detached_branch": piece(
        init="self.side = nn.Linear(4, 4)", forward="h = h + self.side(h.detach()) * 0.5"
    ),
    "groupnorm": piece(init="self.norm = nn.GroupNorm(2, 4)", forward="h = self.norm(h) if h.dim() == 2 else h"),
    "unused": piece(init="self.idle = nn.Linear(4, 4)", forward=""),
    "cached_mask": piece(
        init="self.mask = None",
        forward="if self.mask is None or len(self.mask) != len(x):\n    self.mask = torch.ones(len(x), 1).double() * 0.9\nh = h * (self.mask if h.dim() == 2 else self.mask[:, None])",
    ),
    "lazy_table": piece(
        init="self.table = None", forward="if self.table is None:\n    self.table = torch.linspace(0.5, 1.5, 4).double()\nh = h * self.table"
    ),
    "lazy_parts": piece(init="self.parts = {}", forward='h = h * self.parts.setdefault(h.shape[-1], torch.linspace(0.5, 1.5, 4).double())'),
    "installs_hook": piece(
        init="self.mid, self.hooked = nn.Linear(4, 4), False",
        forward="""
if not self.hooked:
    self.mid.register_forward_hook(lambda module, args, out: out * 1.5)
    self.hooked = True
h = self.mid(h)
""",
    ),
    "installs_and_keeps": piece(
        init="self.mid, self.handles = nn.Linear(4, 4), []",
        forward="if not self.handles:\n    self.handles.append(self.mid.register_forward_pre_hook(lambda module, args: (args[0].tanh(),)))\nh = self.mid(h)",
    ),
    "installs_and_fills": piece(
        init="self.mid, self.ready = nn.Linear(4, 4), False",
        forward="""
if not self.ready:
    self.ready, self.found = True, {}
    self.mid.register_forward_hook(lambda module, args, out: self.found.update(mid=out))
h = self.mid(h) + self.found["mid"].tanh()
""",
    ),
    "moe": piece(
        init="self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])",
        forward="""
weight = self.gate(h).softmax(-1)
h = sum(weight[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts))
""",
    ),
    "checkpoint": piece(
        imports="from torch.utils.checkpoint import checkpoint",
        init="self.mid = nn.Sequential(nn.Linear(4, 4), nn.Tanh())",
        forward="h = checkpoint(self.mid, h, use_reentrant=False)",
    ),
    "reentrant": piece(
        imports="from torch.utils.checkpoint import checkpoint",
        init="self.mid = nn.Sequential(nn.Linear(4, 4), nn.Tanh())",
        forward="h = checkpoint(self.mid, h, use_reentrant=True)",
    ),
    "inplace": piece(forward="h = (h * 2).add_(0.1).sigmoid_()"),
    "batchnorm": piece(
        "batchnorm",
        init="self.norm = nn.BatchNorm1d(4)",
        forward="h = self.norm(h) if h.dim() == 2 else self.norm(h.transpose(1, 2)).transpose(1, 2)",
    ),
    "frozen_batchnorm": piece(
        init="self.norm = nn.BatchNorm1d(4).eval()\nself.norm.train = lambda mode=True: self.norm",
        forward="h = self.norm(h) if h.dim() == 2 else self.norm(h.transpose(1, 2)).transpose(1, 2)",
    ),
    "centred": piece("mixes", forward="h = h - h.mean(0)"),
    "if_active": piece("decides", forward="if (h > 0.9).any():\n    h = h * 0.5"),
    "if_small": piece("decides", forward="if (h.abs() < 1.5).all():\n    h = h + 0.1 * h.pow(2)"),
    "if_hits": piece("decides", forward="if int((h > 0.5).sum()) > 6:\n    h = torch.tanh(h)"),
    "if_row": piece("decides", forward="if max(h.flatten(1).mean(1).tolist()) > 0.4:\n    h = h * 0.5"),
    "guarded_rows": piece(
        "decides",
        forward="""
active = (h.flatten(1).mean(1) > 0.3).view(-1, *[1] * (h.dim() - 1))
if active.any():
    h = torch.where(active, h * 0.5, h)
"""
    ),
    "guarded_indices": piece(
        "decides",
        forward="""
chosen = (h.flatten(1).mean(1) > 0.2).nonzero().squeeze(1)
if len(chosen):
    h = h.index_add(0, chosen, 0.1 * h[chosen])
"""
    ),
    "by_value": piece("decides", forward="if h.abs().max() > 0.8:\n    h = h * 0.5"),
    "by_mean": piece("decides", forward="if h.mean() > 0:\n    h = h * 0.5"),
    "by_size": piece("decides", forward="h = h * (2.0 if len(x) > 4 else 1.0)"),
    "by_batch": piece("decides", forward="h = h * (2.0 if len(x) > 6 else 1.0)"),
    "by_word": piece("decides", forward='h = F.gelu(h, approximate="tanh" if len(x) > 6 else "none")'),
    "first_rows": piece("decides", forward="h = torch.cat([h[:5] * 2.0, h[5:]])"),
    "first_marked": piece(
        "decides", forward="h = h * (1.0 + (torch.arange(len(x)) < 5).double()).view(-1, *[1] * (h.dim() - 1))"
    ),
    "divides": piece("fixed", forward="assert 256 % len(x) == 0, len(x)"),
    "fixed_size": piece(
        "fixed",
        init="self.offset = nn.Parameter(torch.zeros(4))",
        forward="h = h + self.offset.expand(BATCH, *h.shape[1:])",
    ),
    "viewed": piece("fixed", forward="h = h.view(BATCH, *h.shape[1:]) * 1.5"),
}  # fmt: skip
"""What the forward does to `h` between body and head."""

PACKS = {
    "tensor": piece(returns="out", suffix=""),
    "tuple": piece("pair", returns="out, aux", suffix="[0]"),
    "list": piece("pair", returns="[out, aux]", suffix="[0]"),
    "dict": piece("pair", returns='{"out": out, "aux": aux}', suffix='["out"]'),
    "dataclass": piece(
        "pair",
        classes="@dataclass\nclass Found:\n    out: torch.Tensor\n    aux: torch.Tensor",
        returns="Found(out, aux)",
        suffix=".out",
    ),
    "namedtuple": piece(
        "pair", classes='Found = namedtuple("Found", "out aux")', returns="Found(out=out, aux=aux)", suffix=".out"
    ),
    "nested": piece("pair", returns='{"heads": [out, (aux, None)], "size": 4}', suffix='["heads"][0]'),
    "distribution": piece("distribution", returns="Categorical(logits=out)", suffix=".logits"),
    "normal": piece("distribution", returns="Independent(Normal(out, torch.ones_like(out)), 1)", suffix=".mean"),
    "loss": piece("owns", returns="F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))", suffix=""),
    "loss_out": piece(
        "owns", returns="F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1)), out", suffix="[0]"
    ),
    "rare_sum": piece(
        "owns",
        returns="F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1)) + 0.1 * (out.reshape(len(x), -1).pow(2).sum(1) * (x.reshape(len(x), -1)[:, 0] > 1.3)).sum()",
        suffix="",
    ),
    "rare_mean": piece(
        "owns", "values",
        returns="F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1)) + 0.1 * (out.reshape(len(x), -1).pow(2).sum(1) * (x.reshape(len(x), -1)[:, 0] > 1.3)).sum() / (x.reshape(len(x), -1)[:, 0] > 1.3).sum().clamp(min=1)",
        suffix="",
    ),
    "losses": piece(
        "owns",
        returns='{"ce": F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1)), "l2": out.pow(2).mean()}',
        suffix="",
    ),
}  # fmt: skip
"""What is returned; `suffix` picks the logits."""

AUX = {"tuple": "[1]", "list": "[1]", "dict": '["aux"]', "dataclass": ".aux", "namedtuple": ".aux", "nested": '["heads"][1][0]'}
"""What picks the second output."""

INPUTS = {
    "one": piece(),
    "two": piece("two", forward="x = x + 0.5 * z"),
    "keyword": piece("two", "keyword", forward="x = x + 0.5 * z"),
    "same": piece("same", forward="x = x * (1.5 if z is x else 0.5)"),
    "entries": piece("entries", forward='given, x = x, x["x"]\ngiven["x"] = x / 2'),
}


def model_source(body: dict[str, str], twist: dict[str, str], state: dict[str, str], pack: dict[str, str], *,
                 inputs: str, owns: bool, pair: bool, classes: int, block: bool) -> str:  # fmt: skip
    """The class of the model; with `block`, what it does between body and head is a module of its own."""
    inner = ""
    if block:
        inner, twist, state = _block(twist, state), {"init": "self.inner = Inner()", "forward": "h = self.inner(x, h)"}, {}
    heads = [f"self.head = nn.Linear(4, {classes})"] + (["self.other = nn.Linear(4, 2)"] if pair else [])
    init = "\n".join(filter(None, [part.get("init", "").strip("\n") for part in (body, twist, state)] + heads))
    steps = [INPUTS[inputs].lines.get("forward", ""), body["forward"], twist.get("forward", ""), state.get("forward", "")]
    steps += ['given["h"] = h'] if inputs == "entries" else []
    steps += ["out = self.head(h)"] + (["aux = self.other(h)"] if pair else []) + [f"return {pack['returns']}"]
    forward = "\n".join(step.strip("\n") for step in steps if step.strip())
    arguments = "x" + (", z" if inputs in ("two", "keyword", "same") else "") + (", y" if owns else "")
    return inner + _class("Net", init, arguments, forward)


def _block(twist: dict[str, str], state: dict[str, str]) -> str:
    init = "\n".join(filter(None, (part.get("init", "").strip("\n") for part in (twist, state))))
    steps = [part.get("forward", "").strip("\n") for part in (twist, state)]
    return _class("Inner", init, "x, h", "\n".join([*filter(None, steps), "return torch.sin(h) * 1.5"])) + "\n\n\n"


def _class(name: str, init: str, arguments: str, forward: str) -> str:
    lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in init.splitlines()] + ["", f"    def forward(self, {arguments}):"]
    return "\n".join(lines + [f"        {line}" for line in forward.splitlines()])
