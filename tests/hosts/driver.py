"""`lanekit` with the lanes beside this file: driver.py ARGUMENTS..."""

import sys
from pathlib import Path

from lanekit import paths

paths.LANES = Path(__file__).parent / "lanes"  # type: ignore[misc]

from lanekit import cli  # noqa: E402

sys.exit(cli.main(sys.argv[1:]))
