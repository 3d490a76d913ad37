"""What to do: from a profile and a budget to a plan. Values in, a value out; nothing here imports torch."""
