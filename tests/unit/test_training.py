"""The steps of a training lane: read, judged, and laid beside the reference."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import drops
import pytest

from lanekit import paths, programs, training
from lanekit.batch import Taken
from lanekit.errors import Unreadable
from lanekit.load import Run, window

Edit = Callable[[list[dict[str, Any]]], object]


def outcomes(
    tmp_path: Path, edit: Edit = list, *, arm: str = "alltoall", nics: int = 0, after: bool = False
) -> str:
    """The checks that are not met, after an edit of good records, made before or after they were
    printed."""
    lines = drops.steps(2)
    printed = copy.deepcopy(lines) if after else []
    edit(lines)
    path = tmp_path / training.NAME
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = [line for line in printed or lines if line.get("loss", 0.0) is not None]
    log = frozenset(tuple(line.split()) for line in drops.told(shown))
    command = ("python", "/repo/train.py", "--arm=alltoall", "--out=x")
    run = Run(window(drops.START - 60, drops.START + 60), {})
    cells = {"steps": (training.NAME, Taken(training.read(path), command, log, run))}
    checks = training.judge(cells, 2, arm=arm, nics=nics)
    bad = [f"{each.id} {each.outcome}" for each in checks if each.outcome != "met"]
    return ", ".join(each for each in bad if each != "steps-traffic unchecked")


def arm_steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("role") == "arm" and line["kind"] == "step"]


def change(step: int, **fields: object) -> Edit:
    """Change one step of the arm."""
    return lambda lines: arm_steps(lines)[step].update(fields)


def test_good_records_meet_every_rule(tmp_path: Path) -> None:
    assert outcomes(tmp_path) == ""


@pytest.mark.parametrize(
    ("edit", "bad"),
    [
        (lambda lines: lines.pop(), "steps-complete failed, same-run unchecked"),
        (lambda lines: lines.insert(0, lines.pop()), "steps-complete failed"),
        (lambda lines: lines.append(lines[0]), "steps-complete failed, same-run unchecked"),
        (lambda lines: lines[0].update(world=1), "steps-complete failed"),
        (lambda lines: lines[-2].update(kind="note"), "steps-complete failed"),
        (
            lambda lines: lines[0].update(settings={"steps": 10**12}),
            "steps-complete failed, steps-planned failed",
        ),
        (
            lambda lines: lines[0].update(settings={"steps": 4}),
            "steps-complete failed, steps-planned failed",
        ),
        (lambda lines: lines[0].update(settings={"steps": 3, "layers": 1}), "steps-planned failed"),
        (lambda lines: lines.insert(1, lines.pop(5)), "steps-complete failed"),
        (lambda lines: lines[1].update(dispatcher="v2"), "steps-complete failed"),
        (lambda lines: lines[0].update(started=1.0), "same-run failed"),
        (lambda lines: lines[-1].update(ended=drops.START + 99), "same-run failed"),
        (lambda lines: lines[-1].pop("ended"), "same-run unchecked"),
        (lambda lines: lines[0].update(settings={}), "steps-complete failed"),
        (lambda lines: lines.remove(lines[2]), "steps-complete failed, steps-parity failed"),
        (lambda lines: lines.remove(arm_steps(lines)[3]), "steps-complete failed"),
        (change(2, dispatcher="v2"), "steps-complete failed"),
        (change(2, loss=6.0596), "steps-parity failed"),
        (change(2, loss=6.0594), ""),
        (change(0, loss=6.2), "steps-parity failed"),
        (change(3, grad_norm=1.7), "steps-parity failed"),
        (change(3, loss=6.0586), "steps-learns failed, steps-parity failed"),
        (change(3, loss=None), "steps-learns failed, steps-parity failed, steps-printed unchecked"),
        (change(1, ms=0.0), "steps-learns failed, steps-parity failed"),
        (change(1, grad_norm=-1.6), "steps-learns failed, steps-parity failed"),
    ],
)
def test_a_broken_record_fails_its_rule(tmp_path: Path, edit: Edit, bad: str) -> None:
    assert outcomes(tmp_path, edit) == bad


def test_equal_losses_that_do_not_fall_are_no_training(tmp_path: Path) -> None:
    def stand(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["kind"] == "step":
                line["loss"] = 6.2745

    assert outcomes(tmp_path, stand) == "steps-learns failed"


def test_another_arm_than_the_row_s_is_refused(tmp_path: Path) -> None:
    assert outcomes(tmp_path, arm="v2") == "steps-complete failed"


def test_no_records_are_no_evidence(tmp_path: Path) -> None:
    found = outcomes(tmp_path, lambda lines: lines.clear())
    rules = ("complete", "learns", "parity", "planned", "printed")
    wanted = [f"steps-{rule} unchecked" for rule in rules]
    assert found == ", ".join([*wanted, "same-run unchecked"])


def test_a_fleet_with_nics_must_have_sent(tmp_path: Path) -> None:
    def sent(count: object) -> Edit:
        return lambda lines: lines[-2].update(tx_bytes=count)

    assert outcomes(tmp_path, sent(1_096_000_000), nics=16) == ""
    assert outcomes(tmp_path, sent(0), nics=16) == "steps-traffic failed"
    assert outcomes(tmp_path, sent(None), nics=16) == "steps-traffic failed"


@pytest.mark.parametrize(
    "text", ['{"v":2,"kind":"run"}', '{"v":1', '{"v":1,"kind":"step","loss":"low"}', "\x00"]
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / training.NAME
    path.write_text('{"v":1,"kind":"run","world":1}\n' + text + "\n")
    with pytest.raises(Unreadable, match=r"steps\.jsonl:2: "):
        training.read(path)


def test_records_that_were_edited_after_they_were_printed_are_refuted(tmp_path: Path) -> None:
    def faster(lines: list[dict[str, Any]]) -> None:
        for line in arm_steps(lines):
            line["ms"] /= 2

    assert outcomes(tmp_path, faster, after=True) == "steps-printed failed"
    assert outcomes(tmp_path, change(1, ms=40.0), after=True) == "steps-printed unchecked"


def test_rows_hold_both_roles(tmp_path: Path) -> None:
    path = drops.training(tmp_path / "steps", 2) / training.NAME
    rows = training.rows("steps", training.read(path))
    assert [(row.role, row.step) for row in rows] == [
        (role, step) for role in training.ROLES for step in range(4)
    ]
    assert rows[-1].loss == 5.9011


# --- the program, as far as it needs no torch


@pytest.fixture(scope="module")
def program() -> ModuleType:
    module: ModuleType = programs.load("train", paths.LANES / "megatron" / "train.py")
    return module


def test_the_defaults_are_the_published_shape(program: ModuleType) -> None:
    options = program.parse_options(["--arm=v2", "--out=x"])
    assert (options.experts, options.topk, options.hidden, options.ffn) == (128, 8, 2048, 768)
    assert (options.steps, options.arm) == (3, "v2")


def test_more_choices_than_experts_are_refused(program: ModuleType) -> None:
    with pytest.raises(SystemExit):
        program.parse_options(["--arm=v2", "--out=x", "--experts=4"])


def test_an_expert_has_one_name_on_every_number_of_ranks(program: ModuleType) -> None:
    name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    assert program.global_name(name, 64) == name.replace("local_experts.3", "local_experts.67")
    assert program.global_name("decoder.layers.1.mlp.router.weight", 64).count("64") == 0


def test_a_step_is_printed_as_its_record_reads(
    program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    class Place:
        rank = 0

        def write(self, kind: str, **fields: object) -> None:
            records.append(fields)

    records: list[dict[str, object]] = []
    for loss, ms in ((6.2745, 34.3496), (1.00004999, 34.25)):
        program.record(Place(), ("arm", "alltoall", 0), loss, 1.6286, ms)
        words = capsys.readouterr().out.split()
        read = [words[5], words[7], words[-2]]
        shown = records[-1]
        assert read == [f"{shown['loss']:.4f}", f"{shown['grad_norm']:.4f}", f"{shown['ms']:.1f}"]


def test_the_bytes_of_every_port_count(program: ModuleType, tmp_path: Path) -> None:
    assert program.sent_bytes(tmp_path) is None
    for nic, count in (("rdmap0s6", 5), ("rdmap1s6", 7)):
        counter = tmp_path / nic / "ports" / "1" / "hw_counters"
        counter.mkdir(parents=True)
        (counter / "tx_bytes").write_text(f"{count}\n")
    assert program.sent_bytes(tmp_path) == 12
    assert not math.isnan(program.sent_bytes(tmp_path))
