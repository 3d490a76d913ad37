"""Runs a training step to see what it costs: on fake tensors for its allocations, briefly on the device for its seconds."""
