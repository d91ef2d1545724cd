"""`python -m hvpipe` runs the command `hvpipe`."""

import sys

from hvpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
