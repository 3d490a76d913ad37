"""What memory there is: the device, what of it may be used, and how much this process holds."""
