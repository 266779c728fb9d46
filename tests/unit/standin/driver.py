"""`lanekit` with its lanes, caches and results moved: driver.py SCRATCH ARGUMENTS..."""

import sys
from pathlib import Path

from lanekit import capture, paths

scratch = Path(sys.argv[1])
paths.LANES = Path(__file__).parent / "lanes"  # type: ignore[misc]
paths.CACHE = scratch / "cache"  # type: ignore[misc]
paths.RESULTS = scratch / "results"  # type: ignore[misc]

if (scratch / "infiniband").is_dir():  # a fleet with NICs, as its sysfs has them
    asked = capture.RESOURCE.read_text().replace("/sys/class/infiniband", f"{scratch}/infiniband")
    (scratch / "probes.toml").write_text(asked)
    capture.RESOURCE = scratch / "probes.toml"  # type: ignore[misc]

from lanekit import cli  # noqa: E402

sys.exit(cli.main(sys.argv[2:]))
