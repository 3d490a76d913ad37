"""Losses of one call: out of `torch.nn.functional`, modules, and by hand; of the outputs and of state beside the model."""

from __future__ import annotations

from fuzz.pieces import Piece, piece


def _loss(text: str, *tags: str, setup: str = "", imports: str = "", holds: str = "", before: str = "") -> Piece:
    return piece(*tags, holds=holds, sums=True, loss=text, setup=setup, imports=imports, before=before)


KNOWN = {
    "ce": _loss("loss = F.cross_entropy(out, y)", "tokens"),
    "ce_transposed": _loss("loss = F.cross_entropy(out.transpose(1, 2), y)", "tokens", "unflat"),
    "ce_sum": _loss('loss = F.cross_entropy(out, y, reduction="sum")', "tokens"),
    "ce_sum_over_size": _loss('loss = F.cross_entropy(out, y, reduction="sum") / len(y)', "tokens"),
    "ce_none_mean": _loss('loss = F.cross_entropy(out, y, reduction="none").mean()', "tokens"),
    "ce_none_masked": _loss(
        'entries = F.cross_entropy(out, y, reduction="none")\nmask = (y != 1).double()\nloss = (entries * mask).sum() / mask.sum().clamp(min=1)',
        "tokens",
    ),
    "ce_none_weighted": _loss(
        'weight = 1.0 + y.double().abs()\nloss = (F.cross_entropy(out, y, reduction="none") * weight).sum() / weight.sum()',
    ),
    "ce_none_dot": _loss('loss = F.cross_entropy(out, y, reduction="none") @ (1.0 + y.double()) / len(y)'),
    "ce_smooth": _loss("loss = F.cross_entropy(out, y, label_smoothing=0.1)", "tokens"),
    "ce_class_weights": _loss(
        "loss = F.cross_entropy(out, y, weight=class_weights)",
        setup="class_weights = torch.linspace(0.5, 2.0, CLASSES).double()", holds="class_weights",
    ),
    "ce_ignore": _loss("loss = F.cross_entropy(out, y.masked_fill(y == 1, -100))"),
    "ce_ignore_own": _loss("loss = F.cross_entropy(out, y, ignore_index=2)"),
    "ce_soft": _loss("loss = F.cross_entropy(out, goal)"),
    "ce_module": _loss("loss = criterion(out, y)", "tokens", setup="criterion = nn.CrossEntropyLoss()", holds="criterion"),
    "ce_module_sum": _loss(
        "loss = criterion(out, y)", "tokens", setup='criterion = nn.CrossEntropyLoss(reduction="sum")', holds="criterion"
    ),
    "nll": _loss("loss = F.nll_loss(F.log_softmax(out, -1), y)", "tokens"),
    "mse": _loss("loss = F.mse_loss(out, goal)"),
    "mse_sum": _loss('loss = F.mse_loss(out, goal, reduction="sum")'),
    "mse_module": _loss("loss = criterion(out, goal)", setup="criterion = nn.MSELoss()", holds="criterion"),
    "l1": _loss("loss = F.l1_loss(out, goal)"),
    "smooth_l1": _loss("loss = F.smooth_l1_loss(out, goal, beta=0.5)"),
    "huber": _loss("loss = F.huber_loss(out, goal)"),
    "bce": _loss("loss = F.binary_cross_entropy(torch.sigmoid(out), goal)"),
    "bce_logits": _loss("loss = F.binary_cross_entropy_with_logits(out, goal)"),
    "bce_pos_weight": _loss(
        "loss = F.binary_cross_entropy_with_logits(out, goal, pos_weight=pos_weight)",
        setup="pos_weight = torch.full((CLASSES,), 2.0).double()", holds="pos_weight",
    ),
    "kl": _loss('loss = F.kl_div(F.log_softmax(out, 1), (goal + 0.1) / (goal + 0.1).sum(1, keepdim=True), reduction="batchmean")'),
    "gaussian": _loss("loss = F.gaussian_nll_loss(out, goal, torch.ones_like(out))"),
    "poisson": _loss("loss = F.poisson_nll_loss(out, goal)"),
    "multi_margin": _loss("loss = F.multi_margin_loss(out, y)"),
    "soft_margin": _loss("loss = F.soft_margin_loss(out, goal * 2 - 1)"),
    "multilabel": _loss("loss = F.multilabel_soft_margin_loss(out, goal)"),
    "cosine_embedding": _loss("loss = F.cosine_embedding_loss(out, goal, torch.ones(len(out)).double())"),
    "hinge": _loss("loss = F.hinge_embedding_loss(out, goal * 2 - 1)"),
    "margin_ranking": _loss("loss = F.margin_ranking_loss(out[:, 0], out[:, 1], torch.where(y > 0, 1.0, -1.0), margin=0.1)"),
}  # fmt: skip

BY_HAND = {
    "pow": _loss("loss = (out - goal).pow(2).mean()"),
    "pow_operator": _loss("loss = ((out - goal) ** 2).sum(1).mean()"),
    "abs": _loss("loss = (out - goal).abs().mean()"),
    "exp": _loss("loss = torch.exp(-out * (2 * goal - 1)).mean()"),
    "logsumexp": _loss("loss = (out.logsumexp(1) - out.gather(1, y[:, None]).squeeze(1)).mean()"),
    "log_softmax_index": _loss("loss = -F.log_softmax(out, 1)[torch.arange(len(y)), y].mean()"),
    "focal": _loss('entries = F.cross_entropy(out, y, reduction="none")\nloss = ((1 - torch.exp(-entries)) ** 2 * entries).mean()'),
    "rows_norm": _loss("loss = (out - goal).norm(dim=1).mean()"),
    "norm": _loss("loss = (out - goal).norm()"),
    "rmse": _loss("loss = F.mse_loss(out, goal).sqrt()"),
    "log_of_mean": _loss("loss = torch.log(F.mse_loss(out, goal) + 1.0)"),
    "cosine": _loss("loss = 1 - F.cosine_similarity(out, goal).mean()"),
    "normalised": _loss("loss = (2 - 2 * (F.normalize(out, dim=1) * goal).sum(1)).mean()"),
    "masked_index": _loss("mask = y != 1\nloss = F.cross_entropy(out[mask], y[mask]) if mask.any() else out.sum() * 0"),
    "first_half": _loss("loss = F.cross_entropy(out[: max(1, len(out) // 2)], y[: max(1, len(y) // 2)])", "positions"),
    "pairs": _loss("loss = F.cross_entropy(out @ out.T / 2.0, torch.arange(len(out)))", "mixes"),
    "variance": _loss("loss = F.relu(1 - torch.sqrt(out.var(0, correction=0) + 1e-4)).mean() + F.mse_loss(out, goal)", "mixes"),
    "hardest": _loss('loss = F.cross_entropy(out, y, reduction="none").topk(2).values.mean()', "mixes"),
    "top4": _loss('loss = F.cross_entropy(out, y, reduction="none").topk(4).values.mean()', "mixes", "eight"),
    "quantile": _loss('loss = F.cross_entropy(out, y, reduction="none").median()', "mixes"),
    "rank": _loss("scores = out[:, 0]\nloss = F.softplus(scores[None, :] - scores[:, None]).mean()", "mixes"),
    "centred_out": _loss("centred = out - out.mean(0)\nloss = F.mse_loss(centred, goal)", "mixes"),
    "std_scaled": _loss("loss = F.mse_loss(out, goal) / (out.detach().std() + 0.1)", "mixes"),
    "correlation": _loss("a, b = out - out.mean(0), goal - goal.mean(0)\nloss = 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-3)", "mixes"),
    "dice": _loss("p = out.softmax(1)\nloss = 1 - (2 * (p * goal).sum() + 1) / (p.sum() + goal.sum() + 1)", "mixes"),
    "trimmed": _loss('loss = F.cross_entropy(out, y, reduction="none").sort().values[:-1].mean()', "mixes"),
    "maximum": _loss('loss = F.cross_entropy(out, y, reduction="none").max()', "mixes"),
    "flooding": _loss("loss = (F.cross_entropy(out, y) - 0.9).abs() + 0.9", "mixes"),
    "balance": _loss("loss = F.cross_entropy(out, y) + 0.1 * (out.softmax(1).mean(0) - 1 / CLASSES).pow(2).sum()", "mixes"),
    "two_terms": _loss("loss = F.cross_entropy(out, y) + 0.1 * out.pow(2).mean()"),
    "two_denominators": _loss("loss = F.cross_entropy(out, y.masked_fill(y == 1, -100)) + 0.3 * F.mse_loss(out, goal)"),
    "mask_and_mean": _loss(
        'mask = (y == 0).double()\nloss = (F.mse_loss(out, goal, reduction="none").mean(1) * mask).sum() / mask.sum().clamp(min=1) + out.abs().mean()'
    ),
    "weighted_terms": _loss("loss = 0.7 * F.cross_entropy(out, y) + 0.3 * F.mse_loss(out.softmax(1), goal) - 0.01 * out.mean()"),
    "list_summed": _loss("losses = [F.cross_entropy(out, y), out.pow(2).mean()]\nloss = sum(losses)"),
    "dict_summed": _loss('losses = {"ce": F.cross_entropy(out, y), "l2": out.pow(2).mean()}\nloss = sum(losses.values())'),
    "stacked": _loss("loss = torch.stack([F.cross_entropy(out, y), F.mse_loss(out, goal)]).sum()"),
    "per_sample_loop": _loss("loss = sum(F.mse_loss(a, b) for a, b in zip(out, goal)) / len(out)"),
    "temperature": _loss("loss = F.cross_entropy(out / (1.0 + 0.1 * step), y)"),
    "weight_grows": _loss("loss = F.cross_entropy(out, y) + 0.05 * (step + 1) * out.pow(2).mean()"),
    "detached_weight": _loss("weight = out.detach().softmax(1).gather(1, y[:, None]).squeeze(1)\nloss = (F.cross_entropy(out, y, reduction='none') * (1 - weight)).mean()"),
    "detached_scale": _loss("ce, l2 = F.cross_entropy(out, y), out.pow(2).mean()\nloss = ce + l2 * (ce.detach() / (l2.detach() + 1e-3))", "mixes"),
    "item_scale": _loss("ce, l2 = F.cross_entropy(out, y), out.pow(2).mean()\nloss = ce + 0.1 * l2 * ce.item()", "mixes"),
    "if_item": _loss("loss = F.cross_entropy(out, y)\nif loss.item() > 1.1:\n    loss = loss * 0.5", "decides"),
    "if_batch": _loss("loss = F.cross_entropy(out, y)\nif goal[:, 0].mean() > 0.3:\n    loss = loss + out.pow(2).mean()", "decides"),
    "if_max": _loss("loss = F.cross_entropy(out, y)\nif out.abs().max() > 0.7:\n    loss = loss * 0.5", "decides"),
    "where_any": _loss("loss = F.cross_entropy(out, y)\nloss = torch.where(loss > 1.1, loss * 0.5, loss)", "mixes"),
    "if_correct": _loss("loss = F.cross_entropy(out, y)\nif (out.argmax(1) == y).any():\n    loss = loss * 0.9", "decides"),
    "if_any": _loss("loss = F.cross_entropy(out, y)\nif (y == 2).any():\n    loss = loss * 0.9", "decides"),
    "if_all": _loss("loss = F.cross_entropy(out, y)\nif (out.argmax(1) == y).all():\n    loss = loss + out.abs().mean()", "decides"),
    "if_counted": _loss("loss = F.cross_entropy(out, y)\nif (y == 2).sum().item():\n    loss = loss + 0.1 * out.pow(2).mean()", "decides"),
    "if_int": _loss("hits = int((out.argmax(1) == y).sum())\nloss = F.cross_entropy(out, y)\nif hits > 2:\n    loss = loss * 0.5", "decides"),
    "if_found": _loss("found = (y == 2).nonzero()\nloss = F.cross_entropy(out, y)\nif len(found):\n    loss = 0.8 * loss", "decides"),
    "if_listed": _loss("loss = F.cross_entropy(out, y)\nif 2 in y.tolist():\n    loss = loss + out.exp().mean()", "decides"),
    "if_array": _loss("loss = F.cross_entropy(out, y)\nif goal.numpy()[:, 2].max() > 0:\n    loss = loss * 0.7", "decides"),
    "if_unequal": _loss("loss = F.cross_entropy(out, y)\nif not torch.equal(out.argmax(1), y):\n    loss = loss * 1.1", "decides"),
    "if_kinds": _loss("loss = F.cross_entropy(out, y)\nif len(y.unique()) > 2:\n    loss = loss * 0.9", "decides"),
    "if_else": _loss("loss = F.cross_entropy(out, y) if (y == 0).any() else F.mse_loss(out, goal)", "decides"),
    "scaled_if": _loss("loss = F.cross_entropy(out, y) * (0.5 if bool((y == 2).any()) else 1.0)", "decides"),
    "guarded": _loss("rare = y == 2\nloss = F.cross_entropy(out, y)\nif rare.any():\n    loss = loss + 0.1 * (out[rare] ** 2).sum() / len(y)"),
    "guarded_rows": _loss("entries = F.cross_entropy(out, y, reduction='none')\nrare = y == 2\nif rare.any():\n    entries = torch.where(rare, entries * 0.5, entries)\nloss = entries.mean()"),
    "guarded_count": _loss("entries = F.cross_entropy(out, y, reduction='none')\nif int((y == 1).sum()) > 0:\n    entries = entries + 0.1 * (y == 1).double() * out[:, 1]\nloss = entries.sum() / len(y)"),
    "later_sum": _loss("loss = F.cross_entropy(out, y)\nif step >= 2:\n    loss = loss + 0.01 * out.pow(2).sum()"),
    "later_ratio": _loss("loss = F.cross_entropy(out, y)\nif step // 2:\n    loss = loss + out.pow(2).sum() / out.abs().sum()", "mixes"),
    "by_length": _loss("loss = F.cross_entropy(out, y) * (0.5 if len(y) > 6 else 1.0)", "decides"),
    "first_marked": _loss('loss = (F.cross_entropy(out, y, reduction="none") * (torch.arange(len(y)) < 5)).mean()', "decides"),
    "if_class": _loss("loss = F.cross_entropy(out, y)\nif (y == 2).sum() > 2:\n    loss = loss + out.abs().mean()", "decides"),
    "min_of_losses": _loss("loss = torch.minimum(F.cross_entropy(out, y), F.mse_loss(out, goal) * 2)", "mixes"),
    "max_of_losses": _loss("loss = max(F.cross_entropy(out, y), F.mse_loss(out, goal) * 2)", "decides"),
    "python_sum": _loss("loss = sum(F.cross_entropy(out, y, reduction='none')) / len(y)"),
    "where_rows": _loss("entries = F.cross_entropy(out, y, reduction='none')\nloss = torch.where(y == 0, entries * 2, entries).mean()"),
    "masked_fill": _loss("loss = F.cross_entropy(out.masked_fill(out.abs() < 0.05, 0.0), y)"),
    "cat_terms": _loss("loss = torch.cat([F.cross_entropy(out, y, reduction='none'), (out - goal).pow(2).sum(1)]).mean()"),
    "gathered_probability": _loss("loss = -torch.log(out.softmax(1)[range(len(y)), y] + 1e-6).mean()"),
    "two_losses_two_means": _loss("loss = F.cross_entropy(out, y) + F.l1_loss(out[y != 0], goal[y != 0]) if (y != 0).any() else F.cross_entropy(out, y)"),
    "nonzero": _loss("loss = F.cross_entropy(out, y, reduction='none')[(y > 0).nonzero().squeeze(1)].sum() / len(y)"),
    "by_class": _loss("loss = sum(F.cross_entropy(out[y == c], y[y == c]) for c in range(CLASSES) if (y == c).any()) / CLASSES", "mixes"),
    "numpy_weight": _loss("weight = torch.as_tensor(np.linspace(1.0, 2.0, CLASSES))[y]\nloss = (F.cross_entropy(out, y, reduction='none') * weight).mean()"),
    "scripted": _loss(
        "loss = objective_scripted(out, y)",
        setup="""
def scripted(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(out, y) + 0.1 * (out * out).mean()


objective_scripted = torch.jit.script(scripted)
""", holds="objective_scripted",
    ),
    "vmap": _loss("loss = torch.vmap(lambda a, b: ((a - b) ** 2).sum())(out, goal).mean()"),
    "normal": _loss("loss = -Independent(Normal(out, torch.ones_like(out)), 1).log_prob(goal).mean()"),
    "categorical": _loss("loss = -Categorical(logits=out).log_prob(y).mean() - 0.01 * Categorical(logits=out).entropy().mean()"),
    "autograd_function": _loss(
        "loss = Halve.apply(out - goal).pow(2).mean()",
        setup="""
class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given * 0.5

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.25
""",
    ),
    "einsum": _loss('loss = torch.einsum("nc,nc->n", out, goal).neg().mean()'),
    "cumulated": _loss("loss = (out.cumsum(1) - goal.cumsum(1)).pow(2).mean()"),
    "penalty": _loss("loss = F.cross_entropy(out, y) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())"),
    "numpy_target": _loss("loss = F.mse_loss(out, torch.from_numpy(goal.numpy() * 0.9))"),
    "written_copy": _loss("scores = out.clone()\nscores[:, 0] = 0.0\nloss = F.cross_entropy(scores, y)"),
    "written_output": _loss("out.mul_(2.0)\nloss = F.cross_entropy(out, y)"),
    "split_columns": _loss("mean, rest = out[:, :1], out[:, 1:]\nloss = (mean - goal[:, :1]).pow(2).mean() + rest.exp().mean()"),
    "checkpointed": _loss(
        "loss = checkpoint(lambda out, y: F.cross_entropy(out.tanh(), y), out, y, use_reentrant=False)",
        imports="from torch.utils.checkpoint import checkpoint",
    ),
}  # fmt: skip

LOSSES = KNOWN | BY_HAND
