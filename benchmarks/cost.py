"""What memfit itself costs: `run.step` against the same loop written by hand at the same plan, replay, planning, importing.

    python benchmarks/cost.py

Both loops run in one process, in turns, and the quickest of many rounds is compared: the machine's own noise is larger than
what is measured here.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from common import FAMILIES, environment, save, table

ROUNDS = 40


def step_cost(size: str, width: int, samples: int, micro: int, rule: str, rounds: int = ROUNDS) -> dict:
    """Seconds per optimizer step of both loops; `rule` is how the loss is weighted: term, samples or by hand."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import memfit

    torch.manual_seed(0)
    layers = nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    model = nn.Sequential(*layers)
    x, y = torch.randn(samples, 64), torch.randint(0, 10, (samples,))

    def loss_fn(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        if rule == "samples":
            return -F.log_softmax(model(batch[0]), -1).gather(1, batch[1][:, None]).mean()
        return F.cross_entropy(model(batch[0]), batch[1])

    by_hand = nn.Sequential(*[type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else type(m)() for m in model])
    by_hand.load_state_dict(model.state_dict())
    loader = DataLoader(TensorDataset(x, y), batch_size=samples)
    run = memfit.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.01), loader, loss_fn=loss_fn, micro_batch=micro, target_batch=samples
    )
    batch, optimizer = (x, y), torch.optim.SGD(by_hand.parameters(), lr=0.01)
    pieces = range(0, samples, micro)

    def plain() -> None:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for start in pieces:
            loss = loss_fn(by_hand, (x[start : start + micro], y[start : start + micro])) / len(pieces)
            loss.backward()
            total += loss.detach()
        optimizer.step()

    mine, theirs = interleaved([lambda: run.step(batch), plain], rounds)
    count = len(pieces)
    return {
        "size": size,
        "rule": rule,
        "micro_batches": count,
        "by_hand_ms": theirs * 1e3,
        "memfit_ms": mine * 1e3,
        "per_micro_ms": theirs / count * 1e3,
        "overhead_us_per_micro": (mine - theirs) / count * 1e6,
        "overhead": mine / theirs - 1,
    }


def interleaved(functions: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The quickest of `rounds` for each, taken in turns."""
    found: list[list[float]] = [[] for _ in functions]
    for _ in range(3):
        for function in functions:
            function()
    for turn in range(rounds):
        order = list(enumerate(functions))
        for index, function in order if turn % 2 else reversed(order):
            start = time.perf_counter()
            function()
            found[index].append(time.perf_counter() - start)
    return [min(times) for times in found]


def replay_cost(family_name: str, rounds: int = 7) -> dict:
    """Replay against accumulate in script mode at the same micro-batch, and forward's share of accumulate.

    Replay keeps the activations of one micro-batch, as every planned one does. `outside_s`: what the script's loss takes
    longer on the whole output than on its parts, which it would without memfit too; `own_ratio` is without that. Measured by
    itself it is too low where outputs are large: fresh pages cost more between a model's passes than in a loop of their own.
    `by_hand_s` is the same two passes written out, with that loss between them.
    """
    import copy

    import torch
    from helpers import wrapped
    from zoo import FAMILIES as ZOO, first_batch
    from zoo.losses import variants_for
    from zoo.plain import parts

    class Opaque(torch.autograd.Function):
        """An operation that nobody knows, and that costs nothing itself: what follows it runs by replay."""

        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value.view_as(value)

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient

    family = ZOO[family_name]
    model = family.build("bench")
    batch = first_batch(family, 16, size="bench")
    variant = variants_for(family)[0]

    def steps(replayed: bool) -> Callable[[], None]:
        own = copy.deepcopy(model)
        wrapped(own, 4, share=16, fields={"mode": "replay", "keep": 1} if replayed else None)

        def step() -> None:
            own.zero_grad(set_to_none=True)
            scores = family.logits(own, batch)
            variant.loss(Opaque.apply(scores) if replayed else scores, batch).backward()

        return step

    plain, pieces = copy.deepcopy(model), parts(batch, (4, 4, 4, 4))

    def forward() -> None:
        with torch.no_grad():
            for piece in pieces:
                family.logits(plain, piece)

    handmade = copy.deepcopy(model)

    def by_hand() -> None:
        handmade.zero_grad(set_to_none=True)
        with torch.no_grad():
            scores = torch.cat([family.logits(handmade, piece) for piece in pieces])
        scores.requires_grad_()
        variant.loss(scores, batch).backward()
        assert scores.grad is not None
        for piece, gradient in zip(pieces, scores.grad.split(4)):
            family.logits(handmade, piece).backward(gradient)

    with torch.no_grad():
        whole, cut = family.logits(plain, batch), [family.logits(plain, piece) for piece in pieces]

    def loss_of_whole() -> None:
        variant.loss(whole.detach().requires_grad_(), batch).backward()

    def loss_of_parts() -> None:
        for scores, piece in zip(cut, pieces):
            variant.loss(scores.detach().requires_grad_(), piece).backward()

    timed = interleaved([steps(False), steps(True), by_hand, forward, loss_of_whole, loss_of_parts], rounds)
    accumulate, replay, written_out, forwards, outside, inside = timed
    share = forwards / accumulate
    return {
        "family": family_name,
        "accumulate_s": accumulate,
        "replay_s": replay,
        "by_hand_s": written_out,
        "over_by_hand": replay / written_out,
        "ratio": replay / accumulate,
        "outside_s": outside - inside,
        "own_ratio": (replay - outside + inside) / accumulate,
        "forward_share": share,
        "allowed": 1.03 * (1 + share),
    }


def planning_cost(family_name: str) -> dict:
    """Seconds that `wrap` takes in step mode, in a fresh process, where a budget makes it search; and those of the first step
    after it, which is what the batch's own compute takes: planning runs the model on parts of it, and times sizes."""
    script = f"""
import json, time, torch
from zoo import FAMILIES
from torch.utils.data import DataLoader
import memfit
f = FAMILIES[{family_name!r}]
model = f.build("bench", dropout=0.1)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
loader = DataLoader(f.dataset(size="bench", n=128), batch_size=8, collate_fn=f.collate)
start = time.perf_counter()
run = memfit.wrap(model, optimizer, loader, loss_fn=f.loss, target_batch=32, budget="1GiB")
seconds = time.perf_counter() - start
batch = next(iter(run.loader))
start = time.perf_counter()
run.step(batch)
found = {{"parameters": sum(p.numel() for p in model.parameters()), "seconds": seconds}}
print(json.dumps({{"family": {family_name!r}, **found, "first_step": time.perf_counter() - start}}))
"""
    return json.loads(output(script))


def import_cost(rounds: int = 9) -> dict:
    """Milliseconds that `import memfit` adds to `import torch`, the median of fresh processes."""
    script = "import time, torch; s = time.perf_counter(); import memfit; print((time.perf_counter() - s) * 1e3)"
    found = sorted(float(output(script)) for _ in range(rounds))
    return {"median_ms": statistics.median(found), "least_ms": found[0], "most_ms": found[-1]}


def output(script: str) -> str:
    """The last line a fresh process prints."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    imported = import_cost()
    print("import memfit over import torch:", imported)
    # The part that comes once per step shows between few micro-batches and many.
    steps = [step_cost("tiny", 32, samples, 4, rule, 200) for samples in (64, 256) for rule in ("term", "samples")]
    steps += [step_cost("50 ms", 4096, 1024, 512, rule) for rule in ("term", "samples")]
    print(table("own cost", tuple(steps[0]), [tuple(rounded(v) for v in s.values()) for s in steps]))
    plans = [planning_cost(name) for name in FAMILIES]
    print(table("planning", tuple(plans[0]), [tuple(rounded(v) for v in p.values()) for p in plans]))
    replays = [replay_cost(name, rounds) for name, rounds in (("gpt", 7), ("hf_gpt2", 7), ("vit", 20), ("resnet_group", 20))]
    print(table("replay", tuple(replays[0]), [tuple(rounded(v) for v in r.values()) for r in replays]))
    print(save("cost", {"import": imported, "step": steps, "planning": plans, "replay": replays}))


def rounded(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()
