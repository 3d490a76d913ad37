"""The engine: intercepts calls, stages gradients and runs micro-batches. Profiling traces it and training runs it."""
