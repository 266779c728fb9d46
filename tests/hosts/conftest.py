"""The rig, where this machine can have one."""

from collections.abc import Iterator

import pytest
from tests.hosts import rig as rigs

NEEDED = ("vllm-cpu",)


@pytest.fixture(scope="session")
def rig() -> Iterator[rigs.Rig]:
    """Two hosts that hold this machine's images; nothing of them is left at the end."""
    why = rigs.missing() or next(
        (f"needs image {name} in this machine's Docker engine" for name in NEEDED
         if not rigs.held(name)), ""
    )  # fmt: skip
    if why:
        pytest.skip(why)
    with rigs.up() as found:
        yield found
    assert rigs.strays() == []
