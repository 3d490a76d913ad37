"""What a loop does with gradients, optimizers and parameters: backward, clipping, stepping, schedules, freezing, evaluation."""

from __future__ import annotations

from fuzz.pieces import piece

BACKWARD = {
    "once": piece("single", backward="loss.backward()"),
    "twice": piece(backward="loss.backward(retain_graph=True)\nloss.backward()"),
    "retained": piece(backward="loss.backward(retain_graph=True)"),
    "with_factor": piece(backward="loss.backward(torch.tensor(0.5).double())"),
    "two_losses": piece(backward="second = out.pow(2).mean()\nloss.backward(retain_graph=True)\nsecond.backward()"),
    "scaled": piece(backward="(loss * 8).backward()", gradients="for p in model.parameters():\n    if p.grad is not None:\n        p.grad.div_(8)"),
    "autograd_grad": piece(
        backward="""
trained = [p for p in model.parameters() if p.requires_grad]
for p, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True)):
    p.grad = gradient
"""
    ),
    "autograd_backward": piece(backward="torch.autograd.backward([loss])"),
    "scaler": piece(
        setup='scaler = torch.amp.GradScaler("cpu", init_scale=64.0)', backward="scaler.scale(loss).backward()",
        gradients="scaler.unscale_(optimizer)", stepped="scaler.update()",
    ),
    "inputs": piece(backward="loss.backward(inputs=[p for p in model.parameters() if p.requires_grad])"),
    "conflict": piece(
        backward="""
second = out.pow(2).mean()
trained = [p for p in model.parameters() if p.requires_grad]
one = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
two = torch.autograd.grad(second, trained, allow_unused=True)
for p, a, b in zip(trained, one, two):
    p.grad = None if a is None or b is None else a + 0.1 * b
"""
    ),
}  # fmt: skip

ZERO = {
    "first": piece(epoch="", before="optimizer.zero_grad()"),
    "before_backward": piece(between="optimizer.zero_grad()"),
    "last": piece(end_step="optimizer.zero_grad()"),
    "kept": piece(before="optimizer.zero_grad(set_to_none=False)"),
    "last_kept": piece(end_step="optimizer.zero_grad(set_to_none=False)"),
    "model": piece(before="model.zero_grad()"),
    "by_hand": piece(before="for p in model.parameters():\n    p.grad = None"),
    "never": piece(before=""),
}

GRADIENTS = {
    "none": piece(),
    "scaled": piece(gradients="for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)"),
    "replaced": piece(gradients="for p in model.parameters():\n    if p.grad is not None:\n        p.grad = torch.tanh(10 * p.grad) * 0.01"),
    "printed": piece(
        gradients='print("slope", sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None))'
    ),
    "noise": piece(
        gradients="for p in model.parameters():\n    if p.grad is not None:\n        p.grad += 0.01 * torch.randn(p.shape).double()"
    ),
    "kept": piece(setup="kept_slopes = []", gradients="kept_slopes.append([p.grad for p in model.parameters()])"),
    "hooks": piece(setup="for p in model.parameters():\n    if p.requires_grad:\n        p.register_hook(lambda slope: slope * 0.5)"),
    "hook_counts": piece(
        setup="fired = {}\nfor name, p in model.named_parameters():\n    if p.requires_grad:\n        p.register_hook(lambda slope, name=name: fired.update({name: fired.get(name, 0) + 1}))",
        gradients='print("fired", sum(fired.values()))',
    ),
    "post_hooks": piece(
        setup="""
sums = {}
for name, p in model.named_parameters():
    if p.requires_grad:
        p.register_post_accumulate_grad_hook(lambda p, name=name: sums.update({name: p.grad.sum().item()}))
""",
        gradients='print("sums", sum(sums.values()))',
    ),
    "post_hooks_step": piece(
        setup="""
def halve(p):
    p.grad.mul_(0.5)


for p in model.parameters():
    if p.requires_grad:
        p.register_post_accumulate_grad_hook(halve)
""",
    ),
    "module_hook": piece(
        setup='seen = {"n": 0}\n\n\ndef look(module, args, output):\n    seen["n"] += 1\n\n\nmodel.head.register_forward_hook(look)',
    ),
    "module_hook_replaces": piece(setup="model.head.register_forward_hook(lambda module, args, output: output * 0.5)"),
    "backward_hook": piece(
        setup="model.head.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5, *into[1:]))"
    ),
}  # fmt: skip

CLIP = {
    "none": piece(),
    "norm": piece(clip="torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)"),
    "norm_printed": piece(clip='print("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())'),
    "value": piece(clip="torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)"),
}

OPTIMIZERS = {
    "sgd": "torch.optim.SGD({}, lr=0.1)",
    "momentum": "torch.optim.SGD({}, lr=0.05, momentum=0.9, nesterov=True)",
    "decay": "torch.optim.SGD({}, lr=0.1, weight_decay=0.01)",
    "adam": "torch.optim.Adam({}, lr=0.01, eps=1e-3)",
    "adamw": "torch.optim.AdamW({}, lr=0.01, eps=1e-3, weight_decay=0.1)",
    "adagrad": "torch.optim.Adagrad({}, lr=0.05, eps=1e-3)",
    "rmsprop": "torch.optim.RMSprop({}, lr=0.01, eps=1e-3)",
    "groups": 'torch.optim.SGD([{{"params": [p], "lr": 0.1 / (i + 1)}} for i, p in enumerate([{}])])',
    "slow_weights": "SlowWeights(torch.optim.Adam({}, lr=0.01, eps=1e-3))",
    "adaptive": "Adaptive(torch.optim.SGD({}, lr=0.1, momentum=0.9, weight_decay=0.01))",
    "averaging": "Averaging(torch.optim.SGD({}, lr=0.1, momentum=0.9))",
    "noisy": "Noisy({}, lr=0.1)",
    "scheduled": "Scheduled({}, lr=0.1)",
}
"""Epsilons are large, so that rounding of gradients that are nothing does not become an update."""

OUTER_OPTIMIZERS = {
    "slow_weights": """
class SlowWeights(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, inner.defaults
        self.slow, self.steps = {}, 0

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.slow.setdefault(p, p.detach().clone())
        loss = self.inner.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            with torch.no_grad():
                for p, slow in self.slow.items():
                    p.copy_(slow.lerp_(p, 0.5))
        return loss
""",
    "adaptive": """
class Adaptive:
    def __init__(self, inner):
        self.inner = inner

    @property
    def param_groups(self):
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value):
        self.inner.param_groups = value

    @property
    def state(self):
        return self.inner.state

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def step(self):
        decays = [group["weight_decay"] for group in self.inner.param_groups]
        with torch.no_grad():
            for group in self.inner.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.add_(p, alpha=group["weight_decay"]).mul_(p.norm() / (1.0 + p.grad.norm()))
                group["weight_decay"] = 0.0
        self.inner.step()
        for group, decay in zip(self.inner.param_groups, decays):
            group["weight_decay"] = decay
""",
    "averaging": """
class Averaging(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.seen = inner, 0
        self.inner.param_groups = self.param_groups

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.seen += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["mean"] = p.detach().clone() if "mean" not in state else state["mean"] + (p - state["mean"]) / self.seen
        return loss
""",
    "noisy": """
class Noisy(torch.optim.SGD):
    draws = torch.Generator().manual_seed(3)
    steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        Noisy.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape, generator=self.draws).to(p), alpha=0.01 / Noisy.steps)
""",
    "scheduled": """
class Scheduled(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr, momentum=0.5)
        self.rates = torch.optim.lr_scheduler.CosineAnnealingLR(self, 9)

    def step(self, closure=None):
        super().step()
        self.rates.step()
        random.random()
""",
}  # fmt: skip
"""Optimizers of the script's own, most around one of torch's."""

SCHEDULERS = {
    "none": piece(),
    "step": piece(setup="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", end_epoch="scheduler.step()"),
    "cosine": piece(
        setup="scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)", stepped="scheduler.step()"
    ),
    "warmup": piece(
        setup="scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 3))",
        stepped='scheduler.step()\nprint("rate", scheduler.get_last_lr()[0])',
    ),
    "plateau": piece(
        setup="scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)", end_epoch="scheduler.step(loss.item())"
    ),
    "by_hand": piece(before='for group in optimizer.param_groups:\n    group["lr"] = 0.1 / (1 + step)'),
}

PARTS = {
    "none": piece(),
    "frozen_head": piece(setup="model.head.requires_grad_(False)"),
    "frozen_bias": piece(setup="model.head.bias.requires_grad_(False)"),
    "unfreezes": piece("changes", setup="model.head.requires_grad_(False)", end_epoch="model.head.requires_grad_(True)"),
    "freezes": piece("changes", end_epoch="model.head.requires_grad_(False)"),
    "new_head": piece(
        "changes", "replaces",
        end_epoch="""
if epoch == 0:
    model.head = nn.Linear(4, model.head.out_features).double()
    optimizer.add_param_group({"params": model.head.parameters()})
""",
    ),
    "grown_layer": piece(
        "changes", "replaces",
        end_epoch="""
if epoch == 0:
    grown = nn.Linear(model.head.out_features, model.head.out_features).double()
    model.head = nn.Sequential(model.head, grown)
    model.head.out_features = grown.out_features
    optimizer.add_param_group({"params": grown.parameters()})
""",
    ),
    "bias_dropped": piece("changes", end_epoch="if epoch == 0:\n    model.head.bias = None"),
    "added_group": piece(
        "changes", setup="late = nn.Linear(1, 1, bias=False).double()",
        terms="if step > 1:\n    loss = loss * late.weight.sum().exp()",
        end_epoch='if epoch == 0:\n    optimizer.add_param_group({"params": late.parameters()})',
    ),
    "weights_replaced": piece("changes", "replaces", end_epoch="model.head.weight = nn.Parameter(model.head.weight.detach() * 0.5)"),
    "averaged": piece(
        setup="average = torch.optim.swa_utils.AveragedModel(model)", stepped="average.update_parameters(model)"
    ),
    "ema_by_hand": piece(
        setup="average = {name: value.clone() for name, value in model.state_dict().items()}",
        stepped="for name, value in model.state_dict().items():\n    average[name] = 0.9 * average[name] + 0.1 * value",
    ),
    "saved_and_loaded": piece(
        end_epoch="saved = copy.deepcopy(model.state_dict())\nmodel.load_state_dict(saved)\noptimizer.load_state_dict(optimizer.state_dict())"
    ),
    "clamped": piece(stepped="with torch.no_grad():\n    for p in model.parameters():\n        p.clamp_(-0.6, 0.6)"),
}  # fmt: skip

EVALUATION = {
    "none": piece(),
    "epoch": piece(
        end_epoch='model.eval()\nwith torch.no_grad():\n    print("test", «held».mean().item())\nmodel.train()'
    ),
    "step": piece(
        end_step='model.eval()\nwith torch.no_grad():\n    print("test", «held».mean().item())\nmodel.train()'
    ),
    "inference": piece(
        end_step='model.eval()\nwith torch.inference_mode():\n    print("test", «held».mean().item())\nmodel.train()'
    ),
    "train_mode": piece(end_epoch='with torch.no_grad():\n    print("test", «held».sum().item())'),
    "with_graph": piece(end_step='print("test", «held».mean().item())'),
}

ACCUMULATION = ("none", "by_hand", "by_hand_short")
"""Whether the loop steps its optimizer at every second batch only; "short" leaves the last gradients where they are."""
