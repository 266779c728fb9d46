"""Coverage-guided fuzzing of what the verifier reads: logs, AIPerf's files, records, the manifest.

    pip install atheris && python tests/fuzz/fuzz_verify.py TARGET [-runs=N] [-max_total_time=S]

TARGET is scan, records, batch, manifest or verdict. Anything but a LaneError is a finding; so is a
verdict of "proven" for a drop whose log lacks a rank's evidence, whose plan its lane would not
make, or whose figures are not those it had. JSON is mutated as a document, since bytes hardly ever
stay JSON.

Run on 2026-11-30, one core, atheris 3.0: 1,827,642 inputs without a finding (records 883,262, batch
396,554, verdict 331,631, scan 154,255, manifest 61,940), while the verifier grew stricter.
"""

import functools
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
with atheris.instrument_imports(include=["lanekit"]):
    import drops

    from lanekit import (
        batch,
        case,
        contract,
        exchanges,
        judge,
        load,
        logs,
        micro,
        paths,
        prefix,
        ranks,
        records,
        render,
        scan,
        spec,
        training,
    )
    from lanekit.errors import LaneError
    from lanekit.plan import Plan
    from lanekit.verdict import Verdict, decide

SHM = "/dev/shm" if os.path.isdir("/dev/shm") else None
ROOT = Path(tempfile.mkdtemp(prefix="fuzz-", dir=SHM))
RULES = contract.bound(contract.load("v2-efa-proxy"))
PROBES = [*map(logs.probe, RULES), *ranks.JOINS, logs.FIRST_REQUEST]
P5EN = spec.profile("p5en-x2")
GOOD = [line.encode() for line in drops.log("v2-efa-proxy")]
QUOTING = [b"+ echo '", b"+ ", b"prompt: '", b"{", b"server-1  | ", b"(Worker pid=7003) ", b"a\r",
           b"ip-10-0-0-1:7001:7001 [1] NCCL INFO commId 0x62f"]  # fmt: skip
ODD: list[Any] = [
    None, "", 0, -1, 1, 1e308, -0.0, 1 << 63, 1 << 70, True, [], {}, [[]], {"avg": None}, "x" * 300,
    "../../etc/passwd", "\0", {"value": -5}, [{"name": 3}], "complete", "cpu", "v2-efa-proxy",
]  # fmt: skip


@functools.cache
def engine(literals: tuple[bytes, ...], kind: type[Any]) -> scan.Finder:
    """Compiled once: compiling takes far longer than reading a small input."""
    made: scan.Finder = kind(literals) if literals else scan.PythonFinder(())
    return made


def hyperscan(literals: Sequence[bytes]) -> scan.Finder:
    """The fast finder."""
    return engine(tuple(literals), scan.HyperscanFinder)


def plain(literals: Sequence[bytes]) -> scan.Finder:
    """The one without a library."""
    return engine(tuple(literals), scan.PythonFinder)


def lines(data: bytes) -> bytes:
    """A log made of good lines, whole, cut or joined, and of the input's own bytes."""
    feed = atheris.FuzzedDataProvider(data)
    parts: list[bytes] = []
    while feed.remaining_bytes() and len(parts) < 60:
        line = feed.PickValueInList(GOOD)
        choice = feed.ConsumeIntInRange(0, 7)
        if choice == 0:
            line = line[feed.ConsumeIntInRange(0, len(line)) :]
        elif choice == 1:
            line = line[: feed.ConsumeIntInRange(0, len(line))]
        elif choice == 2:
            line = feed.ConsumeBytes(40)
        elif choice == 3:
            line = feed.PickValueInList(QUOTING) + line
        parts.append(
            line + feed.PickValueInList([b"\n", b"\n", b"\n", b"\r\n", b"", b"\0\n", b"\x1b[0m\n"])
        )
    return b"".join(parts)


def mutated(document: Any, feed: Any) -> Any:
    """A JSON document with one value somewhere in it replaced or removed."""
    if isinstance(document, dict) and document and feed.ConsumeIntInRange(0, 3):
        key = feed.PickValueInList(sorted(document))
        if feed.ConsumeIntInRange(0, 5) == 0:
            return {k: v for k, v in document.items() if k != key}
        return document | {key: mutated(document[key], feed)}
    if isinstance(document, list) and document and feed.ConsumeIntInRange(0, 3):
        at = feed.ConsumeIntInRange(0, len(document) - 1)
        return [*document[:at], mutated(document[at], feed), *document[at + 1 :]]
    return feed.PickValueInList(ODD)


def fuzz_scan(data: bytes) -> None:
    """Any bytes are read, and both engines see the same."""
    block = 64 << (data[0] % 8 if data else 0)
    for text in (data, lines(data)):
        seen = []
        for make in (plain, hyperscan):
            found = scan.scan(io.BytesIO(text), PROBES, block=block, make=make)
            marks = [m for x in found.evidence.values() for m in (x.first, x.last)]
            numbers = scan.line_numbers(io.BytesIO(text), marks, block=block)
            assert all(0 < n <= text.count(b"\n") + 1 for n in numbers.values())
            seen.append({k: (x.count, numbers[x.first]) for k, x in found.evidence.items()})
        assert seen[0] == seen[1]
    prefix.parse(data[:256])


def fuzz_records(data: bytes) -> None:
    """AIPerf's files: a good load point with values replaced, or with bytes at the end."""
    feed = atheris.FuzzedDataProvider(data)
    summary, rows = drops.summary(8, 4), [drops.record(n) for n in range(8)]
    for _ in range(feed.ConsumeIntInRange(0, 3)):
        summary = mutated(summary, feed)
    for _ in range(feed.ConsumeIntInRange(0, 3)):
        rows[feed.ConsumeIntInRange(0, 7)] = mutated(rows[0], feed)
    (ROOT / records.SUMMARY).write_text(json.dumps(summary))
    tail = feed.ConsumeBytes(20) if feed.ConsumeBool() else b""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (ROOT / records.RECORDS).write_bytes(text + tail)
    cell = records.read(ROOT)
    records.disagreements(cell)
    one = load.Load("c4", ".", cell, 4, 8, 120.0, 128.0, "0.10.0", "tiny")
    load.load([one], [])
    load.same_run([one], ENDS, None)


ENDS = [(drops.BEGIN.encode(), drops.END.encode())]


def fuzz_manifest(data: bytes) -> None:
    """The manifest of a good drop with values replaced: proven only if it still is that drop."""
    feed = atheris.FuzzedDataProvider(data)
    document = json.loads(MANIFEST)
    for _ in range(feed.ConsumeIntInRange(1, 3)):
        document = mutated(document, feed)
    (DROP / "manifest.json").write_text(json.dumps(document))
    found = case.ours(DROP, FILES, {"lane": None, "arm": None, "profile": None})
    if found.result == "proven":
        good = json.loads(MANIFEST)
        assert document["files"] == good["files"]
        assert document["state"] == "complete"
        plan, before = document["plan"], good["plan"]
        for part in ("contract", "lane", "arm", "profile", "engine", "driver"):
            assert plan[part] == before[part], part
        now, then = (msgspec.convert(x, Plan) for x in (plan, before))
        assert (now.services, now.cells) == (then.services, then.cells)


def fuzz_batch(data: bytes) -> None:
    """A cell of a program with values replaced: what meets every rule shows the same figures."""
    feed = atheris.FuzzedDataProvider(data)
    micro_too = feed.ConsumeBool()
    lines = [*(EXCHANGED if micro_too else TRAINED)]
    for _ in range(feed.ConsumeIntInRange(1, 3)):
        at = feed.ConsumeIntInRange(0, len(lines) - 1)
        lines[at] = mutated(lines[at], feed)
    path = ROOT / (micro.NAME if micro_too else training.NAME)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if micro_too:
        taken = batch.Taken(micro.read(path), COMMAND, PRINTED, RUN)
        checks = exchanges.judge({"c4": taken}, 2)
        now = shown(micro=tuple(micro.rows("c4", taken.records)))
    else:
        taken = batch.Taken(training.read(path), TRAIN, PRINTED, RUN)
        checks = training.judge({"c4": (training.NAME, taken)}, 2, arm="alltoall", nics=0)
        now = shown(steps=tuple(training.rows("c4", taken.records)))
    if all(x.outcome == "met" for x in checks if x.severity == "required"):
        assert now == (SHOWN_MICRO if micro_too else SHOWN_STEPS)


def shown(**rows: Any) -> str:
    """Rows as people see them."""
    return render.text(Verdict("d", "proven", "", **rows))


EXCHANGED = drops.exchanged(2)
TRAINED = drops.steps(2)
TABLE = [*drops.micro(ROOT / "good", EXCHANGED), *drops.told(TRAINED)]
PRINTED = batch.printed(io.BytesIO("\n".join(TABLE).encode()), ())
COMMAND = ("python", "/lanes/micro/ep_bench.py", "--out=x", *drops.MICRO)
TRAIN = ("python", "/lanes/megatron/train.py", "--out=x", "--arm=alltoall")
RUN = load.Run(load.window(drops.START - 60, drops.START + 60), {"cell c4": 12.0})
SHOWN_MICRO = shown(micro=tuple(micro.rows("c4", micro.read(ROOT / "good" / micro.NAME))))
SHOWN_STEPS = shown(steps=tuple(training.rows("c4", [training.Record(**x) for x in TRAINED])))


paths.LANES = drops.lanes(ROOT / "lanes")  # type: ignore[misc]
DROP = drops.drop(ROOT / "drop", "cpu")
MANIFEST = (DROP / "manifest.json").read_text()
FILES = list(logs.inside(DROP))


def fuzz_verdict(data: bytes) -> None:
    """A log of good lines without one rank's: never proven, however they are cut and joined."""
    text = lines(data).replace(b"[7]", b"[6]").replace(b"local_rank=7", b"local_rank=6")
    (ROOT / "serve.log").write_bytes(text)
    log = logs.Log(ROOT / "serve.log", "serve.log", "", "serve.log", 0)
    facts = judge.Facts(P5EN, 8, "0.24.0", "tiny", drops.VERSIONS, options=drops.OPTIONS)
    read = logs.read([log], RULES, P5EN.ranks, make=hyperscan)
    assert decide(judge.transport(RULES, read, facts))[0] != "proven"


def guarded(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """The expected errors are no findings."""

    def run(data: bytes) -> None:
        try:
            target(data)
        except LaneError:
            return

    return run


def main() -> None:
    """Fuzz the target that the first argument names."""
    targets = {
        "scan": fuzz_scan, "records": fuzz_records, "manifest": fuzz_manifest,
        "verdict": fuzz_verdict, "batch": fuzz_batch,
    }  # fmt: skip
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in targets:
        sys.exit(f"usage: fuzz_verify.py {{{','.join(targets)}}} [libFuzzer options]")
    seeds = ROOT / "seeds"
    seeds.mkdir()
    for number, line in enumerate(GOOD[:40]):
        (seeds / str(number)).write_bytes(line + b"\n")
    (seeds / "long").write_bytes(bytes(range(256)) * 8)
    again = any(os.path.isfile(word) for word in sys.argv[1:])  # a finding, to see it once more
    atheris.Setup([*sys.argv, *([] if again else [str(seeds)])], guarded(targets[name]))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
