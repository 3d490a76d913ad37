"""Detection: lists of pictures of different sizes and of their boxes; in training the model returns a dict of losses."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, save, tell
from torch.utils.data import DataLoader, Dataset

#: import memfit


class Scenes(Dataset):
    def __init__(self, args):
        self.count = 120 * args.times

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        height, width = (int(n) for n in torch.randint(12, 20, (2,), generator=generator))
        count = int(torch.randint(1, 4, (1,), generator=generator))
        image = torch.rand(1, height, width, generator=generator)
        corners = torch.rand(count, 2, generator=generator) * 0.5
        boxes = torch.cat([corners, corners + 0.1 + torch.rand(count, 2, generator=generator) * 0.3], 1)
        return image, {"boxes": boxes, "labels": torch.randint(0, 3, (count,), generator=generator), "image_id": index}


class Detector(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 16 * args.width
        first, second = nn.Conv2d(1, wide, 3, padding=1), nn.Conv2d(wide, wide, 3, padding=1)
        self.backbone = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
        self.box, self.cls = nn.Linear(wide, 12), nn.Linear(wide, 9)

    def forward(self, images, targets=None):
        features = [self.backbone(image[None]).mean((2, 3))[0] for image in images]
        boxes = [self.box(f).view(3, 4) for f in features]
        logits = [self.cls(f).view(3, 3) for f in features]
        if not self.training:
            return [{"boxes": b, "labels": c.argmax(-1)} for b, c in zip(boxes, logits)]
        box_losses, label_losses = [], []
        for box, logit, target in zip(boxes, logits, targets):
            n = len(target["labels"])
            box_losses.append(F.smooth_l1_loss(box[:n], target["boxes"]))
            label_losses.append(F.cross_entropy(logit[:n], target["labels"]))
        return {"loss_box_reg": torch.stack(box_losses).mean(), "loss_classifier": torch.stack(label_losses).mean()}


def collate_fn(batch):
    return tuple(zip(*batch))


def main():
    args = arguments(__doc__, batch_size=8)
    data_loader = DataLoader(Scenes(args), batch_size=args.batch_size, shuffle=True, collate_fn=collate_fn)
    model = Detector(args)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-4)
    #: model, optimizer, data_loader = memfit.wrap(model, optimizer, data_loader, target_batch=args.batch_size)

    model.train()
    for step, (images, targets) in enumerate(data_loader):
        images = list(image.to("cpu") for image in images)
        targets = [{k: v.to("cpu") if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        tell(step, losses.item())
        if step + 1 == args.steps:
            break
    model.eval()
    with torch.no_grad():
        print(f"labels: {model(images[:2])[0]['labels'].tolist()}")
    save(args, model)


if __name__ == "__main__":
    main()
