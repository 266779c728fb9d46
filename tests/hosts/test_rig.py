"""The rig itself: whatever ends it, nothing of it is left on this machine."""

import signal
import subprocess
import sys
import time

import pytest
from tests.hosts import rig

from lanekit import paths

pytestmark = pytest.mark.skipif(bool(why := rig.missing()), reason=why)
UP = """\
import sys
from tests.hosts import rig
with rig.up(links=False):
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rig_that_is_ended_from_outside_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """As `timeout` or a CI ends it: engines and SSH daemons are in sessions of their own."""
    with subprocess.Popen(
        [sys.executable, "-c", UP], cwd=paths.ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        if child.stdout.readline() != "up\n":
            pytest.skip(f"two hosts cannot be had here: {child.communicate()[1]}")
        child.send_signal(number)
        child.communicate()
    monkeypatch.setattr(rig, "OURS", f"lanes{child.pid}")
    deadline = time.monotonic() + 60  # the kernel takes cables of a deleted namespace in its time
    while (left := rig.strays()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
