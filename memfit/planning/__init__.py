"""Planning: turns a profile and a budget into a plan. Pure functions over values; nothing here imports torch."""
