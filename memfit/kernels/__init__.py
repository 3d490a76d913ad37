"""Which kernels a GPU would run, and what they allocate inside, told on a machine that has none."""
