"""A word language model: [time, batch] slices of one long text, hidden state carried from slice to slice, updates by hand."""

import math
import os
import sysconfig
from pathlib import Path

import torch
from common import arguments, save, tell
from torch import nn

#: import memfit

BPTT, WORDS = 12, 200


class RNNModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 32 * args.width
        self.drop = nn.Dropout(args.dropout)
        self.encoder = nn.Embedding(WORDS, wide)
        self.rnn = nn.LSTM(wide, wide, 2, dropout=args.dropout)
        self.decoder = nn.Linear(wide, WORDS)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output))
        return decoded.view(-1, WORDS), hidden

    def init_hidden(self, batch_size):
        weight = next(self.parameters())
        return tuple(weight.new_zeros(2, batch_size, self.rnn.hidden_size) for _ in range(2))


def repackage_hidden(hidden):
    return hidden.detach() if isinstance(hidden, torch.Tensor) else tuple(repackage_hidden(h) for h in hidden)


def corpus(args):
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text().split()
    known = {word: i for i, word in enumerate(sorted(set(text), key=lambda word: (-text.count(word), word))[: WORDS - 1])}
    return torch.tensor([known.get(word, WORDS - 1) for word in text] * args.times)


def batchify(data, batch_size):
    rows = len(data) // batch_size
    data = data[: rows * batch_size].view(batch_size, -1).t().contiguous()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return data.tensor_split(size, dim=1)[rank].contiguous()  # each process reads its own columns


def get_batch(source, i):
    seq_len = min(BPTT, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].reshape(-1)


def main():
    args = arguments(__doc__, batch_size=20)
    data = batchify(corpus(args), args.batch_size)
    model = RNNModel(args)
    criterion = nn.CrossEntropyLoss()
    lr = 5.0
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    #: memfit.wrap(model, optimizer)

    model.train()
    hidden = model.init_hidden(data.shape[1])
    total = 0.0
    for step in range(args.steps):
        inputs, targets = get_batch(data, step * BPTT)
        optimizer.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(inputs, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total += loss.item()
        tell(step, loss)
    print(f"train: perplexity {math.exp(total / args.steps):.2f}")
    model.eval()
    with torch.no_grad():
        output, hidden = model(data[-BPTT - 1 : -1], model.init_hidden(data.shape[1]))
        print(f"test: loss {criterion(output, data[-BPTT:].reshape(-1)).item():.4f}")
    save(args, model)


if __name__ == "__main__":
    main()
