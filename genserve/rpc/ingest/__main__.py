"""`python -m genserve.rpc.ingest SETTINGS`."""

import sys

from genserve.rpc.ingest.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
