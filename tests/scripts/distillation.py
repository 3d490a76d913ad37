"""Distillation: features of teacher and student caught by forward hooks, softened logits, and labels."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, load_digits, save, tell
from torch.utils.data import DataLoader, TensorDataset

#: import memfit

TEMPERATURE, ALPHA, BETA = 4.0, 0.5, 0.1


def network(wide, dropout=0.0):
    return nn.Sequential(nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 10))


features = {}


def get_features(name):
    def hook(model, input, output):
        features[name] = output

    return hook


def main():
    args = arguments(__doc__, batch_size=32)
    digits = load_digits(args)
    images = torch.tensor(digits.data, dtype=torch.get_default_dtype()) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=args.batch_size, shuffle=True)
    teacher, student = network(128).eval(), network(32 * args.width, args.dropout)
    teacher[3].register_forward_hook(get_features("teacher"))
    student[3].register_forward_hook(get_features("student"))
    for param in teacher.parameters():
        param.requires_grad = False
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    #: student, optimizer, loader = memfit.wrap(student, optimizer, loader, target_batch=args.batch_size)

    for step, (x, y) in enumerate(loader):
        with torch.no_grad():
            teacher_logits = teacher(x)
        logits = student(x)
        soft = F.kl_div(
            F.log_softmax(logits / TEMPERATURE, dim=1), F.softmax(teacher_logits / TEMPERATURE, dim=1), reduction="batchmean"
        )
        loss = ALPHA * TEMPERATURE**2 * soft + (1 - ALPHA) * F.cross_entropy(logits, y)
        loss = loss + BETA * F.mse_loss(features["student"], features["teacher"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(step, loss)
        if step + 1 == args.steps:
            break
    save(args, student)


if __name__ == "__main__":
    main()
