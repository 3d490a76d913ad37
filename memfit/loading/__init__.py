"""The script's loader, made to yield effective batches: which samples, sent how, and which are longest."""
