"""Predicts which kernels a GPU runs and what they allocate internally, on a machine without a GPU."""
