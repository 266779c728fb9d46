"""`python -m lanekit` is the command `lanekit`."""

import sys

from lanekit.cli import main

sys.exit(main())
