"""The graph, its overridable roots, the tags and the bill of materials, without a Docker engine."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from lanekit import (
    cli,
    contents,
    drop,
    image_commands,
    images,
    paths,
    pins,
    programs,
    registry,
    sbom,
)
from lanekit.errors import ConfigError, ImageFailed

DIGEST = "sha256:" + "0123456789ab" + "c" * 52
HELD = images.Contents(
    system="Debian GNU/Linux 12 (bookworm)",
    python="3.12.1",
    libraries={"nccl": "2.30.4", "nvshmem": "3.6.5"},
    expect={},
    packages={"vllm": "0.24.0", "torch": "2.11.0", "deep-ep": "2.0.0+b8a69a8"},
    debian={"libc6": "2.36-9"},
)


def test_the_graph_is_the_one_the_design_draws() -> None:
    above = images.parents()
    assert above["transport-v2"] == above["transport-v1"] == "transport-base"
    for engine in ("vllm", "sglang", "megatron"):
        assert above[engine] == "transport-v2"
        assert above[f"{engine}-v1"] == "transport-v1"
    assert above["trtllm"] == "transport-v2"
    assert above["nemo-rl"] == "megatron"
    assert images.ancestors("nemo-rl-v1") == ["megatron-v1", "transport-v1", "transport-base"]
    assert above["aiperf"] == above["vllm-cpu"] == "slim_base"


def test_what_a_child_builds_on_is_asked_for_by_name_and_never_exported() -> None:
    """Linked only, the docker driver exported it under its parent's tag (buildx 0.13.1)."""
    assert images.asked(["nemo-rl", "aiperf"]) == [
        "nemo-rl", "aiperf", "_megatron", "_transport-base", "_transport-v2",
    ]  # fmt: skip
    text = images.GRAPH.read_text()

    def body(target: str) -> str:
        found = re.search(rf'^target "{target}" \{{\n(.*?)^\}}', text, re.M | re.S)
        assert found is not None, target
        return found[1]

    made = body("_made")
    assert re.search(r'output += \["type=cacheonly"\]', made)
    assert re.search(r"tags += \[\]", made)
    assert re.search(r'target += "made"', made)
    for name in {parent for parent in images.parents().values() if parent in images.targets()}:
        # The last of what a target inherits wins (Docker's bake reference).
        assert body(f"_{name}").split() == ["inherits", "=", f'["{name}",', '"_made"]'], name


def test_every_image_has_its_folder_with_a_readme() -> None:
    for name in images.targets():
        assert (images.folder(name) / "Dockerfile").is_file()
        assert (images.folder(name) / "README.md").is_file(), name


def test_every_child_ends_with_the_guard_and_every_engine_as_a_user() -> None:
    for name in images.targets():
        text = (images.folder(name) / "Dockerfile").read_text()
        runs = [step for step in text.split("\nRUN ")[1:] if "guard.py" in step]
        assert "guard.py contents" in runs[-1], name
        if not name.startswith("transport"):
            assert "\nUSER 10001:10001" in text, name
            assert "guard.py check" in runs[-1], name


def test_the_readme_draws_the_graph_as_it_is() -> None:
    edges = [f"    {parent} --> {name}" for name, parent in images.parents().items()]
    assert "\n".join(["graph LR", *edges]) in (images.IMAGES / "README.md").read_text()


def test_bases_are_pinned_by_digest_and_overridden_as_one() -> None:
    pinned = images.definition("2026-07", images.Roots())["target"]["aiperf"]["contexts"]
    assert "@sha256:" in pinned["slim_base"]
    given = images.definition("2026-07", images.Roots(base_image="mine:1"))["target"]
    assert given["aiperf"]["contexts"]["slim_base"] == "docker-image://mine:1"
    assert given["transport-base"]["contexts"]["cuda_base"] == "docker-image://mine:1"


def test_every_argument_of_both_stacks_gets_its_pin() -> None:
    for stack in ("2026-07", "current"):
        made = images.definition(stack, images.Roots())["target"]
        assert made["transport-v2"]["args"]["NCCL_VERSION"]
        assert made["vllm"]["args"]["VLLM_LOCK"]
        assert made["transport-base"]["args"]["EFA_SHA256"]
    assert made["transport-v2"]["args"]["DEEPEP_WHEEL_VERSION"]


def test_an_image_sees_only_the_locks_it_names() -> None:
    place = images.definition("2026-07", images.Roots())["target"]["vllm"]["contexts"]["locks"]
    assert [path.name for path in Path(place).iterdir()] == ["vllm-cu130.txt"]


def test_a_stack_leaves_another_stacks_locks_where_bake_reads_them() -> None:
    """A build of `current` failed on it: a lock was gone that another stack had replaced."""
    first = images.definition("current", images.Roots())["target"]["sglang"]["contexts"]["locks"]
    images.definition("2026-07", images.Roots())
    assert [path.name for path in Path(first).iterdir()] == ["sglang-current.txt"]


def test_a_source_is_a_folder_a_file_or_a_url(tmp_path: Path) -> None:
    archive = tmp_path / "installer.tar.gz"
    archive.write_bytes(b"x")

    def given(value: str) -> images.Definition:
        roots = images.roots({"SRC_EFA": value})
        made: images.Definition = images.definition("2026-07", roots)["target"]["transport-base"]
        return made

    assert given(str(tmp_path))["contexts"]["src-efa"] == str(tmp_path)
    staged = Path(given(str(archive))["contexts"]["src-efa"])
    assert [path.name for path in staged.iterdir()] == ["installer.tar.gz"]
    by_url = given("https://mirror.example/efa.tar.gz")
    assert by_url["args"]["EFA_URL"] == "https://mirror.example/efa.tar.gz"
    assert list(Path(by_url["contexts"]["src-efa"]).iterdir()) == []
    assert by_url["args"]["EFA_SHA256"]  # another place, the same bytes


def test_a_git_source_is_its_pinned_commit_wherever_it_comes_from(tmp_path: Path) -> None:
    def given(value: str) -> str:
        made = images.definition("2026-07", images.roots({"SRC_NEMO_RL": value}))["target"]
        return str(made["nemo-rl"]["contexts"]["src-nemo-rl"])

    commit = pins.of_stack(pins.load(), "2026-07")["nemo_rl"].commit
    assert given("") == f"https://github.com/NVIDIA-NeMo/RL.git#{commit}"
    assert given("https://mirror.example/RL.git") == f"https://mirror.example/RL.git#{commit}"
    assert given(str(tmp_path)) == str(tmp_path)


def test_another_file_needs_its_own_checksum_and_the_image_says_so(tmp_path: Path) -> None:
    environ = {"SRC_EFA": str(tmp_path), "SHA256_EFA": "ab" * 32, "BASE_IMAGE": "mine:1"}
    made = images.definition("2026-07", images.roots(environ))["target"]
    assert made["transport-base"]["args"]["EFA_SHA256"] == "ab" * 32
    assert made["transport-base"]["labels"]["lanes.given"] == "base efa"
    assert made["vllm"]["labels"]["lanes.given"] == "base efa"  # what its parents were given
    assert made["aiperf"]["labels"]["lanes.given"] == "base"
    pinned = images.definition("2026-07", images.Roots())["target"]["aiperf"]["labels"]
    assert pinned["lanes.given"] == ""
    assert pinned["org.opencontainers.image.title"] == "aiperf"
    base = "org.opencontainers.image.base"
    assert pinned[f"{base}.name"] == "docker.io/library/debian:bookworm-slim"
    assert pinned[f"{base}.digest"].startswith("sha256:")
    assert f"{base}.digest" not in made["aiperf"]["labels"]  # another's base, by its tag


def test_an_image_says_what_it_is_in_its_recipes_opening_words() -> None:
    made = images.definition("2026-07", images.Roots())["target"]
    told = {name: made[name]["labels"]["org.opencontainers.image.description"] for name in made
            if name != "_common"}  # fmt: skip
    assert told["vllm"] == "vLLM on a transport; NCCL, NVSHMEM and DeepEP stay the transport's."
    assert all(len(said) > 40 and said[0] not in "# " for said in told.values())


def _clone(folder: Path, remote: str) -> None:
    commands = [
        ["init", "--quiet"], ["remote", "add", "origin", remote],
        ["-c", "user.name=me", "-c", "user.email=me@example.invalid", "commit", "--quiet",
         "--allow-empty", "--message=one", "--date=2026-11-30T12:00:00Z"],
    ]  # fmt: skip
    for command in commands:
        environ = {**os.environ, "GIT_COMMITTER_DATE": "2026-11-30T12:00:00Z"}
        subprocess.run(["git", "-C", str(folder), *command], check=True, env=environ)


@pytest.mark.parametrize(
    ("remote", "source"),
    [
        ("https://github.com/me/lanes.git", "https://github.com/me/lanes"),
        ("https://me:secret@git.example:8443/me/lanes", "https://git.example/me/lanes"),
        ("git@github.com:me/lanes.git", "https://github.com/me/lanes"),
        ("ssh://git@git.example:22/me/lanes.git", "https://git.example/me/lanes"),
        ("/home/me/lanes", None),
        ("file:///home/me/lanes", None),
    ],
)
def test_an_image_names_the_public_place_and_commit_it_was_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: str, source: str | None
) -> None:
    _clone(tmp_path, remote)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    told = {name.rpartition(".")[2]: value for name, value in images.checkout().items()}
    assert told.get("source") == source
    assert re.fullmatch(r"[0-9a-f]{40}", told["revision"])
    assert told["created"].startswith("2026-11-30T12:00:00")


def test_an_image_of_a_changed_tree_says_so_and_is_no_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _clone(tmp_path, "https://github.com/me/lanes")
    (tmp_path / "new").write_text("")
    subprocess.run(["git", "-C", str(tmp_path), "add", "new"], check=True)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    told = images.checkout()
    assert told["org.opencontainers.image.revision"].endswith("-dirty")
    assert "org.opencontainers.image.created" not in told


def test_a_tree_without_git_names_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert images.checkout() == {}


def test_a_tree_inside_another_repository_takes_neither_its_commit_nor_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _clone(tmp_path, "https://github.com/me/mine")
    (tmp_path / "lanes").mkdir()
    monkeypatch.setattr(paths, "ROOT", tmp_path / "lanes")
    assert drop.git() == {}
    assert images.checkout() == {}
    with pytest.raises(ConfigError, match="no registry was named"):
        registry.default()


def test_what_a_checkout_is_made_of_is_one_question_to_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clone").mkdir()
    _clone(tmp_path / "clone", "https://github.com/me/mine")
    counted = tmp_path / "git"
    counted.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\nexec {shutil.which("git")} "$@"\n'
    )
    counted.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(paths, "ROOT", tmp_path / "clone")
    assert drop.git()["dirty"] == "no"
    assert len((tmp_path / "asked").read_text().splitlines()) == 1
    (tmp_path / "clone" / "file").write_text("one")
    subprocess.run(["git", "-C", str(tmp_path / "clone"), "add", "file"], check=True)
    assert drop.git()["dirty"] == "yes"


def test_a_file_that_was_taken_without_a_checksum_is_named_after_every_build(
    tmp_path: Path,
) -> None:
    assert images.unrecorded(["vllm", "aiperf"], "2026-07", images.Roots()) == ["gdrcopy"]
    assert images.unrecorded(["aiperf"], "2026-07", images.Roots()) == []
    given = {"SRC_GDRCOPY": str(tmp_path), "SHA256_GDRCOPY": "ab" * 32}
    assert images.unrecorded(["vllm"], "2026-07", images.roots(given)) == []
    assert images.unrecorded(["trtllm"], "current", images.roots(given)) == ["trtllm"]
    given |= {"SRC_TRTLLM_WHEEL": str(tmp_path)}  # its giver's, noted as such
    assert images.unrecorded(["trtllm"], "current", images.roots(given)) == []


def test_the_ca_bundle_and_pip_configuration_are_build_secrets(tmp_path: Path) -> None:
    for name in ("ca.pem", "pip.conf"):
        (tmp_path / name).write_text("")
    environ = {"CA_BUNDLE": str(tmp_path / "ca.pem"), "PIP_CONFIG": str(tmp_path / "pip.conf")}
    made = images.definition("2026-07", images.roots(environ))["target"]["aiperf"]
    assert made["secret"] == [
        f"id=ca,src={tmp_path / 'ca.pem'}",
        f"id=pip,src={tmp_path / 'pip.conf'}",
    ]


@pytest.mark.parametrize("option", ["SRC_EFA", "CA_BUNDLE", "PIP_CONFIG"])
def test_a_root_that_is_not_there_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        images.roots({option: "/nowhere/at/all"})


@pytest.mark.parametrize(
    ("name", "stack", "wanted"),
    [
        ("vllm", "2026-07", ["SRC_DEEPEP_WHEEL"]),
        ("vllm", "current", []),
        ("sglang-v1", "current", ["SRC_DEEPEP_V1_WHEEL"]),
        ("nemo-rl", "2026-07", ["SRC_DEEPEP_WHEEL"]),
        ("vllm-cpu", "2026-07", []),
    ],
)
def test_a_wheel_that_no_index_holds_is_asked_for_before_the_first_step(
    tmp_path: Path, name: str, stack: str, wanted: list[str]
) -> None:
    given = images.roots({option: str(tmp_path) for option in wanted})
    images.require_given([name], stack, given, pins.load())
    for option in wanted:
        others = images.roots({other: str(tmp_path) for other in wanted if other != option})
        with pytest.raises(ConfigError, match=f"no index holds: {option}$") as error:
            images.build([name], stack, others)
        assert f"{option}=FOLDER" in error.value.remedy


def test_an_image_whose_lock_a_stack_lacks_is_not_begun() -> None:
    """NeMo RL's lock would put another torch under the DeepEP of `current`."""
    with pytest.raises(ConfigError, match="stack current has no image nemo-rl") as error:
        images.require_given(["vllm", "nemo-rl"], "current", images.Roots(), pins.load())
    assert error.value.remedy == "STACK=2026-07."
    assert images.stacks("megatron", pins.load()) == ["2026-07", "current"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "--all", "--exact", "--stack", "nope"], "no stack named 'nope'"),
        (["pull", "vllm", "--stack", "nope"], "no stack named 'nope'"),
        (["pull", "vlm"], "no image named 'vlm'"),  # not: nobody published it yet
        (["push", "vlm"], "no image named 'vlm'"),
        (["table", "vlm"], "no image named 'vlm'"),
    ],
)
def test_what_is_no_image_and_no_stack_is_refused_before_anything_else(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["image", *words]) == 2
    assert said in capsys.readouterr().err


def test_every_wheel_that_can_be_given_is_a_source_of_some_recipe() -> None:
    recipes = "".join(path.read_text() for path in images.IMAGES.glob("*/Dockerfile"))
    for name in pins.load().given:
        assert f"from=src-{name.replace('_', '-')}," in recipes


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("SRC_DEEPEP", "https://git.example/DeepEP.git", "no image takes such a source"),
        ("SRC_GDRCPY", ".", "no image takes such a source"),
        ("SRC_NVSHMEM", ".", "no image takes such a source"),  # a pin that comes from a lock
        ("SRC_DEEPEP_WHEEL", "https://mirror.example/deep_ep.whl", "is a URL"),
    ],
)
def test_a_source_that_would_be_ignored_is_refused(option: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: .*{said}"):
        images.roots({option: value})


def test_another_programs_variable_stops_no_build_and_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = images.roots({"SRC_DIR": "/nowhere/at/all", "SRC_EFA": str(tmp_path)})
    assert given.sources == {"efa": str(tmp_path)}
    assert "SRC_DIR is passed over" in capsys.readouterr().err


def test_an_unknown_image_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as error:
        images.build(["vlm"], "2026-07", images.Roots())
    assert "vllm" in error.value.remedy


@pytest.mark.parametrize(
    ("names", "profile", "built"),
    [
        (["vllm"], "cpu", ["vllm-cpu", "aiperf"]),
        (["vllm"], "h200x2", ["vllm", "aiperf"]),
        (["vllm", "aiperf"], "cpu", ["vllm-cpu", "aiperf"]),
        (["transport-v2"], "", ["transport-v2"]),
    ],
)
def test_a_lanes_name_stands_for_all_that_it_needs(
    names: list[str], profile: str, built: list[str]
) -> None:
    assert image_commands.wanted(names, profile) == built


def test_which_profile_was_chosen_is_not_said_into_the_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    image_commands.wanted(["vllm"], "")
    said, told = capsys.readouterr()
    assert said == ""
    assert "image-vllm: for profile " in told


def test_a_profile_the_lane_does_not_run_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="no setting for profile p5en-x2x"):
        image_commands.wanted(["vllm"], "p5en-x2x")


def test_a_tag_says_what_the_image_holds() -> None:
    made = registry.tag(HELD, DIGEST)
    assert made == "vllm0.24.0-deepep2.0.0-nccl2.30.4-nvshmem3.6.5-0123456789ab"


def test_another_build_of_the_same_versions_is_another_tag() -> None:
    assert registry.tag(HELD, DIGEST) != registry.tag(HELD, DIGEST.replace("0123", "4567"))


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        ("", "holds no digest of vllm"),
        ('{"current": {}}', "holds no digest of vllm"),
        ('{"2026-07": {"vllm": {"repository": "r", "tag": "t", "digest": "latest", "sbom": ""}}}',
         "is no digest"),
    ],
)  # fmt: skip
def test_a_missing_or_broken_digest_is_refused(tmp_path: Path, lock: str, said: str) -> None:
    path = tmp_path / "images.lock"
    if lock:
        path.write_text(lock)
    with pytest.raises(ImageFailed, match=said):
        registry.pull("vllm", "2026-07", lock=path)


@pytest.mark.parametrize("other", [True, False])
def test_an_engine_that_brought_another_image_than_was_asked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    """Stand-ins for the engine: a real one refuses by itself (tests/images/test_registry.py)."""
    entry = registry.Entry("r/vllm", registry.tag(HELD, DIGEST), DIGEST, "")
    lock = tmp_path / "images.lock"
    lock.write_bytes(msgspec.json.encode({"2026-07": {"vllm": entry}}))
    name = f"r/vllm@{DIGEST.replace('0123', '4567') if other else DIGEST}"
    brought = SimpleNamespace(id="sha256:" + "e" * 64, repo_digests=[name])
    image = SimpleNamespace(inspect=lambda _: brought, tag=lambda *_: None)
    monkeypatch.setattr(registry, "_docker", lambda *_: None)
    monkeypatch.setattr(images, "docker", lambda *_: SimpleNamespace(image=image))
    monkeypatch.setattr(images, "contents", lambda *_: HELD)
    if not other:
        assert registry.pull("vllm", "2026-07", lock=lock).endswith(f"is r/vllm@{DIGEST}")
        return
    with pytest.raises(ImageFailed, match="arrived as sha256:eee"):
        registry.pull("vllm", "2026-07", lock=lock)


def test_a_lock_that_does_not_decode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images.lock").write_text('{"2026-07": {"vllm": {"digest": 1}}}')
    with pytest.raises(ConfigError, match=r"images\.lock"):
        registry.read(tmp_path / "images.lock")


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("https://github.com/Me/Lanes", "ghcr.io/me/lanes"),
        ("https://git.example/me/lanes", ""),
        ("", ""),
    ],
)
def test_images_go_beside_the_repository_they_come_from(
    monkeypatch: pytest.MonkeyPatch, source: str, place: str
) -> None:
    monkeypatch.setattr(images, "checkout", lambda: {images.SOURCE: source})
    if place:
        assert registry.default() == place
        return
    with pytest.raises(ConfigError) as error:
        registry.default()
    assert "REGISTRY=HOST/NAME" in error.value.remedy


def test_the_workflow_builds_as_a_person_does_and_no_failed_push_goes_on() -> None:
    (path,) = (images.IMAGES.parent / ".github" / "workflows").glob("*.yml")
    text = path.read_text()
    # Without a shell named, GitHub's bash has no pipefail: `push | tee` would pass for its tee.
    assert re.search(r"^      run:\n        shell: bash\b", text, re.M)
    said = re.findall(r"lanekit image (\w+) .*?--stack", text)
    assert said == ["build", "push", "table"]
    assert "ghcr.io/" not in text  # one place knows where images go
    offered = re.search(r"options: \[(.*)\]", text)
    assert offered is not None
    assert {stack.strip(' "') for stack in offered[1].split(",")} == {*pins.load().stacks}


def test_the_workflows_take_their_actions_by_commit() -> None:
    paths = sorted((images.IMAGES.parent / ".github" / "workflows").glob("*.yml"))
    used = [line for path in paths for line in path.read_text().splitlines() if "uses:" in line]
    assert used
    for line in used:
        assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+(\.\d+)+$", line), line


def test_the_bill_names_every_package_and_is_the_same_twice() -> None:
    bill = sbom.of("vllm", HELD, DIGEST)
    made = json.loads(bill)
    assert made["bomFormat"] == "CycloneDX"
    assert made["metadata"]["component"]["version"] == DIGEST
    purls = {component["purl"] for component in made["components"]}
    assert {"pkg:pypi/vllm@0.24.0", "pkg:deb/debian/libc6@2.36-9"} <= purls
    ubuntu = msgspec.structs.replace(HELD, system="Ubuntu 24.04.3 LTS")
    assert b"pkg:deb/ubuntu/libc6@2.36-9" in sbom.of("vllm", ubuntu, DIGEST)
    assert bill == sbom.of("vllm", HELD, DIGEST)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill.decode()) is None


def test_the_contents_table_is_replaced_and_nothing_else() -> None:
    begin, other = contents.BEGIN.format("current"), contents.BEGIN.format("2026-07")
    rest = f"{other}\nolder\n{contents.END}\nend\n"
    text = f"# x\n{begin}\nold\n{contents.END}\n{rest}"
    made = contents.renewed(text, contents.table(HELD, 3_530_000_000, "current"), "current")
    assert "| what | version in current |" in made
    assert "| vllm | 0.24.0 |" in made
    assert "3.53 GB packed" in made
    assert made.startswith("# x\n")
    assert made.endswith(f"\n{rest}")
    assert "\nold\n" not in made


def test_a_readme_without_a_table_of_a_stack_gets_one_more() -> None:
    other = f"# x\n{contents.BEGIN.format('2026-07')}\nolder\n{contents.END}\n"
    made = contents.renewed(other, "new", "current")
    assert made == f"{other}\n{contents.BEGIN.format('current')}\nnew\n{contents.END}\n"


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("vllm", "current"),
        ("vllm-v1", "vllm-v1 in current"),  # else it would replace vllm's
        ("transport-v1", "current"),
    ],
)
def test_variants_that_share_a_readme_have_tables_of_their_own(name: str, of: str) -> None:
    assert contents.place(name, "current") == of


def _bench() -> ModuleType:
    path = images.IMAGES.parent / "scripts" / "bench_images.py"
    module: ModuleType = programs.load("bench_images", path)
    return module


REPORT = """
#5 [aiperf context tools] load from client
#5 DONE 0.0s
#7 [_transport-v2 made 2/6] RUN --mount=type=bind,from=tools /tools/install
#7 CACHED
#8 [vllm-cpu stage-0 3/6] RUN --mount=type=bind,from=evidence cp
#8 DONE 1.0s
#9 [nemo-rl stage-0 2/4] COPY --from=src-nemo-rl / /opt/nemo-rl/
#9 DONE 0.1s
#10 [aiperf stage-0 5/5] WORKDIR /home/lane
"""


def test_the_bench_counts_steps_that_were_not_cached() -> None:
    assert _bench().ran(REPORT) == ["nemo-rl stage-0 2/4", "vllm-cpu stage-0 3/6"]


@pytest.mark.parametrize(
    ("image", "mark", "steps"),
    [
        ("transport-v2", "from=evidence", 2),  # the hook itself and the guard
        ("aiperf", "from=evidence", 0),
        ("sglang", "from=guard", 1),
        ("sglang", "", 0),  # a lane's file is mounted nowhere
    ],
)
def test_the_bench_knows_the_steps_that_follow_a_change(image: str, mark: str, steps: int) -> None:
    assert _bench().following(image, mark) == steps
