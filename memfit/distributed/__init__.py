"""One effective batch over several ranks: agreeing, reducing gradients, starting and stopping together."""
