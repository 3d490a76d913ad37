"""Makes the script's loader yield effective batches: which samples, how workers send them, and which are longest."""
