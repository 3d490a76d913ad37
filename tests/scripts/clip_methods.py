"""Contrastive image and text training: own methods of the model, all pairs of a batch compared, the forward never called."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, load_digits, save, tell
from torch.utils.data import DataLoader, TensorDataset

#: import memfit


class CLIP(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 32 * args.width
        self.visual = nn.Sequential(nn.Linear(64, wide), nn.GELU(), nn.Linear(wide, 16))
        self.token_embedding = nn.Embedding(12, wide)
        self.transformer = nn.TransformerEncoderLayer(wide, 4, 2 * wide, dropout=args.dropout, batch_first=True)
        self.text_projection = nn.Parameter(torch.randn(wide, 16) * wide**-0.5)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def encode_image(self, image):
        return self.visual(image.flatten(1))

    def encode_text(self, text):
        x = self.transformer(self.token_embedding(text))
        return x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection

    def forward(self, image, text):
        image_features, text_features = self.encode_image(image), self.encode_text(text)
        return F.normalize(image_features, dim=-1) @ F.normalize(text_features, dim=-1).t()


def main():
    args = arguments(__doc__, batch_size=24)
    digits = load_digits(args)
    images = torch.tensor(digits.images, dtype=torch.get_default_dtype()) / 16
    words = torch.tensor([[label, (3 * label) % 10, label // 2] for label in digits.target])
    names = F.pad(F.pad(words.repeat(1, args.width), (0, 1), value=11), (0, 1))
    loader = DataLoader(TensorDataset(images, names), batch_size=args.batch_size, shuffle=True)
    model = CLIP(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)
    #: model, optimizer, loader = memfit.wrap(model, optimizer, loader, methods=["encode_image", "encode_text"])

    model.train()
    for step, (image, text) in enumerate(loader):
        optimizer.zero_grad()
        image_features = model.encode_image(image)
        text_features = model.encode_text(text)
        image_features = image_features / image_features.norm(dim=-1, keepdim=True)
        text_features = text_features / text_features.norm(dim=-1, keepdim=True)
        logits = model.logit_scale.exp() * image_features @ text_features.t()
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6)
        tell(step, loss)
        if step + 1 == args.steps:
            break
    model.eval()
    with torch.no_grad():
        similarity = model(images[:20], names[:20])
    print(f"mean similarity {similarity.diag().mean().item():.4f}")
    save(args, model)


if __name__ == "__main__":
    main()
