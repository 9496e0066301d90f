"""`python -m qsdp`."""

import sys

from qsdp.cli import main

sys.exit(main())
