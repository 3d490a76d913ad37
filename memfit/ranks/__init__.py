"""Runs a training on several ranks: how they meet, what they agree on, how gradients are all-reduced."""
