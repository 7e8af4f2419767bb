"""`python -m lightning_ssd`, which is the command `lightning-ssd`."""

import sys

from lightning_ssd.cli import main

if __name__ == "__main__":
    sys.exit(main())
