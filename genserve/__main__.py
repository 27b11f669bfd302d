"""`python -m genserve` is the command line."""

import sys

from genserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
