"""Logs as they come: rotated, split, packed, interleaved, and the ranks that printed them."""

import gzip
import io
import os
from collections.abc import Callable
from pathlib import Path

import drops
import pytest
import zstandard

from lanekit import contract, judge, logs, prefix, ranks, scan, spec
from lanekit.errors import Unreadable
from lanekit.verdict import Check

P5EN = spec.profile("p5en-x2")


def checks(root: Path, name: str) -> dict[str, Check]:
    """The transport checks of a folder of logs."""
    rules = contract.bound(contract.load(name))
    profile = spec.profile(drops.SUBJECTS[name][2])
    found = logs.find(root, list(logs.inside(root)), ours=False)
    read = logs.read(found, rules, profile.ranks)
    facts = judge.Facts(profile, 8, "0.24.0", "tiny", drops.VERSIONS, options=drops.OPTIONS)
    return {x.id: x for x in judge.transport(rules, read, facts)}


def outcomes(root: Path, name: str) -> set[str]:
    return {x.outcome for x in checks(root, name).values() if x.severity == "required"}


def text(name: str) -> list[str]:
    return drops.log(name)


def joined(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()


def test_packed_logs(tmp_path: Path) -> None:
    for suffix, pack in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        folder = tmp_path / suffix
        folder.mkdir()
        (folder / f"serve.log{suffix}").write_bytes(pack(joined(text("v2-efa-proxy"))))
        found = checks(folder, "v2-efa-proxy")
        assert {x.outcome for x in found.values() if x.severity == "required"} == {"met"}
        first = found["efa-provider"].first
        assert first is not None
        assert PROVIDER in text("v2-efa-proxy")[first.line - 1]


PROVIDER = "Selected provider is"


def test_two_zst_frames_are_one_log(tmp_path: Path) -> None:
    lines = text("v2-efa-proxy")
    frames = zstandard.compress(joined(lines[:40])) + zstandard.compress(joined(lines[40:]))
    (tmp_path / "serve.log.zst").write_bytes(frames)
    assert outcomes(tmp_path, "v2-efa-proxy") == {"met"}


def test_a_rotated_log_is_one_log_and_its_oldest_part_comes_first(tmp_path: Path) -> None:
    lines = text("v2-efa-proxy")
    posts = next(n for n, line in enumerate(lines) if "POST" in line)
    (tmp_path / "serve.log").write_bytes(joined(lines[posts:]))
    (tmp_path / "serve.log.1").write_bytes(joined(lines[60:posts]))
    (tmp_path / "serve.log.2.gz").write_bytes(gzip.compress(joined(lines[:60])))
    assert outcomes(tmp_path, "v2-efa-proxy") == {"met"}


def test_evidence_in_a_part_after_the_first_request_comes_too_late(tmp_path: Path) -> None:
    lines = text("v2-efa-proxy")
    hooks = [x for x in lines if "[lane-evidence]" in x]
    (tmp_path / "serve.log.1").write_bytes(joined([x for x in lines if x not in hooks]))
    (tmp_path / "serve.log").write_bytes(joined(hooks))
    assert checks(tmp_path, "v2-efa-proxy")["elastic-proxy"].outcome == "failed"


def test_a_split_log_runs_forwards(tmp_path: Path) -> None:
    lines = text("v2-efa-proxy")
    (tmp_path / "serve.log.00").write_bytes(joined(lines[:60]))
    (tmp_path / "serve.log.01").write_bytes(joined(lines[60:]))
    assert outcomes(tmp_path, "v2-efa-proxy") == {"met"}


def test_a_log_of_each_host_together_make_the_evidence(tmp_path: Path) -> None:
    lines = text("v2-efa-proxy")
    for host in ("ip-10-0-0-1", "ip-10-0-0-2"):
        (tmp_path / f"{host}.log").write_bytes(joined([x for x in lines if host in x]))
    assert outcomes(tmp_path, "v2-efa-proxy") == {"met"}
    (tmp_path / "ip-10-0-0-2.log").unlink()
    found = checks(tmp_path, "v2-efa-proxy")["efa-provider"]
    assert (found.outcome, found.actual) == ("failed", "8 of 16 ranks")
    assert found.missing == ("1 more host [0], [1], [2], [3], [4], [5], [6], [7]",)


# The head of a line that was cut at the end of NCCL's buffer, as in results/20261130T132456Z.
TORN = "ip-10-0-0-1:7009:7009 [1] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->1->0"


@pytest.mark.parametrize(
    "relay",
    [
        lambda line: line.replace("\n", "\r\n"),
        lambda line: f"server-1  | {line}",
        lambda line: f"[pod/lane-0/vllm] {line}",
        lambda line: f"[1,3]<stdout>:{line}",
        lambda line: f"2026-11-30T11:00:00.1Z {line}",
        lambda line: f"\x1b[32m{line}\x1b[0m",
        lambda line: f"{line}\r",
        lambda line: f"\0\0{line}\0",
        lambda line: f"{line}\udcff\udcfe",
        lambda line: f"{TORN}{line}",
        lambda line: f"{line} {line}",
        lambda line: f"Capturing CUDA graphs: 14%|#4 | 1/7 [00:01<00:09]\r{line}",
        lambda line: f"[2026-11-30 11:05:44 DP1 TP1 EP1] {line}",
        lambda line: f"2026-11-30T11:00:00.1Z stderr F {line}",
        lambda line: f"(MegatronPolicyWorker[rank=3] pid=7003, ip=10.0.0.9) {line}",
    ],
)
def test_relayed_and_damaged_lines_still_prove(tmp_path: Path, relay: drops.Edit) -> None:
    lines = [str(relay(line)) for line in text("v2-efa-proxy")]  # type: ignore[arg-type]
    (tmp_path / "serve.log").write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    assert outcomes(tmp_path, "v2-efa-proxy") == {"met"}


def test_a_host_name_glued_to_a_torn_line_is_the_host(tmp_path: Path) -> None:
    lines = text("v2-efa-proxy")
    at = next(n for n, line in enumerate(lines) if PROVIDER in line)
    lines[at] = f"{TORN}{lines[at]}"
    (tmp_path / "serve.log").write_bytes(joined(lines))
    assert checks(tmp_path, "v2-efa-proxy")["efa-provider"].actual == "16 of 16 ranks"


def test_hosts_whose_names_end_alike_stay_two() -> None:
    keys = {ranks.Key(host, i) for host in ("w1", "gw1") for i in range(8)}
    assert ranks.untorn(keys, 2) == keys


def test_names_beyond_any_fleet_are_not_compared_with_each_other() -> None:
    keys = {ranks.Key(f"h{n}", 0) for n in range(8000)} | {ranks.Key("0h1", 0)}
    assert ranks.untorn(keys, 1) == keys


@pytest.mark.parametrize("flood", ["Selected provider is efa, fabric is x{} (found 1 nics)", "x{}"])
def test_a_forbidden_line_behind_a_flood_is_still_found(
    tmp_path: Path, flood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evidence is kept up to a limit; what comes after it is said, not forgotten."""
    monkeypatch.setattr(scan, "GROUPS", 100)
    lines = text("v2-efa-proxy")
    extra = [drops.nccl("ip-10-0-0-1", 0, f"NET/OFI {flood.format(n)}") for n in range(200)]
    bad = drops.nccl("ip-10-0-0-1", 3, "Using network Socket")
    (tmp_path / "serve.log").write_bytes(joined([*lines, *extra, bad]))
    assert checks(tmp_path, "v2-efa-proxy")["net-fallback"].outcome == "failed"


def test_xtrace_and_our_own_output_never_count(tmp_path: Path) -> None:
    lines = ["+ " + line for line in text("v2-efa-proxy")]
    (tmp_path / "serve.log").write_bytes(joined(lines))
    found = checks(tmp_path, "v2-efa-proxy")
    for name in ("efa-provider", "gin-plugin-proxy", "gin-device-comm", "elastic-proxy"):
        assert (found[name].outcome, found[name].actual) == ("unchecked", "no such line")


@pytest.mark.parametrize(
    "quote",
    [
        lambda line: f"Received request cmpl-1: prompt: 'x {line}', params: n=1",
        lambda line: f'{{"prompt": "{line}"}}',
        lambda line: f'{{"log":"{line}","stream":"stderr","time":"2026-11-30T11:00:00Z"}}',
        lambda line: f"[script:3] echo {line}",
        lambda line: f"13:00:00 + echo {line}",
        lambda line: f"+ echo '{line}'",
        lambda line: f"prompt-text | {line}",
        lambda line: f"INFO:  a - {line}",
        lambda line: f"1: {line}",
        lambda line: f"say-1 hello {line}",
        lambda line: f"Received request prompt: '\r{line}'",
        lambda line: f"server-1  | ++ echo {line}",
        lambda line: f"{TORN} '{line}",
        lambda line: f"{TORN} {{{line}",
        lambda line: f"torn -1->1->0 {line}",
        lambda line: f"\udcff{line}",
        lambda line: f"+ echo 'once\n{line}\nand again'",
        lambda line: f"server-1  | + printf 'a\nserver-1  | {line}\nserver-1  | '",
        lambda line: f"+ echo 'it'\\''s\n{line}'",
    ],
)
def test_a_line_that_another_quotes_says_nothing(tmp_path: Path, quote: drops.Edit) -> None:
    lines = [str(quote(line)) for line in text("v2-efa-proxy")]  # type: ignore[arg-type]
    (tmp_path / "serve.log").write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    found = checks(tmp_path, "v2-efa-proxy")
    for name, x in found.items():
        if x.severity == "required" and contract.rules()[name].needs not in ("none", "any"):
            assert (x.outcome != "met", x.first) == (True, None), name


def test_the_hook_s_line_in_a_sentence_of_nccl_s_says_nothing(tmp_path: Path) -> None:
    said = drops.nccl("ip-10-0-0-1", 0, "user said ")
    lines = [said + x if x.startswith("[lane-") else x for x in text("v2-efa-proxy")]
    lines = [said + x.partition(") ")[2] if ") [lane-" in x else x for x in lines]
    (tmp_path / "serve.log").write_bytes(joined(lines))
    assert "unchecked" in outcomes(tmp_path, "v2-efa-proxy") | {"failed"}
    assert outcomes(tmp_path, "v2-efa-proxy") != {"met"}


@pytest.mark.parametrize(
    "echo", ["+ echo 'done'\n", "+ echo 'it'\\''s'\n", "+ echo '\nended'\nit's said\n", "1 + 1 '\n"]
)
def test_a_line_after_an_echo_that_has_ended_counts(tmp_path: Path, echo: str) -> None:
    data = "".join(f"{echo}{line}\n" for line in text("v2-efa-proxy"))
    (tmp_path / "serve.log").write_text(data)
    assert outcomes(tmp_path, "v2-efa-proxy") == {"met"}


@pytest.mark.parametrize(
    "quote", [lambda x: f"+ {x}", lambda x: f"[1,3]<stdout>:+ echo {x}", lambda x: f"prompt: '{x}'"]
)
@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (drops.nccl("ip-10-0-0-1", 3, "Using network Socket"), "net-fallback"),
        (drops.hook("ip-10-0-0-1", 3, 3, 16, **drops.LEGACY), "no-legacy-buffer"),
    ],
)
def test_nothing_hides_a_forbidden_line(
    tmp_path: Path, quote: Callable[[str], str], line: str, rule: str
) -> None:
    (tmp_path / "serve.log").write_bytes(joined([*text("v2-efa-proxy"), quote(line)]))
    assert checks(tmp_path, "v2-efa-proxy")[rule].outcome == "failed"


NOBODY = prefix.Prefix()


def evidence(source: prefix.Prefix = NOBODY, **values: str) -> scan.Evidence:
    mark = scan.Mark(0, 0)
    return scan.Evidence("x", tuple(values.items()), source, 1, mark, mark)


def known() -> ranks.Identities:
    """Two hosts; the second's rank 9 is its GPU 1, as NCCL's line on the whole fleet says."""
    lines = [
        evidence(host="a", pid="70", rank="0", local="0", world="16"),
        evidence(host="b", pid="71", rank="9", local="1", world="16"),
        evidence(host="b", pid="71", rank="1", local="0", world="2"),  # a smaller communicator
    ]
    return ranks.join(lines, 16)


@pytest.mark.parametrize(
    ("found", "key"),
    [
        (evidence(host="b", pid="71", local="0"), ranks.Key("b", 1)),  # a proxy thread says [0]
        (evidence(host="b.ec2.internal", pid="71", local="0"), ranks.Key("b", 1)),
        (evidence(host="b", pid="99", local="3"), ranks.Key("b", 3)),
        (evidence(rank="9"), ranks.Key("b", 1)),
        (evidence(prefix.Prefix(rank="9")), ranks.Key("b", 1)),
        (evidence(prefix.Prefix(pid="71")), ranks.Key("b", 1)),
        (evidence(prefix.Prefix(label="b"), local="4"), ranks.Key("b", 4)),
        (evidence(local="4"), ranks.Key("filehost", 4)),
        (evidence(rank="5"), None),
        (evidence(), None),
    ],
)
def test_who_printed_a_line(found: scan.Evidence, key: ranks.Key | None) -> None:
    assert ranks.key(found, known(), "filehost") == key


def test_contradictory_identities_are_dropped() -> None:
    lines = [
        evidence(host="a", pid="70", rank="0", local="0", world="16"),
        evidence(host="a", pid="70", rank="0", local="5", world="16"),
    ]
    assert ranks.join(lines, 16).by_pid == {}


@pytest.mark.parametrize(
    ("seen", "missing", "extra"),
    [
        ([("a", i) for i in range(8)] + [("b", i) for i in range(8)], [], []),
        ([("a", i) for i in range(8)] + [("b", i) for i in range(7)], ["b [7]"], []),
        ([("a", i) for i in range(9)] + [("b", i) for i in range(8)], [], ["a [8]"]),
        (
            [(h, i) for h in "abc" for i in range(8)], [], ["3 hosts where 2 were expected"],
        ),
    ],
)  # fmt: skip
def test_missing_and_unexpected_ranks_are_named(
    seen: list[tuple[str, int]], missing: list[str], extra: list[str]
) -> None:
    assert ranks.compare([ranks.Key(*x) for x in seen], P5EN) == (missing, extra)


def test_aiperf_s_own_logs_are_not_serve_logs(tmp_path: Path) -> None:
    drops.aiperf(tmp_path / "c4")
    (tmp_path / "c4" / "logs").mkdir()
    for name in ("c4/logs/aiperf.log", "t7_aiperf.log", "serve.log", "notes.md"):
        (tmp_path / name).write_text("x\n")
    found = logs.find(tmp_path, list(logs.inside(tmp_path)), ours=False)
    assert [x.name for x in found] == ["serve.log"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_decompression_bomb_is_refused(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "BOMB_ALLOWANCE", 8 << 20)
    zeros = b"\0" * (64 << 20)
    packed = gzip.compress(zeros) if suffix == ".gz" else zstandard.compress(zeros)
    (tmp_path / f"serve.log{suffix}").write_bytes(packed)
    with pytest.raises(Unreadable, match=r"unpacks to more than (8|14) MiB"):
        checks(tmp_path, "cpu")


def test_packed_logs_share_what_they_may_unpack_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "BOMB_ALLOWANCE", 8 << 20)
    for number in range(16):
        (tmp_path / f"{number}.log.gz").write_bytes(gzip.compress(b"\n" * (4 << 20)))
    with pytest.raises(Unreadable, match="unpacks to more than 0 MiB"):
        checks(tmp_path, "cpu")


def test_of_a_log_s_ends_its_times_alone_are_kept(tmp_path: Path) -> None:
    lines = [drops.BEGIN, "x" * 60_000, drops.END, "y" * 60_000]
    (tmp_path / "serve.log").write_bytes(joined(lines))
    read = logs.read(logs.find(tmp_path, list(logs.inside(tmp_path)), ours=False), (), 1)
    head, tail = read.ends[0]
    assert head == b" INFO 11-30 11:00:00 [\n INFO 11-30 11:12:00 ["
    assert len(tail) < 100


def test_a_folder_of_too_many_logs_is_refused(tmp_path: Path) -> None:
    for number in range(logs.LOGS + 1):
        (tmp_path / f"{number}.log").touch()
    with pytest.raises(Unreadable, match="more than 1024"):
        checks(tmp_path, "cpu")


@pytest.mark.parametrize(
    ("suffix", "packed"),
    [
        (".gz", gzip.compress(os.urandom(100_000))[:-2000]),
        (".gz", b"not packed at all\n"),
        (".zst", zstandard.compress(os.urandom(100_000))[:-2000] + b"x"),
        (".zst", b"not packed at all\n"),
    ],
)
def test_a_torn_archive_is_unreadable(tmp_path: Path, suffix: str, packed: bytes) -> None:
    (tmp_path / f"serve.log{suffix}").write_bytes(packed)
    with pytest.raises(Unreadable):
        checks(tmp_path, "cpu")


def test_line_numbers_after_compression_and_ansi() -> None:
    data = b"\n" * 5000 + b"\x1b[1mprovider is efa\x1b[0m\n" + b"\n" * 5000 + b"provider is efa"
    probe = scan.probe("p", "provider is ")
    found = scan.scan(io.BytesIO(data), [probe], block=512)
    (one,) = found.evidence.values()
    numbers = scan.line_numbers(io.BytesIO(data), [one.first, one.last], block=700)
    assert (numbers[one.first], numbers[one.last]) == (5001, 10002)


def test_members_of_gzip_follow_one_another_empty_torn_or_padded(tmp_path: Path) -> None:
    path = tmp_path / "serve.log.gz"
    nothing, one, two = gzip.compress(b""), gzip.compress(b"one\n"), gzip.compress(b"two\n")
    path.write_bytes(nothing * 20_000 + one + nothing + two + b"\0" * 9000)
    with logs.opened(path) as stream:
        assert stream.read() == b"one\ntwo\n"
    path.write_bytes(one + two[:-3])
    with pytest.raises(Unreadable, match="in the middle of a member"), logs.opened(path) as stream:
        stream.read()
