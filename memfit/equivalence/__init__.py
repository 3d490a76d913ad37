"""Proves on a few samples that micro-batches train as the whole batch does: cutting, weighting, side effects."""
