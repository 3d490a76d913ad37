"""LoRA fine-tuning by hand: a causal language model in bfloat16, frozen, with float32 adapters; prompts are masked."""

import math

import torch
import torch.nn as nn
from common import arguments, save, tell
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

#: import memfit


class LoRA(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base, self.scaling = base, alpha / rank
        self.A = nn.Parameter(torch.randn(base.weight.shape[0], rank) / math.sqrt(rank))
        self.B = nn.Parameter(torch.zeros(rank, base.weight.shape[1]))

    def forward(self, x):
        return self.base(x) + ((x.to(self.A.dtype) @ self.A @ self.B) * self.scaling).to(x.dtype)


def examples(n):
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        ids = torch.randint(0, 120, (18,), generator=generator)
        ids[9:] = (ids[:9] + 1) % 120
        labels = ids.clone()
        labels[: int(torch.randint(5, 10, (1,), generator=generator))] = -100  # the prompt
        yield {"input_ids": ids, "labels": labels}


def print_trainable_parameters(model):
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"trainable params: {trainable} of {sum(p.numel() for p in model.parameters())}")


def main():
    args = arguments(__doc__, batch_size=16)
    wide = 32 * args.width
    config = GPT2Config(
        vocab_size=120, n_positions=32, n_embd=wide, n_layer=2, n_head=4, use_cache=False,
        attn_pdrop=args.dropout, embd_pdrop=args.dropout, resid_pdrop=args.dropout,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if args.dtype == "float32":
        model.to(torch.bfloat16)
    for param in model.parameters():
        param.requires_grad = False
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn)
    print_trainable_parameters(model)
    train_loader = DataLoader(list(examples(160 * args.times)), batch_size=args.batch_size, shuffle=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    #: model, optimizer, train_loader = memfit.wrap(model, optimizer, train_loader, target_batch=args.batch_size)

    model.train()
    for step, batch in enumerate(train_loader):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tell(step, loss)
        if step + 1 == args.steps:
            break
    model.eval()
    with torch.no_grad():
        print(f"next tokens: {model(torch.arange(8)[None]).logits.argmax(-1).tolist()}")
    save(args, *(m for m in model.modules() if isinstance(m, LoRA)))


if __name__ == "__main__":
    main()
