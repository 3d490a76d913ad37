"""Doing it: the two modes, what both share, and the run that users meet."""
