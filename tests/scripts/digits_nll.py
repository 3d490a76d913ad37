"""Image classification with nll_loss: a small convolutional network on handwritten digits, accuracy counted on the way."""

import torch
import torch.nn.functional as F
from common import arguments, load_digits, norm, save, tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

#: import memfit


class Net(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 16 * args.width
        self.conv1 = nn.Conv2d(1, wide, 3, padding=1)
        self.norm = norm(args, wide)
        self.conv2 = nn.Conv2d(wide, 2 * wide, 3)
        self.dropout = nn.Dropout(args.dropout)
        self.fc = nn.Linear(2 * wide * 9, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.fc(self.dropout(torch.flatten(x, 1)))
        return F.log_softmax(x, dim=1)


def test(model, images, labels):
    model.eval()
    with torch.no_grad():
        output = model(images)
        loss = F.nll_loss(output, labels, reduction="sum").item() / len(labels)
        correct = output.argmax(dim=1, keepdim=True).eq(labels.view(-1, 1)).sum().item()
    model.train()
    print(f"test: loss {loss:.4f}, {correct} of {len(labels)}")


def main():
    args = arguments(__doc__, batch_size=32)
    digits = load_digits(args)
    images = torch.tensor(digits.images, dtype=torch.get_default_dtype()).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[:-297], labels[:-297]), batch_size=args.batch_size, shuffle=True)
    model = Net(args)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    #: model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=args.batch_size)

    model.train()
    correct = 0
    for step, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        correct += output.argmax(dim=1).eq(target).sum().item()
        tell(step, loss)
        if step + 1 == args.steps:
            break
    print(f"train: {correct} of {args.steps * args.batch_size}")
    test(model, images[-297:], labels[-297:])
    save(args, model)


if __name__ == "__main__":
    main()
