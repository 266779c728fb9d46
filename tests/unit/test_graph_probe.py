"""The graph probe from outside: each way a rank ends becomes one line; the ranks really end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lanekit import programs

PROBE = Path(__file__).parents[2] / "lanes" / "vllm" / "graph_probe.py"
probe = programs.load("graph_probe", PROBE)

ENDS = {
    "died": "import os; os.abort()",
    "timeout": "import time; time.sleep(60)",
    "illegal": "raise RuntimeError('CUDA error: an illegal memory access was encountered')",
    "error": "raise ValueError('some other fault')",
    "missing": "raise ModuleNotFoundError('no torch on this machine')",
}


@pytest.mark.parametrize("end", ENDS)
def test_each_way_a_rank_ends_is_named(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(ENDS[end])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    case = probe.Case("align/as-is/00", "align")
    line = probe.run_case(case, 2, 5.0 if end == "timeout" else 60.0)
    assert line["actual"] == end
    assert line["world"] == 1  # the sorting kernel needs no second rank
    assert line["ok"] is (end != "missing")  # it is expected to fail, but it has to be asked
    json.dumps(line, allow_nan=False)


def test_the_worst_rank_names_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [{"actual": "timeout"}, {"actual": "illegal", "detail": "rank 1"}]
    monkeypatch.setattr(probe, "start_rank", lambda case, rank, *rest: ends[rank])
    line = probe.run_case(probe.Case("x", "triton_fp8", "remote"), 2, 1.0)
    assert (line["actual"], line["rank"], line["detail"]) == ("illegal", 1, "rank 1")
    assert line["ok"] is False


@pytest.mark.parametrize(
    ("body", "want"), [("x = -1\n", "fails"), ("def _remote_expert_id(", "match")]
)
def test_the_installed_tree_decides_what_is_expected(
    body: str, want: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm/model_executor/layers/fused_moe/prepare_finalize"
    folder.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    (folder / "deepep_v2.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert probe.expected(probe.Case("x", "triton_fp8")) == want
    assert probe.expected(probe.Case("x", "align")) == "fails"  # compiled code, not patched
    assert probe.expected(probe.Case("x", "triton_fp8", "remote")) == "match"


def test_nothing_to_run_with_is_exit_2(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(ENDS["missing"])
    done = subprocess.run(
        [sys.executable, str(PROBE), "--only", "align", "--out", str(tmp_path / "lines")],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nothing ran" in done.stderr
    assert len((tmp_path / "lines").read_text().splitlines()) == 4
