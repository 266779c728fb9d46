"""Print, once per rank and construction, which DeepEP buffer was really built, and once per rank
that this would have been printed.

Nothing upstream says it: DeepEP b306af06 is silent unless EP_BUFFER_DEBUG=1, and that prints about
1 KB per dispatch (read 2026-11-30). lane_evidence.pth imports this module in an interpreter that
has LANE_EVIDENCE=1. The import registers a finder; the work happens when one of WATCHED is.

    [lane-evidence] v=1 armed host=H pid=P rank=R local_rank=L world=W nccl=X.Y.Z nvshmem=A.B.C
        hook=VERSION t=SECONDS
    [lane-evidence] v=1 host=H pid=P rank=R local_rank=L world=W class=deep_ep.ElasticBuffer
        deep_ep=VERSION nccl=X.Y.Z nvshmem=A.B.C gin=TYPE qps=N comms=K timeout_s=T t=SECONDS

are one line each on standard error. The first comes from a process that joined a group of ranks,
which it must before it can build a buffer: only where it stands does the absence of the second say
that no buffer was built. `t` is the time since the epoch, so that a log of another run is known
for one. Values come from the objects and libraries mapped into the process:
`unknown` is a value that could not be read, `none` one that is not there.

Environment: LANE_EVIDENCE=1 switches it on. LANE_REFUSE_LEGACY=1 makes the construction of the
legacy deep_ep.Buffer an error. LANE_TIMEOUT_S (default 600) is the least ElasticBuffer timeout.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # the name checkers know; importing typing would cost 2 ms at every start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

HOOK = "0.3.0"  # of this file, and of its wheel
PACKAGE = "deep_ep"
PACKAGES = (PACKAGE, f"tensorrt_llm.{PACKAGE}")  # TensorRT-LLM 1.x carries its own copy
GROUPS = "torch.distributed.distributed_c10d"
MPI_ENGINE = "tensorrt_llm"  # its ranks form a group by MPI, with or without torch's
WATCHED = (*PACKAGES, GROUPS, MPI_ENGINE)
CLASSES = ("ElasticBuffer", "Buffer")
TIMEOUTS = ("num_cpu_timeout_secs", "num_gpu_timeout_secs")
GIN_TYPES = {0: "none", 2: "proxy", 3: "gdaki"}  # ncclGinType_t, NCCL 2.30.4 nccl_device/core.h
NCCL_API_MAGIC = 0xCAFEBEEF
MARK = "_lane_evidence"
ARMED: set[int] = set()  # processes that said so: a fork has its own number


def _mapped(stem: str) -> list[str]:
    """Paths of the files mapped into this process whose name starts with `stem`."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        fields = (line.rstrip("\n").split(None, 5) for line in maps)
        paths = {row[5].removesuffix(" (deleted)") for row in fields if len(row) == 6}
    return sorted(path for path in paths if os.path.basename(path).startswith(stem))


def _library(path: str) -> Any:
    """The already mapped library; RTLD_NOLOAD, so that asking never loads a second copy."""
    import ctypes  # noqa: PLC0415 - an interpreter without deep_ep must not pay for it

    return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def _nccl_code(path: str) -> int:
    import ctypes  # noqa: PLC0415

    code = ctypes.c_int()
    if _library(path).ncclGetVersion(ctypes.byref(code)) != 0:
        raise OSError(f"{path}: ncclGetVersion failed")
    return code.value


def _nccl_version(path: str) -> str:
    code = _nccl_code(path)
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"


def _nvshmem_version(path: str) -> str:
    import ctypes  # noqa: PLC0415

    parts = [ctypes.c_int() for _ in range(3)]
    _library(path).nvshmemx_vendor_get_version_info(*map(ctypes.byref, parts))
    return ".".join(str(part.value) for part in parts)


def _versions(stem: str, read: Callable[[str], str], absent: str = "unknown") -> str:
    """Version of the mapped library; two mapped copies show as two versions, never as one."""
    from functools import partial  # noqa: PLC0415

    return ",".join(_read(partial(read, path)) for path in _mapped(stem)) or absent


def _gin(buffer: Any) -> str:
    """GIN type that NCCL reports for the communicator under the buffer."""
    if os.environ.get("EP_DISABLE_GIN", "0") not in ("", "0"):
        return "off"
    import ctypes  # noqa: PLC0415

    class Properties(ctypes.Structure):
        """ncclCommProperties of NCCL 2.30.4; a later NCCL fills no more than `size`."""

        _fields_ = (
            ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
            ("ints", ctypes.c_int * 4), ("bools", ctypes.c_bool * 2), ("gin", ctypes.c_int),
            ("lsa_teams", ctypes.c_int), ("host_rma", ctypes.c_bool), ("railed_gin", ctypes.c_int),
        )  # fmt: skip

    (path,) = _mapped("libnccl.so")
    size = ctypes.sizeof(Properties)
    properties = Properties(size=size, magic=NCCL_API_MAGIC, version=_nccl_code(path))
    handle = ctypes.c_void_p(buffer.nccl_comm_handle.get())
    if _library(path).ncclCommQueryProperties(handle, ctypes.byref(properties)) != 0:
        return "unknown"
    railed = bool(buffer.allow_hybrid_mode)
    return GIN_TYPES.get(properties.railed_gin if railed else properties.gin, "unknown")


def _comms(group: Any) -> int:
    """NCCL communicators under the buffer: one, unless the multi-comm series is applied."""
    comm = sys.modules[f"{PACKAGE}.utils.comm"]
    many = getattr(comm, "get_nccl_comm_handles", None)  # cached by then: asking creates nothing
    return len(many(group)) if many is not None else 1


def _package_version() -> str:
    """Version of the distribution that owns the imported package, else its __version__."""
    from importlib.metadata import distributions  # noqa: PLC0415

    module = sys.modules[PACKAGE]
    site = os.path.dirname(os.path.dirname(os.path.abspath(str(module.__file__))))
    for found in distributions(path=[site]):
        name = (found.metadata["Name"] or "").lower().replace("-", "_")
        if name in (PACKAGE, f"sgl_{PACKAGE}"):
            return found.version
    return str(module.__version__)


def _rank_and_world(group: Any) -> tuple[int, int]:
    """Global rank and world; those of the group, else MPI's, where torch.distributed has none."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()), int(dist.get_world_size())
    if group is not None:
        return int(group.rank()), int(group.size())
    return int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])


def _local_rank(world: int = 0) -> int:
    """What the launcher says, else the current device's index before CUDA_VISIBLE_DEVICES. A
    process without a device is not given one; it is the first where it is alone."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    cuda = sys.modules["torch"].cuda
    if world == 1 and not cuda.is_initialized():
        return 0
    current = int(cuda.current_device()) if cuda.is_initialized() else None
    visible = [item for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item]
    if current is None:
        (only,) = visible
        return int(only)
    return int(visible[current]) if visible else current


def _read(get: Callable[[], object]) -> str:
    """The value without blanks; `unknown` where reading it fails, never a guess."""
    try:
        return "_".join(str(get()).split()) or "unknown"
    except Exception:
        return "unknown"


def _who(group: Any) -> dict[str, Callable[[], object]]:
    return {
        "host": lambda: os.uname().nodename,
        "pid": os.getpid,
        "rank": lambda: _rank_and_world(group)[0],
        "local_rank": lambda: _local_rank(_rank_and_world(group)[1]),
        "world": lambda: _rank_and_world(group)[1],
    }


def _print(mark: str, fields: dict[str, Callable[[], object]]) -> None:
    """One write, so that the lines of ranks that share a pipe do not tear. It ends whatever stands
    there unended: NCCL's output is cut at its buffer's end, and this line was glued to it (seen
    2026-11-30)."""
    import time  # noqa: PLC0415

    fields = {**fields, "t": lambda: f"{time.time():.3f}"}
    said = " ".join(f"{key}={_read(get)}" for key, get in fields.items())
    os.write(2, f"\n[lane-evidence] v=1 {mark}{said}\n".encode())


def _arm() -> None:
    """Say once that the hook is in this process."""
    if os.getpid() in ARMED:
        return
    ARMED.add(os.getpid())
    versions = {
        "nccl": lambda: _versions("libnccl.so", _nccl_version, "none"),
        "nvshmem": lambda: _versions("libnvshmem_host.so", _nvshmem_version, "none"),
        "hook": lambda: HOOK,
    }
    _print("armed ", {**_who(None), **versions})


def _built(buffer: Any, package: str, name: str, arguments: dict[str, Any]) -> None:
    group, elastic = arguments.get("group"), name == "ElasticBuffer"
    qps = "num_allocated_qps" if elastic else "num_qps_per_rank"
    fields = {
        "class": lambda: f"{package}.{name}",
        "deep_ep": _package_version,
        "nccl": lambda: _versions("libnccl.so", _nccl_version),
        "nvshmem": lambda: _versions("libnvshmem_host.so", _nvshmem_version),
        "gin": lambda: _gin(buffer) if elastic else "none",
        # The attribute first: a patched constructor caps the count that it was asked for.
        "qps": lambda: getattr(buffer, qps, None) or arguments[qps],
        "comms": lambda: _comms(group) if elastic else "none",
        "timeout_s": lambda: min(arguments[key] for key in TIMEOUTS) if elastic else "none",
    }
    _print("", {**_who(group), **fields})


def _refuse(name: str) -> None:
    if name == "Buffer" and os.environ.get("LANE_REFUSE_LEGACY") == "1":
        raise RuntimeError(
            "lane-evidence: legacy deep_ep.Buffer refused, this lane needs deep_ep.ElasticBuffer. "
            "Choose the engine's DeepEP V2 backend, or unset LANE_REFUSE_LEGACY for a V1 lane."
        )


def _least_timeout() -> int:
    """Seconds. Upstream's 100 s on the GPU is shorter than the first JIT of a big engine."""
    wanted = os.environ.get("LANE_TIMEOUT_S", "")
    return int(wanted) if wanted.isdigit() else 600


def _wrap(cls: type, package: str, name: str) -> None:
    """Make the constructor of `cls` report itself. Does nothing the second time."""
    original = cls.__init__  # type: ignore[misc]
    if getattr(original, MARK, False):
        return
    import inspect  # noqa: PLC0415
    from functools import wraps  # noqa: PLC0415

    signature = inspect.signature(original)

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _refuse(name)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        floor = _least_timeout()
        for key in TIMEOUTS:
            if key in call.arguments:
                call.arguments[key] = max(floor, call.arguments[key])
        original(*call.args, **call.kwargs)
        _built(self, package, name, call.arguments)

    setattr(init, MARK, True)
    cls.__init__ = init  # type: ignore[misc]


def _watch_group(module: Any) -> None:
    """Make the call that joins a group of ranks say so."""
    original = module.init_process_group
    if getattr(original, MARK, False):
        return
    from functools import wraps  # noqa: PLC0415

    @wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        joined = original(*args, **kwargs)
        _arm()
        return joined

    setattr(init_process_group, MARK, True)
    module.init_process_group = init_process_group


def _watch(module: ModuleType) -> None:
    name = module.__name__
    if name == GROUPS:
        _watch_group(module)
    elif name == MPI_ENGINE and "OMPI_COMM_WORLD_RANK" in os.environ:
        _arm()
    for each in CLASSES if name in PACKAGES else ():
        cls = getattr(module, each, None)
        if isinstance(cls, type):
            _wrap(cls, name, each)


class _LaneEvidenceFinder:
    """Finds what is watched with the other finders, and watches it once it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in WATCHED:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, _LaneEvidenceFinder)]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _watch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Register the finder once; watch at once what is already imported."""
    for name in WATCHED:
        if name in sys.modules:
            _watch(sys.modules[name])
    if not any(type(finder).__name__ == _LaneEvidenceFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _LaneEvidenceFinder())


if os.environ.get("LANE_EVIDENCE") == "1":
    try:
        install()
    except Exception as error:  # an interpreter that cannot be watched must still start
        os.write(2, f"lane-evidence: not installed: {error!r}\n".encode())
