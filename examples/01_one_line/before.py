"""An ordinary training script: trains a small byte-level language model on the Python standard library."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Bytes(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(text) + self.place[: text.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def library_text(length: int = 129, samples: int = 2048) -> torch.Tensor:
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[: length * samples]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length].view(-1, length).long()


torch.manual_seed(0)
text = library_text()
model = Bytes()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(TensorDataset(text), batch_size=512, shuffle=True)

for (batch,) in loader:
    optimizer.zero_grad()
    scores = model(batch[:, :-1])
    loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"loss {loss.item():.3f}")
