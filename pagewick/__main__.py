"""`python -m pagewick` is `pagewick`."""

from pagewick.cli import main

if __name__ == "__main__":
    main()
