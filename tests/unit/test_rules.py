"""Every rule of every contract decides something: for each there are the smallest bad logs that it
alone catches, and deleting or weakening it lets one of them pass."""

import dataclasses
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import drops
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanekit import contract, judge, logs, scan, spec
from lanekit.contract import Bound
from lanekit.given import ANYTHING, Given
from lanekit.plan import options
from lanekit.verdict import Check, Result, decide

Lines = list[str]


def judged(lines: Lines, name: str, rules: tuple[Bound, ...], folder: Path) -> list[Check]:
    """The transport checks of a log, by the rules given."""
    path = folder / "serve.log"
    path.write_text("\n".join(lines) + "\n")
    profile = spec.profile(drops.SUBJECTS[name][2])
    found = logs.read([logs.Log(path, "serve.log", "", "serve.log", 0)], rules, profile.ranks)
    return judge.transport(rules, found, facts(name))


def facts(name: str) -> judge.Facts:
    """What the plan of the drops made here says."""
    lane, _, where = drops.SUBJECTS[name]
    version = "0.21.0" if lane == "trtllm" else "0.24.0"
    known = drops.VERSIONS
    fleet = spec.profile(where)
    given = options([drops.TINY, drops.EP, *([drops.HT] if name.startswith("v1") else [])])
    if lane == "sglang":
        sizes = dict.fromkeys(("--tp-size", "--ep-size", "--dp-size"), str(fleet.ranks))
        given = options(["--model-path=/models/tiny", "--served-model-name=tiny",
                         "--load-format=auto"]) | sizes  # fmt: skip
    started = {"serve.log": Given(given, {"NCCL_NVLS_ENABLE": "0"})}
    return judge.Facts(fleet, 8, version, "tiny", known, options=drops.OPTIONS, started=started)


def every(name: str) -> tuple[Bound, ...]:
    """Every rule of a contract, of a server and of a program alike."""
    return contract.bound(contract.load(name), served=True, batch=True)


def result(lines: Lines, name: str, rules: tuple[Bound, ...], folder: Path) -> Result:
    return decide(judged(lines, name, rules, folder))[0]


def drop_one(text: str) -> drops.Edit:
    """Without the last line that holds the text."""

    def edit(lines: Lines) -> Lines:
        last = max(n for n, line in enumerate(lines) if text in line)
        return [line for n, line in enumerate(lines) if n != last]

    return edit


def drop_all(text: str) -> drops.Edit:
    return lambda lines: [line for line in lines if text not in line]


def change_one(text: str, old: str, new: str) -> drops.Edit:
    """One line that holds the text says something else."""

    def edit(lines: Lines) -> Lines:
        last = max(n for n, line in enumerate(lines) if text in line and old in line)
        return [line.replace(old, new) if n == last else line for n, line in enumerate(lines)]

    return edit


def change_all(text: str, pattern: str, new: str) -> drops.Edit:
    return lambda x: [re.sub(pattern, new, line) if text in line else line for line in x]


def add(line: str) -> drops.Edit:
    """One line more, before the server serves."""
    return lambda lines: [lines[0], line, *lines[1:]]


def after(text: str) -> drops.Edit:
    """The lines that hold the text come after the last request."""

    def edit(lines: Lines) -> Lines:
        return [x for x in lines if text not in x] + [x for x in lines if text in x]

    return edit


def late(line: str) -> drops.Edit:
    """One line more, while the server serves."""
    return lambda lines: [*lines, line]


def one_rank(text: str) -> drops.Edit:
    """As many lines as before, all of the first rank."""

    def edit(lines: Lines) -> Lines:
        first = next(line for line in lines if text in line)
        return [first if text in line else line for line in lines]

    return edit


def stranger(text: str) -> drops.Edit:
    """One rank more than there are, and watched like the others."""

    def edit(lines: Lines) -> Lines:
        for kind in dict.fromkeys((text, " armed ")):
            last = next(line for line in reversed(lines) if kind in line)
            more = last.replace("local_rank=", "local_rank=9").replace("pid=7", "pid=9")
            lines = add(more)(lines)
        return lines

    return edit


def twice(line: str) -> drops.Edit:
    """One line more, of a rank by another process, as where the log goes on with another run."""
    watched = drops.armed("ip-10-0-0-1", 3, 3, 16)
    return lambda lines: [x.replace("7003", "9003") for x in (line, watched)] + lines


HOST: Final = "ip-10-0-0-1"
PROVIDER: Final = "Selected provider is"
GOOD_PROVIDER: Final = "NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)"
HOOK: Final = "class=deep_ep."  # the construction, not the armed line


def nccl(text: str) -> drops.Edit:
    return add(drops.nccl(HOST, 3, text))


def read_by_nccl(text: str) -> drops.Edit:
    """One of NCCL's processes read a variable."""

    def edit(lines: Lines) -> Lines:
        head = next(line for line in lines if "NCCL INFO" in line).partition("NCCL INFO")[0]
        return add(f"{head}NCCL INFO {text}")(lines)

    return edit


def per_rank(text: str) -> list[drops.Edit]:
    """The ways to have a line, and not from every rank."""
    return [drop_one(text), one_rank(text), change_one(text, "7007:7007 [7]", "7006:7006 [6]")]


def driver(backend: str) -> list[drops.Edit]:
    """What can be wrong with the ranks of the Megatron driver."""
    return [
        drop_one("[megatron]"),
        stranger("[megatron]"),
        change_one("[megatron]", "world=", "world=9"),
        change_one("[megatron]", f"backend={backend}", "backend=mpi"),
    ]


def other_versions() -> list[drops.Edit]:
    """A rank that mapped another library than the plan pins, or could not say which."""
    wrong = [(key, f"{key}={drops.VERSIONS[key]}", value)
             for key in drops.VERSIONS for value in ("9.9.9", "unknown")]  # fmt: skip
    return [change_one(HOOK, old, f"{key}={value}") for key, old, value in wrong]


BAD: Final[dict[str, list[drops.Edit]]] = {
    "efa-provider": [
        *per_rank(PROVIDER),
        change_one(PROVIDER, "ip-10-0-0-2", "ip-10-0-0-3"),  # 17: a third host
        change_all(PROVIDER, "ip-10-0-0-2", HOST),  # 8 + 8, one host twice
        change_one(PROVIDER, "is efa,", "is tcp;ofi_rxm,"),
        change_one(PROVIDER, "is efa-direct", "is efa"),
        change_one(PROVIDER, "found 16 nics", "found 15 nics"),
        twice(drops.nccl(HOST, 3, GOOD_PROVIDER)),
        change_one(PROVIDER, HOST, f"+ echo {HOST}"),
        change_one(PROVIDER, HOST, f"[1,3]<stdout>:+ {HOST}"),
    ],
    "nccl-version": [change_one("armed", "nccl=2.30.4", "nccl=2.28.9")],
    "efa-old-plugin": [nccl("NET/OFI Selected Provider is efa (found 4 nics)")],
    "net-plugin-libfabric": [
        *per_rank("Assigned NET plugin"),
        nccl("Assigned NET plugin Socket to comm"),
    ],
    "net-fallback": [
        nccl("Using network Socket"),
        nccl("Using network IB"),
        late(drops.nccl(HOST, 3, "Using network Socket")),
    ],
    "socket-channel": [nccl("Channel 00/0 : 1[1] -> 8[0] [send] via NET/Socket/0")],
    "one-communicator": [
        drop_one("commId"),
        one_rank("commId"),
        change_one("commId", "commId 0x6", "commId 0x7"),  # a rank of another job
        change_all("commId", r"nranks \d+", "nranks 8"),
        drop_all("commId"),
    ],
    "gin-plugin-proxy": [
        *per_rank("Assigned GIN plugin"),
        nccl("Assigned GIN plugin Libfabric_GDAKI to comm"),
    ],
    "gin-plugin-gda": [
        *per_rank("Assigned GIN plugin"),
        nccl("Assigned GIN plugin Libfabric to comm"),
    ],
    "gin-none": [nccl("Failed to initialize any GIN plugin")],
    "gin-device-comm": per_rank("devCommCreate"),
    "gin-gdaki-context": per_rank("gin GDAKI"),
    "gin-gdaki-forbidden": [nccl("NET/OFI gin GDAKI: createContext done (nranks=16)")],
    "p2p-channels": [drop_one("via P2P"), one_rank("via P2P")],
    "shm-channel": [nccl("Channel 00 : 1[1] -> 0[0] via SHM/direct/direct")],
    "elastic-proxy": [
        drop_one(HOOK),
        one_rank(HOOK),
        change_one(HOOK, "world=16", "world=8"),
        *other_versions(),
        change_one(HOOK, "gin=proxy", "gin=gdaki"),
        change_one(HOOK, "gin=proxy", "gin=unknown"),
        change_one(HOOK, "qps=2", "qps=17"),
        change_one(HOOK, "qps=2", "qps=unknown"),
        change_one(HOOK, "comms=1", "comms=8"),
        after(HOOK),
    ],
    "elastic-gda": [
        drop_one(HOOK),
        change_one(HOOK, "world=16", "world=8"),
        *other_versions(),
        change_one(HOOK, "gin=gdaki", "gin=proxy"),
        change_one(HOOK, "comms=1", "comms=8"),
        after(HOOK),
    ],
    "elastic-nvlink": [
        drop_one(HOOK),
        stranger(HOOK),
        change_one(HOOK, "world=", "world=9"),
        *other_versions(),
        change_one(HOOK, "gin=off", "gin=proxy"),
        change_one(HOOK, "comms=1", "comms=8"),
        after(HOOK),
    ],
    "legacy-buffer": [
        drop_one(HOOK),
        *other_versions(),
        change_one(HOOK, "deep_ep.Buffer", "deep_ep.ElasticBuffer"),
        change_one(HOOK, "world=", "world=9"),
        after(HOOK),
    ],
    "micro-gloo": [
        drop_one("[micro]"),
        stranger("[micro]"),
        change_one("[micro]", "world=", "world=9"),
        change_one("[micro]", "gloo", "nccl"),
    ],
    "micro-nccl": [
        drop_one("[micro]"),
        stranger("[micro]"),
        change_one("[micro]", "world=", "world=9"),
        change_one("[micro]", "nccl", "gloo"),
    ],
    "megatron-v2": [*driver("nccl"), change_one("[megatron]", "=v2", "=v1")],
    "megatron-v1": [*driver("nccl"), change_one("[megatron]", "=v1", "=v2")],
    "megatron-nccl": [*driver("nccl"), change_one("[megatron]", "=alltoall", "=v2")],
    "megatron-gloo": [*driver("gloo"), change_one("[megatron]", "=alltoall", "=v2")],
    "nemo-rl-step": [drop_all("Loss"), change_one("Loss", "0.0123", "nan")],
    "sglang-native": [
        drop_one("Initialized DeepEP"),
        change_one("Initialized DeepEP", "world_size=", "world_size=9"),
        after("Initialized DeepEP"),
    ],
    "sglang-options": [
        *(
            change_one("ServerArgs", f", {kind}_size=", f", {kind}_size=9")
            for kind in ("tp", "dp", "ep")
        ),
        change_one("ServerArgs", "load_format='auto'", "load_format='dummy'"),
        change_one("ServerArgs", "'tiny'", "'other'"),
        change_one("ServerArgs", "/models/tiny", "/models/other"),
        change_one("ServerArgs", "load_format='auto', ", ""),
    ],
    "sglang-a2a-deepep": [
        drop_all("ServerArgs"),
        change_one("ServerArgs", ", moe_a2a_backend='deepep'", ", moe_a2a_backend='none'"),
    ],
    "sglang-a2a-none": [
        drop_all("ServerArgs"),
        change_one("ServerArgs", ", moe_a2a_backend='none'", ", moe_a2a_backend='deepep'"),
    ],
    "trtllm-version": [
        drop_one("LLM version"),
        change_one("LLM version", "0.21.0", "0.20.0"),
    ],
    "trtllm-alltoall-none": [
        drop_all("alltoall_method"),
        change_one("alltoall_method", "NotEnabled", "DeepEP"),
    ],
    "no-buffer": [
        add(drops.hook(HOST, 3, 3, 16)),
        late(drops.hook(HOST, 3, 3, 16, **{"class": "tensorrt_llm.deep_ep.Buffer"})),
        drop_one("armed"),
        drop_all("armed"),
        change_one("armed", "world=", "world=9"),
    ],
    "no-legacy-buffer": [
        add("lane-evidence: legacy deep_ep.Buffer refused, this lane needs"),
        late(drops.hook(HOST, 3, 3, 16, **{"class": "deep_ep.Buffer"})),
    ],
    "vllm-manager-dense": [
        drop_all("all2all manager"),
        add(drops.MANAGER.format("DeepEPV2All2AllManager")),
    ],
    "vllm-manager-v2": [
        drop_all("all2all manager"),
        add(drops.MANAGER.format("AgRsAll2AllManager")),
    ],
    "vllm-manager-v1": [
        drop_all("all2all manager"),
        add(drops.MANAGER.format("DeepEPV2All2AllManager")),
    ],
    "vllm-prepare-v1": [
        drop_all("PrepareAndFinalize"),
        add(drops.PREPARE.format("V2")),
    ],
    "vllm-prepare-v2": [
        drop_all("PrepareAndFinalize"),
        add(drops.PREPARE.format("HT")),
    ],
    "vllm-engine-cpu": [
        drop_all("V1 LLM engine"),
        change_one("V1 LLM", "v0.24.0", "v0.23.0"),
        change_one("V1 LLM", "=cpu", "=cuda"),
        change_one("V1 LLM", "name=tiny", "name=other"),
        change_one("V1 LLM", "eager=False", "eager=True"),  # of another arm
        change_one("V1 LLM", "load_format=auto", "load_format=dummy"),
        change_one("V1 LLM", "/models/tiny", "/models/other"),
    ],
    "vllm-engine-gpu": [
        drop_all("V1 LLM engine"),
        change_one("V1 LLM", "v0.24.0", "v0.23.0"),
        change_one("V1 LLM", "=cuda", "=cpu"),
        change_one("V1 LLM", "name=tiny", "name=other"),
        change_one("V1 LLM", "eager=False", "eager=True"),  # of another arm
        change_one("V1 LLM", "load_format=auto", "load_format=dummy"),
        change_one("V1 LLM", "/models/tiny", "/models/other"),
        change_one("V1 LLM", "CUDAGraphMode.NONE", "CUDAGraphMode.FULL"),
    ],
    "vllm-options": [
        drop_all("non-default"),
        change_one("non-default", ", 'enable_expert_parallel': True", ""),
        change_one("non-default", "'enable_expert_parallel': True", "'max_num_seqs': 64"),
        change_one("non-default", "'model'", "'max_num_seqs': 64, 'model'"),
        change_one("non-default", "/models/tiny", "/models/other"),
    ],
    "vllm-expert-parallel": [
        change_one("non-default", ", 'enable_expert_parallel': True", ""),
        change_one("non-default", "parallel': True", "parallel': False"),
    ],
    "vllm-graphs": [drop_all("Graph capturing"), after("Graph capturing")],
    "sglang-graphs": [drop_all("Capture cuda graph"), after("Capture cuda graph")],
    "vllm-graphs-lowered": [
        add("FULL is not supported with F backend; setting cudagraph_mode=FULL_DECODE_ONLY"),
        late("Overriding cudagraph_mode from FULL to PIECEWISE for reliability."),
    ],
    "nccl-variables": [
        read_by_nccl("NCCL_NVLS_ENABLE set by environment to 1."),
        read_by_nccl("NCCL_PROTO set by environment to LL128"),
    ],
    "nccl-variables-efa": [read_by_nccl("NCCL_NVLS_ENABLE set by environment to 1.")],
    "vllm-world-gloo": [
        drop_all("world_size"),
        change_one("world_size", "world_size=1", "world_size=2"),
        change_one("world_size", "gloo", "nccl"),
        add(
            "(Worker pid=8) world_size=1 rank=0 local_rank=1 distributed_init_method=x backend=gloo"
        ),
    ],
    "vllm-world-nccl": [
        drop_all("world_size"),
        change_one("world_size", "world_size=1", "world_size=2"),
        change_one("world_size", "nccl", "gloo"),
        add(
            "(Worker pid=8) world_size=1 rank=0 local_rank=1 distributed_init_method=x backend=nccl"
        ),
    ],
    # Twelve answers where eight were planned, over three processes; then all of one, or nearly so.
    "requests-spread": [
        drop_all("POST"),
        change_all("POST", r"pid=\d+", "pid=4"),
        lambda x: [y for y in x if "POST" not in y] + [drops.POST] * 11 + [drops.answer(4)],
        change_all("POST", "200 OK", "500 Internal"),
    ],
    "router-ready": [
        drop_all("Router ready"),
        change_all("Router ready", r"^", "said: "),
        change_all("Router ready", r"src/server\.rs", "of/another.rs"),
    ],
    "picker-started": [drop_all("EPP starting")],
    "picker-picked": [
        drop_one("Request handled"),
        change_all("Request handled", "10.0.0.1:80", "10.0.0.2:80"),
        drop_all("Request handled"),
    ],
    "requests-served": [drop_one("POST"), change_one("POST", "200 OK", "500 Internal")],
    "nvshmem-provider": [
        drop_one("Selected provider efa"),
        change_one("Selected provider", "provider efa", "provider tcp"),
        change_one("Selected provider", "efa-direct", "efa"),
    ],
    "nvshmem-not-direct": [
        add("Libfabric transport is using efa fabric instead of efa-direct, use libfabric v2.1.0")
    ],
    "nvshmem-no-transport": [add("Unable to open the libfabric.so.6 transport. No such file")],
    "seam-elastic-trtllm": [
        drop_one("constructing"),
        add("[deep-ep-v2-seam] constructing deep_ep.ElasticBuffer (max_tokens/rank=8192)"),
    ],
    "trtllm-alltoall": [
        drop_all("alltoall_method"),
        change_one("alltoall_method", "DeepEP", "NotEnabled"),
        change_one("alltoall_method", "[11/30", "+ grep [11/30"),
    ],
    "t3-elastic-vllm": [drop_all("constructing")],
    "seam-elastic-sglang": [drop_all("returning raw")],
    "seam-legacy": [add("[t3-patch] FATAL: legacy deep_ep.Buffer constructed on EFA")],
}


# Where a rank was not watched, nothing says either which NCCL it mapped, nor that its lines are of
# this run.
COMPANIONS: Final = {
    "vllm-options": {"vllm-expert-parallel"},
    "vllm-expert-parallel": {"vllm-options"},
    "sglang-a2a-deepep": {"sglang-options"},  # of the same line
    "sglang-a2a-none": {"sglang-options"},
    "no-buffer": {
        "nccl-version", "p2p-channels", "efa-provider", "net-plugin-libfabric", "micro-gloo",
        "megatron-gloo", "megatron-nccl", "one-communicator",
    },
    "efa-provider": {"no-buffer", "no-legacy-buffer"},
}  # fmt: skip


def inherited(name: str) -> tuple[str, ...]:
    """The rules of the contract that one extends: they are tried there."""
    base = contract.load(name).extends
    return contract.load(base).required if base else ()


USES: Final = [
    (name, bound.id)
    for name in contract.names()
    for bound in every(name)
    if bound.severity == "required" and bound.id not in inherited(name)
]


@pytest.mark.parametrize("name", contract.names())
def test_the_smallest_good_log_is_proven(name: str, tmp_path: Path) -> None:
    rules = every(name)
    assert result(drops.log(name), name, rules, tmp_path) == "proven"


@pytest.mark.parametrize(("name", "rule"), USES)
def test_the_smallest_bad_logs_are_not_proven_and_the_rule_says_so(
    name: str, rule: str, tmp_path: Path
) -> None:
    rules = every(name)
    for edit in BAD[rule]:
        checks = judged(edit(drops.log(name)), name, rules, tmp_path)
        assert decide(checks)[0] != "proven"
        bad = {x.id for x in checks if x.severity == "required" and x.outcome != "met"}
        assert bad - COMPANIONS.get(rule, set()) == {rule}


def mutants(rule: contract.Rule, alone: bool) -> Iterator[tuple[str, contract.Rule | None]]:
    """A rule deleted, and weakened in every way its data allows. alone: no other rule of its
    contract already needs the hook in every rank."""
    replace = msgspec.structs.replace
    yield "deleted", None
    for group in rule.expect:
        kept = {k: v for k, v in rule.expect.items() if k != group}
        yield f"any {group}", replace(rule, expect=kept)
    if rule.planned:
        yield "whatever was planned", replace(rule, planned="")
    if rule.phase != "any":
        yield "any phase", replace(rule, phase="any")
    if rule.needs == "one":
        yield "whichever communicator", replace(rule, needs="ranks")
    if rule.needs in ("ranks", "one", "count", "lines", "requests"):
        yield "one line is enough", replace(rule, needs="line")
    if rule.sensor == "hook" and rule.needs == "none" and alone:
        yield "no sensor needed", replace(rule, sensor="")
    if rule.needs == "count":
        yield "more lines are as good", replace(rule, needs="lines")


@pytest.mark.parametrize(("name", "rule"), USES)
def test_no_rule_is_dead(name: str, rule: str, tmp_path: Path) -> None:
    rules = every(name)
    if contract.rules()[rule].unless == ANYTHING:  # of strangers, whom no plan is known of
        rules = tuple(x for x in rules if not x.rule.planned)
    alone = not any(x.rule.needs == "ranks" and "lane-evidence" in x.rule.literal for x in rules)
    for what, mutant in mutants(contract.rules()[rule], alone):
        weaker = tuple(
            msgspec.structs.replace(x, rule=mutant) if x.id == rule and mutant else x
            for x in rules
            if x.id != rule or mutant
        )
        fooled = [
            edit
            for edit in BAD[rule]
            if result(edit(drops.log(name)), name, weaker, tmp_path) == "proven"
        ]
        can_prove = any(x.rule.needs != "none" for x in weaker if x.severity == "required")
        assert fooled or not can_prove, f"{rule}: {what}"


def test_every_rule_of_the_library_is_used_and_has_bad_logs() -> None:
    used = {rule for _, rule in USES}
    noted = {rule for n in contract.names() for rule in contract.load(n).noted}
    assert set(contract.rules()) == used | noted
    assert set(BAD) == used


def test_a_forbidden_line_cannot_be_excluded_where_nccl_is_silent(tmp_path: Path) -> None:
    rules = contract.bound(contract.load("v1-efa"))
    silent = drop_all("NCCL INFO")(drops.log("v1-efa"))
    assert result(silent, "v1-efa", rules, tmp_path) == "no verdict"


FLEET: Final = [(h, i) for h in (HOST, "ip-10-0-0-2") for i in range(8)]
EVIDENCE: Final = (PROVIDER, "commId", "Assigned NET", "Assigned GIN", "devCommCreate", HOOK)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_proven_exactly_when_every_rank_has_every_line_in_time(data: st.DataObject) -> None:
    """Lines lost, repeated and reordered: the verdict is what a plain count of ranks says."""
    lines = drops.log("v2-efa-proxy")
    lost = data.draw(st.sets(st.integers(0, len(lines) - 1), max_size=2))
    kept = [line for n, line in enumerate(lines) if n not in lost]
    again = data.draw(st.lists(st.sampled_from(lines), max_size=5))
    places = [data.draw(st.integers(0, len(kept))) for _ in again]
    for line, place in zip(again, places, strict=True):
        kept.insert(place, line)
    if data.draw(st.booleans()):
        kept = data.draw(st.permutations(kept))
    first = next((n for n, line in enumerate(kept) if "POST" in line), len(kept))
    early = {HOOK: kept[:first]}
    whole = all(
        any(text in x and f"[{i}]" in x.replace(f"local_rank={i} ", f"[{i}]") and host in x
            for x in early.get(text, kept))
        for text in EVIDENCE
        for host, i in FLEET
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        rules = contract.bound(contract.load("v2-efa-proxy"))
        found = result(kept, "v2-efa-proxy", rules, Path(folder))
    assert (found == "proven") == whole


@pytest.mark.parametrize("name", contract.names())
def test_both_engines_give_the_same_checks(name: str, tmp_path: Path) -> None:
    pytest.importorskip("hyperscan")
    rules = every(name)
    profile = spec.profile(drops.SUBJECTS[name][2])
    path = tmp_path / "serve.log"
    for edit in [list, *(e for n, rule in USES if n == name for e in BAD[rule])]:
        path.write_text("\n".join(edit(drops.log(name))))
        log = logs.Log(path, "serve.log", "", "serve.log", 0)
        seen = [
            judge.transport(rules, logs.read([log], rules, profile.ranks, make=make), facts(name))
            for make in (scan.PythonFinder, scan.HyperscanFinder)
        ]
        assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("name", "rule", "eager"),
    [
        ("v2-nvlink", "vllm-graphs", "--enforce-eager"),
        ("sglang-floor", "sglang-graphs", "--disable-cuda-graph"),
    ],
)
def test_graphs_are_asked_for_only_where_the_plan_captures_some(
    name: str, rule: str, eager: str
) -> None:
    for planned, applies in (({}, True), ({eager: "True"}, False), (None, False)):
        plan = dataclasses.replace(facts(name), options=planned)
        assert (rule in {x.id for x in judge.applying(every(name), plan)}) == applies


def test_what_is_held_to_a_plan_is_not_asked_of_a_log_without_one() -> None:
    stranger = dataclasses.replace(facts("v2-nvlink"), started=None)
    left = {x.id for x in every("v2-nvlink")} - {
        x.id for x in judge.applying(every("v2-nvlink"), stranger)
    }
    assert left == {"vllm-options", "nccl-variables"}


def test_a_stranger_s_server_must_have_been_asked_for_expert_parallelism() -> None:
    """One that was not was "could not check" once vllm-options, which needs a plan, said it."""
    stranger = dataclasses.replace(facts("v2-nvlink"), options=None, started=None)
    asked = [
        {x.id for x in judge.applying(every("v2-nvlink"), plan)}
        for plan in (stranger, facts("v2-nvlink"))
    ]
    assert ["vllm-expert-parallel" in x for x in asked] == [True, False]
