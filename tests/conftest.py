"""What every test stands under."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A scratch folder of the session's own, for the tests and for all that they start: what still
    lies in it at the end was left by a command of ours, whose users would find it in theirs.

    Hundreds of BuildKit's, AIPerf's and torchrun's lay in one machine's after a day (2026-12-01).
    """
    tmp_path_factory.getbasetemp()  # pytest's own stays where it keeps those of the last sessions
    with pytest.MonkeyPatch.context() as patch:
        folder = tempfile.mkdtemp(prefix="t-")  # short: a socket's path may hold 107 bytes
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
    left = sorted(path.name for path in Path(folder).iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"left in TMPDIR: {', '.join(left)}"
