"""`lanekit` with its lanes, caches and results moved: driver.py SCRATCH ARGUMENTS..."""

import sys
from pathlib import Path

from lanekit import paths

scratch = Path(sys.argv[1])
paths.LANES = Path(__file__).parent / "lanes"  # type: ignore[misc]
paths.CACHE = scratch / "cache"  # type: ignore[misc]
paths.RESULTS = scratch / "results"  # type: ignore[misc]

from lanekit import cli  # noqa: E402

sys.exit(cli.main(sys.argv[2:]))
