"""`python -m evenstep` is `evenstep`."""

from evenstep.cli import main

if __name__ == "__main__":
    main()
