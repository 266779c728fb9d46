"""The rig, where this machine can have one."""

import contextlib
from collections.abc import Iterator

import pytest
from tests.hosts import rig as rigs
from tests.images import recipe

from lanekit import images

NEEDED = ("vllm-cpu",)
MPI = """\
FROM {parent}
USER root
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends \\
    openmpi-bin openssh-client openssh-server && rm -rf /var/lib/apt/lists/*
USER 10001:10001
"""


def build_mpi() -> None:
    """An image with an MPI of Debian's and SSH, where Debian can be reached: before the rig, whose
    engines see what images this machine has when they start."""
    stack = images.DEFAULT_STACK
    made = MPI.format(parent=images.local("vllm-cpu", stack))
    recipe.build(made, "--load", "--network=host", f"--tag={images.local('mpi-probe', stack)}")


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest) -> Iterator[rigs.Rig]:
    """Two hosts that hold this machine's images; nothing of them is left at the end."""
    why = rigs.missing() or next(
        (f"needs image {name} in this machine's Docker engine" for name in NEEDED
         if not rigs.held(name)), ""
    )  # fmt: skip
    if why:
        pytest.skip(why)
    if any("mpirun" in item.name for item in request.session.items):
        build_mpi()
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(rigs.up())
        except RuntimeError as error:  # what the kernel or a container around us does not allow
            pytest.skip(f"two hosts cannot be had here: {error}")
        yield found
    assert rigs.strays() == []
