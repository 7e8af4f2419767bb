"""`python -m lightning_ssd`, which is the command `lightning-ssd`."""

import sys

from lightning_ssd.cli import main

sys.exit(main())
