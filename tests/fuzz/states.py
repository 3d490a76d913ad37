"""State: what the forward of a model leaves on it."""

from __future__ import annotations

import textwrap

from fuzz.pieces import piece

_FOLLOWS = """
with torch.no_grad():
    for slow, online in zip(self.slow.parameters(), self.online.parameters()):
        slow.mul_(0.9).add_(online, alpha=0.1)
h = self.online(h) + self.slow(h.detach())
"""

_RARE = "rare = h.detach()[h.detach().flatten(1).mean(1) > 0.4]\n"


def _indented(lines: str) -> str:
    return textwrap.indent(lines, "    ")


STATES = {
    "none": piece(),
    "counter": piece("state", init="self.calls = 0", forward="self.calls += 1"),
    "tensor_counter": piece(
        "state", init='self.register_buffer("calls", torch.zeros((), dtype=torch.long))', forward="self.calls += 1"
    ),
    "tensor_attribute": piece(
        "state", init="self.seen = torch.zeros(())", forward="self.seen = self.seen + 1"
    ),
    "running_mean": piece(
        "state",
        init='self.register_buffer("centre", torch.zeros(4))',
        forward="self.centre.mul_(0.9).add_(h.detach().reshape(-1, 4).mean(0), alpha=0.1)",
    ),
    "running_used": piece(
        "state",
        init='self.register_buffer("centre", torch.zeros(4))',
        forward="h = h - self.centre\nself.centre = 0.9 * self.centre + 0.1 * h.detach().reshape(-1, 4).mean(0)",
    ),
    "ema_data": piece(
        "state",
        init='self.register_buffer("centre", torch.zeros(4))',
        forward="self.centre.data = 0.9 * self.centre.data + 0.1 * h.data.reshape(-1, 4).mean(0)",
    ),
    "last": piece("state", init="self.last = None", forward="self.last = h.detach()"),
    "history": piece("state", init="self.history = []", forward="self.history.append(h.detach())"),
    "samples_seen": piece("state", init="self.samples = 0", forward="self.samples += len(x)"),
    "momentum_encoder": piece(
        "state",
        init="self.online, self.slow = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)",
        forward="""
with torch.no_grad():
    for slow, online in zip(self.slow.parameters(), self.online.parameters()):
        slow.mul_(0.9).add_(online, alpha=0.1)
h = self.online(h) + self.slow(h.detach())
""",
    ),
    "copied_encoder": piece(
        "state",
        init="self.online = nn.Linear(4, 4)\nself.slow = copy.deepcopy(self.online).requires_grad_(False)",
        forward=_FOLLOWS,
    ),
    "later_encoder": piece(
        "state",
        init="self.calls, self.online = 0, nn.Linear(4, 4)\nself.slow = copy.deepcopy(self.online).requires_grad_(False)",
        forward="self.calls += 1\nif self.calls > 2:" + _indented(_FOLLOWS),
    ),
    "encoder_now_and_then": piece(
        "state",
        init="self.calls, self.online = 0, nn.Linear(4, 4)\nself.slow = nn.Linear(4, 4).requires_grad_(False)",
        forward="self.calls += 1\nif self.calls % 3 == 2:" + _indented(_FOLLOWS),
    ),
    "counted_encoder": piece(
        "state",
        init="""
self.register_buffer("calls", torch.zeros((), dtype=torch.long))
self.online = nn.Linear(4, 4)
self.slow = copy.deepcopy(self.online).requires_grad_(False)
""",
        forward="self.calls += 1\nif self.calls > 3:" + _indented(_FOLLOWS),
    ),
    "copied_tensors": piece(
        "state",
        init="self.online = nn.Linear(4, 4)\nself.slow = {name: value.double() for name, value in self.online.state_dict().items()}",
        forward="""
self.slow = {name: 0.5 * value + 0.5 * self.online.state_dict()[name] for name, value in self.slow.items()}
h = self.online(h) + F.linear(h.detach(), self.slow["weight"], self.slow["bias"])
""",
    ),
    "warming": piece(
        "state",
        init="self.calls, self.warmth = 0, 0.0",
        forward="self.calls += 1\nif self.calls > 2:\n    self.warmth = min(self.warmth + 0.4, 1.0)\nh = h * (1.0 + self.warmth)",
    ),
    "largest": piece(
        "state", "decides",
        init='self.register_buffer("most", torch.tensor(0.5))',
        forward="self.most.copy_(torch.maximum(self.most, h.detach().abs().max()))\nh = h / (1.0 + self.most)",
    ),
    "numpy_mean": piece(
        "state", init="self.mean = np.zeros(4)",
        forward="self.mean[:] = 0.9 * self.mean + 0.1 * h.detach().reshape(-1, 4).mean(0).numpy()",
    ),
    "dict_state": piece(
        "state", init='self.stats = {"n": 0, "mean": torch.zeros(4).double()}',
        forward="""
self.stats["n"] += 1
self.stats["mean"] = 0.9 * self.stats["mean"] + 0.1 * h.detach().reshape(-1, 4).mean(0)
""",
    ),
    "class_counter": piece("state", forward="type(self).forwards = getattr(type(self), 'forwards', 0) + 1"),
    "clipped_weight": piece("state", forward="with torch.no_grad():\n    self.head.weight.clamp_(-0.4, 0.4)"),
    "max_norm": piece(
        "state", init="self.renorm = nn.Embedding(2, 4, max_norm=0.5)", forward="h = h + self.renorm((h.detach().sum(-1) > 0).long())"
    ),
    "spectral": piece(
        "state",
        init="self.sn = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))",
        forward="h = self.sn(h)",
    ),
    "hidden": piece(
        "state", "fixed",
        init="self.hidden, self.cell = None, nn.GRUCell(4, 4)",
        forward="""
first = h if h.dim() == 2 else h[:, 0]
hidden = self.hidden if self.hidden is not None and len(self.hidden) == len(first) else torch.zeros_like(first)
mixed = self.cell(first, hidden)
self.hidden = mixed.detach()
h = h + (mixed if h.dim() == 2 else mixed[:, None])
""",
    ),
    "rare_counter": piece(
        "state", init="self.seen = 0", forward=_RARE + "if len(rare):\n    self.seen += len(x)"
    ),
    "rare_hits": piece("state", init="self.hits = 0", forward=_RARE + "if len(rare):\n    self.hits += len(rare)"),
    "rare_mean": piece(
        "state", init='self.register_buffer("centre", torch.zeros(4))',
        forward=_RARE + "h = h - self.centre\nif len(rare):\n    self.centre = 0.9 * self.centre + 0.1 * rare.reshape(-1, 4).mean(0)",
    ),
    "rare_rows": piece(
        "state", init="self.bank = torch.zeros(0, 4).double()",
        forward=_RARE + "if len(rare):\n    self.bank = torch.cat([self.bank, rare.reshape(-1, 4)])",
    ),
    "rare_items": piece("state", init="self.items = []", forward=_RARE + "self.items.extend(rare.flatten(1).sum(1).tolist())"),
    "class_counts": piece(
        "state", init="self.counts = {}",
        forward="for one in h.detach().reshape(len(h), -1, 4).mean(1).argmax(1).tolist():\n    self.counts[one] = self.counts.get(one, 0) + 1",
    ),
    "rolling_list": piece(
        "state", init="self.recent = []", forward="self.recent.append(h.detach().mean())\nself.recent = self.recent[-3:]"
    ),
    "rolling_rows": piece(
        "state", init="self.recent = torch.zeros(0, 4).double()",
        forward="self.recent = torch.cat([self.recent, h.detach().reshape(-1, 4)])[-20:]",
    ),
    "drawn": piece("state", init="self.scales = itertools.cycle([1.0, 0.9, 0.8])", forward="h = h * next(self.scales)"),
    "kept_graph": piece("door", init="self.kept = {}", forward='self.kept["h"] = h * 2.0'),
    "aux_loss": piece("door", init="self.aux_loss = None", forward="self.aux_loss = (h - 0.1).pow(2).mean()",
                      terms="loss = loss + 0.1 * model.aux_loss"),
    "mask": piece(
        "door",  # without a graph
        init="self.mask = None",
        forward="self.mask = (h.detach() > 0.1).to(h.dtype)\nh = h * (1.0 - 0.5 * self.mask)",
        terms="loss = loss * (1.0 + model.mask.mean())",
    ),
}  # fmt: skip
"""What the forward leaves on the module."""
