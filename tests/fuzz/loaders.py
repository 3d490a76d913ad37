"""Where batches come from."""

from __future__ import annotations

from fuzz.pieces import piece

DATA = {
    "rows": "xs = torch.randn(N, 6, generator=source).double()",
    "pictures": "xs = torch.randn(N, 2, 4, 4, generator=source).double()",
    "series": "xs = torch.randn(N, 4, 3, generator=source).double()",
    "words": """
lengths = torch.randint(2, 6, (N,), generator=source)
xs = torch.randint(1, 7, (N, 5), generator=source) * (torch.arange(5) < lengths[:, None])
""",
}
SHAPES = {"rows": "6", "pictures": "2, 4, 4", "series": "4, 3", "words": "5"}

BOTH = 'TensorDataset(xs, zs, ys) if "zs" in globals() else TensorDataset(xs, ys)'

LOADERS = {
    "shuffled": piece(loader="loader = DataLoader(DATASET, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))"),
    "in_order": piece(loader="loader = DataLoader(DATASET, batch_size=BATCH)"),
    "global_shuffle": piece(loader="loader = DataLoader(DATASET, batch_size=BATCH, shuffle=True)"),
    "drop_last": piece(
        loader="loader = DataLoader(DATASET, batch_size=BATCH, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(5))"
    ),
    "dicts": piece(
        loader="""
samples = [dict(zip(NAMES, sample)) for sample in DATASET]
loader = DataLoader(samples, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
""",
        unpack="FIELDS = [batch[name] for name in NAMES]",
    ),
    "lists": piece(
        loader="""
samples = [list(sample) for sample in DATASET]
loader = DataLoader(samples, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
""",
    ),
    "namedtuples": piece(
        classes='Sample = namedtuple("Sample", NAMES)',
        loader="""
samples = [Sample(*sample) for sample in DATASET]
loader = DataLoader(samples, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
""",
        unpack="FIELDS = [getattr(batch, name) for name in NAMES]",
    ),
    "collated": piece(
        loader="""
def collate(samples):
    return [torch.stack(column) for column in zip(*samples)]


loader = DataLoader(DATASET, batch_size=BATCH, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(5))
""",
    ),
    "ragged": piece(
        "ragged",
        loader="""
samples = [(x[x != 0], *rest) for x, *rest in DATASET]


def collate(samples):
    xs, *rest = zip(*samples)
    return [nn.utils.rnn.pad_sequence(xs, batch_first=True), *map(torch.stack, rest)]


loader = DataLoader(samples, batch_size=BATCH, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(5))
""",
    ),
    "ragged_labels": piece(
        "ragged_labels",
        loader="""
samples = [(x[x != 0], y[x != 0]) for x, y in DATASET]


def collate(samples):
    xs, ys = zip(*samples)
    pad = nn.utils.rnn.pad_sequence
    return pad(xs, batch_first=True), pad(ys, batch_first=True, padding_value=-100)


loader = DataLoader(samples, batch_size=BATCH, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(5))
""",
    ),
    "drawing_dataset": piece(
        loader="""
class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        x, *rest = DATASET[i]
        return (x, *(part.clone() for part in rest))


loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
""",
    ),
    "iterable": piece(
        loader="""
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(list(DATASET))


loader = DataLoader(Stream(), batch_size=BATCH)
""",
    ),
    "batches": piece("no_loader", loader="loader = [tuple(part) for part in zip(*(column.split(BATCH) for column in DATASET.tensors))]"),
    "unsized": piece(
        "no_loader",
        loader="""
class Batches:
    def __iter__(self):
        yield from zip(*(column.split(BATCH) for column in DATASET.tensors))


loader = Batches()
""",
    ),
    "length_raises": piece(
        "no_loader",
        loader="""
class Batches:
    def __len__(self):
        raise NotImplementedError("unknown")

    def __iter__(self):
        yield from zip(*(column.split(BATCH) for column in DATASET.tensors))


loader = Batches()
""",
    ),
    "get_batch": piece(
        "no_loader", "get_batch",
        loader="""
def get_batch(n):
    picked = torch.randint(0, N, (BATCH,), generator=source)
    return [column[picked] for column in DATASET.tensors]


loader = None
""",
    ),
    "whole_batches": piece(
        loader="""
batches = [tuple(part) for part in zip(*(column.split(BATCH) for column in DATASET.tensors))]
loader = DataLoader(batches, batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(5))
""",
    ),
    "batch_sampler": piece(
        loader="""
order = torch.utils.data.RandomSampler(DATASET, generator=torch.Generator().manual_seed(5))
loader = DataLoader(DATASET, batch_sampler=torch.utils.data.BatchSampler(order, BATCH, False))
""",
    ),
    "weighted_sampler": piece(
        loader="""
order = torch.utils.data.WeightedRandomSampler(torch.ones(N), N, generator=torch.Generator().manual_seed(5))
loader = DataLoader(DATASET, batch_size=BATCH, sampler=order)
""",
    ),
    "function": piece(
        "no_loader",
        loader="""
def batches_of():
    order = torch.randperm(N, generator=source)
    for picked in order.split(BATCH):
        yield [column[picked] for column in DATASET.tensors]


loader = None
""",
    ),
}  # fmt: skip
