"""`python -m tenure.cli`: the same program, for child processes with the same interpreter."""

from tenure.cli import main

if __name__ == "__main__":
    main()
