"""Graph classification: graphs of different sizes joined into one large graph, pooled by graph."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, save, tell
from torch.utils.data import DataLoader

#: import memfit

FEATURES, CLASSES = 8, 3


class Batch:
    def __init__(self, x, edge_index, batch, y):
        self.x, self.edge_index, self.batch, self.y, self.num_graphs = x, edge_index, batch, y, len(y)


def graphs(n):
    """Rings, stars, and rings with a chord from every node."""
    generator = torch.Generator().manual_seed(0)
    for i in range(n):
        size, y = int(torch.randint(5, 15, (1,), generator=generator)), i % CLASSES
        node = torch.arange(size)
        edges = torch.stack([torch.zeros_like(node[1:]), node[1:]] if y == 1 else [node, (node + 1) % size])
        if y == 2:
            edges = torch.cat([edges, torch.stack([node, (node + 2) % size])], 1)
        edges = torch.cat([edges, edges.flip(0)], 1)
        degree = torch.bincount(edges[0], minlength=size).clamp(max=FEATURES - 1)
        yield F.one_hot(degree, FEATURES) + 0.3 * torch.randn(size, FEATURES, generator=generator), edges, y


def collate(items):
    xs, edges, ys = zip(*items)
    sizes = torch.tensor([len(x) for x in xs])
    first = sizes.cumsum(0) - sizes
    edge_index = torch.cat([e + start for e, start in zip(edges, first)], 1)
    return Batch(torch.cat(xs), edge_index, torch.arange(len(xs)).repeat_interleave(sizes), torch.tensor(ys))


def split(batch, sizes):
    """The call's arguments by numbers of graphs: memfit cannot know which nodes and edges belong together."""
    (x, edge_index, index), kwargs = batch
    parts, start = [], 0
    for size in sizes:
        nodes = (index >= start) & (index < start + size)
        edges = edge_index[:, nodes[edge_index[0]]] - int((index < start).sum())
        parts.append(((x[nodes], edges, index[nodes] - start), kwargs))
        start += size
    return parts


def global_mean_pool(x, batch):
    size = int(batch.max()) + 1
    total = x.new_zeros(size, x.shape[1]).index_add_(0, batch, x)
    return total / torch.bincount(batch, minlength=size).clamp(min=1).unsqueeze(1)


class GINConv(nn.Module):
    def __init__(self, args, inside, wide):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        norm = nn.BatchNorm1d(wide) if args.as_it_comes else nn.LayerNorm(wide)
        self.mlp = nn.Sequential(nn.Linear(inside, wide), norm, nn.ReLU(), nn.Linear(wide, wide), nn.ReLU())

    def forward(self, x, edge_index):
        neighbours = torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])
        return self.mlp((1 + self.eps) * x + neighbours)


class GIN(nn.Module):
    def __init__(self, args):
        super().__init__()
        wide = 32 * args.width
        self.convs = nn.ModuleList([GINConv(args, FEATURES, wide), GINConv(args, wide, wide), GINConv(args, wide, wide)])
        self.lin1, self.lin2 = nn.Linear(wide, wide), nn.Linear(wide, CLASSES)
        self.dropout = args.dropout

    def forward(self, x, edge_index, batch):
        for conv in self.convs:
            x = conv(x, edge_index)
        x = self.lin1(global_mean_pool(x, batch)).relu()
        return self.lin2(F.dropout(x, p=self.dropout, training=self.training))


def main():
    args = arguments(__doc__, batch_size=16)
    dataset = list(graphs(240 * args.times))
    loader = DataLoader(dataset[:-40], batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(dataset[-40:], batch_size=args.batch_size, collate_fn=collate)
    model = GIN(args)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    #: model, optimizer, loader = memfit.wrap(model, optimizer, loader, target_batch=args.batch_size, split=split)

    total_loss = seen = 0
    for step, data in enumerate(loader):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.batch)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        total_loss, seen = total_loss + loss.item() * data.num_graphs, seen + data.num_graphs
        optimizer.step()
        tell(step, loss)
        if step + 1 == args.steps:
            break
    model.eval()
    with torch.no_grad():
        right = sum(int((model(d.x, d.edge_index, d.batch).argmax(-1) == d.y).sum()) for d in test_loader)
    print(f"loss {total_loss / seen:.4f}, test {right} of {len(test_loader.dataset)}")
    save(args, model)


if __name__ == "__main__":
    main()
