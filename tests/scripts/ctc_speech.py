"""Speech: padded features, targets one after the other with their lengths, CTC, batches by duration."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, save, tell
from torch.utils.data import DataLoader, Dataset, Sampler

#: import memfit

FEATURES, SIGNS = 8, 12


class Utterances(Dataset):
    def __init__(self, args):
        self.lengths = [20 + (7 * i) % 25 for i in range(120 * args.times)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(1, SIGNS, (self.lengths[index] // 6,), generator=generator)
        spoken = F.one_hot(text.repeat_interleave(6)[: self.lengths[index]], SIGNS)[:, :FEATURES]
        noise = torch.randn(len(spoken), FEATURES, generator=generator)
        return spoken.to(noise.dtype) + 0.1 * noise, text


class DurationSampler(Sampler):
    """Batches of about the same number of frames."""

    def __init__(self, lengths, frames):
        self.batches, batch = [], []
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and lengths[index] * (len(batch) + 1) > frames:
                self.batches.append(batch)
                batch = []
            batch.append(index)
        self.batches.append(batch)

    def __iter__(self):
        for i in torch.randperm(len(self.batches)).tolist():
            yield self.batches[i]

    def __len__(self):
        return len(self.batches)


def collate(samples):
    features = nn.utils.rnn.pad_sequence([f for f, _ in samples], batch_first=True)
    input_lengths = torch.tensor([len(f) for f, _ in samples])
    target_lengths = torch.tensor([len(t) for _, t in samples])
    return features, torch.cat([t for _, t in samples]), input_lengths, target_lengths


class SpeechModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 32 * args.width
        self.conv = nn.Conv1d(FEATURES, wide, 3, padding=1)
        self.birnn = nn.GRU(wide, wide, bidirectional=True, batch_first=True)
        self.classifier = nn.Linear(2 * wide, SIGNS)

    def forward(self, x):
        x = F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.classifier(self.birnn(x)[0])


def main():
    args = arguments(__doc__, batch_size=10)
    data = Utterances(args)
    loader = DataLoader(data, batch_sampler=DurationSampler(data.lengths, 30 * args.batch_size), collate_fn=collate)
    model = SpeechModel(args)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    #: model, optimizer, loader = memfit.wrap(model, optimizer, loader)

    for step, (spectrograms, labels, input_lengths, label_lengths) in enumerate(loader):
        optimizer.zero_grad()
        output = model(spectrograms)  # [batch, time, signs]
        output = F.log_softmax(output, dim=2)
        output = output.transpose(0, 1)  # [time, batch, signs]
        loss = criterion(output, labels, input_lengths, label_lengths)
        loss.backward()
        optimizer.step()
        tell(step, loss)
        if step + 1 == args.steps:
            break
    save(args, model)


if __name__ == "__main__":
    main()
