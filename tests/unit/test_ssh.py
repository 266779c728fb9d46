"""One connection a host: what it says when there is none. Real connections are in tests/hosts."""

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import psutil
import pytest

from lanekit import ssh
from lanekit.errors import ConfigError, HostLost
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
def test_a_key_pair_leaves_nothing_behind_and_is_another_each_time(tmp_path: Path) -> None:
    files = []
    for _ in range(2):
        with tarfile.open(fileobj=io.BytesIO(ssh.keys(tmp_path))) as tar:
            assert tar.getnames() == ["id_rsa", "authorized_keys", "known_hosts"]  # the last tells
            assert {member.mode for member in tar} == {0o600}
            files.append([tar.extractfile(name).read() for name in tar.getnames()])  # type: ignore[union-attr]
        assert list(tmp_path.iterdir()) == []
    (private, public, known), other = files
    assert b"PRIVATE KEY" in private
    assert known == b"* " + public
    assert other[0] != private
    (tmp_path / "key").write_bytes(private)
    (tmp_path / "key").chmod(0o600)
    ask = ["ssh-keygen", "-y", "-f", str(tmp_path / "key")]
    assert (
        subprocess.run(ask, capture_output=True, check=True).stdout.split()[:2]
        == (public.split()[:2])
    )


def test_a_machine_without_ssh_keygen_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="ssh-keygen makes no key") as error:
        ssh.keys(tmp_path)
    assert "openssh-client" in error.value.remedy


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
