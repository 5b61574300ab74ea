"""`python -m everplex`: the command line, for launchers that start modules."""

from everplex.cli import main

if __name__ == "__main__":
    main()
