"""`python -m tenure.cli`: the same program, for children that must use the same interpreter."""

from tenure.cli import main

if __name__ == "__main__":
    main()
