"""Logs of several hosts as one stream: every line once, with its host and ranks."""

import gzip
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zstandard

from lanekit import cli, drop, follow
from lanekit.errors import Unreadable
from lanekit.manifest import Manifest, Row
from lanekit.plan import Host


def write(root: Path, state: str) -> None:
    hosts = [Host("a", "10.0.0.1", "leader", 0, 0, 8), Host("b", "10.0.0.2", "worker", 1, 8, 8)]
    plan = {"hosts": msgspec.to_builtins(hosts)}
    made = Manifest(Row("l", "a", "p", ()), "s", state, "", plan, {}, {})  # type: ignore[arg-type]
    (root / "logs").mkdir(parents=True, exist_ok=True)
    (root / drop.MANIFEST).write_bytes(msgspec.json.encode(made))


def test_every_line_bears_its_host_and_ranks(tmp_path: Path) -> None:
    write(tmp_path, "complete")
    (tmp_path / "logs" / "a-server.log").write_bytes(b"one\ntwo\n")
    (tmp_path / "logs" / "b-server.log").write_bytes(b"\xff half")
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "b-warm.log").write_bytes(b"compiling\n")
    assert list(follow.stream(tmp_path, follow=False)) == [
        "b (ranks 8-15) warm | compiling",
        "a (ranks 0-7) server | one",
        "a (ranks 0-7) server | two",
        "b (ranks 8-15) server | \ufffd half",
    ]


def test_it_follows_until_the_run_has_ended_and_tears_no_line(tmp_path: Path) -> None:
    write(tmp_path, "sweeping")
    log = tmp_path / "logs" / "b-server.log"

    def run() -> None:
        with log.open("wb", buffering=0) as stream:
            for word in (b"first ", b"line\nsec", b"ond line\n"):
                stream.write(word)
                time.sleep(1.5 * follow.POLL_S)
        write(tmp_path, "complete")

    writer = threading.Thread(target=run)
    writer.start()
    seen = list(follow.stream(tmp_path, follow=True))
    writer.join()
    assert seen == ["b (ranks 8-15) server | first line", "b (ranks 8-15) server | second line"]


def test_what_is_no_drop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable):
        list(follow.stream(tmp_path, follow=False))
    assert cli.main(["logs", str(tmp_path)]) == 2


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_packed_log_is_shown_too(tmp_path: Path, packed: str) -> None:
    write(tmp_path, "complete")
    pack = gzip.compress if packed == ".gz" else zstandard.ZstdCompressor().compress
    (tmp_path / "logs" / f"a-server.log{packed}").write_bytes(pack(b"one\ntwo"))
    assert list(follow.stream(tmp_path, follow=True)) == [
        "a (ranks 0-7) server | one",
        "a (ranks 0-7) server | two",
    ]


def test_a_drop_without_a_line_says_how_its_run_ended(tmp_path: Path) -> None:
    write(tmp_path, "failed")
    (tmp_path / "logs" / "a-server.log").write_bytes(b"")
    with pytest.raises(Unreadable, match="no log holds a line; its run is failed"):
        list(follow.stream(tmp_path, follow=False))
