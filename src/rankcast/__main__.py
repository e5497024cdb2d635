"""`python -m rankcast`: the same as the `rankcast` command, and nothing else."""

import sys

from rankcast.cli import main

if __name__ == "__main__":
    sys.exit(main())
