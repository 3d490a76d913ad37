"""Describes batches: their nesting, the batch dimension of each tensor, how they are cut and how outputs are joined."""
