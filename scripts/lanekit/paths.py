"""Where things stand in a checkout. The harness runs from a checkout, as make does."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
LANES: Final = ROOT / "lanes"
PROFILES: Final = LANES / "profiles"
CONTRACTS: Final = LANES / "contracts"
VARIABLES: Final = LANES / "variables.toml"
LOCKS: Final = ROOT / "locks"
RESULTS: Final = ROOT / "results"
EVIDENCE: Final = ROOT / "scripts" / "evidence"
CACHE: Final = ROOT / ".cache"
PROVENANCE: Final = "provenance.json"  # in a bundle: the git commit that its checkout was
