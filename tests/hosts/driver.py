"""`lanekit` with the lanes beside this file, or in LANES_FOLDER: driver.py ARGUMENTS..."""

import os
import sys
from pathlib import Path

from lanekit import paths

paths.LANES = Path(os.environ.get("LANES_FOLDER", Path(__file__).parent / "lanes"))  # type: ignore[misc]

from lanekit import cli  # noqa: E402

sys.exit(cli.main(sys.argv[1:]))
