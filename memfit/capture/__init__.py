"""Captures what a training script computes from the model: calls, lazy outputs, and the expressions between output and loss."""
