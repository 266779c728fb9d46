"""`lanekit` with the lanes beside this file, or in LANES_FOLDER: driver.py ARGUMENTS..."""

import os
import sys
from pathlib import Path

from lanekit import paths

paths.LANES = Path(os.environ.get("LANES_FOLDER", Path(__file__).parent / "lanes"))  # type: ignore[misc]

from lanekit import cli, published  # noqa: E402

# The report of a run is of its own folder: the committed one knows none of these lanes.
assert published.FILE.is_file()
given = [word.partition("=")[2] for word in sys.argv if word.startswith("--results=")]
paths.RESULTS = Path(*given[:1])  # type: ignore[misc]

sys.exit(cli.main(sys.argv[1:]))
