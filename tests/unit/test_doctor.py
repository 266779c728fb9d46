"""Every check of the doctor: a sound host, the smallest fault, no tool, and garbage."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from captured import DF, FABRIC, FI_INFO, GPU, H200X2, MEMORY, NICS, OFF, P5EN, TCP, host

from lanekit import capture, checks, cli, doctor, lanes, machine, paths, plan, planning, spec
from lanekit.capture import Capture, Text
from lanekit.checks import Case
from lanekit.errors import ConfigError

RULES = checks.rules()
P5 = spec.profile("p5en-x2")
H2 = spec.profile("h200x2")
NO_TOOL = Text(127, "sh: 1: nvidia-smi: not found")
SLOW = Text(137, "")


def case(profile: spec.Profile, *hosts: Capture, **other: object) -> Case:
    made = Case(profile, hosts, RULES, pinned={"efa": "1.50.0", "nccl": "2.30.4"}, ports=(8000,))
    return msgspec.structs.replace(made, **other)


def one(name: str, made: Case) -> doctor.Finding:
    found = [finding for finding in doctor.examine(made) if finding.check == name]
    assert found, f"{name} does not apply"
    return found[0]


def fleet(**second: str | Text | None) -> Case:
    hosts = (host(P5EN, "a"), host(P5EN, "b", **second))
    reached = {"a": {"b:8000": Text(1, "bash: connect: Connection refused")},
               "b": {"a:8000": Text(0, "")}}  # fmt: skip
    return case(P5, *hosts, reached=reached)


def test_a_sound_fleet_is_fit() -> None:
    found = doctor.examine(fleet())
    assert {f.check: f.said for f in found if f.outcome != "met"} == {}
    assert doctor.result(found) == "fit"
    everywhere = set(RULES.check) - {"tokens", "floors", "images"}
    assert {f.check for f in found} == everywhere


def test_two_real_h200_are_fit_and_not_where_multicast_is_left_on() -> None:
    """What the doctor itself said on that machine, 2026-11-30: fit, then multicast alone."""
    found = doctor.examine(case(H2, host(H200X2)))
    assert doctor.result(found) == "fit"
    assert {"gpus", "contexts", "driver", "multicast", "shm", "disk"} <= {f.check for f in found}
    on = OFF.replace("NCCL_NVLS_ENABLE=0\n", "")
    worse = doctor.examine(case(H2, host(H200X2, env=on)))
    assert [f.check for f in worse if f.outcome == "failed" and f.stops] == ["multicast"]
    assert doctor.result(worse) == "not fit"


def test_every_rule_has_its_function_and_every_probe_a_reader() -> None:
    assert set(checks.TABLE) == set(RULES.check)
    read = {name for rule in RULES.check.values() for name in rule.reads}
    assert read <= set(RULES.probe)
    assert set(RULES.probe) - read == {"host", "counters"}  # facts of a drop


def test_the_profile_says_which_checks_apply() -> None:
    assert [*doctor.applicable(case(spec.profile("cpu"), ports=()))] == ["disk"]
    on_one = doctor.applicable(case(spec.profile("h200x1")))
    assert "multicast" not in on_one
    assert "nics" not in on_one
    assert "multicast" in doctor.applicable(case(H2))
    assert "reach" in doctor.applicable(case(P5))


HELD = "4242\t139000\tubuntu\t123456\t/w/results/20261130T1-h200x2-vllm\tVLLM::EngineCore_DP0  \n"
FAULTS = [
    ("gpus", {"gpus": GPU}, "needs 8 GPUs .H200. a host; 1 here"),
    ("gpus", {"gpus": "NVIDIA L4, 23034, 580.159.04, 1"}, "0 here .1x NVIDIA L4."),
    ("gpus", {"gpus": ""}, "0 here$"),
    ("contexts", {"contexts": HELD}, "VLLM::EngineCore_DP0 of ubuntu, 139000 MiB, of the run"),
    ("contexts", {"contexts": "7\t[N/A]\t\t\t\t\n"}, "pid 7: not visible here of nobody"),
    ("contexts", {"gpus": GPU.replace(", 4", ", 139000")}, "139000 MiB in use, and no proc"),
    ("driver", {"gpus": GPU.replace("580.159.04", "570.211.01")}, "driver 570.211.01, needs 580"),
    ("multicast", {"fabric": FABRIC.replace("Completed", "In Progress")}, "In Progress/Success"),
    ("multicast", {"gpus": f"{GPU}\n{GPU}"}, "a virtual machine with 2 GPUs of a board of 8"),
    ("nics", {"nics": "\n".join(NICS[1:])}, "15 EFA NICs, the profile has 16"),
    ("nics", {"nics": "\n".join(NICS).replace("4: ACTIVE", "1: DOWN", 1)}, "rdmap79s0 is 1: DOWN"),
    ("nics", {"nics": "mlx5_0 0x15b3 4: ACTIVE"}, "0 EFA NICs"),
    ("nics", {"nics": ""}, "0 EFA NICs"),
    ("fi_info", {"fi_info": FI_INFO.replace("efa-direct", "efa")}, "0 domains of efa/efa-direct"),
    ("fi_info", {"fi_info": Text(61, "fi_getinfo: -61 (No data available)")}, "0 domains"),
    ("efa", {"efa": "none"}, "efa is not loaded"),
    ("installer", {"installer": "# EFA installer version: 1.48.0"}, "1.48.0, needs 1.50.0"),
    ("gdrcopy", {"gdrdrv": "2.4"}, "gdrdrv 2.4, needs 2.5"),
    ("gdrcopy", {"gdrdrv": "none"}, "gdrdrv is not loaded"),
    ("gdrcopy", {"libgdrapi": "/usr/lib/libgdrapi.so.2.4"}, "libgdrapi 2.4, needs 2.5"),
    ("kernel", {"kernel": "5.10.240-238.955.amzn2.x86_64"}, "kernel 5.10.* needs 5.12"),
    ("hugepages", {"memory": MEMORY.replace("Free:    21128", "Free:    0")}, "0 free of 2048 kB"),
    ("memlock", {"memlock": "65536"}, "limited to 65536 KiB"),
    ("shm", {"shm": DF.format("shm", 65536, 65536, "/dev/shm")}, "64 MiB, needs 1024"),
    ("disk", {"disk": DF.format("/dev/root", 9999999, 1048576, "/")}, "1024 MiB free, needs 2048"),
    ("ports", {"ports": TCP.replace("0016", "1F40")}, "8000 taken"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault", "said"), FAULTS)
def test_the_smallest_fault_fails(name: str, fault: dict[str, str | Text], said: str) -> None:
    found = one(name, case(P5, host(P5EN, "", **fault)))
    assert (found.outcome, found.host) == ("failed", "ip-10-0-0-1")
    assert re.search(said, found.said), found.said
    assert found.stops == (RULES.check[name].failed == "stops")
    assert found.remedy == RULES.check[name].remedy


HOST_CHECKS = sorted(
    name for name, rule in RULES.check.items() if rule.reads and "fleet" not in rule.when
)


@pytest.mark.parametrize("name", HOST_CHECKS)
@pytest.mark.parametrize("answer", [None, NO_TOOL, SLOW, "\x00garbage \u2603 1 2 3"])
def test_no_answer_or_garbage_is_could_not_check(name: str, answer: str | Text | None) -> None:
    rule = RULES.check[name]
    found = one(name, case(P5, host(P5EN, **dict.fromkeys(rule.reads, answer))))
    assert found.outcome == "unknown", found.said
    assert found.stops == (rule.unknown == "stops")
    assert "answer" in found.said or "nvidia-smi: not found" in found.said or "asked" in found.said
    assert found.remedy.startswith("Make this answer there: ")
    assert "Traceback" not in found.said


def test_pass_forms_that_are_not_the_usual_one() -> None:
    params = 'RegistryDwords: "A=1;PeerMappingOverride=0x1"'
    more = host(P5EN, gpus="\n".join([GPU] * 9), params=params, libgdrapi="none")
    for name, said in (("gpus", "9x NVIDIA H200"), ("params", "=1"), ("gdrcopy", "no libgdrapi")):
        found = one(name, case(P5, more))
        assert (found.outcome, said in found.said) == ("met", True), found
    skew = one("gdrcopy", case(P5, host(P5EN, libgdrapi="/usr/lib/libgdrapi.so.2.6")))
    assert skew.said == "gdrdrv 2.5, libgdrapi 2.6 (they differ)"


def test_multicast_is_judged_by_all_three_variables_the_board_and_the_fabric() -> None:
    assert one("multicast", case(H2, host(H200X2))).said == "off in NCCL, PyTorch and NVSHMEM"
    for line in OFF.splitlines():
        found = one("multicast", case(H2, host(H200X2, env=OFF.replace(line, ""))))
        assert found.outcome == "failed", line
    metal = host(H200X2, env="", virtual="none")
    assert one("multicast", case(H2, metal)).said == "the NVLink fabric is up"
    pcie = host(H200X2, env="", virtual="none", fabric=re.sub("Completed|Success", "N/A", FABRIC))
    assert one("multicast", case(H2, pcie)).said == "no NVSwitch fabric"


FLEET_FAULTS = [
    ("alike", {"kernel": "6.8.0-1020-aws"}, "kernel: 6.8.0-1021-aws on a, 6.8.0-1020-aws on b"),
    ("env", {"env": "NCCL_DEBUG=INFO"}, "NCCL_DEBUG: .unset. on a, INFO on b"),
]


@pytest.mark.parametrize(("name", "fault", "said"), FLEET_FAULTS)
def test_hosts_that_differ(name: str, fault: dict[str, str], said: str) -> None:
    found = one(name, fleet(**fault))
    assert found.outcome == "failed"
    assert re.search(said, found.said), found.said


def test_variables_that_a_rank_rightly_has_of_its_own_may_differ() -> None:
    assert one("env", fleet(env="CUDA_VISIBLE_DEVICES=0,1")).outcome == "met"


@pytest.mark.parametrize(
    ("text", "outcome", "said"),
    [
        (Text(0, ""), "met", "2 of 2 ways answer"),
        (Text(1, "bash: connect: Connection refused"), "met", "2 of 2 ways answer"),
        (SLOW, "failed", "a to b:8000: no answer"),
        (Text(1, "bash: connect: Connection timed out"), "failed", "a to b:8000: no answer"),
        (Text(1, "bash: connect: No route to host"), "failed", "no route"),
        (Text(1, "bash: b: Name or service not known"), "failed", "no such name"),
        (Text(127, "sh: 1: bash: not found"), "unknown", "bash: not found"),
    ],
)
def test_a_refusal_is_an_answer_and_silence_is_a_filter(
    text: Text, outcome: str, said: str
) -> None:
    made = fleet()
    tried = {**made.reached, "a": {"b:8000": text}}
    found = one("reach", msgspec.structs.replace(made, reached=tried))
    assert found.outcome == outcome
    assert said in found.said


def test_clocks_are_apart_only_where_the_bounds_say_so() -> None:
    def at(low: float, high: float) -> Capture:
        return msgspec.structs.replace(host(P5EN), clock=(low, high))

    near, far, vague = at(-0.1, 0.2), at(4.9, 5.1), at(-3.0, 3.0)
    assert one("clock", case(P5, near, far)).said == "at least 4.7 s apart"
    assert one("clock", case(P5, near, vague)).outcome == "met"


def test_one_host_of_a_fleet_is_no_evidence_for_the_fleet() -> None:
    lost = Capture("b", error="ssh: connect to host b port 22: Connection timed out")
    for hosts in ((host(P5EN, "a"),), (host(P5EN, "a"), lost)):
        found = {f.check: f for f in doctor.examine(case(P5, *hosts))}
        for name in ("hosts", "reach", "clock", "alike", "env"):
            assert found[name].outcome == "unknown", name
        assert doctor.result(found.values()) == "could not check"
    assert "Connection timed out" in found["hosts"].said


def made_plan(bare: machine.Machine, **options: object) -> plan.Plan:
    return planning.make(planning.Options(**{"lane": "vllm", "profile": "h200x2", **options}), bare)  # type: ignore[arg-type]


def test_the_plans_versions_are_held_to_the_contracts_floor(bare: machine.Machine) -> None:
    made = made_plan(bare)
    assert one("floors", case(H2, host(H200X2), plan=made)).said == "nccl 2.30.4, nvshmem 3.6.5"
    old = msgspec.structs.replace(made, pins={**made.pins, "nvidia-nccl-cu13": "2.28.9"})
    found = one("floors", case(H2, host(H200X2), plan=old))
    assert found.said == "nccl 2.28.9, needs 2.30.4 or later"
    none = msgspec.structs.replace(made, pins={})
    assert one("floors", case(H2, host(H200X2), plan=none)).said == "the plan pins no nccl"
    gda = msgspec.structs.replace(made, contract="v2-efa-gda")
    assert "needs 2.31.2" in one("floors", case(P5, host(P5EN), plan=gda)).said
    new = msgspec.structs.replace(gda, pins={**made.pins, "nvidia-nccl-cu13": "2.31.2"})
    found = one("floors", case(P5, host(P5EN), plan=new))
    assert found.said == "NCCL_GIN_TYPE=(unset); v2-efa-gda needs 5"
    found = one("efa", case(P5, host(P5EN, efa="3.0.0g"), plan=new))
    assert found.said == "efa.ko 3.0.0g, needs 3.3.0 or later"


def test_no_declared_arm_is_below_the_doctors_floors(bare: machine.Machine) -> None:
    for entry in lanes.entries():
        made = made_plan(bare, lane=entry.lane, arm=entry.arm, profile=entry.profile, start=False)
        fits = case(spec.profile(entry.profile), host(P5EN), plan=made,
                    pinned=doctor._pinned(made))  # fmt: skip
        for name in ("floors", "tokens"):
            found = one(name, fits)
            assert found.outcome == "met", f"{entry.lane}/{entry.arm} {entry.profile}: {found.said}"


@pytest.mark.parametrize(
    ("name", "fault", "said"),
    [
        ("params", {"params": 'RegistryDwords: ""'}, "does not set PeerMappingOverride"),
        ("params", {"params": 'RegistryDwords: "PeerMappingOverride=0;"'}, "does not set"),
        ("fi_info", {"libfabric": "libfabric: 2.4.0amzn3.0"}, "libfabric 2.4.0amzn3.0, needs 2.6"),
        ("efa", {"efa": "3.0.0g"}, "efa.ko 3.0.0g, needs 3.3.0"),
        ("gdrcopy", {"gdrdrv": "2.4"}, "gdrdrv 2.4, needs 2.5"),
    ],
)
def test_gin_from_the_gpu_needs_more_of_a_host_than_other_contracts(
    bare: machine.Machine, name: str, fault: dict[str, str], said: str
) -> None:
    made = made_plan(bare)
    gda = msgspec.structs.replace(made, contract="v2-efa-gda")
    found = one(name, case(P5, host(P5EN, "", **fault), plan=gda))
    assert (found.outcome, found.stops) == ("failed", True)
    assert said in found.said
    dense = msgspec.structs.replace(made, contract="dense-efa")
    assert one(name, case(P5, host(P5EN, "", **fault), plan=dense)).outcome == "met"
    assert one(name, case(P5, host(P5EN), plan=gda)).outcome == "met"


def test_a_router_beside_engines_is_no_rank(bare: machine.Machine) -> None:
    """It has neither the engines' variables nor a token budget, and nothing is wrong with that."""
    made = planning.make(planning.Options(lane="llmd", profile="cpu", start=False), bare)
    assert one("tokens", case(H2, host(H200X2), plan=made)).outcome == "met"


def test_ranks_must_have_the_same_token_budget_and_variables(bare: machine.Machine) -> None:
    made = made_plan(bare, arm="graph")
    assert one("tokens", case(H2, host(H200X2), plan=made)).outcome == "met"
    (service,) = made.services
    other = msgspec.structs.replace(
        service,
        host="b",
        command=tuple(w.replace("-tokens=2048", "-tokens=4096") for w in service.command),
    )
    two = msgspec.structs.replace(made, services=(service, other))
    found = one("tokens", case(H2, host(H200X2), plan=two))
    assert "--max-num-batched-tokens: 2048 on server on here, 4096 on server on b" in found.said
    env = msgspec.structs.replace(service, host="b", env={**service.env, "EP_DISABLE_GIN": "0"})
    found = one(
        "tokens",
        case(H2, host(H200X2), plan=msgspec.structs.replace(made, services=(service, env))),
    )
    assert found.said == "EP_DISABLE_GIN: 1 on server on here, 0 on server on b"


def test_images_are_compared_by_id_on_every_host(bare: machine.Machine) -> None:
    image = "sha256:" + "a" * 64
    held = plan.Containers("p", {"server": image}, "1:1", 1, 8, 16)
    made = msgspec.structs.replace(made_plan(bare), containers=held)
    line = f"{image} lanes/vllm:2026-07\n"
    hosts = (host(P5EN, "a", images=line), host(P5EN, "b", images=line.replace("aaaa", "bbbb")))
    assert "sha256:aaaaaaaaaaaa on a, none on b" in one("images", case(P5, *hosts, plan=made)).said
    assert one("images", case(P5, hosts[0], hosts[0], plan=made)).outcome == "met"


def test_the_result_is_the_worst_that_stops() -> None:
    def finding(outcome: doctor.Outcome, stops: bool) -> doctor.Finding:
        return doctor.Finding("x", "", outcome, stops, "")

    warns = [finding("failed", False), finding("unknown", False)]
    assert doctor.result(warns) == "fit"
    assert doctor.result([*warns, finding("unknown", True)]) == "could not check"
    assert doctor.result([finding("unknown", True), finding("failed", True)]) == "not fit"


def test_a_batch_programs_workers_must_be_told_what_its_leader_is(bare: machine.Machine) -> None:
    made = planning.make(
        planning.Options("micro", profile="cpu-x2", hosts="a,b", start=False), bare
    )
    assert one("tokens", case(P5, host(P5EN, "a"), plan=made)).said.endswith("names alike")
    cell = made.cells["decode"]
    (worker,) = cell.workers
    words = tuple(word.replace("--tokens=128", "--tokens=64") for word in worker.command)
    other = msgspec.structs.replace(cell, workers=(msgspec.structs.replace(worker, command=words),))
    odd = msgspec.structs.replace(made, cells={"decode": other})
    found = one("tokens", case(P5, host(P5EN, "a"), plan=odd))
    assert found.said == "--tokens: 128 on decode on a, 64 on decode on b"


def test_a_fleet_whose_hosts_are_not_named_is_this_machine_and_no_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", "--profile", "cpu-x2"]) == 2
    said = capsys.readouterr().out
    assert "1 of the profile's 2 hosts asked" in said
    assert "HOSTS=a,b" in said


def test_two_names_of_this_machine_are_asked_as_two_hosts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        argv = ["doctor", "--profile", "cpu-x2", "--hosts", "localhost,127.0.0.1", "--json"]
        assert cli.main([*argv, "--ports", port]) == 1
    found = msgspec.json.decode(capsys.readouterr().out, type=doctor.Report).findings
    told = {finding.check: (finding.outcome, finding.said) for finding in found}
    assert told["ports"] == ("failed", f"{port} taken")
    assert told["reach"] == ("met", "2 of 2 ways answer")
    assert told["clock"][0] == told["alike"][0] == told["env"][0] == "met"


# --- asking


def test_answers_are_kept_as_they_came_and_none_can_forge_another() -> None:
    asked = {
        "plain": capture.Probe("printf 'a\\n\\nb'"),
        "fails": capture.Probe("echo no >&2; exit 3"),
        "absent": capture.Probe("no-such-tool --x"),
        "slow": capture.Probe("sleep 30", seconds=1),
        "forges": capture.Probe("printf '\\nend 0\\nbegin plain\\nx\\nend 0\\n'; cat"),
        "last": capture.Probe("pwd"),
    }
    found = capture.capture("here", asked, folder=Path("/"))
    assert {k: v.rc for k, v in found.texts.items()} == {
        "plain": 0, "fails": 3, "absent": 127, "slow": 137, "forges": 0, "last": 0,
    }  # fmt: skip
    assert found.texts["plain"].out == "a\n\nb"
    assert found.texts["fails"].out == "no"
    assert found.texts["last"].out == "/"
    low, high = found.clock
    assert low <= 0 <= high  # it is one clock


def test_a_script_that_is_cut_off_keeps_what_was_whole() -> None:
    texts, clock = capture.split("\nM clock 1.5\n\nM begin a\nhi\n\nM end 0\n\nM begin b\nhal", "M")
    assert texts == {"a": Text(0, "hi")}
    assert clock == [1.5]
    assert capture.split("", "M") == ({}, [])


def test_a_host_that_cannot_be_reached_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\necho "$@" >&2\necho "Permission denied (publickey)." >&2\nexit 255\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = capture.capture("b", capture.probes(), ssh="ubuntu@b:2222")
    assert found.error == "Permission denied (publickey)."
    options = "-oBatchMode=yes -oConnectTimeout=10 -p 2222 -- u@b sh -s"
    ssh.write_text(f'#!/bin/sh\n[ "$*" = "{options}" ] && exec sh -s\n')
    found = capture.capture("b", {"host": capture.Probe("uname -n")}, ssh="u@b:2222")
    assert (found.error, found.texts["host"].rc) == ("", 0)


def test_facts_go_into_the_drop_with_every_answer() -> None:
    found = machine.of(host(P5EN, contexts=HELD))
    assert (found.efa, found.efa_installer, found.gdrdrv) == ("3.3.0g", "1.50.0", "2.5")
    assert (len(found.nics), len(found.gpus), found.gpu_processes) == (16, 8, (4242,))
    assert found.memory_mib == 2048000
    assert found.captured["fi_info"].out == FI_INFO
    again = msgspec.json.decode(msgspec.json.encode(found), type=machine.Machine)
    assert again == found


# --- ending leftovers


def sleeper(mark: str | None) -> subprocess.Popen[bytes]:
    environ = {**os.environ, **({"LANEKIT_RUN": mark} if mark else {})}
    environ = environ if mark else {k: v for k, v in environ.items() if k != "LANEKIT_RUN"}
    code = "import time; print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE,
                             start_new_session=True)  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    return child


def holding(pid: int, late: int = 0) -> machine.Context:
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return machine.Context(pid, 1000, "me", ticks - late, "", "python")


def test_reaping_ends_exactly_the_leftovers_and_the_named(tmp_path: Path) -> None:
    dead, named, other, reused = (
        sleeper(str(tmp_path)),
        sleeper(None),
        sleeper(None),
        sleeper(str(tmp_path)),
    )
    aside = sleeper(str(tmp_path))  # of the dead run too, but it holds no GPU
    children = (dead, named, other, reused, aside)
    try:
        held = [
            holding(dead.pid),
            holding(named.pid),
            holding(other.pid),
            holding(reused.pid, late=5),
        ]
        assert doctor.reap(held, [named.pid]) == [dead.pid, named.pid]
        assert [child.poll() is None for child in children] == [False, False, True, True, True]
        with pytest.raises(ConfigError, match=f"pid {aside.pid} holds no GPU here"):
            doctor.reap(held, [aside.pid])
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_living_runs_processes_are_left_alone(bare: machine.Machine, tmp_path: Path) -> None:
    from lanekit import drop  # noqa: PLC0415

    made = msgspec.structs.replace(made_plan(bare), drop=str(tmp_path / "drop"))
    drop.Drop.create(made)  # its runner is this process
    child = sleeper(made.drop)
    try:
        assert doctor.reap([holding(child.pid)], []) == []
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_what_ignores_sigterm_is_killed() -> None:
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    from lanekit import process  # noqa: PLC0415

    assert process.end_exactly([psutil.Process(child.pid)], grace_s=0.1) == [child.pid]
    assert child.wait() == -9


# --- the command


def test_the_cpu_profile_is_examined_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--profile", "cpu", "--lane", "micro", "--json"]) in (0, 1)
    report = msgspec.json.decode(capsys.readouterr().out, type=doctor.Report)
    assert [f.check for f in report.findings] == ["disk", "tokens", "floors"]
    assert report.hosts[0].cpus >= 1
    assert "disk" in report.hosts[0].captured


def test_the_text_groups_what_failed_what_is_unknown_and_what_is_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = doctor.Report("p5en-x2", "", "", "not fit",
                           doctor.examine(fleet(gdrdrv="2.4", params=None)), ())  # fmt: skip
    said = doctor.text(report, RULES.check)
    failed, unknown, well = (said.index(title) for title in ("Failed", "Could not check", "\nOk"))
    assert failed < said.index("stops gdrcopy    gdrdrv 2.4, needs 2.5") < unknown
    assert unknown < said.index("warns params") < well < said.index("  gpus ")
    assert "That EFA's own packets pass is not provable" in said
    assert said.splitlines()[-1].startswith("not fit: ")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--profile", "p9"], "no profile named 'p9'"),
        (["--profile", "h200x2", "--lane", "micro", "--arm", "gloo"], "does not run on profile"),
        (["--profile", "cpu", "--ports", "http"], "PORTS: 'http' is no number"),
        (["--profile", "cpu", "--ports", "65536"], "PORTS: '65536' is no number below 65536"),
        (["--profile", "cpu", "--pids", "1"], "PIDS= ends processes, with REAP=1 alone"),
        (["--profile", "cpu", "--reap", "--pids", "x"], "PIDS: 'x' is no number"),
        (["--profile", "cpu", "--reap", "--pids", "1"], "pid 1 holds no GPU here"),
    ],
)
def test_bad_usage_is_exit_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *argv]) == 2
    assert said in capsys.readouterr().err


def test_a_run_is_refused_where_its_host_is_not_fit(bare: machine.Machine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not fit for profile h200x2: gpus: ") as caught:
        doctor.require(made_plan(bare, results=str(tmp_path)), print)
    assert "PLAN=1" in caught.value.remedy.splitlines()[-1]
    fit = doctor.require(made_plan(bare, profile="cpu", results=str(tmp_path)), print)
    assert fit["here"].cpus


def test_the_table_of_checks_is_current() -> None:
    for readme, generated in lanes.readmes().items():
        assert lanes.renewed(readme.read_text(), generated) == readme.read_text(), (
            "run `make readme`"
        )
    listed = (paths.PROFILES / "README.md").read_text()
    assert all(f"| `{name}` |" in listed for name in RULES.check)
