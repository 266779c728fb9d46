"""A redacted drop names nothing of its machine and is judged as the drop was."""

import gzip
import json
from pathlib import Path

import drops
import msgspec
import pytest
import zstandard

from lanekit import cli, paths, redact
from lanekit import drop as drop_module
from lanekit.errors import ConfigError, LaneError, Unreadable
from lanekit.verdict import Verdict
from lanekit.verify import verify

pytestmark = pytest.mark.usefixtures("known_lanes")

SECRETS = (
    "ip-10-0-0-1", "ip-10-0-0-2", "10.0.0.1", "fe80::1ff:fe23", "123456789012",
    "hf_abcdefghijklmnopqrst", "AKIAABCDEFGHIJKLMNOP", "ghp_abcdefghijklmnopqrstuvwxyz",
    "opensesame1", "/home/ann", "/fsx/ann", "i-0123456789abcdef0", "hunter2x",
)  # fmt: skip
LINES = (
    "ip-10-0-0-1:7000:7000 [0] NCCL INFO NET/Socket : Using [0]e1:10.0.0.1<0> fe80::1ff:fe23%e1",
    "\x1b[36mfetching arn:aws:iam::123456789012:role/x with Bearer opensesame1\x1b[0m",
    "HF_TOKEN=hf_abcdefghijklmnopqrst AKIAABCDEFGHIJKLMNOP ghp_abcdefghijklmnopqrstuvwxyz",
    "loading /home/ann/models/tiny from /fsx/ann/x on i-0123456789abcdef0 password=hunter2x",
    "->1->0ip-10-0-0-2:7001:7001 [1] NCCL INFO Channel 00",
)


def outcomes(found: Verdict) -> list[tuple[str, str]]:
    return [(c.id, c.outcome) for c in found.checks]


def everything(root: Path) -> str:
    names = [str(p.relative_to(root)) for p in root.rglob("*")]
    return "\n".join([*names, *(p.read_text() for p in root.rglob("*") if p.is_file())])


def two_hosts(root: Path, name: str = "v2-efa-proxy") -> Path:
    drop = drops.drop(root, name, lambda lines: [lines[0], *LINES, *lines[1:]])
    drops.edit_json(drop / "host" / "ip-10-0-0-1.json", host="ip-10-0-0-1")
    found = json.loads((drop / "manifest.json").read_text())
    found["environment"] = {"HOME": "/home/ann", "X": "/lab7/ann/x"}
    (drop / "manifest.json").write_text(json.dumps(found))
    return drops.seal(drop)


@pytest.mark.parametrize("name", sorted(drops.SUBJECTS))
def test_every_verdict_stays(tmp_path: Path, name: str) -> None:
    drop = drops.drop(tmp_path / "drop", name)
    redact.redact(drop, tmp_path / "out")
    before, after = verify(drop), verify(tmp_path / "out")
    assert (before.result, outcomes(before)) == (after.result, outcomes(after))


def test_names_are_gone_and_ranks_stay(tmp_path: Path) -> None:
    drop = two_hosts(tmp_path / "drop")
    before = everything(drop)
    assert all(word in before for word in SECRETS)
    redact.redact(drop, tmp_path / "out")
    after = everything(tmp_path / "out")
    assert [word for word in (*SECRETS, "lab7", "/ann") if word in after] == []
    found = verify(tmp_path / "out")
    assert found.result == verify(drop).result == "proven"
    assert outcomes(found) == outcomes(verify(drop))
    assert (tmp_path / "out" / "logs" / "host-1-server.log").is_file()
    assert "host-2:7001:7001 [1] NCCL INFO" in after
    assert everything(drop) == before
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["redacted"] is True
    assert [host["name"] for host in manifest["plan"]["hosts"]] == ["host-1", "host-2"]
    assert "logs/host-1-server.log" in manifest["files"]


def test_the_same_word_is_the_same_everywhere_and_figures_are_left() -> None:
    words = redact.Words([b"gpu-b", b"gpu-a", b"gpu-b.lab.org"], [])
    assert words.replace(b"gpu-a gpu-b.lab.org 10.0.0.9 10.0.0.8 10.0.0.9") == (
        b"host-1 host-2.example 198.18.0.1 198.18.0.2 198.18.0.1"
    )
    assert words.replace(b"https://ann:secret9@x.org") == b"https://redacted-1@x.org"
    assert words.replace(b"/home/ann/x.py /home/ann/y.py") == b"/d1/d2/x.py /d1/d2/y.py"
    kept = (
        b"127.0.0.1 0.0.0.0 ::1 POST /v1/completions torch==2.11.0.1 12:13:14 0.123456789012 "
        b"c10::Error http://work/x"
    )
    assert words.replace(kept) == kept
    assert words.replace(b'{"rdma_write_bytes":123456789012,"a":1}', data=True).count(b"3456") == 1
    assert words.replace(b'{"account":"123456789012"}', data=True) == b'{"account":"000000000001"}'
    assert words.replace(rb'{"failure":"x\n/home/ann/a\n10.0.0.9"}') == (
        rb'{"failure":"x\n/d1/d2/d3\n198.18.0.1"}'
    )


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_log_that_was_packed_after_the_run_is_still_the_sealed_one(
    tmp_path: Path, suffix: str
) -> None:
    drop = two_hosts(tmp_path / "drop")
    log = drop / "logs" / "ip-10-0-0-1-server.log"
    packed = gzip.compress if suffix == ".gz" else zstandard.compress
    log.with_name(log.name + suffix).write_bytes(packed(log.read_bytes()))
    log.unlink()
    redact.redact(drop, tmp_path / "out")
    assert verify(drop).result == verify(tmp_path / "out").result == "proven"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_logs_stay_packed(tmp_path: Path, suffix: str) -> None:
    drop = two_hosts(tmp_path / "drop")
    log = drop / "logs" / "ip-10-0-0-1-server.log"
    content, log_bytes = log.read_bytes(), log.with_name(log.name + suffix)
    packed = gzip.compress(content) if suffix == ".gz" else zstandard.compress(content)
    log_bytes.write_bytes(packed)
    log.unlink()
    drops.seal(drop)
    redact.redact(drop, tmp_path / "out")
    out = (tmp_path / "out" / "logs" / f"host-1-server.log{suffix}").read_bytes()
    plain = gzip.decompress(out) if suffix == ".gz" else zstandard.ZstdDecompressor().stream_reader(
        out
    ).read()  # fmt: skip
    assert b"host-2:7001:7001 [1]" in plain
    assert [word for word in SECRETS if word.encode() in plain] == []
    assert verify(tmp_path / "out").result == "proven"


def test_an_edited_file_stays_refuted(tmp_path: Path) -> None:
    drop = two_hosts(tmp_path / "drop")
    with (drop / "logs" / "ip-10-0-0-1-server.log").open("a") as stream:
        stream.write("one line more\n")
    redact.redact(drop, tmp_path / "out")
    assert verify(tmp_path / "out").reason == verify(drop).reason == "failed: files"


def test_an_incomplete_drop_can_be_redacted(tmp_path: Path) -> None:
    drop = two_hosts(tmp_path / "drop")
    drops.edit_json(drop / "manifest.json", state="failed", files={}, failure="at /home/ann/x")
    redact.redact(drop, tmp_path / "out")
    assert "failed: at /d" in verify(tmp_path / "out").reason
    assert msgspec.json.decode((tmp_path / "out" / "manifest.json").read_bytes())["files"] == {}


@drops.needs_published
def test_the_published_drop_keeps_its_verdict(tmp_path: Path) -> None:
    source = drops.PUBLISHED / "trtllm-deepep-dropin-20260707" / "trtllm-native-seam"
    redact.redact(source, tmp_path / "out")
    found = verify(tmp_path / "out", lane="trtllm", arm="seam", profile="p5en-x2")
    assert outcomes(found) == outcomes(verify(source))
    assert found.result == "proven"


def test_the_reserve_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    source = two_hosts(tmp_path / "drop")
    drops.edit_json(source / "manifest.json", state="sweeping", files={})
    (source / drop_module.RESERVE).write_bytes(b"\0" * 65536)
    redact.redact(source, tmp_path / "out")
    assert not (tmp_path / "out" / drop_module.RESERVE).exists()
    assert "incomplete" in verify(tmp_path / "out").reason


def test_a_drop_that_is_excused_by_its_bytes_cannot_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own of 2026-11-30, older than a check: what is said is not that a word is at fault."""
    monkeypatch.setattr(paths, "LANES", paths.ROOT / "lanes")
    source = paths.ROOT / "results" / "20261130T154304Z-h200x2-vllm-dense"
    with pytest.raises(LaneError, match="proven became no verdict") as caught:
        redact.redact(source, tmp_path / "out")
    assert "older.toml excuses this drop" in caught.value.remedy


def test_nothing_is_left_when_it_cannot_be_done(tmp_path: Path) -> None:
    drop = two_hosts(tmp_path / "drop")
    for out in (drop, drop / "in", tmp_path):
        with pytest.raises(ConfigError, match="exists, or lies in the drop"):
            redact.redact(drop, out)
    (drop / "core.bin").write_bytes(b"\0\1")
    with pytest.raises(Unreadable, match="binary"):
        redact.redact(drop, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["drop"]


def test_a_verdict_that_would_change_is_not_written(tmp_path: Path) -> None:
    """A host named like a word of the evidence: replacing it would take the evidence away."""
    drop = two_hosts(tmp_path / "drop")
    drops.edit_json(drop / "host" / "ip-10-0-0-1.json", hostname="Libfabric")
    drops.seal(drop)
    with pytest.raises(LaneError, match="verdict would change"):
        redact.redact(drop, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["drop"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drop = two_hosts(tmp_path / "drop")
    assert cli.main(["redact", str(drop), "--out", str(tmp_path / "out")]) == 0
    assert cli.main(["redact", str(drop), "--out", str(tmp_path / "out")]) == 2
    assert "never edited in place" in capsys.readouterr().err
    assert redact.beside(drop) == tmp_path / "redacted" / "drop"
