"""What programs print of their own options and variables, beside a plan."""

import gzip
import re
import shutil
from pathlib import Path

import drops
import msgspec
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st

from lanekit import contract, drop, given, judge, planning, row, spec
from lanekit.plan import Plan, public
from lanekit.verify import verify

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
# As vLLM 0.24.0 printed it on two H200 (2026-11-30), without what is always None in the middle.
SAID = (
    "'host': '127.0.0.1', 'port': 45399, 'model': '/a/qwen, 3', 'max_model_len': 4096, "
    "'served_model_name': ['lane-model'], 'enable_expert_parallel': True, "
    "'gpu_memory_utilization': 0.7, 'compilation_config': {'mode': <CompilationMode.NONE: 0>, "
    "'inductor_compile_config': {'size_asserts': False}, 'cudagraph_mode': "
    "<CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>, 'cudagraph_capture_sizes': [1, 2, 4], "
    "'dynamic_shapes_config': {'type': <DynamicShapesType.BACKED: 'backed'>}}"
)
PLANNED = {
    "--host": "127.0.0.1", "--port": "45399", "--model": "/a/qwen, 3", "--max-model-len": "4096",
    "--served-model-name": "lane-model", "--enable-expert-parallel": "True",
    "--gpu-memory-utilization": "0.7", "-cc.mode": "0", "-cc.cudagraph_mode": "FULL_DECODE_ONLY",
    "-cc.cudagraph_capture_sizes": "[1,2,4]", "--load-format": "auto",
}  # fmt: skip
USUAL = {"load_format": "auto", "port": "8000", "-cc.cudagraph_capture_sizes": "None"}


def test_a_server_that_was_started_as_planned_says_so() -> None:
    assert not list(given.options(SAID, PLANNED, USUAL))


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"--max-num-seqs": "64"}, "max_num_seqs nothing, planned 64"),
        ({"--max-model-len": None}, "max_model_len 4096, planned nothing"),
        ({"--max-model-len": "409"}, "max_model_len 4096, planned 409"),
        ({"--enable-expert-parallel": None}, "enable_expert_parallel True, planned nothing"),
        ({"--load-format": "dummy"}, "load_format auto, planned dummy"),
        ({"--port": None}, "port 45399, planned 8000"),
        ({"-cc.mode": "3"}, "-cc.mode <CompilationMode.NONE: 0>, planned 3"),
        ({"-cc.cudagraph_mode": "FULL"}, "-cc.cudagraph_mode <CUDAGraphMode.FULL_DECODE_ONLY"),
        ({"-cc.cudagraph_capture_sizes": "[1,2]"}, "-cc.cudagraph_capture_sizes [1, 2, 4], pla"),
        ({"-cc.cudagraph_capture_sizes": None}, "-cc.cudagraph_capture_sizes [1, 2, 4], pla"),
        ({"-cc.unheard_of": "1"}, "-cc.unheard_of nothing, planned 1"),
    ],
)
def test_any_other_option_is_named(change: dict[str, str | None], differs: str) -> None:
    planned = {name: value for name, value in (PLANNED | change).items() if value is not None}
    (found,) = given.options(SAID, planned, USUAL)
    assert found.startswith(differs)


@pytest.mark.parametrize(
    ("said", "differs"),
    [
        ("'use_inductor_graph_partition': None, 'pass_config': {}, 'backend': 'inductor'", []),
        ("'use_inductor_graph_partition': True", ["use_inductor_graph_partition True"]),
        ("'max_cudagraph_capture_size': 8", ["max_cudagraph_capture_size 8"]),
        ("'pass_config': {'fuse_act_quant': True}", ["pass_config {'fuse_act_quant': True}"]),
    ],
)
def test_a_compilation_setting_that_nobody_planned_is_the_usual_one(
    said: str, differs: list[str]
) -> None:
    usual = contract.rules()["vllm-options"].usual
    found = list(given.options(f"'compilation_config': {{{said}}}", {}, usual))
    assert [x.removeprefix("-cc.").partition(", planned")[0] for x in found] == differs


# SGLang 0.5.11 on two H200 (2026-11-30), with a tenth of what it prints.
CALL = (
    "model_path='/s/tree', load_format='dummy', trust_remote_code=True, port=46447, "
    "mem_fraction_static=0.85, chunked_prefill_size=1024, watchdog_timeout=1800.0, "
    """deepep_config='{"normal_dispatch":{"num_sms":24,"x":16}}', cuda_graph_bs=[256], """
    "cuda_graph_max_bs=256, buckets=None"
)


@pytest.mark.parametrize(
    ("size", "differs"), [("256", []), ("64", ["cuda_graph_bs [256], planned 64"])]
)
def test_what_sglang_prints_beyond_the_plan_is_its_default(size: str, differs: list[str]) -> None:
    planned = {
        "--model-path": "/s/tree", "--load-format": "dummy", "--trust-remote-code": "True",
        "--port": "46447", "--mem-fraction-static": "0.85", "--chunked-prefill-size": "2048",
        "--watchdog-timeout": "1800", "--cuda-graph-bs": size,
        "--deepep-config": '{"normal_dispatch":{"num_sms":24,"x":16}}',
    }  # fmt: skip
    usual = contract.rules()["sglang-options"].usual
    assert list(given.options(CALL, planned, usual)) == differs


@pytest.mark.parametrize(
    ("printed", "instead", "differs"),
    [
        ("", "", []),
        (
            "speculative_algorithm=None",
            "speculative_algorithm='EAGLE'",
            ["speculative_algorithm 'EAGLE', planned None"],
        ),
        ("quantization=None", "quantization='w4afp8'", ["quantization 'w4afp8', planned None"]),
        ("device='cuda'", "device='cpu'", ["device 'cpu', planned cuda"]),
        (
            "enable_two_batch_overlap=False",
            "enable_two_batch_overlap=True",
            ["enable_two_batch_overlap True, planned False"],
        ),
    ],
)
def test_sglang_says_what_nobody_gave_it(printed: str, instead: str, differs: list[str]) -> None:
    """The real line of two H200, and one with an option more."""
    log = gzip.decompress((LOGS / "h200x2-sglang-v2-no-cumem.log.gz").read_bytes()).decode()
    (line,) = [line for line in log.splitlines() if "server_args=ServerArgs(" in line]
    assert f", {printed}" in line
    call = line[line.index("(", line.index("ServerArgs")) + 1 : -1]
    usual = contract.rules()["sglang-options"].usual
    said = call.replace(f", {printed}", f", {instead}") if printed else call
    assert list(given.options(said, {}, usual)) == differs


@pytest.mark.parametrize(
    ("said", "planned", "usual", "differs"),
    [
        ("0", {"NCCL_X": "0"}, {}, ""),
        ("1", {"NCCL_X": "0"}, {}, "NCCL_X 1, planned 0"),
        ("1", {}, {}, "NCCL_X 1, planned nothing"),
        ("1", {}, {"NCCL_X": "*"}, ""),
        ("1", {}, {"NCCL_X": "0"}, "NCCL_X 1, planned 0"),
        ("1", {"NCCL_X": "0"}, {"*": "*"}, "NCCL_X 1, planned 0"),
        ("1", {}, {"*": "*"}, ""),
        ("16", {"NCCL_X": "0x10"}, {}, ""),
        ("10", {"NCCL_X": "0x10"}, {}, "NCCL_X 10, planned 0x10"),
        ("x", {"NCCL_X": "0x10"}, {}, "NCCL_X x, planned 0x10"),
    ],
)
def test_a_variable_is_the_planned_one_or_what_it_usually_is(
    said: str, planned: dict[str, str], usual: dict[str, str], differs: str
) -> None:
    assert given.variable("NCCL_X", said, planned, usual) == differs


@pytest.mark.parametrize(
    ("end", "value"),
    [
        ("0.", "0"),
        ("0.vm:4892:4892 [0] NCCL INFO Bootstrap", "0"),
        ("0.[lane-evidence] v=1 host=vm", "0"),
        ("0vm:4892:4892 [0] NCCL INFO Bootstrap", None),
        ("0[lane-evidence] v=1 host=vm", None),
        ("0.(Worker_DP0 pid=9) INFO", "0"),
        ("Libfabric", "Libfabric"),
        ("INIT,NET,ENV", "INIT,NET,ENV"),
        ("10.0.0.1", "10.0.0.1"),
        ("/opt/x/libnccl-net.so", "/opt/x/libnccl-net.so"),
        ("allreduce:ring", "allreduce:ring"),
        ("mlx5_0:1.", "mlx5_0:1"),
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("^[x](y)", "^[x](y)"),
        ("0vm:4892:4892", None),
        ("Ringvm:4892:4892", None),
    ],
)
def test_a_variable_s_line_that_was_cut_off_says_no_other_value(
    end: str, value: str | None
) -> None:
    line = f"vm:4891:4891 [1] NCCL INFO NCCL_X set by environment to {end}"
    for name in ("nccl-variables", "nccl-variables-efa"):
        found = re.match(contract.rules()[name].pattern, line)
        assert (found and found["value"]) == value


@pytest.mark.parametrize(
    ("limit", "value", "allowed"),
    [("2", "2", True), ("2", "3", False), ("0", "129", True), ("2", "two", False)],
)
def test_a_limit_holds_and_none_is_none(limit: str, value: str, allowed: bool) -> None:
    assert judge._allows(f"{contract.AT_MOST}{limit}", value) == allowed


RESULTS = Path(__file__).resolve().parents[2] / "results"


def relabelled(root: Path, name: str, arm: str) -> Path:
    """A committed drop of the vllm lane, its manifest made anew as another arm's."""
    drop = shutil.copytree(RESULTS / name, root / name)
    held = msgspec.json.decode((drop / "manifest.json").read_bytes())
    lane = spec.lane("vllm")
    plan = msgspec.structs.replace(msgspec.convert(held["plan"], Plan), arm=arm)
    held["row"]["arm"], held["plan"] = arm, public(planning.again(plan, lane))
    held["plan"]["lane_sha256"] = planning.digest(lane, arm, held["row"]["profile"])
    held["patches"] = held["plan"]["patches"]
    (drop / "manifest.json").write_bytes(msgspec.json.encode(held))
    return drops.seal(drop)


@pytest.mark.parametrize(
    ("name", "arm", "differs"),
    [
        (
            "20261130T154645Z-h200x2-vllm-graph",
            "graph-all",
            "_sizes [1, 2, 4, 8, 16, 24, 32], pl",
        ),
        (
            "20261130T154437Z-h200x2-vllm-dense-graph",
            "graph",
            "ter, planned deepep_v2",
        ),
        (
            "20261130T154031Z-cpu-vllm-floor",
            "floor-graph",
            "_mode nothing, planned FULL_D",
        ),
    ],
)
def test_a_real_run_under_another_arm_s_name_is_refuted(
    tmp_path: Path, name: str, arm: str, differs: str
) -> None:
    found = verify(relabelled(tmp_path, name, arm))
    (check,) = [each for each in found.checks if each.id == "vllm-options"]
    assert (found.result, check.outcome) == ("refuted", "failed")
    assert differs in check.actual
    assert check.first is not None


@settings(max_examples=300, deadline=None)
@hypothesis_given(st.text(alphabet="'\"\\\\,:=[]{}()<> ab1", max_size=200))
def test_whatever_is_printed_is_taken_apart(said: str) -> None:
    """Never an error, and never the plan's options."""
    assert list(given.options(said, PLANNED, USUAL))


@pytest.mark.parametrize("piece", ["'", "\\'", "'\\\\", "\"'", "{'a': ", "<", ",", "'a': '"])
def test_a_line_made_to_take_long_does_not(piece: str) -> None:
    """As long as a line is looked at: by the square it would be a minute."""
    said = "'" + piece * (200_000 // len(piece))
    assert list(given.options(said, PLANNED, USUAL))


def test_a_manifest_excuses_no_variable_that_no_run_takes_from_its_surroundings() -> None:
    """A log with NCCL_ALGO=Ring was proven once the manifest's own environment said so."""
    held = drop.read(RESULTS / "20261130T154924Z-h200x2-vllm-epnc1")
    ambient = {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}
    made = msgspec.structs.replace(held, environment=ambient)
    taken = row.started(made)["logs/host-1-server.log"].variables
    assert given.variable("NCCL_NVLS_ENABLE", "0", taken, {}) == ""
    assert given.variable("NCCL_ALGO", "Ring", taken, {}) == "NCCL_ALGO Ring, planned nothing"
    assert "inherited: NCCL_NVLS_ENABLE=0" in row.said(made, row.lane(made.row))
