"""Profiles the cost of a training step: memory from a trace on fake tensors, time from short runs. Neither has side effects."""
