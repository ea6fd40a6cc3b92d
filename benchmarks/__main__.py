"""`python -m benchmarks`: see README.md in this folder."""

import sys

from benchmarks.cli import main

if __name__ == "__main__":
    sys.exit(main())
