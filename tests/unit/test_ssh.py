"""One connection a host: what it says when there is none. Real connections are in tests/hosts."""

import os
import shutil
from pathlib import Path

import psutil
import pytest

from lanekit import ssh
from lanekit.errors import HostLost
from lanekit.plan import Host

HERE = Host("here", "127.0.0.1", "leader", 0, 0, 1)
NOBODY = Host("b", "127.0.0.1", "worker", 1, 8, 8, ssh="127.0.0.1:1")
needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs an SSH client")


def line(host: Host, place: Path) -> ssh.Line:
    return ssh.Line(host, place, os.environ)


def test_this_machine_needs_no_connection(tmp_path: Path) -> None:
    here = line(HERE, tmp_path)
    assert here.run("echo yes") == "yes\n"
    assert here.alive
    here.require()
    here.close()


def test_a_command_that_fails_says_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(HostLost, match="no such thing"):
        line(HERE, tmp_path).run("echo no such thing >&2; exit 3")


@needs_ssh
def test_a_host_where_nobody_answers_is_named_with_its_ranks(tmp_path: Path) -> None:
    lost = line(NOBODY, tmp_path)
    with pytest.raises(HostLost, match=r"host b \(ranks 8-15\) cannot be reached: .*refused") as it:
        lost.open(0)
    assert "ssh 127.0.0.1:1 true" in it.value.remedy
    lost.close()
    assert lost.process is not None
    assert not psutil.pid_exists(lost.process.pid)


def test_all_hosts_are_asked_at_once_and_the_first_ones_error_is_raised(tmp_path: Path) -> None:
    lines = [line(HERE, tmp_path), line(NOBODY, tmp_path), line(NOBODY, tmp_path)]
    asked: list[ssh.Line] = []

    def ask(each: ssh.Line) -> None:
        asked.append(each)
        if each.host is NOBODY:
            raise HostLost(f"number {lines.index(each)}")

    with pytest.raises(HostLost, match="number 1"):
        ssh.everywhere(lines, ask)
    assert len(asked) == 3
