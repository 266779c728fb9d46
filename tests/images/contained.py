"""An image run as a lane would run it."""

import subprocess
from typing import Final

from lanekit import images

EVERY: Final = "every image"


class Container:
    """Runs commands in an image as a lane would: no network, read-only root, no capability."""

    def __init__(self, name: str, stack: str) -> None:
        self.name = name
        self.reference = images.identify(name, stack)

    def run(self, *command: str, status: int = 0, **env: str) -> str:
        """What a command prints; fails with all of it when it ends otherwise."""
        ran = subprocess.run(
            [
                "docker", "run", "--rm", "--network=none", "--read-only", "--cap-drop=ALL",
                "--tmpfs=/tmp:exec", "--env=HOME=/tmp", *(f"--env={k}={v}" for k, v in env.items()),
                f"--volume={images.IMAGES / 'guard'}:/guard:ro", self.reference, *command,
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = ran.stdout + ran.stderr
        assert ran.returncode == status, f"{command} ended with {ran.returncode}:\n{said}"
        return said
