"""Whole drops, ours and strangers', to their verdict and exit code."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drops
import msgspec
import pytest

from lanekit import cli, contract, lanes, logs, paths, planning, row, scan, spec, variables
from lanekit import drop as drop_module
from lanekit import verify as verify_module
from lanekit.errors import ConfigError, LaneError, Unreadable
from lanekit.verdict import Check, Verdict
from lanekit.verify import verify

TRTLLM = drops.PUBLISHED / "trtllm-deepep-dropin-20260707"
pytestmark = pytest.mark.usefixtures("known_lanes")
EAGER = drops.SHARED / "logs" / "h200x2-vllm-deepep_v2-eager.log"


def check(found: Verdict, name: str) -> Check:
    return next(x for x in found.checks if x.id == name)


@drops.needs_published
def test_published_trtllm_seam_is_proven() -> None:
    found = verify(TRTLLM / "trtllm-native-seam")
    assert (found.result, found.exit_code) == ("proven", 0)
    assert (found.lane, found.arm, found.profile) == ("trtllm", "seam", "p5en-x2")
    assert "inferred from the path" in found.said[0]
    provider = check(found, "efa-provider")
    assert provider.actual == "16 of 16 ranks"
    assert provider.expected.endswith("provider efa, fabric efa-direct, nics 16")
    buffers = check(found, "seam-elastic-trtllm")
    assert buffers.actual == "16 lines"
    assert "carry no rank" in buffers.note
    alltoall = check(found, "trtllm-alltoall")
    assert alltoall.actual == "method DeepEP"
    assert alltoall.first is not None
    assert alltoall.first.line == alltoall.last.line == 3  # type: ignore[union-attr]
    assert [(c.name, c.requests, c.errors) for c in found.cells] == [
        ("c4", 40, 0), ("c8", 64, 0), ("c32", 128, 0),
    ]  # fmt: skip
    assert [round(c.tok_s or 0, 2) for c in found.cells] == [67.64, 142.38, 563.28]
    assert {c.source for c in found.cells} == {"records"}


@pytest.mark.parametrize(
    ("given", "message", "remedy"),
    [
        ({}, "neither path nor options tell", "Known without manifest: trtllm/seam"),
        ({"lane": "micro"}, "micro/any arm is not judged without one", "with its manifest"),
        ({"lane": "vllm", "arm": "epnc9"}, "vllm/epnc9 is not judged", "vllm/epnc8"),
    ],
)
def test_a_log_that_nothing_names_says_what_is_missing(
    tmp_path: Path, given: dict[str, str], message: str, remedy: str
) -> None:
    (tmp_path / "serve.log").write_text("a line\n")
    with pytest.raises(ConfigError, match=message) as caught:
        verify(tmp_path, **given)
    assert remedy in caught.value.remedy


def test_a_folder_of_drops_asks_for_one_of_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        drops.drop(tmp_path / name, "cpu")
    with pytest.raises(ConfigError, match="no drop, but a folder of 2") as caught:
        verify(tmp_path)
    assert f"RESULTS={tmp_path}/b" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "arm", "how"),
    [
        ("h200x2-vllm-allgather", "dense", "profile h200x2 inferred from the path"),
        ("serve", "epnc1", "profile p5en-x2 assumed"),
    ],
)
def test_the_path_is_asked_before_an_arm_is_assumed(
    tmp_path: Path, name: str, arm: str, how: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "serve.log").write_text("a line\n")
    found = verify(tmp_path / name, lane="vllm")
    assert found.arm == arm
    assert found.said[0].endswith(f"arm {arm}, {how}")


@drops.needs_published
def test_published_trtllm_shim_has_no_verdict_on_its_buffer() -> None:
    found = verify(TRTLLM / "trtllm")
    assert (found.result, found.exit_code) == ("no verdict", 2)
    assert found.reason == "could not check: seam-elastic-trtllm"
    assert check(found, "efa-provider").actual == "16 of 16 ranks"
    assert check(found, "efa-provider").outcome == "met"


@drops.needs_published
def test_published_vllm_has_no_serve_log_and_its_cells_are_shown() -> None:
    found = verify(drops.PUBLISHED / "vllm-deepep-dropin-20260706" / "vllm" / "aiperf-epnc1")
    assert (found.result, found.reason) == ("no verdict", "no serve log")
    assert [round(c.tok_s or 0, 2) for c in found.cells] == [19.46, 38.80, 144.64]
    assert {c.source for c in found.cells} == {"summary"}
    assert "from the summary only" in check(found, "records").actual


@drops.needs_published
def test_two_published_runs_are_not_judged_as_one() -> None:
    """The shim's run has no buffer line and the seam's has: together they would look whole."""
    with pytest.raises(ConfigError, match="holds more than one run"):
        verify(TRTLLM)


@drops.needs_logs
def test_nvlink_log_is_refuted_under_the_efa_contract() -> None:
    found = verify(EAGER, profile="p5en-x2")
    assert (found.contract, found.result, found.exit_code) == ("v2-efa-proxy", "refuted", 1)
    assert check(found, "efa-provider").actual == "no such line"
    assert check(found, "net-fallback").outcome == "failed"
    assert "vm [2]" in check(found, "net-plugin-libfabric").missing[0]


@drops.needs_logs
def test_nvlink_log_without_the_hook_proves_p2p_and_not_the_buffer() -> None:
    found = verify(EAGER, profile="h200x2")
    assert (found.contract, found.result) == ("v2-nvlink", "no verdict")
    assert found.reason == "could not check: elastic-nvlink, no-legacy-buffer"
    assert check(found, "p2p-channels").actual == "2 of 2 ranks"
    assert check(found, "vllm-manager-v2").actual == "manager DeepEPV2All2AllManager"
    assert check(found, "vllm-prepare-v2").actual == "prepare DeepEPV2PrepareAndFinalize"


@drops.needs_logs
def test_line_numbers_are_the_raw_file_s() -> None:
    text = EAGER.read_bytes().split(b"\n")
    place = check(verify(EAGER, profile="h200x2"), "vllm-prepare-v2").first
    assert place is not None
    assert b"Using DeepEPV2PrepareAndFinalize" in text[place.line - 1]


@pytest.mark.parametrize("name", contract.names())
def test_the_smallest_good_drop_is_proven(tmp_path: Path, name: str) -> None:
    found = verify(drops.drop(tmp_path / "d", name))
    assert (found.result, found.reason) == ("proven", found.reason)
    assert all(x.outcome == "met" for x in found.checks if x.severity == "required")


def without_hyperscan(patch: pytest.MonkeyPatch, path: Path) -> Verdict:
    """The verdict where the library is not installed."""
    with patch.context() as there:
        there.setattr(scan, "fast", lambda: False)
        return verify(path)


@pytest.mark.parametrize("name", contract.names())
def test_both_engines_give_the_same_verdict(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the good drop, and of drops whose log lacks every third line, or holds other things."""
    assert scan.fast(), "this machine has Hyperscan: the test would compare nothing"
    edits: dict[str, drops.Edit] = {
        "good": list,
        "thinned": lambda x: [y for n, y in enumerate(x) if n % 3],
        "foreign": lambda x: [*drops.log("cpu"), *x[::-1]],
        "odd": lambda x: ["\x1b[33m+ echo", *(f"\x1b[1m{y}\x1b[0m\r" for y in x), "\0\0" * 99],
    }
    for kind, edit in edits.items():
        root = drops.drop(tmp_path / kind, name, edit)
        assert without_hyperscan(monkeypatch, root) == verify(root)


@drops.needs_logs
@pytest.mark.parametrize("log", sorted((drops.SHARED / "logs").glob("*.log")), ids=lambda p: p.name)
def test_both_engines_give_the_same_verdict_of_real_logs(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = verify(log, lane="vllm", arm="v2", profile="h200x2")
    with monkeypatch.context() as there:
        there.setattr(scan, "fast", lambda: False)
        assert verify(log, lane="vllm", arm="v2", profile="h200x2") == one


def test_without_hyperscan_large_logs_are_read_by_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "vllm-deepep_v2"
    root.mkdir()
    lines = drops.log("v2-efa-proxy")
    for host in drops.HOSTS:
        mine = [line for line in lines if host in line]
        (root / f"{host}-serve.log").write_text("\n".join(mine) + "\n")
    (root / "torn.log.gz").write_bytes(b"no archive")
    monkeypatch.setattr(logs, "PROCESSES_FROM", 0)
    with pytest.raises(Unreadable, match="not unpackable"):
        without_hyperscan(monkeypatch, root)
    (root / "torn.log.gz").unlink()
    one = verify(root)
    assert check(one, "efa-provider").actual == "16 of 16 ranks"
    assert without_hyperscan(monkeypatch, root) == one


@pytest.mark.parametrize("name", [n for n in contract.names() if "efa" in n or "published" in n])
def test_a_cpu_log_never_satisfies_an_efa_contract(tmp_path: Path, name: str) -> None:
    found = verify(drops.drop(tmp_path / "d", name, lambda _: drops.log("cpu")))
    assert found.result != "proven"


def test_a_cpu_contract_does_not_judge_an_efa_profile(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d", "v2-efa-proxy", plan={"contract": "cpu"})
    with pytest.raises(ConfigError, match="judges fabric none"):
        verify(root)


@pytest.mark.parametrize(
    ("edit", "failing"),
    [
        (lambda x: [y.replace("v0.24.0", "v0.23.0") for y in x], "vllm-engine-cpu"),
        (lambda x: [y.replace("device_config=cpu", "device_config=cuda") for y in x],
         "vllm-engine-cpu"),
        (lambda x: [y.replace("name=tiny", "name=other") for y in x], "vllm-engine-cpu"),
        (lambda x: [y.replace("parallel': True", "parallel': False") for y in x],
         "vllm-options"),
        (lambda x: [y.replace("world_size=1", "world_size=2") for y in x], "vllm-world-gloo"),
        (lambda x: [y for n, y in enumerate(x) if n != x.index(drops.POST)], "requests-served"),
        (lambda x: [*x, drops.hook("vm", 0, 0, 1)], "no-buffer"),
    ],
)  # fmt: skip
def test_a_cpu_drop_is_refuted_by_one_wrong_line(
    tmp_path: Path, edit: drops.Edit, failing: str
) -> None:
    found = verify(drops.drop(tmp_path / "d", "cpu", edit))
    assert (found.result, found.exit_code) == ("refuted", 1)
    assert check(found, failing).outcome == "failed"


@pytest.mark.parametrize("state", ["planned", "starting", "sweeping", "failed", "interrupted"])
def test_an_incomplete_run_has_no_verdict_and_says_how_far_it_came(
    tmp_path: Path, state: str
) -> None:
    root = drops.drop(tmp_path / "d")
    drops.edit_json(root / "manifest.json", state=state, failure="the server died")
    found = verify(root)
    assert found.exit_code == 2
    assert found.reason == f"incomplete, it came as far as {state}: the server died"
    assert [c.name for c in found.cells] == ["c4"]


def test_a_changed_file_refutes(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d")
    with (root / "logs" / "here-server.log").open("a") as stream:
        stream.write("one line more\n")
    found = verify(root)
    assert found.result == "refuted"
    assert check(found, "files").actual == "changed: logs/here-server.log"


def test_an_added_file_refutes(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d")
    (root / "logs" / "late-server.log").write_text("evidence made afterwards\n")
    assert check(verify(root), "files").actual == "added: logs/late-server.log"


def test_a_verdict_is_not_written_into_the_drop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be an added file, and refute the drop from then on."""
    root = drops.drop(tmp_path / "d")
    for name in ("out.json", "verdict.json"):
        assert cli.main(["verify", str(root), "--json", str(root / "logs" / name)]) == 2
        assert "is in what is judged" in capsys.readouterr().err
    (root / "verdict.json").symlink_to("manifest.json")
    assert cli.main(["verify", str(root), "--json", str(root / "verdict.json")]) == 2
    (root / "verdict.json").unlink()
    log = str(root / "logs" / "here-server.log")
    assert cli.main(["verify", log, "--json", log]) == 2
    assert verify(root).result == "proven"
    assert cli.main(["verify", str(root), "--json", str(tmp_path / "out.json")]) == 0


@pytest.mark.parametrize("option", ["--json", "--junit"])
@pytest.mark.parametrize("word", ["0", "1"])
def test_a_switch_is_no_name_of_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    word: str,
) -> None:
    root = drops.drop(tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", str(root), option, word]) == 2
    assert f"{word} is no name of a file" in capsys.readouterr().err
    assert not (tmp_path / word).exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d")
    (root / "logs" / "here-server.log").unlink()
    assert check(verify(root), "files").missing == ("logs/here-server.log",)


def test_the_verdict_s_own_file_is_no_part_of_the_drop(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d")
    (root / "verdict.json").write_text("{}")
    assert verify(root).result == "proven"


def test_a_contract_that_changed_since_is_said(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d", plan={"contract_sha256": "0" * 64})
    found = verify(root)
    assert found.result == "proven"
    assert any("has changed since" in said for said in found.said)


def test_a_contract_other_than_the_lane_s_refutes(tmp_path: Path) -> None:
    root = drops.drop(
        tmp_path / "d", "cpu", lambda _: drops.log("floor"), plan={"contract": "floor"}
    )
    assert check(verify(root), "manifest").actual == "contract floor, the lane has cpu"


TIMELESS = "complete, but it does not say when it began and ended"


@pytest.mark.parametrize(
    ("plan", "other", "said"),
    [
        ({"arm": "epnc8"}, {}, "arm epnc8 planned, floor in the row"),
        ({"lane": None}, {}, "lane None planned, vllm in the row"),
        ({"profile": "h200x2"}, {}, "profile h200x2 planned, cpu in the row"),
        ({"driver": "batch"}, {}, "driver batch, the lane has aiperf"),
        ({"engine": "trtllm"}, {}, "engine trtllm, the lane has vllm"),
        ({"pins": {"aiperf": "0.10.0"}}, {}, "no version of vllm is pinned"),
        ({"hosts": ["a", "b"]}, {}, "2 hosts, the profile has 1"),
        ({"launcher": "compose"}, {}, "containers without an image"),
        ({"services": []}, {}, "the server's command lacks 8000, /models/tiny"),
        ({"services": [{"command": ["true"]}]}, {},
         "the server's command lacks 8000, /models/tiny"),
        ({"services": [{"command": "--port 8000 /models/tiny"}]}, {},
         "the server's command lacks 8000, /models/tiny"),
        ({"cells": {"c4": {"command": ["true"], "artifacts": "aiperf/c4"}}}, {},
         "c4 was sent to none, not to http://127.0.0.1:8000; no command that takes c4"),
        ({"cells": {"c4": {"command": [], "artifacts": "aiperf/c4"}}}, {},
         "no command that takes c4"),
        ({}, {"runner": None}, "no process ran it"),
        ({"ranks": 2}, {}, "ranks 2, the lane has 1"),
        ({}, {"ended": None}, TIMELESS),
        ({}, {"started": "yesterday"}, TIMELESS),
        ({}, {"started": "0001-01-01T00:00:00+00:00"}, TIMELESS),
        ({}, {"ended": "9999-12-31T23:59:59+00:00"}, TIMELESS),
        ({}, {"started": "2026-11-30T11:00:00"}, TIMELESS),
        ({}, {"timings": {}}, "a cell whose time was not taken"),
        ({}, {"timings": {"cell c4": 0.0}}, "a cell whose time was not taken"),
        ({}, {"timings": {"cell c4": 9999.0}}, "cells of 9999 s in a run of 780 s"),
        ({}, {"patches": {"vllm/0.24.0": "0" * 64}},
         "other patches than planned; patches vllm/0.24.0, the lane has none"),
        ({}, {"failure": "server died"}, "complete, but it failed: server died"),
        ({}, {"timings": {"cell c4": 60.0, "cell c32": 1.0}},
         "cells c32 were run, and are not in the row"),
        ({}, {"row": {"lane": "vllm", "arm": "floor", "profile": "cpu", "cells": ["c4", "c8"]}},
         "cells c4 planned, c4, c8 in the row; a cell whose time was not taken"),
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_or_its_lane_refutes(
    tmp_path: Path, plan: dict[str, Any], other: dict[str, Any], said: str
) -> None:
    found = verify(drops.drop(tmp_path / "d", plan=plan, **other))
    assert (found.result, check(found, "manifest").actual) == ("refuted", said)


def planned(root: Path, change: Callable[[dict[str, Any]], object], name: str = "cpu") -> Verdict:
    """The verdict of a drop whose plan was changed."""
    drop = drops.drop(root / "d", name)
    found = json.loads((drop / "manifest.json").read_text())["plan"]
    change(found)
    drops.edit_json(drop / "manifest.json", plan=found)
    return verify(drop)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x["services"][0]["command"].append("--other"),
         "plan.services.0.command.8 --other, the lane has None"),
        (lambda x: x["services"][0]["command"].pop(), "plan.services.0.command.7 None, the lane"),
        (lambda x: x["services"][0].update(env={"A": "1"}), "plan.services.0.env.A 1, the lane"),
        (lambda x: x["cells"]["c4"].update(requests=4), "plan.cells.c4.requests 4, the lane has 8"),
        (lambda x: x["cells"]["c4"]["command"].remove("--streaming"), "plan.cells.c4.command."),
        (lambda x: x.update(prefill=[8]), "plan.prefill.0 8, the lane has None"),
        (lambda x: x.update(patches={"a": "0"}), "plan.patches.a 0, the lane has None"),
        (lambda x: x.update(comparable=True), "plan.comparable True, the lane has False"),
        (lambda x: x.update(stack="current"), "plan.stack current, the lane has 2026-07"),
        (lambda x: x.update(url="http://10.0.0.9:1"), "plan.url http://10.0.0.9:1, the lane has"),
    ],
)  # fmt: skip
def test_a_plan_that_its_lane_would_not_make_refutes(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    found = planned(tmp_path, change)
    lane = check(found, "lane")
    assert (found.result, lane.outcome, lane.severity) == ("refuted", "failed", "required")
    assert said in lane.actual


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x["cells"]["c4"].update(deadline_s=5.0),
        lambda x: x["services"][0].update(env={"FOO": "1"}),
        lambda x: x.update(extra_env={"FOO": "1"}),
        lambda x: x["cells"]["c4"]["env"].update(lane_sha256="/another.so"),
        lambda x: x.update(schema=-1),
        lambda x: x.update(hosts=["here"]),
    ],
)
def test_a_plan_that_is_not_today_s_is_no_proof_whatever_digest_it_states(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    """Tuning a lane makes no old drop false; but a plan could state any digest, so it proves
    nothing either."""

    def older(plan: dict[str, Any]) -> None:
        plan["lane_sha256"] = "0" * 64
        change(plan)

    found = planned(tmp_path, older)
    lane = check(found, "lane")
    assert (found.reason, lane.severity) == ("could not check: lane", "required")
    assert "the lane has changed since, or the plan: " in lane.actual


def test_an_unchanged_plan_of_a_lane_that_changed_since_stands(tmp_path: Path) -> None:
    found = planned(tmp_path, lambda x: x.update(lane_sha256="0" * 64))
    assert (found.result, check(found, "lane").outcome) == ("proven", "met")


@pytest.mark.usefixtures("known_lanes")
def test_variables_of_a_person_s_own_are_said_and_may_not_make_another_arm(tmp_path: Path) -> None:
    def given(plan: dict[str, Any]) -> None:
        plan["extra_env"] = plan["cells"]["c4"]["env"] = {"A": "1"}
        plan["services"][0]["env"] |= {"A": "1"}

    found = planned(tmp_path, given)
    assert found.result == "proven"
    assert "with ENV=: A=1" in found.said
    lane = spec.lane("vllm")
    arm = msgspec.structs.replace(lane.arms["floor"], env={"A": "2"})
    known = msgspec.structs.replace(lane, arms=lane.arms | {"floor": arm})
    first = row.checks(drop_module.read(tmp_path / "d"), known)[0]
    assert (first.outcome, first.actual) == ("failed", "ENV= made A 1, the arm is 2")
    known = msgspec.structs.replace(lane, arms=lane.arms | {"another": arm})
    first = row.checks(drop_module.read(tmp_path / "d"), known)[0]
    assert (first.outcome, first.actual) == ("failed", "ENV= made A 1, the arm is without it")


def older_file(folder: Path, manifest: str, lacks: list[str]) -> Path:
    folder.mkdir()
    for path in paths.CONTRACTS.glob("*.toml"):
        shutil.copy(path, folder)
    (folder / "older.toml").write_text(
        f'[[older]]\ndrop = "d"\nmanifest = "{manifest}"\nlacks = {lacks}\nwhy = "it was early"\n'
    )
    return folder


def test_an_older_drop_is_excused_by_its_bytes_and_only_of_what_could_not_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timeless(lines: list[str]) -> list[str]:
        return [line for line in untimed(lines) if " armed " not in line]

    root = drops.drop(tmp_path / "d", "v2-nvlink", timeless)
    assert verify(root).reason == "could not check: hook-clock"
    digest = drop_module.sha256(root / "manifest.json")
    known = contract.older(older_file(tmp_path / "contracts", digest, ["hook-clock", "requests"]))
    monkeypatch.setattr(contract, "older", lambda: known)
    found = verify(root)
    clock = check(found, "hook-clock")
    assert (found.result, clock.severity, clock.note) == ("proven", "noted", "d: it was early")
    (root / "aiperf" / "c4" / "profile_export.jsonl").write_text("")
    assert check(verify(root), "requests").severity == "required"
    manifest = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps(manifest))
    drops.edit_json(root / "manifest.json", stage="")
    assert check(verify(root), "hook-clock").severity == "required"


def test_every_excused_drop_is_a_committed_one() -> None:
    here = {drop_module.sha256(x / "manifest.json"): x.name for x in lanes.tracked()}
    assert {k: x.drop for k, x in contract.older().items()}.items() <= here.items()


@pytest.mark.parametrize(
    "change",
    [
        lambda command: command.__setitem__(command.index("--url") + 1, "http://other:1"),
        lambda command: command.extend(["--url", "http://other:1"]),
        lambda command: command.append("--url=http://other:1"),
        lambda command: command.extend(["-u", "http://other:1"]),
        lambda command: command.remove("--url"),
    ],
)
def test_a_load_sent_elsewhere_refutes_whatever_lane_it_is_of(
    tmp_path: Path, change: Callable[[list[str]], object]
) -> None:
    def edit(plan: dict[str, Any]) -> None:
        plan["lane_sha256"] = "x"
        change(plan["cells"]["c4"]["command"])

    found = planned(tmp_path, edit)
    assert found.result == "refuted"
    assert "c4 was sent to" in check(found, "manifest").actual


def test_a_drop_on_efa_that_names_no_series_for_its_variables_is_refuted(tmp_path: Path) -> None:
    drop = drops.drop(tmp_path / "d", "v2-efa-proxy", plan={"patches": {}}, patches={})
    found = verify(drop)
    assert found.result == "refuted"
    assert any("patches none, the lane has deepep/b306af06" in x.actual for x in found.checks)


def test_a_series_whose_text_changed_since_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the lane's digest is today's: prose of a series makes no drop false."""
    monkeypatch.setattr(planning, "_series", lambda *_: {"vllm/0.24.0": "1" * 64})
    was = {"vllm/0.24.0": "0" * 64}
    monkeypatch.setattr(variables, "series", lambda *_: tuple(was))
    drop = drops.drop(tmp_path / "d", patches=was)
    plan = json.loads((drop / "manifest.json").read_text())["plan"]
    drops.edit_json(drop / "manifest.json", plan=plan | {"patches": was})
    lane = check(verify(drop), "lane")
    assert (lane.outcome, lane.severity) == ("unchecked", "noted")
    assert "plan.patches.vllm/0.24.0" in lane.actual


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.pop("stack"),
        lambda x: x["environments"]["aiperf"].update(python=""),
        lambda x: x.update(environments={}),
        lambda x: x.update(ports={}),
        lambda x: x.update(ports={"server": -1}),
    ],
)
def test_a_plan_that_is_none_refutes_where_its_lane_is_the_same(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    forged = check(planned(tmp_path, change), "lane")
    assert (forged.outcome, forged.severity) == ("failed", "required")


@pytest.mark.parametrize(
    ("root", "met"), [("/a checkout/of mine", True), ("/x/y", True), ("elsewhere", False)]
)
def test_a_checkout_may_stand_in_a_folder_with_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, met: bool
) -> None:
    """A run of 2026-11-30 in such a clone was refuted by paths that were its own."""
    monkeypatch.setattr(paths, "LANES", paths.ROOT / "lanes")
    source = paths.ROOT / "results" / "20261130T154031Z-cpu-vllm-floor"
    plan = json.loads((source / "manifest.json").read_text())["plan"]
    stood = plan["model"]["path"].partition("/.cache/")[0]
    shutil.copytree(source, tmp_path / "d")
    manifest = tmp_path / "d" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"{stood}/', f'"{root}/'))
    assert (check(verify(tmp_path / "d"), "lane").outcome == "met") == met


@pytest.mark.usefixtures("known_lanes")
def test_what_a_plan_hides_makes_no_difference(tmp_path: Path) -> None:
    """A variable named like a secret: the lane's own value is not in the drop either."""

    def hidden(plan: dict[str, Any]) -> None:
        plan["extra_env"] = plan["cells"]["c4"]["env"] = {"API_TOKEN": "(hidden)"}
        plan["services"][0]["env"] |= {"API_TOKEN": "(hidden)"}

    found = check(planned(tmp_path, hidden), "lane")
    assert (found.outcome, found.actual) == ("met", "as the lane plans")


@pytest.mark.usefixtures("known_lanes")
def test_where_a_checkout_stood_makes_no_difference(tmp_path: Path) -> None:
    def moved(plan: dict[str, Any]) -> None:
        command = plan["cells"]["c4"]["command"]
        assert command[1].endswith("/micro/ep_bench.py")
        command[1] = "/elsewhere/lanes/micro/ep_bench.py"

    assert check(planned(tmp_path, moved, "v2-one"), "lane").outcome == "met"


@pytest.mark.parametrize(("lane", "arm"), [("vllm", "nonesuch"), ("nonesuch", "floor")])
def test_a_row_that_no_lane_knows_has_no_verdict(tmp_path: Path, lane: str, arm: str) -> None:
    row = {"lane": lane, "arm": arm, "profile": "cpu", "cells": ["c4"]}
    found = verify(drops.drop(tmp_path / "d", plan={"lane": lane, "arm": arm}, row=row))
    assert (found.result, found.exit_code) == ("no verdict", 2)
    assert check(found, "manifest").actual == f"this checkout has no {lane}/{arm} on cpu"


def batch(root: Path, cells: dict[str, str], **other: Any) -> Verdict:
    """A drop of a program that was started once a cell, each time as other processes. cells: name
    -> folder."""
    drop = drops.drop(root / "d", "v2-one", cells=tuple(cells), **other)
    found = json.loads((drop / "manifest.json").read_text())["plan"]
    for name, folder in cells.items():
        found["cells"][name]["artifacts"] = folder
    drops.edit_json(drop / "manifest.json", plan=found)
    shutil.rmtree(drop / "micro")
    (drop / "logs" / "here-c4.log").unlink()
    for number, name in enumerate(("decode", "prefill")):
        printed = [x.replace("7000", f"{7 + number}000") for x in drops.log("v2-one")]
        lines = drops.exchanged(1, drops.START + 20 * number)
        table = drops.micro(drop / "micro" / name, lines)
        if name in cells:
            (drop / "logs" / f"here-{name}.log").write_text("\n".join([*printed, *table]) + "\n")
    return verify(drops.seal(drop))


def test_a_batch_drop_is_judged_cell_by_cell(tmp_path: Path) -> None:
    found = batch(tmp_path, {n: f"micro/{n}" for n in ("decode", "prefill")})
    assert (found.result, {row.cell for row in found.micro}) == ("proven", {"decode", "prefill"})


def test_a_batch_drop_without_cells_proves_nothing(tmp_path: Path) -> None:
    found = batch(tmp_path, {})
    assert (found.result, check(found, "cells").outcome) == ("refuted", "failed")


def test_a_batch_drop_that_lacks_a_cell_of_its_row_is_refuted(tmp_path: Path) -> None:
    row = {"lane": "micro", "arm": "v2", "profile": "h200x1", "cells": ["decode", "prefill"]}
    found = batch(tmp_path, {"decode": "micro/decode"}, row=row)
    assert (found.result, check(found, "cells").outcome) == ("refuted", "failed")


SERVED = [name for name in contract.names() if contract.load(name).served]


@pytest.mark.parametrize("name", SERVED)
def test_a_server_that_answered_too_few_requests_is_refuted(tmp_path: Path, name: str) -> None:
    fewer = drops.drop(tmp_path / "d", name, lambda x: [y for y in x if y != drops.POST] + [x[-2]])
    assert check(verify(fewer), "requests-served").actual == "32 lines"
    assert check(verify(fewer), "requests-served").outcome == "failed"


@pytest.mark.parametrize(
    ("name", "more", "result"),
    [
        ("cpu", 16, "proven"),
        ("cpu", 17, "refuted"),
        ("routed", 8, "proven"),
        ("routed", 9, "refuted"),
    ],
)
def test_a_server_that_answered_more_than_the_plan_explains_is_refuted(
    tmp_path: Path, name: str, more: int, result: str
) -> None:
    """A cell that was taken out of row, plan and drop is still in the server's log."""
    extra = [drops.answer(4 + n % 2) for n in range(more)]
    found = verify(drops.drop(tmp_path / "d", name, lambda x: [*x[:-1], *extra, x[-1]]))
    assert found.result == result
    if result == "refuted":
        assert "more than the plan explains: 55" in next(
            x.actual for x in found.checks if x.id in ("requests-served", "requests-spread")
        )


def test_a_server_that_answered_with_errors_is_refuted(tmp_path: Path) -> None:
    """Beside as many good answers as were planned, and an AIPerf that saw no error."""
    bad = drops.POST.replace("200 OK", "500 Internal Server Error")
    found = verify(drops.drop(tmp_path / "d", "cpu", lambda x: [*x[:-1], bad, bad, x[-1]]))
    errors = check(found, "server-errors")
    assert (found.reason, errors.outcome) == ("failed: server-errors", "failed")
    assert errors.actual.startswith("2 ")


@pytest.mark.parametrize("name", ["cpu", "cpu-gloo"])
@pytest.mark.parametrize(
    ("line", "result"),
    [
        # as in a real crash, on 2x H200; before and after the last request
        ("(EngineCore pid=7) torch.AcceleratorError: CUDA error: an illegal memory access was "
         "encountered", "refuted"),
        ("RuntimeError: CUDA error: unspecified launch failure", "refuted"),
        ("(APIServer pid=3) ERROR 11-30 11:11:59 [async_llm.py:704] vllm.v1.engine.exceptions."
         "EngineDeadError: EngineCore encountered an issue.", "proven"),
    ],
)  # fmt: skip
def test_a_run_in_which_a_process_lost_its_gpu_is_refuted(
    tmp_path: Path, name: str, line: str, result: str
) -> None:
    found = verify(drops.drop(tmp_path / "d", name, lambda x: [*x, line]))
    assert found.result == result
    assert check(found, "gpu-lost").outcome == ("met" if result == "proven" else "failed")


def test_every_contract_of_a_server_counts_its_answers() -> None:
    """Published excerpts hold no access log, and a program of its own answers none."""
    program = {n for n, subject in drops.SUBJECTS.items() if subject[0] in drops.DRIVERS}
    others = {n for n in contract.names() if "published" not in n} - program
    counted = [(x.required, x.served) for x in map(contract.load, sorted(others))]
    counts = {"requests-served", "requests-spread"}
    assert all(counts & {*required, *served} for required, served in counted)


def test_a_program_that_built_the_same_buffer_answers_no_requests(tmp_path: Path) -> None:
    subjects = {**drops.SUBJECTS, "v2-nvlink": ("micro", "v2", "h200x2")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drops, "SUBJECTS", subjects)
        patch.setattr(paths, "LANES", drops.lanes(tmp_path / "lanes"))
        root = drops.drop(tmp_path / "d", "v2-nvlink", lambda x: [y for y in x if y != drops.POST])
        found = verify(root)
    assert found.result == "proven"
    assert all(x.id != "requests-served" for x in found.checks)


def test_one_record_does_not_stand_for_two_cells(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="more than one cell"):
        batch(tmp_path, dict.fromkeys(("decode", "prefill"), "micro/decode"))


def test_a_server_s_drop_is_not_judged_as_a_program_s(tmp_path: Path) -> None:
    """As a batch drop it would need no AIPerf export at all."""
    root = drops.drop(tmp_path / "d", plan={"driver": "batch"})
    assert check(verify(root), "requests").outcome == "met"


@pytest.mark.parametrize("where", ["../outside", "micro/absent", "/etc"])
def test_a_batch_cell_outside_the_drop_is_refused(tmp_path: Path, where: str) -> None:
    with pytest.raises(Unreadable, match="not in the drop"):
        batch(tmp_path, {"decode": where})


def test_a_planned_cell_that_was_not_run_refutes(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d", cells=("c4", "c8"))
    assert check(verify(root), "cells").missing == ("c8",)
    assert verify(root).result == "refuted"


def test_options_that_contradict_a_manifest_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its manifest says profile cpu"):
        verify(drops.drop(tmp_path / "d"), profile="h200x2")


def bad_inputs(root: Path) -> dict[str, Path]:
    for name in ("empty", "noise", "zeros", "truncated", "gz", "utf16"):
        (root / name).mkdir()
    (root / "noise" / "picture.png").write_bytes(b"\x89PNG")
    (root / "zeros" / "vllm-deepep_v2.log").write_bytes(b"\0" * 100_000)
    drops.aiperf(root / "truncated" / "vllm-deepep_v2" / "c4")
    torn = root / "truncated" / "vllm-deepep_v2" / "c4" / "profile_export_aiperf.json"
    torn.write_bytes(torn.read_bytes()[:200])
    whole = gzip.compress(b"a line\n" * 1000)
    (root / "gz" / "vllm-deepep_v2.log.gz").write_bytes(whole[:-20])
    (root / "manifest-zeros").mkdir()
    (root / "manifest-zeros" / "manifest.json").write_bytes(b"\0" * 4096)
    return {
        "missing": root / "missing",
        "empty": root / "empty",
        "noise": root / "noise",
        "zeros": root / "zeros",
        "zeros-file": root / "zeros" / "vllm-deepep_v2.log",
        "truncated": root / "truncated" / "vllm-deepep_v2",
        "torn-gz": root / "gz" / "vllm-deepep_v2.log.gz",
        "manifest-zeros": root / "manifest-zeros",
    }


@pytest.mark.parametrize(
    "name",
    ["missing", "empty", "noise", "zeros", "zeros-file", "truncated", "torn-gz", "manifest-zeros"],
)
def test_bad_input_is_one_clear_line_and_exit_2(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = bad_inputs(tmp_path)[name]
    program = [
        sys.executable,
        "-m",
        "lanekit",
        "verify",
        str(path),
        "--lane",
        "vllm",
        "--arm",
        "v2",
    ]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.strip().splitlines()) <= 2


@pytest.mark.parametrize("name", ["../outside.log", "/etc/passwd", "logs/../../x", "a\0b", ""])
def test_a_manifest_that_names_a_file_outside_is_refused(tmp_path: Path, name: str) -> None:
    root = drops.drop(tmp_path / "d")
    drops.edit_json(root / "manifest.json", files={name: "0" * 64})
    with pytest.raises(Unreadable, match="outside the drop"):
        verify(root)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "/etc"])
def test_a_link_that_leads_out_of_the_drop_is_refused(tmp_path: Path, target: str) -> None:
    root = drops.drop(tmp_path / "d")
    (tmp_path / "outside").write_text("x")
    (root / "logs" / "linked.log").symlink_to(target)
    with pytest.raises(Unreadable, match="leads out of the drop"):
        verify(root)


def test_a_pipe_in_a_drop_is_not_opened(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d")
    os.mkfifo(root / "logs" / "pipe.log")
    assert verify(root).result == "proven"


def nested(root: Path) -> None:
    (root / "waivers.toml").write_text("a = " + "[" * 100_000)


def dotted(root: Path) -> None:
    (root / "waivers.toml").write_text("a" + ".a" * 60_000 + " = 1")


def looping(root: Path) -> None:
    (root / "logs" / "a.log").symlink_to("b.log")
    (root / "logs" / "b.log").symlink_to("a.log")


def unprintable(root: Path) -> None:
    Path(os.fsdecode(bytes(root / "logs") + b"/\xff.log")).write_text("x\n")


def deep(root: Path) -> None:
    """Deeper than any path may be long."""
    at, name = os.open(root, os.O_RDONLY), "deeper" * 40
    for _ in range(20):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def piped(root: Path) -> None:
    (root / "manifest.json").unlink()
    os.mkfifo(root / "manifest.json")


def piped_records(root: Path) -> None:
    (root / "aiperf" / "c4" / "profile_export.jsonl").unlink()
    os.mkfifo(root / "aiperf" / "c4" / "profile_export.jsonl")


def vast(name: str) -> Callable[[Path], None]:
    def grow(root: Path) -> None:
        with (root / name).open("ab") as stream:
            stream.truncate(3 << 30)

    return grow


@pytest.mark.parametrize(
    "breaks",
    [nested, dotted, looping, unprintable, deep, piped, piped_records, vast("manifest.json"),
     vast("waivers.toml")],
)  # fmt: skip
def test_what_is_made_to_break_a_reader_is_one_line_and_exit_2(
    tmp_path: Path, breaks: Callable[[Path], None]
) -> None:
    root = drops.drop(tmp_path / "d")
    breaks(root)
    with pytest.raises(LaneError) as caught:
        verify(root)
    assert caught.value.exit_code == 2
    assert len(caught.value.message.splitlines()) == 1
    caught.value.message.encode()


@pytest.mark.parametrize("name", ["x" * 5000, os.fsdecode(b"\xff")])
def test_a_path_that_cannot_be_one_is_unreadable(name: str) -> None:
    with pytest.raises(Unreadable):
        verify(Path(name))


def test_a_link_that_goes_round_is_said_to_lead_nowhere(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "self").symlink_to("self")
    assert cli.main(["verify", str(tmp_path / "self")]) == 2
    assert "a link that leads nowhere" in capsys.readouterr().err


def test_a_list_of_a_thousand_files_is_cut(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d")
    files = {f"logs/{n:04}.log": "0" * 64 for n in range(1000)}
    drops.edit_json(root / "manifest.json", files=files)
    assert check(verify(root), "files").missing[-1] == "960 more"


def test_more_files_than_any_run_leaves_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 files in one folder took two minutes only to be listed (2026-11-30)."""
    root = drops.drop(tmp_path / "d")
    monkeypatch.setattr(verify_module, "FILES", len(list(logs.inside(root))))
    assert verify(root).result == "proven"
    (root / "logs" / "one-more.txt").touch()
    with pytest.raises(Unreadable, match="more than"):
        verify(root)


def test_json_and_exit_code_of_the_command(tmp_path: Path) -> None:
    root = next(x for x in lanes.tracked() if x.name.endswith("cpu-vllm-floor"))
    out = tmp_path / "v.json"
    program = [sys.executable, "-m", "lanekit", "verify", str(root), "--json", str(out)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert json.loads(out.read_text())["result"] == "proven"
    assert "\x1b" not in ended.stdout


def test_an_unknown_lane_lists_the_known(tmp_path: Path) -> None:
    (tmp_path / "serve.log").write_text("x\n")
    with pytest.raises(LaneError) as caught:
        verify(tmp_path, lane="nonesuch")
    assert "trtllm/seam" in caught.value.remedy
    assert "LANE=" in caught.value.remedy, "a make user has no --lane"


def test_a_drop_made_for_the_buffer_s_contract_is_judged_by_the_engine_s(tmp_path: Path) -> None:
    """The first Megatron drops of two H200 were made before their lane's contract had its own."""
    whole = drops.drop(tmp_path / "a", "megatron-v2-nvlink", plan={"contract": "v2-nvlink"})
    found = verify(whole)
    assert (found.result, found.contract) == ("proven", "megatron-v2-nvlink")
    assert any("judged by megatron-v2-nvlink, which extends it" in line for line in found.said)
    lacking = drops.drop(
        tmp_path / "b",
        "megatron-v2-nvlink",
        lambda lines: [line for line in lines if "dispatcher=v2" not in line],
        plan={"contract": "v2-nvlink"},
    )
    assert verify(lacking).result != "proven"


def relogged(root: Path, edit: drops.Edit, name: str = "v2-efa-proxy") -> Verdict:
    """The verdict of a drop whose second host wrote a log of its own, edited, without requests."""
    drop = drops.drop(root / "d", name)
    (log,) = (drop / "logs").iterdir()
    lines = log.read_text().splitlines()
    second = [x for x in lines if "ip-10-0-0-2" in x]
    log.write_text("\n".join(x for x in lines if x not in second) + "\n")
    other = drop / "logs" / log.name.replace(*drops.HOSTS)
    other.write_text("\n".join(edit(second)) + "\n")
    return verify(drops.seal(drop))


def at(seconds: float) -> drops.Edit:
    """The hook's lines printed that many seconds after the first request."""
    return lambda x: [re.sub(r" t=[\d.]+", f" t={drops.START + seconds:.3f}", y) for y in x]


def untimed(lines: list[str]) -> list[str]:
    return [re.sub(r" t=[\d.]+", "", line) for line in lines]


@pytest.mark.parametrize(
    ("edit", "rule", "outcome", "result"),
    [
        (list, "elastic-proxy", "met", "proven"),
        (at(-1), "elastic-proxy", "met", "proven"),
        (at(1), "elastic-proxy", "failed", "refuted"),
        (untimed, "elastic-proxy", "unchecked", "no verdict"),
        (at(40 * 86400), "hook-clock", "failed", "refuted"),
        (at(-40 * 86400), "hook-clock", "failed", "refuted"),
        (untimed, "hook-clock", "unchecked", "no verdict"),
    ],
)
def test_a_log_without_requests_is_held_to_the_same_times(
    tmp_path: Path, edit: drops.Edit, rule: str, outcome: str, result: str
) -> None:
    found = relogged(tmp_path, edit)
    assert (check(found, rule).outcome, found.result) == (outcome, result)


def test_the_transport_of_another_run_proves_nothing(tmp_path: Path) -> None:
    """NCCL's lines and the hook's are joined by process."""

    def mixed(lines: list[str]) -> list[str]:
        return [re.sub(r"(vm:)7(\d+:)7", r"\g<1>5\g<2>5", x) if "NCCL" in x else x for x in lines]

    found = verify(drops.drop(tmp_path / "d", "v2-nvlink", mixed))
    assert found.result == "no verdict"
    assert "the evidence hook was not in" in check(found, "p2p-channels").actual


@pytest.mark.parametrize(
    "name", ["vm-aaa.log", "here-server2.log", "here.log", "aaa-server.log.gz"]
)
def test_a_log_that_nothing_planned_wrote_refutes(tmp_path: Path, name: str) -> None:
    root = drops.drop(tmp_path / "d", "v2-nvlink")
    data = "\n".join(drops.log("v2-nvlink")).encode()
    (root / "logs" / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    found = verify(drops.seal(root))
    assert (found.result, check(found, "logs").outcome) == ("refuted", "failed")


def test_a_log_that_was_packed_and_kept_counts_once(tmp_path: Path) -> None:
    """After `gzip -k` there are two files, and still the answers of one."""
    root = drops.drop(tmp_path / "d")
    log = root / "logs" / "here-server.log"
    (root / "logs" / "here-server.log.gz").write_bytes(gzip.compress(log.read_bytes()))
    found = verify(root)
    assert [x.id for x in found.checks if x.outcome != "met"] == ["files"]
    assert check(found, "files").actual == "added: logs/here-server.log.gz"


def test_a_planned_log_may_be_packed_but_no_run_of_ours_rotates_one(tmp_path: Path) -> None:
    root = drops.drop(tmp_path / "d", "v2-nvlink")
    log = root / "logs" / "here-server.log"
    whole = log.read_bytes().splitlines(keepends=True)
    log.unlink()
    (root / "logs" / "here-server.log.gz").write_bytes(gzip.compress(b"".join(whole)))
    assert verify(drops.seal(root)).result == "proven"
    (root / "logs" / "here-server.log.gz").write_bytes(gzip.compress(b"".join(whole[5:])))
    (root / "logs" / "here-server.log.1").write_bytes(b"".join(whole[:5]))
    found = verify(drops.seal(root))
    assert (found.result, check(found, "logs").actual) == (
        "refuted", "also logs/here-server.log.1"
    )  # fmt: skip
