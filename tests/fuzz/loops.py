"""What a loop does in a step: calls of the model, arithmetic on losses, metrics, backward, gradients."""

from __future__ import annotations

from fuzz.pieces import Piece, piece

GAN = """
judging.zero_grad()
(F.softplus(judge(out.detach())) + F.softplus(-judge(goal))).mean().backward()
judging.step()
loss = F.softplus(-judge(out)).mean()
"""

CALLS = {
    "one": piece("single", call="out = «x»"),
    "sum_of_two": piece(call="out = «x»\nother = «x + 0.5»", terms="loss = loss + F.mse_loss(other, goal)"),
    "sum_of_three": piece(
        "owns", call="out = «x»", loss="loss = 0.0\nfor i in range(3):\n    loss += F.cross_entropy(«x + 0.1 * i», y)\nloss = loss / 3"
    ),
    "siamese": piece(
        "owns", call="out, other = «x», «x + 0.5»",
        loss="loss = F.mse_loss(out, other.detach()) + F.mse_loss(other, out.detach())",
    ),
    "simsiam": piece(
        "owns", call="out, other = «x», «x + 0.5»",
        loss="loss = -(F.cosine_similarity(out, other.detach()).mean() + F.cosine_similarity(other, out.detach()).mean()) / 2",
    ),
    "one_loss_of_two": piece("owns", call="out, other = «x», «x + 0.5»", loss="loss = F.mse_loss(out, other)"),
    "one_loss_and_more": piece(
        "owns", call="out, other = «x», «x + 0.5»", loss="loss = F.mse_loss(out, other) + F.cross_entropy(out, y)"
    ),
    "rdrop": piece(
        "owns", call="out, other = «x», «x + 0.1»",
        loss="""
loss = (F.cross_entropy(out, y) + F.cross_entropy(other, y)) / 2
loss = loss + 0.5 * F.kl_div(F.log_softmax(out, 1), other.softmax(1), reduction="batchmean")
loss = loss + 0.5 * F.kl_div(F.log_softmax(other, 1), out.softmax(1), reduction="batchmean")
""",
    ),
    "trades": piece(
        "owns", call="out, other = «x», «x + 0.1 * torch.sign(x)»",
        loss='loss = F.cross_entropy(out, y) + 2.0 * F.kl_div(F.log_softmax(other, 1), out.softmax(1), reduction="batchmean")',
    ),
    "adversarial": piece(
        call="""
given = x.clone().requires_grad_()
slope, = torch.autograd.grad(F.cross_entropy(«given», y), given)
out = «x + 0.1 * slope.sign()»
""",
    ),
    "triplet": piece(
        "owns", call="out, positive, negative = «x», «x + 0.1», «x.flip(0)»",
        loss="loss = F.triplet_margin_loss(out, positive, negative)",
    ),
    "triplet_norm": piece(
        "owns", call="out, positive, negative = «x», «x + 0.1», «x.flip(0)»",
        loss="loss = F.relu((out - positive).norm(dim=1) - (out - negative).norm(dim=1) + 1.0).mean()",
    ),
    "vicreg": piece(
        "owns", call="out, other = «x», «x + 0.5»",
        loss="""
loss = F.mse_loss(out, other)
for each in (out, other):
    each = each - each.mean(0)
    loss = loss + F.relu(1 - torch.sqrt(each.var(0, correction=0) + 1e-4)).mean() + (each.T @ each / len(each)).pow(2).sum() * 0.01
""",
    ),
    "contrastive": piece(
        "owns", call="out, other = «x», «x + 0.5»",
        loss="scores = F.normalize(out, dim=1) @ F.normalize(other, dim=1).T\nloss = F.cross_entropy(scores * 3, torch.arange(len(x)))",
    ),
    "catenated": piece(call="out, other = «torch.cat([x, x + 0.5])».chunk(2)", terms="loss = loss + F.mse_loss(other, goal)"),
    "averaged": piece(call="out = («x» + «x + 0.5») / 2"),
    "stacked": piece(call="out = torch.stack([«x», «x + 0.5»]).mean(0)"),
    "self_training": piece(
        "owns", call="with torch.no_grad():\n    guess = «x».softmax(1)\nout = «x + 0.1»", loss="loss = F.cross_entropy(out, guess)"
    ),
    "teacher": piece(
        setup="teacher = copy.deepcopy(model).requires_grad_(False)",
        call="with torch.no_grad():\n    taught = «x»\nout = «x»".replace("taught = «x»", "taught = teacher«x»"),
        terms="loss = loss + F.mse_loss(out, taught)",
        end_step="""
with torch.no_grad():
    for slow, online in zip(teacher.parameters(), model.parameters()):
        slow.mul_(0.9).add_(online, alpha=0.1)
""",
    ),
    "evaluated_first": piece(
        call="model.eval()\nwith torch.no_grad():\n    before = «x»\nmodel.train()\nout = «x»",
        terms="loss = loss + 0.1 * F.mse_loss(out, before)",
    ),
    "mixup": piece(
        "owns", call="lam = float(np.random.beta(2.0, 2.0))\norder = torch.randperm(len(x))\nout = «lam * x + (1 - lam) * x[order]»",
        loss="loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[order])",
    ),
    "checkpointed": piece(
        "single", imports="from torch.utils.checkpoint import checkpoint",
        call="out = checkpoint(lambda x: «x», x, use_reentrant=False)",
    ),
    "checkpointed_data": piece(
        "single", imports="from torch.utils.checkpoint import checkpoint",
        call="out = checkpoint(lambda x: «x», x, use_reentrant=True) + 0.0 * «x»",
    ),
    "checkpointed_reentrant": piece(
        "single", imports="from torch.utils.checkpoint import checkpoint",
        call="given = x.clone().requires_grad_()\nout = checkpoint(lambda x: «x», given, use_reentrant=True)",
    ),
    "input_gradient": piece(
        call="x = x.clone().requires_grad_()\nout = «x»", stepped='print("into", x.grad.norm().item())'
    ),
    "reconstructs": piece(
        "owns", setup="decoder = nn.Linear(CLASSES, 6).double()", params="*decoder.parameters()",
        call="out = «x»", loss="loss = F.mse_loss(decoder(out), x)",
    ),
    "features": piece(
        "owns", setup="frozen = copy.deepcopy(model).requires_grad_(False).eval()",
        call="with torch.no_grad():\n    goal_out = frozen«x»\nout = «x»",
        loss='loss = F.kl_div(F.log_softmax(out / 2, 1), (goal_out / 2).softmax(1), reduction="batchmean") * 4 + F.cross_entropy(out, y)',
    ),
    "in_two_by_hand": piece(
        "owns", call="parts = x.split(4)", loss="""
loss = 0.0
for part, labels in zip(parts, y.split(4)):
    out = «part»
    loss = loss + F.cross_entropy(out, labels) * len(part) / len(x)
""",
    ),
    "in_fives_by_hand": piece(
        "owns", call="loss = 0.0", loss="""
for start in range(0, len(x), 5):
    out = «x[start : start + 5]»
    loss = loss + F.cross_entropy(out, y[start : start + 5], reduction="sum") / len(x)
""",
    ),
    "each_backward": piece(
        "owns", call="out = «x»", loss="""
loss = F.cross_entropy(out, y) / 2
loss.backward()
out = «x + 0.1»
loss = F.cross_entropy(out, y) / 2
""",
    ),
    "saved_hooks": piece(
        "single", call="with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):\n    out = «x»"
    ),
    "saved_on_cpu": piece("single", call="with torch.autograd.graph.save_on_cpu():\n    out = «x»"),
    "gan": piece(
        "owns", setup="judge = nn.Linear(CLASSES, 1).double()\njudging = torch.optim.SGD(judge.parameters(), lr=0.05)",
        call="out = «x»",
        loss=GAN,
    ),
    "gan_of_two": piece(
        "owns",
        setup="""
judge = nn.Linear(CLASSES, 1).double()
judging = torch.optim.SGD(judge.parameters(), lr=0.05)
#: import memfit
#: memfit.wrap(judge, judging, micro_batch=3)
""",
        call="out = «x»",
        loss=GAN,
    ),
    "two_models": piece(
        setup="second = copy.deepcopy(model)", params="*second.parameters()", call="out = «x»\nother = second«x»",
        terms="loss = loss + F.mse_loss(out, other)",
    ),
    "cotraining": piece(
        "owns", setup="second = copy.deepcopy(model)", params="*second.parameters()", call="out, other = «x», second«x»",
        loss="loss = F.cross_entropy(out, y) + F.cross_entropy(other, y) + F.mse_loss(out, other.detach())",
    ),
    "policy": piece(
        "owns", call="out = «x»\nunused = torch.rand(1)",
        loss="""
policy = Categorical(logits=out)
action = policy.sample()
reward = (action == y).double()
loss = -(policy.log_prob(action) * (reward - reward.mean())).mean()
""",
    ),
    "baseline": piece(
        "owns", call="out = «x»\nwith torch.no_grad():\n    before = «x»",
        loss="loss = (F.cross_entropy(out, y, reduction='none') * (before.argmax(1) == y).double().add(0.5)).mean()",
    ),
    "autocast": piece("single", call='with torch.autocast("cpu", torch.bfloat16):\n    out = «x»'),
    "list_of_calls": piece("owns", call="outs = [«x + 0.1 * i» for i in range(3)]\nout = outs[0]", loss="loss = sum(F.cross_entropy(each, y) for each in outs)"),
    "residual_calls": piece(call="first = «x»\nout = first + 0.5 * «x + 0.1»"),
    "noisy": piece("single", call="out = «x + 0.1 * torch.randn(x.shape).double()»"),
}  # fmt: skip
"""Calls of the model in a step; those tagged "owns" bring their own loss."""

TERMS = {
    "none": piece(),
    "l2_out": piece(terms="loss = loss + 0.1 * out.pow(2).mean()"),
    "l1_parameters": piece(terms="loss = loss + 1e-3 * sum((p.pow(2) + 1e-4).sqrt().sum() for p in model.parameters())"),
    "aux": piece("aux", terms="loss = loss + 0.1 * aux.pow(2).mean()"),
    "aux_ce": piece("aux", terms="loss = loss + F.cross_entropy(aux.reshape(-1, 2), (y != 0).long().reshape(-1))"),
    "entry": piece("entries", terms='loss = loss + 0.1 * given["h"].pow(2).mean()'),
    "entropy": piece(terms="loss = loss - 0.01 * -(out.softmax(-1) * F.log_softmax(out, -1)).sum(-1).mean()"),
}

ARITHMETIC = {
    "none": piece(),
    "divided": piece(arithmetic="loss = loss / 4"),
    "divided_in_place": piece(arithmetic="loss /= 4"),
    "times_in_place": piece(arithmetic="loss *= 0.5"),
    "added_in_place": piece(arithmetic="loss += 1e-2 * sum(p.pow(2).sum() for p in model.parameters())"),
    "constant_added": piece(arithmetic="loss += 1.0"),
    "div_": piece(arithmetic="loss.div_(4)"),
    "mul_": piece(arithmetic="loss.mul_(0.25)"),
    "neg_": piece(arithmetic="loss.neg_()"),
    "add_": piece(arithmetic="loss.add_(0.1 * out.mean())"),
    "sub_": piece(arithmetic="loss.sub_(0.1)"),
    "sum_then_div_": piece(arithmetic="loss = loss + F.mse_loss(out, goal)\nloss.div_(4)"),
    "squared": piece(arithmetic="loss = loss ** 2"),
    "pow_": piece(arithmetic="loss.pow_(2)"),
    "through_list": piece(arithmetic="parts = [loss]\nparts[0] = parts[0] * 2\nloss = sum(parts) / len(parts)"),
    "minus_detached": piece(arithmetic="loss = loss - loss.detach() + 1.0"),
    "nan_guard": piece(arithmetic="loss = torch.nan_to_num(loss)"),
    "maximum": piece(arithmetic="loss = torch.maximum(loss, torch.tensor(0.1))"),
    "sqrt": piece(arithmetic="loss = (loss + 1.0).sqrt()"),
    "log": piece(arithmetic="loss = torch.log1p(loss)"),
    "divided_by_itself": piece(arithmetic="loss = loss / (loss.detach() + 0.1)"),
    "functional_div": piece(arithmetic="loss = torch.div(loss, 3.0)"),
    "iadd_out": piece(arithmetic="loss += 0.1 * out.pow(2).mean()"),
    "isub_item": piece(arithmetic="loss -= 0.5 * loss.item()"),
    "stack_mean": piece(arithmetic="loss = torch.stack([loss, loss * 2]).mean()"),
    "weighted_in_place": piece(arithmetic="w = 0.5 + step\nloss *= w"),
    "by_tensor": piece(arithmetic="loss = loss * torch.tensor(0.5)"),
    "clamped": piece(arithmetic="loss = loss.clamp(max=0.9)"),
    "negated": piece(arithmetic="loss = -loss"),
    "scaled_by_count": piece(arithmetic="loss = loss * len(x) / 8"),
    "unsqueezed": piece(arithmetic="loss = loss.unsqueeze(0).sum()"),
    "repeated_use": piece(arithmetic="loss = loss + 0.5 * loss.detach() * loss"),
    "cloned": piece(arithmetic="loss = loss.clone()"),
    "to_double": piece(arithmetic="loss = loss.double()"),
    "own_function": piece(
        setup="""
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2
""",
        arithmetic="loss = Doubled.apply(loss)",
    ),
    "scripted_scale": piece(
        setup="def scaled(loss: torch.Tensor) -> torch.Tensor:\n    return loss * 1.5\n\n\nscripted_scale = torch.jit.script(scaled)",
        arithmetic="loss = scripted_scale(loss)",
    ),
    "where": piece(arithmetic="loss = torch.where(loss > 1.1, loss, loss * 0.5)"),
    "all_parameters": piece(arithmetic="loss = loss + 0.0 * sum(p.sum() for p in model.parameters())"),
    "viewed": piece(arithmetic="loss = loss.view(1).mean()"),
    "powered_rate": piece(arithmetic='loss = loss * (1.0 + optimizer.param_groups[0]["lr"])'),
    "unbound": piece(arithmetic="loss = torch.stack([loss, 0.5 * loss]).unbind()[1]"),
    "parts_logged": piece(arithmetic="first, loss = loss, loss + 0.1 * out.pow(2).mean()", stepped='print("first", first.item())'),
    "swapped": piece(arithmetic="loss, half = loss * 0.5, loss * 0.25\nloss = loss + half"),
}

METRICS = {
    "none": piece(),
    "accuracy": piece(metrics='print("accuracy", (out.argmax(-1) == y).double().mean().item())'),
    "correct": piece(setup="correct = torch.zeros(())", metrics="correct += (out.argmax(-1) == y).sum()"),
    "correct_number": piece(setup="correct = 0", metrics="correct += (out.argmax(-1) == y).sum().item()"),
    "total_add_": piece(setup="total = torch.zeros(()).double()", metrics="total.add_(out.detach().mean())"),
    "total_plus": piece(setup="total = torch.zeros(()).double()", metrics="total = total + out.detach().mean()"),
    "norm": piece(metrics='print("norm", out.detach().norm().item())'),
    "topk": piece(metrics='print("top", (out.topk(2, -1).indices == y.unsqueeze(-1)).any(-1).sum().item())'),
    "no_grad": piece(metrics='with torch.no_grad():\n    print("mean", out.softmax(-1).amax(-1).mean().item())'),
    "numpy": piece(metrics='print("sum", float(out.detach().numpy().sum()))'),
    "shape": piece(metrics='print("shape", out.shape[0], out.dim(), out.size(-1), out.requires_grad, out.dtype)'),
    "correct_add_": piece(setup="correct = torch.zeros((), dtype=torch.long)", metrics="correct.add_((out.argmax(-1) == y).sum())"),
    "plus_equals": piece(setup="total = 0.0", metrics="total += out.detach().pow(2).mean().item()"),
    "per_class": piece(setup="hits = torch.zeros(CLASSES).double()", metrics="hits += F.one_hot(out.argmax(-1), CLASSES).reshape(-1, CLASSES).sum(0)"),
    "slice_kept": piece(setup="firsts = []", metrics="firsts.append(out[0].detach().clone())"),
    "other_loss": piece(metrics='with torch.no_grad():\n    print("other", F.cross_entropy(out, y).item())'),
    "set_item": piece(setup="table = torch.zeros(20).double()", metrics="table[step] = out.detach().mean()"),
    "copy_": piece(setup="held_out = torch.zeros(()).double()", metrics="held_out.copy_(out.detach().max())"),
    "list_of_preds": piece(setup="preds = []", metrics="preds.extend(out.argmax(-1).flatten().tolist())"),
    "finite": piece(metrics="assert torch.isfinite(out).all()"),
    "max_metric": piece(setup="most = torch.tensor(-1e9).double()", metrics="most = torch.maximum(most, out.detach().max())"),
}
"""Put before the loss or after the step."""

WHERE = ("before", "after", "stepped")

LOGGING = {
    "item": piece(stepped='print("loss", loss.item())'),
    "none": piece(),
    "before_backward": piece(between='print("loss", loss.item())'),
    "total": piece(setup="running = 0.0", stepped='running += loss.item() * len(x)\nprint("running", running)'),
    "detached_sum": piece(setup="running = 0.0", stepped='running += loss.detach()', end='print("running", float(running))'),
    "losses_kept": piece(setup="losses_kept = []", stepped="losses_kept.append(loss)",
                         end='print("mean", float(torch.stack(losses_kept).mean()))'),
    "tensor_total": piece(setup="running = torch.zeros(()).double()", stepped="running += loss.detach()",
                          end='print("running", running.item())'),
    "finite": piece(between='if not torch.isfinite(loss):\n    raise SystemExit("not finite")'),
    "formatted": piece(stepped='print("loss", float(f"{loss:.6f}"), loss.dim())'),
}  # fmt: skip

BETWEEN = {
    "none": piece(),
    "parameter_data": piece("writes", between="next(model.parameters()).data.mul_(1.01)"),
    "all_data": piece("writes", between="for p in model.parameters():\n    p.data = p.data * 0.99"),
    "input_data": piece("floats", "writes", between="x.data.mul_(0.9)"),
    "parameter_data_early": piece("writes", metrics="next(model.parameters()).data.add_(0.01)"),
    "input_data_early": piece("floats", "writes", metrics="x.data.add_(0.1)"),
    "output_kept": piece(setup="last = None", between="if last is not None:\n    print('last', last.mean().item())\nlast = out.detach()"),
    "outputs_kept": piece(setup="outputs = []", between="outputs.append(out)", end='print("outputs", torch.cat(outputs).mean().item())'),
    "output_with_graph": piece(setup="last = None", between="last = out"),
    "labels_written": piece("rows_only", "writes", between="y.data.fill_(0)"),
    "batch_deleted": piece(between="del x, batch"),
    "buffers_data": piece("writes", between="for b in model.buffers():\n    b.data = b.data * 1.0"),
    "retain_grad": piece(metrics="out.retain_grad()", gradients='print("slope", out.grad.norm().item())'),
    "output_hook": piece(metrics="out.register_hook(lambda gradient: gradient * 0.5)"),
    "hook_list": piece(setup="slopes = []", metrics="out.register_hook(lambda gradient: slopes.append(gradient.norm().item()))"),
    "gain_reset": piece(
        setup="model.gain = 1.0\nmodel.head.register_forward_hook(lambda module, args, out: out * model.gain)",
        before="model.gain = 0.5 + 0.1 * step", metrics="model.gain = 1.0",
    ),
    "maps_replaced": piece(
        setup="model.maps = []\nmodel.body.register_forward_hook(lambda module, args, h: model.maps.append(h.detach().mean().item()))",
        before="if step == 2:\n    model.maps = []", end='print("maps", len(model.maps), sum(model.maps))',
    ),
    "entries_replaced": piece(
        setup="seen = {}\nmodel.body.register_forward_hook(lambda module, args, h: seen.setdefault('h', []).append(h.detach().mean().item()))",
        before="if step == 2:\n    seen = {}", end='print("seen", len(seen["h"]), sum(seen["h"]))',
    ),
    "cast_to_and_fro": piece(before="if step == 2:\n    model.float().double()"),
    "share_kept": piece(
        setup="model.share = 0.0\nmodel.body.register_forward_hook(lambda module, args, h: setattr(model, 'share', (h.detach() > 0.9).double().mean().item()))",
        stepped='print("share", model.share)',
    ),
    "share_used": piece(
        setup="model.share = 0.0\nmodel.body.register_forward_hook(lambda module, args, h: setattr(model, 'share', (h.detach() > 0.9).double().mean()))",
        metrics="out.detach().sum().item()", between="loss = loss * (1 + model.share)",
    ),
    "stage_set": piece(
        setup="model.stage = 0\nmodel.body.register_forward_hook(lambda module, args, h: h * 2.0 if model.stage == 1 else h.sin())",
        before="model.stage = step % 2",
    ),
    "stage_mixes": piece(
        "mixes",
        setup="STAGE = 0\nmodel.body.register_forward_hook(lambda module, args, h: h - h.mean(0) if STAGE == 1 else h)",
        before="STAGE = int(step > 1)",
    ),
    "function_set": piece(
        setup="model.act = torch.sin\nmodel.body.register_forward_hook(lambda module, args, h: model.act(h))",
        before="model.act = (torch.sin, torch.tanh)[step % 2]",
    ),
    "function_mixes": piece(
        "mixes",
        setup="""
def as_is(h):
    return h
def centred(h):
    return h - h.mean(0)
model.acts = [as_is]
model.body.register_forward_hook(lambda module, args, h: model.acts[0](h))
""",
        before="model.acts[0] = centred if step > 1 else as_is",
    ),
    "flag_mixes": piece(
        "mixes",
        setup="""
model.register_buffer("flag", torch.zeros((), dtype=torch.long))
model.body.register_forward_hook(lambda module, args, h: h - h.mean(0) if model.flag.item() else h)
""",
        before="model.flag.fill_(int(step > 1))",
    ),
    "hook_late": piece("mixes", before="if step == 2:\n    model.body.register_forward_hook(lambda module, args, h: h - h.mean(0))"),
    "backward_hook_late": piece(
        "mixes",
        before="""
if step == 2:
    model.head.register_full_backward_hook(lambda module, into, out: (into[0] / (into[0].norm() + 1e-6),))
""",
    ),
    "frozen_mixes": piece(
        "mixes",
        setup="model.body.register_forward_hook(lambda module, args, h: h if model.head.bias.requires_grad else h - h.mean(0))",
        before="model.head.bias.requires_grad_(step < 2)",
    ),
    "class_late": piece(
        "mixes",
        setup="""
class Centring(nn.Module):
    def forward(self, h):
        return h - h.mean(0)


model.centre = nn.Identity()
model.body.register_forward_hook(lambda module, args, h: model.centre(h))
""",
        before="if step == 2:\n    model.centre.__class__ = Centring",
    ),
    "rule_in_turn": piece(
        setup="""
model.seen, model.rule = torch.zeros(()).double(), "mean"
def track(module, args, h):
    model.seen = getattr(h.detach().double(), model.rule)()
model.body.register_forward_hook(track)
""",
        before='model.rule = ("mean", "sum")[step % 2]', between='print("seen", model.seen.item())',
    ),
    "global_set": piece(
        setup="GAIN = 1.0\nmodel.head.register_forward_hook(lambda module, args, out: out * GAIN)", metrics="GAIN += 0.25"
    ),
    "class_set": piece(
        setup="Net.gain = 1.0\nmodel.head.register_forward_hook(lambda module, args, out: out * model.gain)",
        metrics="Net.gain = 0.75 + 0.1 * step",
    ),
    "table_set": piece(
        setup='model.table = {"gain": [1.0]}\nmodel.head.register_forward_hook(lambda module, args, out: out * model.table["gain"][0])',
        metrics='model.table["gain"][0] += 0.25',
    ),
    "buffer_set": piece(
        setup="""
model.register_buffer("gain", torch.ones(()).double())
model.head.register_forward_hook(lambda module, args, out: out * model.gain)
""",
        metrics="model.gain = model.gain * 1.1",
    ),
    "entry_set": piece("entries", metrics='given["x"] = given["x"] * 3.0'),
    "entry_read": piece("entries", metrics='print("entry", given["h"].mean().item(), given["x"].sum().item(), sorted(given))'),
    "entry_dropped": piece("entries", metrics='given.clear()'),
    "hook_around": piece(
        before="handle = model.head.register_forward_hook(lambda module, args, out: out * 0.5)", metrics="handle.remove()"
    ),
    "state_read": piece(
        setup="""
def total(value):
    if isinstance(value, (list, dict)):
        return sum(total(each) for each in (value.values() if isinstance(value, dict) else value))
    return float(value.sum() if hasattr(value, "sum") else value or 0)

""",
        metrics="""
for module in model.modules():
    for name in ("calls", "seen", "centre", "last", "history", "mean", "stats", "hidden", "mask"):
        print(name, total(getattr(module, name, None)))
""",
    ),
    "activation_read": piece(
        setup="""
activations = {}
model.head.register_forward_hook(lambda module, args, out: activations.update(out=out.detach()))
""",
        metrics='print("activation", activations["out"].sum().item())',
    ),
    "loss_hook": piece(between="loss.register_hook(lambda gradient: gradient * 2)"),
    "draw": piece(between='print("draw", random.random(), float(np.random.rand()), torch.rand(()).item())'),
}  # fmt: skip


def names(table: dict[str, Piece]) -> tuple[str, ...]:
    """The options of a table."""
    return tuple(table)
