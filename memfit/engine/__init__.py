"""The engine: one interception, one staged gradient, one micro-batch at a time. Profiling traces it, training runs it."""
