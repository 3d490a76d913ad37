"""A mixture of experts whose layers leave their balance loss on themselves, for the training loop to add."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, save, tell
from torch.utils.data import DataLoader, TensorDataset

#: import memfit

EXPERTS = 4


class MoE(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.router = nn.Linear(wide, EXPERTS)
        experts = (nn.Sequential(nn.Linear(wide, 2 * wide), nn.GELU(), nn.Linear(2 * wide, wide)) for _ in range(EXPERTS))
        self.experts = nn.ModuleList(experts)
        self.aux_loss = None

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        weight, chosen = probabilities.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).unsqueeze(-1)
            out = out + mask * weight.unsqueeze(-1) * expert(x)
        share = F.one_hot(chosen, EXPERTS).to(x.dtype).mean((0, 1))
        self.aux_loss = EXPERTS * (share * probabilities.mean((0, 1))).sum()
        return out


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 16 * args.width
        self.embed = nn.Embedding(50, wide)
        self.layers = nn.ModuleList(MoE(wide) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(2))
        self.head = nn.Linear(wide, 50)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(x)


def main():
    args = arguments(__doc__, batch_size=16)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (200 * args.times, 10), generator=generator)
    loader = DataLoader(TensorDataset(tokens, (tokens * 3 + 1) % 50), batch_size=args.batch_size, shuffle=True)
    model = Model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    #: model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=args.batch_size)

    for step, (x, y) in enumerate(loader):
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        for layer in model.layers:
            loss = loss + 0.01 * layer.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(step, loss)
        if step + 1 == args.steps:
            break
    save(args, model)


if __name__ == "__main__":
    main()
