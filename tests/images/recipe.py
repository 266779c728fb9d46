"""A recipe of a test's own, built."""

import subprocess
import tempfile
from pathlib import Path


def build(
    recipe: str, *options: str, context: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """What `docker buildx build` says of a recipe, with `context` to copy from, or nothing.

    From a file: one that buildx reads on its standard input it writes into a folder in TMPDIR, with
    an empty one for the context, and removes neither (0.13.1, 2026-12-01).
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "Dockerfile"
        file.write_text(recipe)
        command = ["docker", "buildx", "build", "--progress=plain", f"--file={file}", *options]
        return subprocess.run(
            [*command, str(context or folder)], capture_output=True, text=True, check=False
        )
