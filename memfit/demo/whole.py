"""Runs one optimizer step on the whole batch without memfit, under the limit: `python -m memfit.demo.whole`."""

from __future__ import annotations

import sys

from memfit.demo.limit import limit_this_process, limited_device
from memfit.demo.model import next_byte_loss
from memfit.demo.task import Demo, training
from memfit.demo.text import LibraryText


def run(demo: Demo) -> None:
    """Run the step as a plain script without memfit does."""
    text, device = LibraryText(demo.shape.length), limited_device()
    limit_this_process(demo.budget, device)
    plain = training(demo, text, device)
    here, following = next(iter(plain.loader))
    loss = next_byte_loss(plain.model, (here.to(device), following.to(device)))
    loss.backward()
    plain.optimizer.step()


if __name__ == "__main__":
    run(Demo.from_json(sys.argv[1]))
