"""What a step costs: memory from a trace without running, time from running a little, both without leaving a trace."""
