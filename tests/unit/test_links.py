"""Every relative link of the documents leads to a file that a clone has."""

import re
import subprocess
from pathlib import Path

import pytest

from lanekit import paths

ROOT = paths.ROOT.resolve()
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


def tracked() -> set[str]:
    ask = ["git", "-C", str(ROOT), "ls-files", "-z"]
    return set(filter(None, subprocess.check_output(ask, text=True).split("\0")))


def dead(text: str, folder: Path, have: set[str]) -> list[str]:
    """The targets that are no tracked file and no folder of one."""
    places = {ROOT / name for name in have}
    places |= {parent for place in places for parent in place.parents if parent != ROOT.parent}
    return [
        target
        for target in LINK.findall(text)
        if not (place := (folder / target).resolve()).is_relative_to(ROOT) or place not in places
    ]


def test_links_lead_to_what_a_clone_has() -> None:
    have = tracked()
    documents = [ROOT / name for name in sorted(have) if name.endswith(".md")]
    assert len(documents) > 20
    found = {str(path): dead(path.read_text(), path.parent, have) for path in documents}
    assert {path: targets for path, targets in found.items() if targets} == {}


@pytest.mark.parametrize("target", ["nosuch.md", "results/2026-nosuch/x.txt", "../out.md"])
def test_a_link_to_nothing_is_found(target: str) -> None:
    text = f"[x]({target}) [site](https://example.invalid/a) [part](#part) [all](lanes#arms)"
    assert dead(text, ROOT, tracked()) == [target]
