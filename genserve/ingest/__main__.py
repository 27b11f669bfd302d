"""`python -m genserve.ingest SETTINGS`."""

import sys

from genserve.ingest.relay import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
