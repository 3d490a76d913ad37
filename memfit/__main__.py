"""Runs the command line for `python -m memfit`."""

from memfit.cli import main

if __name__ == "__main__":
    main()
