"""`python -m memfit`: the command line."""

from memfit.cli import main

if __name__ == "__main__":
    main()
