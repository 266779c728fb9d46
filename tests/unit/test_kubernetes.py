"""A plan as objects of a cluster: against Kubernetes' own schemas, and as golden files.

Validated: Jobs, Services, ConfigMaps and every pod template with the schemas that
kubernetes-validate carries; the few fields of LeaderWorkerSet and MPIJob around them with the
schema below, written from their documentation. `LANES_CRDS=DIR`, a folder that holds the two
CustomResourceDefinitions, validates those with upstream's own as well.

No cluster is here: nothing below shows that an object runs. `LANES_GOLDEN=1` renews golden files.
"""

import contextlib
import http.server
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import msgspec
import pytest
import yaml

from lanekit import drop as drops
from lanekit import kubernetes, machine, manifests, paths, planning
from lanekit.errors import ConfigError, HostLost, ServerDied
from lanekit.plan import Plan
from lanekit.progress import Progress
from lanekit.run import Run

GOLDEN = Path(__file__).parent / "golden"
IMAGE = "ghcr.io/deepep-lanes/{}@sha256:" + "1" * 64
ROWS = {
    "vllm": {"lane": "vllm", "profile": "p5en-x2"},
    "sglang": {"lane": "sglang", "profile": "p5en-x2"},
    "trtllm": {"lane": "trtllm", "profile": "p5en-x2"},
    "micro": {"lane": "micro", "profile": "cpu-x2"},
}
POD = {"type": "object", "required": ["metadata", "spec"]}
REPLICAS = {
    "type": "object", "additionalProperties": False, "required": ["template"],
    "properties": {"replicas": {"type": "integer", "minimum": 1},
                   "restartPolicy": {"enum": ["Never", "OnFailure"]}, "template": POD},
}  # fmt: skip
OURS: dict[str, Any] = {
    "LeaderWorkerSet": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "spec": {
            "type": "object", "additionalProperties": False, "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer"},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "networkConfig": {
                    "type": "object", "additionalProperties": False,
                    "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                },
                "leaderWorkerTemplate": {
                    "type": "object", "additionalProperties": False, "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart"]},
                        "leaderTemplate": POD, "workerTemplate": POD,
                    },
                },
            },
        },
    },
    "MPIJob": {
        "apiVersion": {"const": "kubeflow.org/v2beta1"},
        "spec": {
            "type": "object", "additionalProperties": False, "required": ["mpiReplicaSpecs"],
            "properties": {
                "slotsPerWorker": {"type": "integer"}, "runLauncherAsWorker": {"type": "boolean"},
                "sshAuthMountPath": {"type": "string"},
                "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
                "launcherCreationPolicy": {"enum": ["AtStartup", "WaitForWorkersReady"]},
                "runPolicy": {
                    "type": "object", "additionalProperties": False,
                    "properties": {"cleanPodPolicy": {"enum": ["None", "All", "Running"]},
                                   "backoffLimit": {"type": "integer"}},
                },
                "mpiReplicaSpecs": {
                    "type": "object", "additionalProperties": False, "required": ["Launcher"],
                    "properties": {"Launcher": REPLICAS, "Worker": REPLICAS},
                },
            },
        },
    },
}  # fmt: skip


@pytest.fixture
def plans(
    bare: machine.Machine, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Plan]:
    """Three lanes as the cluster gets them, with nothing of this machine or moment in them."""
    ports = iter(range(20000, 30000))
    monkeypatch.setattr(planning, "free_port", lambda: next(ports))
    found = {}
    for name, row in ROWS.items():
        drop = Path(f"/results/20261130T000000Z-{row['profile']}-{name}")
        monkeypatch.setattr(planning, "_drop", lambda *_, drop=drop: drop)
        options = planning.Options(
            lane=row["lane"], profile=row["profile"], launcher="kubernetes", start=False
        )
        made = planning.make(options, bare)
        assert made.containers is not None
        images = {key: IMAGE.format(tag.partition("/")[2].partition(":")[0])
                  for key, tag in made.containers.images.items()}  # fmt: skip
        held = msgspec.structs.replace(made.containers, images=images, user="10001:10001")
        found[name] = msgspec.structs.replace(made, containers=held)
    return found


def objects(plan: Plan) -> list[dict[str, Any]]:
    jobs = [manifests.job(plan, cell) for cell in plan.cells] if plan.driver == "batch" else []
    return [*manifests.standing(plan), *jobs]


def templates(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every pod template in an object."""
    for key, value in found.items():
        if key in ("template", "leaderTemplate", "workerTemplate") and "spec" in value:
            yield value
        elif isinstance(value, dict):
            yield from templates(value)


@pytest.mark.parametrize("row", ROWS)
def test_every_object_and_pod_fits_its_schema(plans: dict[str, Plan], row: str) -> None:
    seen = set()
    for each in objects(plans[row]):
        kind = each["kind"]
        seen.add(kind)
        if kind in OURS:
            schema = {"type": "object", "additionalProperties": False, "properties": {
                "kind": {"const": kind}, "metadata": {"type": "object"}, **OURS[kind]}}  # fmt: skip
            jsonschema.validate(each, schema)
        else:
            kubernetes_validate.validate(each, "1.34", strict=True)
        for template in templates(each):
            pod = {"apiVersion": "v1", "kind": "Pod", **template}
            kubernetes_validate.validate(pod, "1.34", strict=True)
    serving = {"LeaderWorkerSet", "ConfigMap"}
    assert seen >= {"vllm": serving, "sglang": serving, "trtllm": {"MPIJob", "ConfigMap"},
                    "micro": {"Job", "Service", "ConfigMap"}}[row]  # fmt: skip


def test_the_schemas_refuse_what_is_wrong(plans: dict[str, Plan]) -> None:
    job = manifests.job(plans["micro"], "decode")
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="comand"):
        kubernetes_validate.validate(job, "1.34", strict=True)
    lws = next(x for x in objects(plans["vllm"]) if x["kind"] == "LeaderWorkerSet")
    lws["spec"]["leaderWorkerTemplate"]["sise"] = 2
    with pytest.raises(jsonschema.ValidationError, match="sise"):
        jsonschema.validate(lws["spec"], OURS["LeaderWorkerSet"]["spec"])


def strict(schema: Any) -> Any:
    """A CustomResourceDefinition's schema in which an unknown field is an error, not pruned."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.pop("x-kubernetes-int-or-string", False):
        made = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return made


@pytest.mark.skipif("LANES_CRDS" not in os.environ, reason="LANES_CRDS names no folder of CRDs")
@pytest.mark.parametrize("row", ["vllm", "sglang", "trtllm"])
def test_upstreams_own_schema_agrees(plans: dict[str, Plan], row: str) -> None:
    known = {}
    for path in Path(os.environ["LANES_CRDS"]).glob("*.yaml"):
        crd = yaml.safe_load(path.read_text())
        for version in crd["spec"]["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            known[f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]] = (
                schema
            )
    (found,) = (x for x in objects(plans[row]) if x["kind"] in OURS)
    for template in templates(found):
        template["metadata"] = {}
    jsonschema.validate(found, known[found["apiVersion"], found["kind"]])


@pytest.mark.parametrize("row", ROWS)
def test_the_objects_are_as_they_were(plans: dict[str, Plan], row: str) -> None:
    shown = [
        each for each in objects(plans[row]) if not each["metadata"]["name"].endswith("-files")
    ]
    text = yaml.safe_dump_all(shown, sort_keys=False).replace(str(paths.ROOT), "/checkout")
    path = GOLDEN / f"kubernetes-{row}.yaml"
    if "LANES_GOLDEN" in os.environ:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_a_host_asks_for_its_gpus_nics_and_huge_pages_and_for_a_node_of_its_own(
    plans: dict[str, Plan],
) -> None:
    lws = next(x for x in objects(plans["vllm"]) if x["kind"] == "LeaderWorkerSet")
    assert lws["spec"]["leaderWorkerTemplate"]["size"] == 2
    for pod in templates(lws):
        (server, *_) = pod["spec"]["containers"]
        limits = server["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 16,
                          "hugepages-2Mi": "5120Mi"}  # fmt: skip
        assert pod["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5en.48xlarge"}
        assert "podAntiAffinity" in pod["spec"]["affinity"]
        assert server["image"].endswith("@sha256:" + "1" * 64)


def test_every_pod_runs_the_plans_own_command_under_the_clusters_own_names(
    plans: dict[str, Plan],
) -> None:
    plan = plans["vllm"]
    assert [h.address for h in plan.hosts] == [
        "lane-vllm-20261130t000000z-0.lane-vllm-20261130t000000z",
        "lane-vllm-20261130t000000z-0-1.lane-vllm-20261130t000000z",
    ]
    scripts = objects(plan)[0]["data"]
    assert set(scripts) == {"server-0.sh", "worker-1.sh"}
    assert f"--data-parallel-address={plan.hosts[0].address}" in scripts["worker-1.sh"]
    for text in scripts.values():
        assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0


def test_what_a_config_map_cannot_hold_is_refused_before_anything_is_made(
    plans: dict[str, Plan],
) -> None:
    plan = plans["vllm"]
    first = plan.services[0]
    long = msgspec.structs.replace(first, env={"X": "x" * manifests.CONFIG_MAP})
    with pytest.raises(ConfigError, match="a ConfigMap holds 1048576") as caught:
        manifests.standing(msgspec.structs.replace(plan, services=(long, *plan.services[1:])))
    assert "LAUNCHER=slurm" in caught.value.remedy


@pytest.mark.usefixtures("checkout")
def test_hosts_named_for_a_cluster_are_said_to_be_placed_by_it(bare: machine.Machine) -> None:
    options = planning.Options(lane="vllm", profile="p5en-x2", launcher="kubernetes", start=False)
    named = msgspec.structs.replace(options, hosts="a,b")
    assert "the cluster places the pods" in planning.make(named, bare).hosts_why
    assert "cluster" not in planning.make(options, bare).hosts_why


def test_a_pod_is_warm_before_its_ranks_start_and_keeps_what_it_compiled(
    plans: dict[str, Plan],
) -> None:
    plan = plans["sglang"]
    host = msgspec.structs.replace(plan.hosts[0], cache="/var/lanes")
    for made, kept in ((plan, {"emptyDir": {}}), (
        msgspec.structs.replace(plan, hosts=(host, *plan.hosts[1:])),
        {"hostPath": {"path": "/var/lanes", "type": "Directory"}},
    )):  # fmt: skip
        lws = next(x for x in objects(made) if x["kind"] == "LeaderWorkerSet")
        for pod in templates(lws):
            (warm,), (server, *_) = pod["spec"]["initContainers"], pod["spec"]["containers"]
            assert warm["command"][:2] == ["timeout", "3600"]
            assert warm["command"][-1] == "exec /bin/sh /lane/run/warm-${LWS_WORKER_INDEX:-0}.sh"
            for each in (warm, server):
                assert {"name": "kept", "mountPath": "/kept"} in each["volumeMounts"]
            assert {"name": "kept", **kept} in pod["spec"]["volumes"]
    scripts = objects(plan)[0]["data"]
    assert {"warm-0.sh", "warm-1.sh", "server-0.sh", "server-1.sh"} == set(scripts)
    assert "-m sglang.compile_deep_gemm" in scripts["warm-1.sh"]
    assert "export HOME=/kept/10001" in scripts["warm-1.sh"]
    assert "initContainers" not in str(objects(plans["vllm"]))


@pytest.mark.parametrize(("row", "more"), [("sglang", 3600.0), ("vllm", 0.0)])
def test_a_start_may_take_as_long_as_its_pods_are_warmed(
    plans: dict[str, Plan], tmp_path: Path, row: str, more: float
) -> None:
    plan = msgspec.structs.replace(plans[row], drop=str(tmp_path / "drop"))
    run = Run(plan, drops.Drop.create(plan), Progress())
    run.warm()  # its pods do so themselves
    assert run.drop.manifest.processes == []
    assert run.ready_s == plan.ready_s + more
    elsewhere = Run(msgspec.structs.replace(plan, launcher="compose"), run.drop, Progress())
    assert elsewhere.ready_s == plan.ready_s


def test_a_batch_program_waits_until_what_it_left_was_taken(tmp_path: Path) -> None:
    """The script itself, run: the file says how it ended, and the script waits for its removal."""
    mark = tmp_path / "out" / ".code"
    text = manifests.script(["sh", "-c", "exit 3"], {"A": "x y"}, str(mark))
    child = subprocess.Popen(["sh", "-c", text])
    while not mark.is_file() or not mark.read_text():
        time.sleep(0.02)
    assert (child.poll(), mark.read_text()) == (None, "3\n")
    mark.unlink()
    assert child.wait(timeout=30) == 3


def test_nothing_secret_is_written(bare: machine.Machine, checkout: Path) -> None:
    options = planning.Options(
        lane="micro", profile="cpu-x2", launcher="kubernetes", start=False, env=("MY_TOKEN=hf_x",)
    )
    text = yaml.safe_dump_all(objects(planning.make(options, bare)))
    assert "hf_x" not in text
    assert "secretKeyRef" in text


def test_what_env_gives_reaches_every_container_once(bare: machine.Machine, checkout: Path) -> None:
    """AIPerf's too, and batch programs'; a secret by its name alone, from the cluster's Secret."""
    for row in ("vllm", "micro"):
        options = planning.Options(
            lane=row, profile=ROWS[row]["profile"], launcher="kubernetes", start=False,
            env=("A=$(B) $c", "MY_TOKEN=hf_x", "HF_TOKEN=hf_y", "HOME=/h"),
        )  # fmt: skip
        found = objects(planning.make(options, bare))
        pods = [pod["spec"] for each in found for pod in templates(each)]
        held = [c for pod in pods for c in (*pod["containers"], *pod.get("initContainers", ()))]
        for container in held:
            names = [each["name"] for each in container["env"]]
            assert {"MY_TOKEN", "HF_TOKEN"} <= {*names}, container["name"]
            assert len({*names}) == len(names), container["name"]
        values = [{e["name"]: e.get("value") for e in c["env"]}
                  for c in held if c["name"] == "aiperf"]  # fmt: skip
        assert [(v["A"], v["HOME"]) for v in values] == [("$$(B) $$c", "/h")] * (row == "vllm")
        assert "hf_" not in yaml.safe_dump_all(found)


def listed(**status: Any) -> dict[str, Any]:
    labels = {"leaderworkerset.sigs.k8s.io/worker-index": "1"}
    return {"items": [{"metadata": {"name": "lane-0-1", "labels": labels}, "status": status}]}


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        ({"phase": "Running"}, ""),
        ({"phase": "Pending", "containerStatuses": [{"name": "server", "state": {"waiting": {
            "reason": "ImagePullBackOff", "message": "denied"}}}]}, "ImagePullBackOff: denied"),
        ({"phase": "Pending", "containerStatuses": [{"name": "server", "state": {"waiting": {
            "reason": "ContainerCreating"}}}]}, ""),
        ({"phase": "Running", "containerStatuses": [{
            "name": "server", "restartCount": 1, "state": {"running": {}},
            "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]},
         "server ended with signal SIGKILL (OOMKilled)"),
        ({"phase": "Failed", "containerStatuses": [{"name": "server", "state": {"terminated": {
            "exitCode": 3, "reason": "Error"}}}]}, "server ended with exit status 3 (Error)"),
        ({"phase": "Failed", "reason": "NodeLost", "message": "gone"}, "NodeLost: gone"),
        ({"phase": "Pending", "initContainerStatuses": [{"name": "warm", "restartCount": 1,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 124, "reason": "Error"}}}]},
         "warm ended with exit status 124 (Error)"),
    ],
)  # fmt: skip
def test_what_keeps_a_pod_from_going_on_is_told(status: dict[str, Any], trouble: str) -> None:
    (pod,) = kubernetes.pods(listed(**status))
    assert pod.number == 1
    assert trouble in pod.trouble
    assert bool(pod.trouble) == bool(trouble)


@pytest.mark.parametrize(
    "label", ["leaderworkerset.sigs.k8s.io/worker-index", "training.kubeflow.org/replica-index",
              "batch.kubernetes.io/job-completion-index"],
)  # fmt: skip
def test_a_pod_says_which_host_it_is_whatever_made_it(label: str) -> None:
    item = {"metadata": {"name": "x", "labels": {label: "3"}}, "status": {"phase": "Running"}}
    (pod,) = kubernetes.pods({"items": [item]})
    assert pod.number == 3


DISCOVERY: dict[str, Any] = {  # what kubectl asks before it asks for anything
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [
        {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod",
         "verbs": ["get", "list"]}]},
}  # fmt: skip


class Api(http.server.BaseHTTPRequestHandler):
    """An API that answers every request with an error, or with nothing for a long time."""

    status, delay = 500, 0.0
    pods: dict[str, Any] | None = None  # answered instead of the error, with one line as every log

    def answer(self) -> None:
        time.sleep(self.delay)
        if self.pods:
            self.know(self.pods)
            return
        body = json.dumps(
            {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "message": "etcd is not to be reached",
                "code": self.status,
            }
        ).encode()
        self.send(self.status, body)

    def know(self, pods: dict[str, Any]) -> None:
        """The pods as a list, one of them, or the log of a container that has begun."""
        path, _, query = self.path.partition("?")
        if path in DISCOVERY:
            self.send(200, json.dumps(DISCOVERY[path]).encode())
            return
        name = path.partition("/pods/")[2].partition("/")[0]
        if path.endswith("/log"):
            container = query.partition("container=")[2].partition("&")[0]
            self.send(200, f"I am {container} in {name}\n".encode())
        elif name:
            self.send(200, json.dumps(next(
                p for p in pods["items"] if p["metadata"]["name"] == name)).encode())  # fmt: skip
        else:
            self.send(200, json.dumps(pods).encode())

    def send(self, status: int, body: bytes) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    do_GET = do_POST = do_PATCH = do_DELETE = answer

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def api(tmp_path: Path) -> Iterator[tuple[type[Api], dict[str, str]]]:
    """A stand-in API server, for its errors alone, and the variables that lead kubectl there."""
    handler = type("Handler", (Api,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = tmp_path / "kubeconfig"
    config.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "x", "cluster": {
            "server": f"http://127.0.0.1:{server.server_address[1]}"}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "users": [{"name": "x", "user": {}}],
    }))  # fmt: skip
    yield handler, {**os.environ, "KUBECONFIG": str(config), "HOME": str(tmp_path)}
    server.shutdown()
    server.server_close()


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


@needs_kubectl
@pytest.mark.parametrize("status", [500, 503, 403])
def test_an_api_that_answers_errors_ends_the_run(
    api: tuple[type[Api], dict[str, str]], plans: dict[str, Plan], tmp_path: Path,
    status: int,
) -> None:  # fmt: skip
    api[0].status = status
    plan = msgspec.structs.replace(plans["micro"], drop=str(tmp_path / "drop"))
    drop = drops.Drop.create(plan)
    with pytest.raises(HostLost) as caught, kubernetes.launching(plan, drop, api[1], print):
        pytest.fail("it must not start")
    assert caught.value.message.startswith("the Kubernetes API: ")  # then kubectl's own words
    assert "kubectl version" in caught.value.remedy
    assert drop.manifest.left, "nobody knows whether something was made"
    assert "objects lane-micro" in drop.manifest.left[0]


@needs_kubectl
def test_the_next_run_says_what_a_dead_one_may_have_left_in_a_cluster(
    api: tuple[type[Api], dict[str, str]], plans: dict[str, Plan], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("KUBECONFIG", api[1]["KUBECONFIG"])
    plan = msgspec.structs.replace(plans["micro"], drop=str(tmp_path / "drop"))
    (tmp_path / "drop" / kubernetes.FOLDER).mkdir(parents=True)
    assert kubernetes.end_the_dead(tmp_path / "drop") == []  # nothing was applied
    text = yaml.safe_dump_all(manifests.standing(plan))
    (tmp_path / "drop" / kubernetes.FOLDER / "plan.yaml").write_text(text)
    (why,) = kubernetes.end_the_dead(tmp_path / "drop")
    assert why.startswith("objects of the cluster: the Kubernetes API: ")


@needs_kubectl
def test_an_api_that_does_not_answer_is_given_up(
    api: tuple[type[Api], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    api[0].delay = 60.0
    monkeypatch.setattr(kubernetes, "API_S", 1)
    with pytest.raises(HostLost) as caught:
        kubernetes.Kubectl(api[1]).run("get", "pods")
    assert "kubectl version" in caught.value.remedy


@needs_kubectl
def test_an_api_that_restarts_is_asked_again(
    api: tuple[type[Api], dict[str, str]], plans: dict[str, Plan], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plan = msgspec.structs.replace(plans["micro"], drop=str(tmp_path / "drop"))
    drop = drops.Drop.create(plan)
    launcher = kubernetes.KubernetesLauncher(plan, drop, kubernetes.Kubectl(api[1]))
    assert launcher.pods() == []
    monkeypatch.setattr(kubernetes, "DEAF_S", -1.0)
    with pytest.raises(HostLost, match="the Kubernetes API"):
        launcher.pods()


def test_a_batch_cell_whose_pod_failed_ends_the_run(
    plans: dict[str, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell's own question for pods must not count as the look at what troubles them."""
    monkeypatch.setattr(kubernetes, "POLL_S", 0.05)
    plan = msgspec.structs.replace(plans["micro"], drop=str(tmp_path / "drop"))
    drop = drops.Drop.create(plan)
    launcher = kubernetes.KubernetesLauncher(plan, drop, kubernetes.Kubectl({}))
    labels = {manifests.INDEX: "0"}
    failed = {"items": [{"metadata": {"name": "lane-0", "labels": labels},
                         "status": {"phase": "Failed", "reason": "Evicted"}}]}  # fmt: skip

    def run(*words: str) -> str:
        if words[0] == "get":
            return json.dumps(failed)
        raise HostLost("container not found", remedy="")

    monkeypatch.setattr(launcher.kubectl, "run", run)
    task = kubernetes.PodTask(launcher, plan, "decode", child=None, log=tmp_path / "x.log")

    def wait() -> None:
        for _ in range(100):
            assert task.poll() is None
            time.sleep(0.02)

    with pytest.raises(ServerDied, match="Evicted"):
        wait()


@needs_kubectl
def test_a_log_is_followed_when_its_container_has_begun_and_not_before(
    api: tuple[type[Api], dict[str, str]], plans: dict[str, Plan], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """kubectl refuses the log of a container that has not started, and says so into the log."""
    monkeypatch.setattr(kubernetes, "POLL_S", 0.0)
    plan = msgspec.structs.replace(plans["sglang"], drop=str(tmp_path / "drop"))
    drop = drops.Drop.create(plan)
    (drop.path / kubernetes.FOLDER).mkdir()
    launcher = kubernetes.KubernetesLauncher(plan, drop, kubernetes.Kubectl(api[1]))
    worker = next(s for s in plan.services if s.host == plan.hosts[1].name)
    log = drop.log(worker.host, worker.name)
    waiting = {"waiting": {"reason": "PodInitializing"}}
    running: dict[str, Any] = {"running": {}}
    launcher.start(worker, {}, log)
    for state in (waiting, running):
        found = listed(phase="Pending", initContainerStatuses=[
            {"name": "warm", "state": {"terminated": {"exitCode": 0}}}],
            containerStatuses=[{"name": "server", "state": state}])  # fmt: skip
        found["items"][0] |= {"kind": "Pod", "apiVersion": "v1", "spec": {"containers": [
            {"name": "warm"}, {"name": "server"}]}}  # fmt: skip
        api[0].pods = {"kind": "PodList", "apiVersion": "v1", **found}
        launcher.check()
        assert log.exists() == (state is running)
    launcher.stop()
    assert log.read_text() == "I am server in lane-0-1\n"
    warm = drop.path / "warm" / f"{worker.host}-warm.log"
    assert warm.read_text() == "I am warm in lane-0-1\n"


def test_without_kubectl_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no kubectl here"):
        kubernetes.Kubectl({}).run("version")


def test_a_model_that_only_this_machine_has_is_refused(
    bare: machine.Machine, checkout: Path
) -> None:
    options = planning.Options(lane="vllm", profile="cpu", launcher="kubernetes", start=False)
    with pytest.raises(ConfigError, match="made on this machine"):
        planning.make(options, bare)
