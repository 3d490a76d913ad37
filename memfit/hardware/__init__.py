"""Describes the available memory: the device, how much of it may be used, and how much this process holds."""
