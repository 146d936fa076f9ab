"""`python -m leasehold.cli`: the same program, for children that must use the same interpreter."""

from leasehold.cli import main

if __name__ == "__main__":
    main()
