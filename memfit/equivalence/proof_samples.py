"""Chooses the samples that a proof runs on: those on which loss weightings differ most, by labels, masks and numbers.

The first samples of a batch may be of one class, or all be counted; then every weighting looks right on them. What samples of
one class or group compute together (pairs of a contrastive loss, attention within a group) shows if both parts have some of it.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from itertools import pairwise
from typing import Any

import torch

from memfit.batches.tree import Path, is_column, leaves
from memfit.engine.branches import Act, Branches, Branching, MovedPlace, branching_of
from memfit.engine.random_state import reseed
from memfit.tracing.sandbox import Traces

LOOKED_AT = 48
"""Samples of a batch that are examined."""
SMALL = 1 << 16
"""Elements up to which a leaf of one sample is read; labels and masks are smaller."""
TRIES = 200
"""Random choices that are compared."""
REDRAWN = 16
"""Runs with other random numbers, to find branches on those."""
PAIRS = 24
"""Pairs of samples of one class or group that are tried."""

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

TRIED = 8
"""Proofs that try to have samples of one group in both parts."""
READS = 64
"""Batches of which entries on a device are read."""

KEY = "key"
"""The mark that says to which class or group a sample belongs."""
Entries = dict[Path, Sequence[Hashable]]
Marks = dict[Hashable, float]
"""What a loss might count in one sample: valid labels, classes, mask entries, weights."""


def spaced(samples: int, pairs: Iterable[tuple[int, int]] = ()) -> list[int]:
    """Return the indices of the samples to examine, spread over the batch. Of a large batch they are neighbors, and half of it
    apart, as two views of one sample are if all first views come first. `pairs` are among them."""
    if samples <= LOOKED_AT:
        return list(range(samples))
    spread, half = LOOKED_AT // 4, samples // 2
    firsts = [i * half // spread for i in range(spread)]
    alike = [i for pair in pairs for i in pair]
    return sorted({*alike, *(min(i + beside, samples - 1) for i in firsts for beside in (0, 1, half, half + 1))})


def entries_of(tree: Any, samples: int, places: Collection[Path] | None = None, *, on_host: bool = False) -> Entries:
    """Return the entries of each leaf of a batch that says to which class or group samples belong: an integer or a text per
    sample. `places`: the leaves to look at; None: all. `on_host`: only tensors on the host are looked at."""
    found: Entries = {}
    for path, leaf in leaves(tree):
        if places is not None and path not in places:
            continue
        if is_column(leaf) and len(leaf) == samples and type(leaf[0]) is not float:
            found[path] = leaf
        elif _says_groups(leaf, samples) and (leaf.device.type == "cpu" or not on_host):
            found[path] = leaf.detach().to("cpu").numpy().reshape(-1).tolist()  # (one transfer)
    return found


def _says_groups(leaf: Any, samples: int) -> bool:
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_meta or leaf.numel() != samples:
        return False
    return leaf.dtype in _INTEGERS


def pairs_in(entries: Entries) -> dict[Path, tuple[int, int]]:
    """Return two samples with the same entry, for each leaf that has some."""
    pairs = {path: _pair_in(each) for path, each in entries.items()}
    return {path: pair for path, pair in pairs.items() if pair is not None}


def _pair_in(entries: Sequence[Hashable]) -> tuple[int, int] | None:
    met: dict[Hashable, int] = {}
    return next(((met[entry], i) for i, entry in enumerate(entries) if met.setdefault(entry, i) != i), None)


class Apart:
    """The leaves that say to which class or group samples belong, while no proof has had samples of one group in both parts.
    `left`: how many more proofs may try, and how many more batches are read off a device."""

    def __init__(self) -> None:
        self.left: dict[Path, int] = {}
        self._reads = READS
        self._known: set[Path] = set()

    def pairs_in(self, tree: Any, samples: int, *, waits: bool) -> bool:
        """Whether a batch has two samples of one group, for a proof to try. `waits`: entries on a device are read, too."""
        waits = waits and self._reads > 0
        self._reads -= waits
        pairs = pairs_in(entries_of(tree, samples, self.left, on_host=not waits))
        for path in pairs:
            self.left[path] -= 1
        self.left = {path: left for path, left in self.left.items() if left}
        return bool(pairs)

    def proven(self, entries: Entries, first: int) -> None:
        """Note the entries of a proof's samples, `first` of which are in its first part."""
        for path, each in entries.items():
            if not {*each[:first]}.isdisjoint(each[first:]):
                self.left.pop(path, None)
            elif path not in self._known:
                self.left[path] = TRIED
            self._known.add(path)


def marks_of(sample: Any) -> Marks:
    """Return the marks of one sample, which is a batch of one."""
    found: Marks = {}
    for path, leaf in leaves(sample):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and 0 < leaf.numel() <= SMALL:
            found.update({(path, name): value for name, value in _marks(leaf.detach()).items()})
        elif isinstance(leaf, (list, tuple)) and len(leaf) == 1 and isinstance(leaf[0], (int, str)):
            found[path, KEY] = float(zlib.crc32(str(leaf[0]).encode()))
    return found


def _marks(leaf: torch.Tensor) -> dict[str, float]:
    if leaf.is_complex() or (leaf.is_floating_point() and leaf.numel() > 1 and not bool(((leaf == 0) | (leaf == 1)).all())):
        return {}
    entries = leaf.to("cpu", torch.float64).numpy()  # not item(): reading a scalar off a tensor looks like a device sync
    found = {"set": float((entries != 0).sum()), "valid": float((entries != -100).sum())}
    if entries.size != 1:
        return found
    value = float(entries.reshape(-1)[0])
    of_kind = not leaf.is_floating_point() and leaf.dtype is not torch.bool
    return found | {"value": value} | ({KEY: value} if of_kind else {})


def act_marks(run: Callable[[], Any], differing: Collection[Act], aside: Callable[[], AbstractContextManager[Traces]]) -> Marks:
    """Return which of these acts the script does for one sample, as marks. `run` computes what it makes of the sample; `aside`
    gives contexts that restore what it moves."""
    moves = any(isinstance(each, MovedPlace) for each in differing)
    try:
        with aside() if moves else nullcontext() as traces:
            with Branches() as look, redirect_stdout(None), redirect_stderr(None):
                run()
            moved = () if traces is None else traces.moved().keys()
    except (Exception, SystemExit):  # it cannot be run alone
        return {}
    done = {*look.made, *map(MovedPlace, moved)}
    return {each: float(each in done) for each in differing}


def drawn(
    run: Callable[[], Any],
    aside: Callable[[], AbstractContextManager[Any]],
    differing: Collection[Act],
    device: torch.device,
) -> Branching:
    """Return which of these calls depend on random numbers: each micro-batch draws its own. `run` computes what the script
    makes of some samples, in a context `aside` that restores what it changes."""
    runs = []
    for seed in range(REDRAWN):
        try:
            with aside():
                reseed(seed, device)
                with Branches() as look, redirect_stdout(None), redirect_stderr(None):
                    run()
        except (Exception, SystemExit):
            break
        runs.append(look.made)
    if not runs:
        return Branching()
    sites = {site for site, _ in branching_of(runs).free}
    calls = [each for each in differing if not isinstance(each, MovedPlace)]
    return Branching(varied=frozenset(site for site, _ in calls if site in sites))


def most_telling(marks: Sequence[Marks], sizes: Sequence[int]) -> list[int]:
    """Return indices of samples for two parts of these `sizes`, chosen so that the marks of the parts differ most, and that
    both have samples of one class or group. Both parts should keep something that counts: a part without a loss proves nothing.
    The samples stay in the order of the batch, if a mark falls along it (`pack_padded_sequence` takes the longest first)."""
    count, first = sum(sizes), sizes[0]
    columns, keys = _columns(marks), _keys(marks)
    if not (columns or keys) or len(marks) < count or len(sizes) < 2 or (len(marks) == count and not keys):
        return list(range(count))
    ordered = any(all(a >= b for a, b in pairwise(column)) for column in columns)
    draw = random.Random(0)
    tried = [list(range(count)), *(draw.sample(range(len(marks)), count) for _ in range(TRIES))]
    for column in columns:
        low = sorted(range(len(marks)), key=column.__getitem__)
        tried += [[*low[:first], *low[first - count :]], [*low[-first:], *low[: count - first]]]
    for key in keys:
        tried += [_with_both([pair], len(marks), sizes, draw) for pair in _pairs(key, draw)]
    for pairs in zip(*(_pairs(key, draw) for key in keys)) if len(keys) > 1 else ():
        if len({i for pair in pairs for i in pair}) == 2 * len(pairs) <= 2 * min(sizes):
            tried.append(_with_both(pairs, len(marks), sizes, draw))
    tried = [sorted(chosen) for chosen in tried] if ordered else [_in_parts(chosen, first) for chosen in tried]
    return max(tried, key=lambda chosen: _score(chosen, first, columns, keys))


def _in_parts(chosen: Sequence[int], first: int) -> list[int]:
    """Put the samples of each part into the order of the batch."""
    return [*sorted(chosen[:first]), *sorted(chosen[first:])]


def _columns(marks: Sequence[Marks]) -> list[list[float]]:
    """Return the marks that all samples have and that differ between them, scaled to [0, 1]."""
    found = []
    for name in _in_all(marks):
        values = [m[name] for m in marks]
        low, high = min(values), max(values)
        if low < high and abs(low) + abs(high) < float("inf") and not _is_key(name):
            found.append([(v - low) / (high - low) for v in values])
    return found


def _keys(marks: Sequence[Marks]) -> list[list[float]]:
    """Return the keys that all samples have, if some have the same one and some do not."""
    columns = ([m[name] for m in marks] for name in _in_all(marks) if _is_key(name))
    return [column for column in columns if 1 < len(set(column)) < len(column)]


def _in_all(marks: Sequence[Marks]) -> list[Hashable]:
    return [name for name in marks[0] if all(name in m for m in marks)] if marks else []


def _is_key(name: Hashable) -> bool:
    return isinstance(name, tuple) and name[-1] == KEY


def _pairs(key: Sequence[float], draw: random.Random) -> Iterator[tuple[int, int]]:
    """Yield pairs of samples with the same key."""
    times = Counter(key)
    several = [i for i, value in enumerate(key) if times[value] > 1]
    for one in draw.sample(several, min(PAIRS, len(several))):
        yield one, draw.choice([i for i in several if key[i] == key[one] and i != one])


def _with_both(pairs: Sequence[tuple[int, int]], samples: int, sizes: Sequence[int], draw: random.Random) -> list[int]:
    """Return samples of which one of each pair is in the first part, and one in the other."""
    firsts, seconds = map(list, zip(*pairs))
    others = draw.sample([i for i in range(samples) if i not in (*firsts, *seconds)], sum(sizes) - 2 * len(pairs))
    more = sizes[0] - len(firsts)
    return [*firsts, *others[:more], *seconds, *others[more:]]


def _score(chosen: Sequence[int], first: int, columns: Sequence[Sequence[float]], keys: Sequence[Sequence[float]]) -> float:
    kinds = {tuple(column[i] for column in columns) for i in chosen}
    score = len(kinds) / len(chosen)
    for column in columns:
        one, other = [column[i] for i in chosen[:first]], [column[i] for i in chosen[first:]]
        apart = abs(sum(one) / len(one) - sum(other) / len(other))
        score += (2 * min(apart, 0.5) + 0.5 * (max(one) > 0 < max(other)) + 0.25 * (min(one) < 1 > min(other))) / len(columns)
    for key in keys:
        shared = {key[i] for i in chosen[:first]} & {key[i] for i in chosen[first:]}
        score += 2 * bool(shared) / len(keys)
    return score
