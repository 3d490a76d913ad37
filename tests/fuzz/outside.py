"""State and parameters that a script keeps beside its model, in what computes the loss."""

from __future__ import annotations

from fuzz.pieces import Piece, piece


def _outside(classes: str, text: str, *tags: str, setup: str, holds: str, params: str = "", imports: str = "") -> Piece:
    sections = {"classes": classes, "loss": text, "setup": setup, "params": params, "imports": imports}
    return piece("outside", *tags, holds=holds, sums=True, **{name: lines for name, lines in sections.items() if lines})


def _module(name: str, init: str, body: str, *tags: str, params: bool = False) -> Piece:
    """A loss module called as `criterion(out, y)`."""
    lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in init.splitlines()] + ["", "    def forward(self, out, y):"]
    lines += [f"        {line}" for line in body.strip("\n").splitlines()]
    return _outside(
        "\n".join(lines), "loss = criterion(out, y)", *tags,
        setup=f"criterion = {name}().double()", holds="criterion", params="*criterion.parameters()" if params else "",
    )  # fmt: skip


OUTSIDE = {
    "none": piece(),
    "centre_buffer": _module(
        "Centre", 'self.register_buffer("centre", torch.zeros(CLASSES))',
        "loss = F.cross_entropy(out - self.centre, y)\nwith torch.no_grad():\n    self.centre.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)\nreturn loss",
    ),
    "centre_attribute": _module(
        "Centre", "self.centre = torch.zeros(CLASSES).double()",
        "loss = F.cross_entropy(out - self.centre, y)\nself.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)\nreturn loss",
    ),
    "scale_float": _module(
        "Scaled", "self.scale = 1.0",
        "loss = F.cross_entropy(out, y) * self.scale\nself.scale *= 0.9\nreturn loss",
    ),
    "running_float": _module(
        "Scaled", "self.mean = 1.0",
        "loss = F.cross_entropy(out, y)\nself.mean = 0.9 * self.mean + 0.1 * loss.item()\nreturn loss / self.mean",
    ),
    "counted": _module("Counted", "self.calls = 0", "self.calls += 1\nreturn F.cross_entropy(out, y) / self.calls"),
    "listed": _module(
        "Listed", "self.values = []", "loss = F.cross_entropy(out, y)\nself.values.append(loss.detach())\nreturn loss"
    ),
    "bank": _module(
        "Bank", 'self.register_buffer("bank", torch.zeros(6, CLASSES))\nself.at = 0',
        """
loss = F.cross_entropy(out, y) + 0.1 * (out @ self.bank.clone().T).exp().mean()
rows = [(self.at + i) % 6 for i in range(min(len(out), 6))]
self.bank[rows] = out.detach()[: len(rows)]
self.at = (self.at + len(rows)) % 6
return loss
""",
    ),
    "queue": _module(
        "Queue", "self.queue = deque(maxlen=5)",
        """
loss = F.cross_entropy(out, y)
if self.queue:
    loss = loss + 0.1 * (out @ torch.stack(list(self.queue)).T).pow(2).mean()
self.queue.extend(out.detach())
return loss
""",
    ),
    "class_centres": _module(
        "Centres", 'self.register_buffer("centres", torch.zeros(CLASSES, CLASSES))',
        """
loss = F.cross_entropy(out, y) + 0.1 * (out - self.centres[y]).pow(2).sum(1).mean()
with torch.no_grad():
    self.centres.index_add_(0, y, 0.1 * (out - self.centres[y]))
return loss
""",
    ),
    "temperature": _module(
        "Tempered", "self.log_t = nn.Parameter(torch.zeros(()))", "return F.cross_entropy(out * self.log_t.exp(), y)", params=True
    ),
    "uncertainty": _module(
        "Uncertain", "self.logs = nn.Parameter(torch.zeros(2))",
        "terms = torch.stack([F.cross_entropy(out, y), out.pow(2).mean()])\nreturn (terms * (-self.logs).exp() + self.logs).sum()",
        params=True,
    ),
    "arcface": _module(
        "Arc", "self.weight = nn.Parameter(torch.linspace(-1, 1, CLASSES * CLASSES).reshape(CLASSES, CLASSES))",
        """
cosine = F.linear(F.normalize(out), F.normalize(self.weight)).clamp(-0.99, 0.99)
margin = F.one_hot(y, CLASSES) * 0.2
return F.cross_entropy(4 * torch.cos(torch.acos(cosine) + margin), y)
""",
        params=True,
    ),
    "centre_loss": _module(
        "Centres", "self.centres = nn.Parameter(torch.zeros(CLASSES, CLASSES))",
        "return F.cross_entropy(out, y) + 0.1 * (out - self.centres[y]).pow(2).sum(1).mean()", params=True,
    ),
    "plain_parameter": _outside(
        "", "loss = F.cross_entropy(out * scale, y)", holds="scale",
        setup="scale = nn.Parameter(torch.ones(CLASSES).double())", params="scale",
    ),
    "head_outside": _outside(
        "", "loss = F.cross_entropy(head(out), y)", holds="head", setup="head = nn.Linear(CLASSES, CLASSES).double()",
        params="*head.parameters()",
    ),
    "warmup_attribute": _module(
        "Warm", "self.step = 0", "self.step += 1\nreturn F.cross_entropy(out, y) * min(1.0, self.step / 3)",
    ),
    "class_counts": _module(
        "Counting", 'self.register_buffer("counts", torch.ones(CLASSES))',
        "self.counts += F.one_hot(y, CLASSES).sum(0)\nreturn F.cross_entropy(out, y, weight=self.counts.sum() / self.counts)",
    ),
    "balancing": _module(
        "Balanced", "self.w = [1.0, 1.0]",
        """
terms = [F.cross_entropy(out, y), out.pow(2).mean()]
self.w = [0.9 * w + 0.1 * float(term.detach()) for w, term in zip(self.w, terms)]
return sum(term / w for term, w in zip(terms, self.w))
""",
    ),
    "default_argument": _outside(
        "def smoothed(out, y, cache={}):\n    loss = F.cross_entropy(out, y)\n    cache['mean'] = 0.9 * cache.get('mean', 1.0) + 0.1 * float(loss.detach())\n    return loss / cache['mean']",
        "loss = smoothed(out, y)", setup="cached = smoothed.__defaults__[0]", holds="smoothed",
    ),
    "generator_weights": _outside(
        "", "loss = F.cross_entropy(out, y) * next(weights)", setup="weights = iter([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])",
        holds="weights",
    ),
    "cycle_weights": _outside(
        "", "loss = F.cross_entropy(out, y) * next(weights)", setup="weights = itertools.cycle([1.0, 0.9, 0.7])", holds="weights"
    ),
    "loader_goals": _outside(
        "", "loss = F.cross_entropy(out, y) + 0.1 * (out - next(goals)).pow(2).mean()",
        setup="goals = iter(DataLoader(torch.arange(90.0).double().view(30, 3) / 90, batch_size=None))", holds="goals",
    ),
    "prompt": piece(
        "outside", "prompt", setup="prompt = nn.Parameter(torch.zeros(INPUT).double())", params="prompt", before="x = x + prompt",
    ),
    "nonlocal_count": _outside(
        "def counting():\n    n = 0\n\n    def weight():\n        nonlocal n\n        n += 1\n        return 1.0 / n\n\n    return weight",
        "loss = F.cross_entropy(out, y) * weight()", setup="weight = counting()", holds="weight",
    ),
    "numpy_running": _module(
        "Centre", "self.centre = np.zeros(CLASSES)",
        """
loss = F.cross_entropy(out - torch.from_numpy(self.centre.copy()), y)
self.centre[:] = 0.9 * self.centre + 0.1 * out.detach().mean(0).numpy()
return loss
""",
    ),
    "numpy_anew": _module(
        "Centre", "self.centre = np.zeros(CLASSES)",
        "loss = F.cross_entropy(out, y)\nself.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0).numpy()\nreturn loss",
    ),
    "numpy_number": _module(
        "Scaled", "self.mean = np.float64(1.0)",
        "loss = F.cross_entropy(out, y)\nself.mean = 0.9 * self.mean + 0.1 * loss.detach().numpy()[()]\nreturn loss",
    ),
    "class_centre": _outside(
        "class Centre:\n    centre = torch.zeros(CLASSES).double()\n    seen = 0", """
loss = F.cross_entropy(out - Centre.centre, y)
Centre.centre = 0.9 * Centre.centre + 0.1 * out.detach().mean(0)
Centre.seen += len(y)
""",
        setup="centred = Centre", holds="centred",
    ),
    "class_number": _outside(
        "class Scaled:\n    mean = 1.0",
        "loss = F.cross_entropy(out, y)\nScaled.mean = 0.9 * Scaled.mean + 0.1 * float(loss.detach())",
        setup="scaled = Scaled", holds="scaled",
    ),
    "slotted": _outside(
        "class Centre:\n    __slots__ = ('centre', 'seen')\n\n    def __init__(self):\n        self.centre, self.seen = torch.zeros(CLASSES).double(), 0",
        """
loss = F.cross_entropy(out, y)
slots.centre = 0.9 * slots.centre + 0.1 * out.detach().mean(0)
slots.seen += len(y)
""",
        setup="slots = Centre()", holds="slots",
    ),
    "tensor_list": _module(
        "Means", "self.means = [torch.zeros(CLASSES).double() for _ in range(2)]",
        """
loss = F.cross_entropy(out - self.means[0], y)
for mean, factor in zip(self.means, (0.9, 0.5)):
    mean.mul_(factor).add_(out.detach().mean(0), alpha=1 - factor)
return loss
""",
    ),
    "set_of_classes": _module("Met", "self.met = set()", "self.met.update(y.tolist())\nreturn F.cross_entropy(out, y) / len(self.met)"),
    "static_count": _outside(
        "class Counted:\n    calls = 0\n\n    @classmethod\n    def weight(cls):\n        cls.calls += 1\n        return 1.0 / cls.calls",
        "loss = F.cross_entropy(out, y) * Counted.weight()", setup="counted = Counted", holds="counted",
    ),
    "global_list": _outside(
        "", "loss = F.cross_entropy(out, y)\nkept.append(float(loss.detach()))", setup="kept = []", holds="kept"
    ),
    "global_dict": _outside(
        "", 'loss = F.cross_entropy(out, y) * state["w"]\nstate["w"] *= 0.9\nstate["n"] += len(y)',
        setup='state = {"w": 1.0, "n": 0}', holds="state",
    ),
    "global_tensor": _outside(
        "", "loss = F.cross_entropy(out, y)\nhistogram[y] += 1", setup="histogram = torch.zeros(CLASSES).double()", holds="histogram"
    ),
    "running_average_meter": _outside(
        "class Meter:\n    def __init__(self):\n        self.total, self.n = 0.0, 0\n\n    def update(self, value, n):\n        self.total += value * n\n        self.n += n",
        "loss = F.cross_entropy(out, y)\nmeter.update(loss.item(), len(y))", setup="meter = Meter()", holds="meter",
    ),
    "confusion": _outside(
        "", "loss = F.cross_entropy(out, y)\nconfusion.index_put_((y, out.argmax(1)), torch.tensor(1), accumulate=True)",
        setup="confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.long)", holds="confusion",
    ),
}  # fmt: skip
"""What holds state or parameters; all but "none" and "prompt" take the place of the loss."""

OPTIMISED = ("same", "own")
"""Whether parameters outside of the model are in the model's optimizer or in one of their own."""


def reached(text: str, holds: str, how: str) -> tuple[str, str]:
    """Lines that define `objective(out, y, goal)` around a loss, and the line that calls it, by how it reaches what it holds."""
    body = "\n".join(f"    {line}" for line in text.strip("\n").splitlines()) + "\n    return loss"
    call = "loss = objective(out, y, goal)"
    held = holds or "_"
    if how == "inline":
        return "", text
    if how == "global":
        return f"def objective(out, y, goal):\n{body}", call
    if how == "partial":
        bound = f"functools.partial(unbound, {holds})" if holds else "functools.partial(unbound, None)"
        return f"def unbound({held}, out, y, goal):\n{body}\n\n\nobjective = {bound}", call
    deeper = "\n".join(f"    {line}" if line.strip() else "" for line in body.splitlines())
    given = holds or "None"
    if how == "closure":
        return f"def made({held}):\n    def objective(out, y, goal):\n{deeper}\n\n    return objective\n\n\nobjective = made({given})", call
    assert how == "bound", how
    inner = f"        {held} = self.held\n{deeper}"
    lines = "class Task:\n    def __init__(self, held):\n        self.held = held\n\n    def objective(self, out, y, goal):\n"
    return f"{lines}{inner}\n\n\ntask = Task({given})", "loss = task.objective(out, y, goal)"
