"""The micro lane is judged by its records: whole, correct before timed, as planned, as printed."""

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drops
import msgspec
import pytest

from lanekit import batch, exchanges, micro
from lanekit.errors import Unreadable
from lanekit.load import Run, window
from lanekit.verdict import Check

Lines = list[dict[str, Any]]
Change = Callable[[Lines], object]
COMMAND = ("/env/bin/python", "/repo/lanes/micro/ep_bench.py", "--out", "/d/c4", *drops.MICRO)
RUN = Run(window(drops.START - 60, drops.START + 60), {"cell c4": 12.0})


def judged(
    folder: Path,
    change: Change = list,
    *,
    world: int = 2,
    log: Callable[[list[str]], list[str]] = list,
    command: tuple[str, ...] = COMMAND,
    run: Run | None = RUN,
    printed_too: bool = True,
    more: tuple[str, ...] = (),
) -> dict[str, Check]:
    """The checks of a cell whose records were changed, with the table that such records print, or
    with the one of before. more: options that it ran with."""
    lines = drops.exchanged(world, more=more)
    table = drops.micro(folder, lines)
    change(lines)
    (folder / micro.NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = drops.micro(folder, lines) if printed_too else table
    text = "\n".join(log(["[micro] v=1 host=vm", *told])).encode()
    shown = batch.printed(io.BytesIO(text), micro.read(folder / micro.NAME))
    taken = batch.Taken(micro.read(folder / micro.NAME), command, shown, run)
    return {x.id.removeprefix("c4-"): x for x in exchanges.judge({"c4": taken}, world)}


@pytest.mark.parametrize("world", [1, 2, 8, 16])
def test_a_whole_cell_is_met(tmp_path: Path, world: int) -> None:
    found = judged(tmp_path, world=world)
    assert {name: x.outcome for name, x in found.items()} == dict.fromkeys(
        ("complete", "correct", "planned", "printed", "same-run"), "met"
    )


def each(kind: str, **fields: Any) -> Change:
    """Set fields of all records of a kind."""

    def change(lines: Lines) -> None:
        for line in lines:
            if line["kind"] == kind:
                line.update(fields)

    return change


def one(at: int, **fields: Any) -> Change:
    """Set fields of one record: 0 run, 1-2 floors, 3 check, 4-11 times, 12 done."""
    return lambda lines: lines[at].update(fields)


def scaled(lines: Lines) -> None:
    for line in lines:
        if line["kind"] == "time":
            line["bytes"] *= 2
            line["gbs"] = round(line["bytes"] / line["p50_us"] / 1e3, 3)


def odd_rows(lines: Lines) -> None:
    for line in lines:
        if line.get("op") == "dispatch":
            line["bytes"] += 64
            line["gbs"] = round(line["bytes"] / line["p50_us"] / 1e3, 3)


REFUTED: list[tuple[str, Change, str]] = [
    ("complete", lambda x: x.pop(), "does not begin with its start and end with its end"),
    ("complete", lambda x: x.pop(0), "0 starts, 1 ends"),
    ("complete", lambda x: x.append(x[-1]), "1 starts, 2 ends"),
    ("complete", lambda x: x.insert(0, x[3]), "does not begin with its start"),
    ("complete", one(4, kind="note"), "records of an unknown kind: note"),
    ("complete", one(0, world=1), "world 1, 2, not 2"),
    ("complete", one(5, ranks=1), "world 1, 2, not 2"),
    ("complete", one(5, ranks=None), "world 2, None, not 2"),
    ("complete", lambda x: x.insert(4, x.pop(9)), "repetitions are not in order"),
    ("complete", lambda x: x.insert(9, x.pop(1)), "floors, modes and repetitions are not in order"),
    ("correct", lambda x: x.pop(3), "timed before it was checked"),
    ("correct", lambda x: x.insert(9, x.pop(3)), "timed before it was checked"),
    ("correct", one(3, ok=False), "came back wrong"),
    ("correct", one(3, ok=None), "came back wrong"),
    ("correct", one(3, wrong_rows=[0, 1]), "came back wrong"),
    ("correct", one(3, wrong_rows=[0]), "came back wrong"),
    ("correct", one(3, mode="graph"), "timed before it was checked"),
    ("correct", one(3, dtype="fp8"), "timed before it was checked"),
    ("correct", one(3, tokens=64), "timed before it was checked"),
    ("correct", one(3, sms=16), "timed before it was checked"),
    ("correct", one(4, p50_us=11.0), "its times or its GB/s cannot be"),
    ("correct", one(4, p50_us=7.0), "its times or its GB/s cannot be"),
    ("correct", one(1, min_us=0.0), "its times or its GB/s cannot be"),
    ("correct", one(1, min_us=-1.0), "its times or its GB/s cannot be"),
    ("correct", one(4, gbs=99.0), "its times or its GB/s cannot be"),
    ("correct", one(4, bytes=4000), "its times or its GB/s cannot be"),
    ("correct", one(9, bytes=9, gbs=0.001), "other bytes in another repetition"),
    ("correct", scaled, "rows,"),
    ("correct", odd_rows, "bytes a row dispatched"),
    ("correct", each("time", hidden=0), "is not said"),
    ("planned", one(0, settings={"hidden": 128}), "hidden 128, planned 256"),
    ("planned", one(0, settings={"iterations": 1}), "iterations 1, planned 3"),
    ("planned", one(4, iterations=2), "dispatch eager bf16 8: 2 iterations"),
    ("planned", lambda x: x.pop(4), "dispatch eager bf16 8: repetitions [1], 2 planned"),
    ("planned", lambda x: x.insert(4, x[4]), "dispatch eager bf16 8: repetitions [0, 0, 1]"),
    ("planned", lambda x: x.pop(1), "copy-local eager 65536: repetitions [1], 2 planned"),
    ("planned", each("time", tokens=16), "eager bf16 16: repetitions [0, 1], not planned"),
    ("planned", each("time", max_tokens=64), "repetitions none, 2 planned"),
    ("planned", each("time", mode="graph"), "graph bf16 8: repetitions [0, 1], not planned"),
    ("same-run", one(0, started=drops.START - 90), "c4: ran"),
    ("same-run", one(12, ended=drops.START + 90), "c4: ran"),
    ("same-run", one(12, ended=drops.START + 30), "took 30 s, its cell 12 s"),
    ("same-run", one(0, started=1e300), "no clock shows"),
    ("same-run", one(0, started=-5.0), "no clock shows"),
    ("same-run", one(0, started=drops.START + 20), "no clock shows"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "said"), REFUTED)
def test_a_forged_cell_is_refuted(tmp_path: Path, name: str, change: Change, said: str) -> None:
    found = judged(tmp_path, change)[name]
    assert (found.outcome, said in found.actual) == ("failed", True), found.actual


VARIED = ("--variants=1",)


def test_variants_are_planned_checked_and_printed(tmp_path: Path) -> None:
    found = judged(tmp_path, more=VARIED, command=(*COMMAND, *VARIED))
    assert {x.outcome for x in found.values()} == {"met"}


def without(**fields: Any) -> Change:
    """Take out the records that have these fields."""
    return lambda lines: lines.__setitem__(
        slice(None), [x for x in lines if any(x.get(k) != v for k, v in fields.items())]
    )


def lighter(lines: Lines) -> None:
    for line in lines:
        if line.get("op") == "reduced-combine":
            line.update(bytes=512, gbs=round(512 / 9.0 / 1e3, 3))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(kind="check", op="cached"), "cached-dispatch eager bf16 8: timed before it was"),
        (without(kind="check", op="expanded"), "reduced-combine eager bf16 8: timed before it was"),
        (without(kind="check", op="expanded"), "expanded-dispatch eager bf16 8: timed before"),
        (without(kind="check", op=""), "dispatch eager bf16 8: timed before it was checked"),
        (one(5, ok=False), "came back wrong"),
        (lighter, "reduced-combine does not move the bytes of combine"),
        (without(op="cached-dispatch"), "cached-dispatch eager bf16 8: repetitions none, 2"),
    ],
)
def test_a_forged_variant_is_refuted(tmp_path: Path, change: Change, said: str) -> None:
    found = judged(tmp_path, change, more=VARIED, command=(*COMMAND, *VARIED))
    assert any(x.outcome == "failed" and said in x.actual for x in found.values()), found


def test_a_variant_that_was_not_planned_is_refuted(tmp_path: Path) -> None:
    found = judged(tmp_path, lambda x: x[0]["settings"].pop("variants"), more=VARIED)["planned"]
    assert "expanded-dispatch eager bf16 8: repetitions [0, 1], not planned" in found.actual


def test_each_check_alone_refutes_something(tmp_path: Path) -> None:
    alone = set()
    for number, (name, change, _) in enumerate(REFUTED):
        found = judged(tmp_path / str(number), change)
        if [x for x in found if found[x].outcome == "failed"] == [name]:
            alone.add(name)
    assert alone == {"complete", "correct", "planned", "same-run"}


@pytest.mark.parametrize(
    "change",
    [each("time", p50_us=8.5, gbs=None), each("time", min_us=None), each("time", max_us=None)],
)
def test_a_time_without_its_figures_is_refuted(tmp_path: Path, change: Change) -> None:
    assert judged(tmp_path, change, printed_too=False)["correct"].outcome == "failed"


def faster(lines: Lines) -> None:
    for line in lines:
        if line["kind"] == "time":
            line.update(p50_us=8.0, gbs=round(line["bytes"] / 8.0 / 1e3, 3))


def test_records_that_were_edited_after_their_table_was_printed_are_refuted(tmp_path: Path) -> None:
    found = judged(tmp_path, faster, printed_too=False)
    assert found["printed"].outcome == "failed"
    assert "not in the log: copy-local eager 65536" in found["printed"].actual
    assert found["correct"].outcome == found["planned"].outcome == "met"


def test_a_log_without_a_table_refutes(tmp_path: Path) -> None:
    found = judged(tmp_path, log=lambda x: ["another run's log", *x[:1]])
    assert found["printed"].outcome == "failed"


def test_a_floor_that_was_taken_out_of_the_records_is_missed(tmp_path: Path) -> None:
    """Without it the exchange looks better than what it stands beside."""

    def without(op: str) -> Change:
        return lambda lines: lines.__setitem__(slice(None), [x for x in lines if x.get("op") != op])

    found = judged(tmp_path, without("copy-local"), printed_too=False)["printed"]
    assert (found.outcome, "only in the log: copy-local" in found.actual) == ("unchecked", True)


def test_a_line_that_another_rank_tore_is_no_verdict(tmp_path: Path) -> None:
    """NCCL may print in the middle of a row: the row cannot be found, and nobody forged it."""
    torn = judged(
        tmp_path, log=lambda x: [*x[:-1], x[-1][:30] + "vm:1:1 [0] NCCL INFO", x[-1][30:]]
    )
    assert torn["printed"].outcome == "unchecked"


@pytest.mark.parametrize(
    "command",
    [(), ("/bin/true",), ("python", "x/ep_bench.py", "--help"), (*COMMAND, "--backend=other")],
)
def test_a_command_that_plans_nothing_cannot_be_checked(
    tmp_path: Path, command: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert judged(tmp_path, command=command)["planned"].outcome == "unchecked"
    assert capfd.readouterr() == ("", "")


def test_an_option_newer_than_the_records_was_not_set(tmp_path: Path) -> None:
    older = judged(tmp_path, lambda x: x[0]["settings"].pop("sms"))
    assert older["planned"].outcome == "met"
    newer = judged(tmp_path, lambda x: x[0]["settings"].pop("sms"), command=(*COMMAND, "--sms=9"))
    assert "sms [0], planned [9]" in newer["planned"].actual


def test_records_without_a_clock_or_with_half_of_one_are_no_proof(tmp_path: Path) -> None:
    def timeless(lines: Lines) -> None:
        del lines[0]["started"], lines[-1]["ended"]

    found = judged(tmp_path, timeless)["same-run"]
    assert (found.outcome, found.severity) == ("unchecked", "required")
    half = judged(tmp_path, lambda x: x[0].pop("started"))["same-run"]
    assert (half.outcome, half.severity) == ("unchecked", "required")
    cells = {}
    for name, change in (("a", list), ("b", timeless)):
        lines = copy.deepcopy(drops.exchanged(2))
        change(lines)
        drops.micro(tmp_path / name, lines)
        records = micro.read(tmp_path / name / micro.NAME)
        cells[name] = batch.Taken(records, COMMAND, frozenset(), RUN)
    (found,) = [x for x in exchanges.judge(cells, 2) if x.id == "same-run"]
    assert (found.outcome, found.severity) == ("unchecked", "required")


def test_one_cell_s_records_are_not_another_s(tmp_path: Path) -> None:
    """A copy under another name: the second began before the first had ended."""
    drops.micro(tmp_path, drops.exchanged(2))
    taken = batch.Taken(micro.read(tmp_path / micro.NAME), COMMAND, frozenset(), RUN)
    (found,) = [x for x in exchanges.judge({"a": taken, "b": taken}, 2) if x.id == "same-run"]
    assert "b: began at 11:10:00, before the one planned before it was over" in found.actual


def test_no_records_are_no_pass(tmp_path: Path) -> None:
    (tmp_path / micro.NAME).write_text("")
    taken = batch.Taken(micro.read(tmp_path / micro.NAME), COMMAND, frozenset(), RUN)
    found = exchanges.judge({"c4": taken}, 2)
    assert all(x.outcome != "met" for x in found)


def test_a_log_of_other_lines_is_not_kept_and_one_of_rows_alone_is_refused(tmp_path: Path) -> None:
    """1.5 million lines of 10 words were each compared with each row (2026-11-30)."""
    drops.micro(tmp_path, drops.exchanged(2))
    records = micro.read(tmp_path / micro.NAME)
    other = b"".join(b"%d b c d e f g h i j\n" % n for n in range(50_000))
    assert batch.printed(io.BytesIO(other), records) == frozenset()
    rows = b"".join(b"dispatch %d c d e f g h i j\n" % n for n in range(50_000))
    with pytest.raises(Unreadable, match="rows of its table"):
        batch.printed(io.BytesIO(rows), records)


def test_a_forged_number_is_not_counted_up_to(tmp_path: Path) -> None:
    """Each ended in the kernel's hands, or not at all (2026-11-30)."""
    found = judged(tmp_path, command=(*COMMAND, "--repeat", str(10**12)))
    assert found["planned"].outcome == "failed"
    numbers = ",".join(map(str, range(1, 5000)))
    found = judged(tmp_path, command=(*COMMAND, f"--tokens={numbers}"))
    assert "more than 4096 shapes planned" in found["planned"].actual
    found = judged(tmp_path, each("time", experts=2 * 10**8, topk=10**8))
    assert found["correct"].outcome == "failed"


def test_a_log_of_one_endless_line_is_read_in_pieces() -> None:
    stream = io.BytesIO(b"x " * (1 << 20) + b"\n" + b"pair eager bf16 8 8 9 1.0 1.0 1.0 0.0% 1.0\n")
    records = [msgspec.convert({"v": 1, "kind": "time", "op": "pair"}, micro.Record)]
    assert len(batch.printed(stream, records)) == 1


@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize("choice", [False, True])
def test_bytes_of_every_kind_of_exchange_can_be(ranks: int, *, choice: bool) -> None:
    """As received_bytes of the program counts them: a row a rank, or a row a chosen expert."""
    shape = micro.Shape("fp8", 128, 7168, 8, 256, 128, 0)
    values = 7168 + 7168 // 32
    rows = 128 * 8 * (ranks - 1) / ranks if choice else {2: 127.5, 16: 771.0}[ranks]
    out = round(rows * (values + 16 if choice else values + 8 * 12))
    back = round(rows * 7168 * 2)
    moved = {"dispatch": out, "combine": back, "pair": out + back}
    assert exchanges._carried(shape, moved, ranks) == ""
    assert "expected" in exchanges._carried(shape, {k: v * 2 for k, v in moved.items()}, ranks)


TIME = {
    "v": 1, "kind": "time", "op": "pair", "mode": "graph", "dtype": "fp8", "tokens": 128,
    "bytes": 1000, "p50_us": 20.0, "min_us": 18.0, "max_us": 25.0, "rep": 0,
}  # fmt: skip


def test_repetitions_fold_into_one_row_with_their_spread(tmp_path: Path) -> None:
    path = tmp_path / micro.NAME
    times = [{**TIME, "rep": n, "p50_us": p} for n, p in enumerate((20.0, 22.0, 21.0))]
    path.write_text("".join(json.dumps(line) + "\n" for line in times))
    (row,) = micro.rows("decode", micro.read(path))
    assert (row.p50_us, row.min_us, row.max_us, row.repetitions) == (21.0, 18.0, 25.0, 3)
    assert row.spread == pytest.approx(2 / 21, abs=1e-4)


def test_a_chosen_sm_count_is_a_row_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / micro.NAME
    lines = ({**TIME, "sms": 16}, {**TIME, "sms": 32})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    modes = [row.mode for row in micro.rows("decode", micro.read(path))]
    assert modes == ["graph, 16 SMs", "graph, 32 SMs"]


@pytest.mark.parametrize("text", ["{", "[]", '{"v": 2, "kind": "run"}', "\0\0"])
def test_a_damaged_record_is_unreadable_and_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / micro.NAME
    path.write_text(json.dumps(TIME) + "\n" + text + "\n")
    with pytest.raises(Unreadable, match=r"micro\.jsonl:2"):
        micro.read(path)


def test_a_file_larger_than_any_sweep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / micro.NAME
    with path.open("wb") as stream:
        stream.truncate(3 << 30)
    with pytest.raises(Unreadable, match="larger than"):
        micro.read(path)


def test_a_time_without_its_extremes_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / micro.NAME
    path.write_text(json.dumps({**TIME, "min_us": None, "max_us": None}) + "\n")
    assert micro.rows("decode", micro.read(path)) == []
