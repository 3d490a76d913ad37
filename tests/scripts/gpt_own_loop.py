"""A small GPT that returns (logits, loss), batches without a loader, and micro-steps of the script's own."""

import contextlib
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, save, tell

#: import memfit

BLOCK, VOCAB = 16, 256


class Block(nn.Module):
    def __init__(self, wide, dropout):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.c_attn, self.c_proj = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide), nn.Dropout(dropout))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, 4, C // 4).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 32 * args.width
        self.wte, self.wpe = nn.Embedding(VOCAB, wide), nn.Embedding(BLOCK, wide)
        self.h = nn.ModuleList(Block(wide, args.dropout) for _ in range(2))
        self.ln_f = nn.LayerNorm(wide)
        self.lm_head = nn.Linear(wide, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay, learning_rate):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def main():
    args = arguments(__doc__, batch_size=12)
    gradient_accumulation_steps = 2
    text = (Path(sysconfig.get_paths()["stdlib"]) / "typing.py").read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = GPT(args)
    optimizer = model.configure_optimizers(0.1, 1e-3)
    draws = torch.Generator().manual_seed(7)
    ctx = contextlib.nullcontext()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    #: memfit.wrap(model, optimizer, script_accumulation=gradient_accumulation_steps)

    def get_batch():
        ix = torch.randint(len(data) - BLOCK, (args.batch_size,), generator=draws)
        ix = ix.tensor_split(size)[rank]  # each process its own part
        return torch.stack([data[i : i + BLOCK] for i in ix]), torch.stack([data[i + 1 : i + 1 + BLOCK] for i in ix])

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        losses = torch.zeros(3)
        for k in range(3):
            X, Y = get_batch()
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        model.train()
        return losses.mean()

    X, Y = get_batch()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        lossf = 0.0
        for _ in range(gradient_accumulation_steps):
            with ctx:
                _, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch()
            scaler.scale(loss).backward()
            lossf += loss.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        tell(step, lossf)
    print(f"estimated loss {estimate_loss():.4f}")
    save(args, model)


if __name__ == "__main__":
    main()
