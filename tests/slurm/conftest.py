"""A Slurm of one node, where this machine can have one."""

from collections.abc import Iterator

import pytest
from tests.slurm import rig


@pytest.fixture(scope="session")
def slurm() -> Iterator[rig.Slurm]:
    """Controller and node."""
    if why := rig.missing():
        pytest.skip(why)
    with rig.up() as found:
        yield found
