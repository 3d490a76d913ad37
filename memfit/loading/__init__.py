"""The script's loader, made to yield effective batches: which samples they are, how workers send them, and which are longest."""
