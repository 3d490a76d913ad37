"""Adversarial training: the batch's own gradient (fast gradient sign) makes the batch that is trained on."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, load_digits, save, tell
from torch.utils.data import DataLoader, TensorDataset

#: import memfit


def fgsm_attack(image, epsilon, data_grad):
    return torch.clamp(image + epsilon * data_grad.sign(), 0, 1)


def main():
    args = arguments(__doc__, batch_size=32)
    digits = load_digits(args)
    images = torch.tensor(digits.data, dtype=torch.get_default_dtype()) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=args.batch_size, shuffle=True)
    wide = 64 * args.width
    model = nn.Sequential(nn.Linear(64, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    #: model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=args.batch_size)

    for step, (data, target) in enumerate(loader):
        data.requires_grad = True
        output = model(data)
        init_pred = output.max(1, keepdim=True)[1]
        loss = F.nll_loss(F.log_softmax(output, dim=1), target)
        model.zero_grad()
        loss.backward()
        perturbed = fgsm_attack(data, 0.1, data.grad.data).detach()

        optimizer.zero_grad()
        output = model(perturbed)
        loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
        final_pred = output.max(1, keepdim=True)[1]
        tell(step, loss)
        print(f"right before {int((init_pred.flatten() == target).sum())}, after {int((final_pred.flatten() == target).sum())}")
        if step + 1 == args.steps:
            break
    save(args, model)


if __name__ == "__main__":
    main()
