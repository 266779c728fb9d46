"""A stand-in of deep_ep over gloo: the calls of both buffers, with a real exchange between ranks.

What it proves: that an engine and our series call DeepEP as it wants to be called, and that what
they compute from its answers is right. It says nothing of DeepEP itself. Signatures are those of
b306af06, as far as Megatron uses them; a call that the real one would refuse fails here.
"""

from types import SimpleNamespace
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
import torch.distributed as dist  # type: ignore[import-not-found,unused-ignore]

from .utils.event import EventHandle, EventOverlap


class Exchange:
    """Tokens go once to every rank that holds one of their experts, and come back added up."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def layout(self, topk_idx: Any, num_experts: int) -> Any:
        """Who gets which token; what V2 calls its handle."""
        world = self.group.size()
        per_rank = num_experts // world
        goes = [(topk_idx // per_rank == peer).any(1).nonzero()[:, 0] for peer in range(world)]
        sent = [len(index) for index in goes]
        counts = torch.empty(world, dtype=torch.int64)
        dist.all_to_all_single(counts, torch.tensor(sent), group=self.group)
        return SimpleNamespace(
            sent=sent, got=counts.tolist(), order=torch.cat(goes), tokens=len(topk_idx),
            per_rank=per_rank, num_sms=20, num_recv_tokens_per_expert_list=[],
        )  # fmt: skip

    def send(self, rows: Any, handle: Any) -> Any:
        """Rows to the ranks of the layout."""
        return self._move(rows[handle.order], handle.sent, handle.got)

    def back(self, rows: Any, handle: Any) -> Any:
        """Rows back, those of one token added: [tokens, width]."""
        came = self._move(rows, handle.got, handle.sent)
        return torch.zeros(handle.tokens, rows.shape[1], dtype=rows.dtype).index_add_(
            0, handle.order, came
        )

    def _move(self, rows: Any, sent: list[int], got: list[int]) -> Any:
        out = rows.new_empty((sum(got), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), got, sent, group=self.group)
        return out

    def first(self, topk_idx: Any, weights: Any, handle: Any) -> tuple[Any, Any]:
        """Local expert ids, -1 where a choice went elsewhere, and the weights of those here."""
        assert topk_idx.dtype == torch.int64
        assert weights.dtype == torch.float32
        experts = self.send(topk_idx, handle)
        here = experts // handle.per_rank == self.group.rank()
        local = torch.where(here, experts % handle.per_rank, -1)
        counts = torch.bincount(local[local >= 0], minlength=handle.per_rank)
        handle.num_recv_tokens_per_expert_list = counts.tolist()
        return local, torch.where(here, self.send(weights, handle), 0.0)


class ElasticBuffer(Exchange):
    """V2: one dispatch, a handle that repeats its layout, events as handles."""

    def __init__(
        self, group: Any, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0
    ) -> None:
        super().__init__(group)
        self.cap = num_max_tokens_per_rank
        assert hidden > 0
        assert num_topk >= 0
        print("deep_ep.ElasticBuffer constructed", flush=True)

    def dispatch(
        self,
        x: Any,
        *,
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_experts: Any = None,
        num_sms: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Any = None,
    ) -> Any:
        """Dispatch, or repeat the layout of a handle."""
        self._check(previous_event, async_with_compute_stream, allocate_on_comm_stream)
        assert len(x) <= self.cap
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            assert num_sms == handle.num_sms
            return self.send(x, handle), None, None, handle, EventOverlap()
        handle = self.layout(topk_idx, num_experts)
        local, weights = self.first(topk_idx, topk_weights, handle)
        return self.send(x, handle), local, weights, handle, EventOverlap()

    def combine(
        self,
        x: Any,
        handle: Any,
        *,
        topk_weights: Any = None,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """Add up what comes back."""
        self._check(previous_event, async_with_compute_stream, allocate_on_comm_stream)
        assert x.is_contiguous()
        weights = None if topk_weights is None else self.back(topk_weights, handle)
        return self.back(x, handle), weights, EventOverlap()

    @staticmethod
    def _check(event: Any, finish: bool, on_comm_stream: bool) -> None:
        assert event is None or (on_comm_stream and isinstance(event, EventHandle))
        assert isinstance(finish, bool)


class Buffer(Exchange):
    """V1: a layout first, events as EventOverlap, a buffer of two sizes."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        super().__init__(group)
        self.group_size = group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.num_experts = 0
        print("deep_ep.Buffer constructed", flush=True)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Must be even upstream."""
        assert new_num_sms % 2 == 0

    @staticmethod
    def get_dispatch_config(_ranks: int) -> Any:
        """Size hints."""
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda *_: 1, get_rdma_buffer_size_hint=lambda *_: 0
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Any, num_experts: int, **_: Any) -> Any:
        """Counts that dispatch is given back; here it finds them itself."""
        self.num_experts = num_experts
        return None, None, torch.zeros(num_experts, dtype=torch.int), None, EventOverlap()

    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        *,
        topk_idx: Any = None,
        topk_weights: Any = None,
        **_: Any,
    ) -> Any:
        """Dispatch, or repeat the layout of a handle."""
        if handle is not None:
            return self.send(x, handle), None, None, None, None, EventOverlap()
        handle = self.layout(topk_idx, self.num_experts)
        local, weights = self.first(topk_idx, topk_weights, handle)
        counts = handle.num_recv_tokens_per_expert_list
        return self.send(x, handle), local, weights, counts, handle, EventOverlap()

    def combine(self, x: Any, handle: Any, *, topk_weights: Any = None, **_: Any) -> Any:
        """Add up what comes back."""
        weights = None if topk_weights is None else self.back(topk_weights, handle)
        return self.back(x, handle), weights, EventOverlap()
