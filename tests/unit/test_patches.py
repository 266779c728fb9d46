"""The patch tool, driven on small git repositories made here."""

import copy
import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from lanekit import patches, paths, spec
from lanekit.cli import main
from lanekit.errors import ConfigError, LaneError, Unreadable

TEXT = "".join(f"line {number}\n" for number in range(1, 21))
STEP = {
    "what": "Change a line.",
    "why": "So that there is something to apply.",
    "upstream": "none",
    "tested": "here",
    "drop": "never",
    "switch": "SWITCH=0",
}


def git(folder: Path, *command: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    me = ("-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *me, *command], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(root: Path, name: str, text: str, message: str) -> str:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", message)
    return git(root, "rev-parse", "HEAD")


class Upstream:
    """A root with a base, an upstream commit after it, and a change of ours on the base."""

    def __init__(self, home: Path) -> None:
        place, folder = home / "root", home / "patches"
        place.mkdir(parents=True)
        git(place, "init", "--quiet", "--initial-branch=main")
        self.place, self.changed = place, TEXT.replace("line 10\n", "line ten\n")
        self.base = commit(place, "src/a.txt", TEXT, "base")
        git(place, "checkout", "--quiet", "-b", "ours")
        commit(place, "src/a.txt", self.changed, "Write ten out")
        self.folder = folder / "tool" / self.base[:8]
        self.folder.mkdir(parents=True)
        patch = git(place, "format-patch", "--stdout", "--no-signature", "-1")
        (self.folder / "0001-ten.patch").write_text(patch + "\n")
        self.tree = git(place, "rev-parse", "HEAD^{tree}")
        git(place, "checkout", "--quiet", "main")

    def series(self, *steps: dict[str, str], extra: str = "", **changes: str) -> Path:
        """Write series.toml; `changes` replace keys of [source] or the tree."""
        steps = steps or (STEP | {"patch": "0001-ten.patch"},)
        keys = {"name": "TOOL", "base": self.base, "git": "https://git.example.invalid/tool"}
        keys |= {key: value for key, value in changes.items() if key != "tree"}
        lines = [
            'what = "One line."',
            'stack = "current"',
            f'tree = "{changes.get("tree", self.tree)}"',
        ]
        lines += ["[source]", *(f'{key} = "{value}"' for key, value in keys.items() if value)]
        for step in steps:
            lines += ["[[step]]", *(f'{key} = "{value}"' for key, value in step.items())]
        (self.folder / "series.toml").write_text("\n".join(lines) + "\n" + extra)
        return self.folder


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    return Upstream(tmp_path_factory.mktemp("upstream"))


@pytest.fixture
def upstream(made_once: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upstream:
    shutil.copytree(made_once.place.parent, tmp_path, dirs_exist_ok=True)
    made = copy.copy(made_once)
    made.place = tmp_path / "root"
    made.folder = tmp_path / "patches/tool" / made_once.folder.name
    monkeypatch.setattr(patches, "PATCHES", tmp_path / "patches")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("SRC_TOOL", str(made.place))
    return made


def refusal(folder: Path, kind: type[LaneError] = patches.Refused) -> str:
    with pytest.raises(kind) as error:
        list(patches.judge(folder))
    assert error.value.remedy
    return error.value.message


def test_a_series_applies_and_leaves_the_tree_it_records(
    upstream: Upstream, tmp_path: Path
) -> None:
    lines = list(patches.judge(upstream.series(), tmp_path / "out"))
    assert lines[0] == "applied 0001-ten.patch: 1 file changed, 1 insertion(+), 1 deletion(-)"
    assert lines[1].startswith(f"tree {upstream.tree[:12]} as recorded")
    left = tmp_path / "out/tool" / upstream.folder.name
    assert (left / "src/a.txt").read_text() == upstream.changed
    assert not (left / ".git").exists()
    with pytest.raises(ConfigError, match="is there already"):
        list(patches.judge(upstream.folder, tmp_path / "out"))


def test_the_root_is_never_written_to(upstream: Upstream) -> None:
    before = sorted(str(one) for one in upstream.place.rglob("*"))
    list(patches.judge(upstream.series()))
    assert sorted(str(one) for one in upstream.place.rglob("*")) == before
    assert git(upstream.place, "status", "--porcelain") == ""


def test_a_url_is_fetched_once_and_kept(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRC_TOOL", f"file://{upstream.place}")
    list(patches.judge(upstream.series()))
    upstream.place.rename(tmp_path / "gone")
    assert list(patches.judge(upstream.folder))


def test_an_upstream_commit_is_picked_by_hash(upstream: Upstream) -> None:
    later = TEXT.replace("line 19\n", "line nineteen\n")
    hash_ = commit(upstream.place, "src/a.txt", later, "Upstream's own change")
    step = STEP | {"pick": hash_}
    both = upstream.changed.replace("line 19\n", "line nineteen\n")
    git(upstream.place, "checkout", "--quiet", "-b", "both")
    commit(upstream.place, "src/a.txt", both, "both")
    tree = git(upstream.place, "rev-parse", "HEAD^{tree}")
    folder = upstream.series(step, STEP | {"patch": "0001-ten.patch"}, tree=tree)
    assert next(patches.judge(folder)).startswith(f"picked {hash_[:7]}: 1 file changed")


def test_a_pick_that_is_already_there_fails(upstream: Upstream) -> None:
    git(upstream.place, "checkout", "--quiet", "ours")
    (upstream.folder / "0001-ten.patch").unlink()
    hash_ = git(upstream.place, "rev-parse", "HEAD")
    folder = upstream.series(STEP | {"pick": hash_})
    assert next(patches.judge(folder)).startswith("picked")
    twice = upstream.series(STEP | {"pick": hash_}, STEP | {"pick": hash_})
    assert "changes nothing, it is already there" in refusal(twice)


def test_a_pick_that_the_base_grew_from_is_not_applied_twice(upstream: Upstream) -> None:
    git(upstream.place, "checkout", "--quiet", "main")
    added = "".join(f"{line}\n" for line in ("export A=1", "export B=2"))
    hash_ = commit(upstream.place, "src/env", added, "Adds lines")
    text = "export C=3\n" * 9 + added.replace("A=1", "A=1 # moved")
    commit(upstream.place, "src/env", text, "Moves and changes them")
    folder = upstream.series(STEP | {"pick": hash_}, STEP | {"patch": "0001-ten.patch"})
    toml = (folder / "series.toml").read_text()
    (folder / "series.toml").write_text(toml.replace("[source]\n", '[source]\nnewer = ["main"]\n'))
    assert f"  {hash_[:7]}: changes nothing, it is already there" in list(patches.refresh(folder))


def test_a_pick_that_conflicts_names_the_file(upstream: Upstream) -> None:
    git(upstream.place, "checkout", "--quiet", "ours")
    hash_ = commit(upstream.place, "src/a.txt", TEXT.replace("line 10\n", "line X\n"), "clash")
    steps = (STEP | {"pick": hash_}, STEP | {"patch": "0001-ten.patch"})
    assert "conflicts in src/a.txt" in refusal(upstream.series(*steps))


def test_a_hunk_that_moved_is_refused_on_a_pinned_base(upstream: Upstream) -> None:
    patch = upstream.folder / "0001-ten.patch"
    text = patch.read_text()
    assert "@@ -7,7 +7,7 @@" in text
    patch.write_text(text.replace("@@ -7,7 +7,7 @@", "@@ -4,7 +4,7 @@"))
    assert refusal(upstream.series()) == "0001-ten.patch: src/a.txt hunk 1 moved by 3"


def test_a_hunk_whose_context_differs_is_refused_without_fuzz(upstream: Upstream) -> None:
    patch = upstream.folder / "0001-ten.patch"
    patch.write_text(patch.read_text().replace("\n line 13\n", "\n line thirteen\n"))
    assert refusal(upstream.series()) == "0001-ten.patch: src/a.txt hunk 1 refused"


def test_a_patch_to_a_file_that_is_not_there_is_refused(upstream: Upstream) -> None:
    patch = upstream.folder / "0001-ten.patch"
    patch.write_text(patch.read_text().replace("src/a.txt", "src/b.txt"))
    assert refusal(upstream.series()) == "0001-ten.patch: src/b.txt refused"


def test_a_patch_without_a_change_is_refused(upstream: Upstream) -> None:
    patch = upstream.folder / "0001-ten.patch"
    patch.write_text(patch.read_text().split("diff --git")[0])
    assert refusal(upstream.series()).startswith("0001-ten.patch: error:")


def test_another_tree_than_recorded_is_refused(upstream: Upstream) -> None:
    message = refusal(upstream.series(tree="0" * 40))
    assert upstream.tree in message
    assert "0" * 40 in message


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("src/a.txt", "line eleven", "does not hold 'line eleven'"),
        ("src/b.txt", "line ten", "does not hold 'line ten'"),
        ("src/a.txt", "line 11", "holds 'line 11' before any step"),
    ],
)
def test_a_gate_proves_that_the_change_is_there(
    upstream: Upstream, path: str, text: str, fault: str
) -> None:
    gate = f'[[gate]]\npath = "{path}"\ntext = "{text}"\n'
    assert fault in refusal(upstream.series(extra=gate))
    good = '[[gate]]\npath = "src/a.txt"\ntext = "line ten"\n'
    assert list(patches.judge(upstream.series(extra=good)))


def test_a_wheel_or_a_plain_folder_can_be_the_root(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "tool-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("src/a.txt", TEXT)
    (tmp_path / "plain/src").mkdir(parents=True)
    (tmp_path / "plain/src/a.txt").write_text(TEXT)
    folder = upstream.folder.rename(upstream.folder.parent / "1.0")
    upstream.folder = folder
    upstream.series(git="", pypi="tool", base="1.0")
    for place in (wheel, tmp_path / "plain"):
        monkeypatch.setenv("SRC_TOOL", str(place))
        assert list(patches.judge(folder))


def test_only_the_named_paths_of_a_big_repository_are_taken(upstream: Upstream) -> None:
    commit(upstream.place, "src/big.bin", "big\n", "more")
    upstream.base = git(upstream.place, "rev-parse", "HEAD")
    folder = upstream.folder.rename(upstream.folder.parent / upstream.base[:8])
    upstream.folder = folder
    upstream.series()
    text = (folder / "series.toml").read_text()
    named = text.replace("[source]\n", '[source]\npaths = ["src/a.txt"]\n')
    (folder / "series.toml").write_text(named)
    assert list(patches.judge(folder))
    (folder / "series.toml").write_text(text)
    assert "the tree is" in refusal(folder)


def test_only_the_named_paths_of_a_wheel_or_folder_are_taken(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, plain = tmp_path / "tool-1.0-py3-none-any.whl", tmp_path / "plain"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("src/a.txt", TEXT)
        archive.writestr("other/b.txt", TEXT)
    zipfile.ZipFile(wheel).extractall(plain)
    upstream.folder = upstream.folder.rename(upstream.folder.parent / "1.0")
    upstream.series(git="", pypi="tool", base="1.0")
    toml = upstream.folder / "series.toml"
    text = toml.read_text()
    for place in (wheel, plain):
        monkeypatch.setenv("SRC_TOOL", str(place))
        toml.write_text(text.replace("[source]\n", '[source]\npaths = ["src/a.txt"]\n'))
        assert list(patches.judge(upstream.folder))
        toml.write_text(text.replace("[source]\n", '[source]\npaths = ["src/z.txt"]\n'))
        assert "src/z.txt" in refusal(upstream.folder, Unreadable)


def test_a_tree_that_cannot_be_known_says_why(upstream: Upstream) -> None:
    folder = upstream.series()
    text = (folder / "series.toml").read_text()
    why = text.replace(f'tree = "{upstream.tree}"', 'unrecorded = "nobody could fetch it"')
    (folder / "series.toml").write_text(why)
    assert "not recorded: nobody could fetch it" in list(patches.judge(folder))[-1]


def test_a_broken_wheel_is_unreadable(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tool.whl").write_bytes(b"not a wheel")
    monkeypatch.setenv("SRC_TOOL", str(tmp_path / "tool.whl"))
    assert "not a zip file" in refusal(upstream.series(), Unreadable)


@pytest.mark.parametrize("override", ["", "/nowhere/at/all"])
def test_a_root_that_cannot_be_had_says_how_to_give_one(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setenv("SRC_TOOL", override)
    upstream.series(git="file:///nowhere/either")
    with pytest.raises(Unreadable) as error:
        list(patches.judge(upstream.folder))
    assert "SRC_TOOL=" in error.value.remedy


def test_a_root_without_the_base_is_unreadable(upstream: Upstream) -> None:
    missing = "f" * 40
    folder = upstream.folder.rename(upstream.folder.parent / missing[:8])
    upstream.folder = folder
    message = refusal(upstream.series(base=missing), Unreadable)
    assert f"does not hold commit {missing}" in message


def test_refresh_says_what_moved_and_what_no_longer_fits(upstream: Upstream) -> None:
    commit(upstream.place, "src/a.txt", "a new first line\n" + TEXT, "moves every line")
    git(upstream.place, "tag", "v2")
    commit(
        upstream.place, "src/a.txt", TEXT.replace("line 11\n", "line XI\n"), "breaks the context"
    )
    folder = upstream.series()
    text = (folder / "series.toml").read_text()
    (folder / "series.toml").write_text(
        text.replace("[source]\n", '[source]\nnewer = ["v2", "main"]\n')
    )
    lines = list(patches.refresh(folder))
    assert lines[1] == "  0001-ten.patch: src/a.txt hunk 1 moved by 1"
    assert lines[3] == "  0001-ten.patch: src/a.txt hunk 1 refused"


def test_a_branch_is_the_repositorys_own_and_a_tag_is_its_commit(upstream: Upstream) -> None:
    source = patches.load(upstream.series()).source
    mine = git(upstream.place, "rev-parse", "main")
    git(
        upstream.place,
        "update-ref",
        "refs/remotes/other/main",
        git(upstream.place, "rev-parse", "ours"),
    )
    git(upstream.place, "tag", "--annotate", "--message", "v1", "v1", "main")
    assert [patches.resolve(source, ref) for ref in ("main", "v1")] == [mine, mine]


def test_refresh_refuses_a_ref_that_is_not_there(upstream: Upstream) -> None:
    folder = upstream.series()
    text = (folder / "series.toml").read_text()
    (folder / "series.toml").write_text(text.replace("[source]\n", '[source]\nnewer = ["v9"]\n'))
    with pytest.raises(Unreadable, match="has no ref v9"):
        list(patches.refresh(folder))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"git": ""}, "git or pypi, and not both"),
        ({"pypi": "tool"}, "git or pypi, and not both"),
        ({"name": "tool"}, "no name for SRC_"),
        ({"base": "main"}, "not a commit of 40 digits"),
        ({"base": "e" * 40}, "not named after source.base"),
        ({"tree": "abc"}, "not a git tree of 40 digits"),
        ({"tree": ""}, "needs tree or, where it cannot be known, unrecorded"),
        ({"branch": "main"}, "unknown key 'branch'"),
    ],
)
def test_a_wrong_source_is_refused(upstream: Upstream, changes: dict[str, str], fault: str) -> None:
    assert fault in refusal(upstream.series(**changes), ConfigError)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, "needs one of patch, pick and fetched"),
        ({"patch": "0001-ten.patch", "pick": "a" * 40}, "needs one of patch, pick and fetched"),
        ({"pick": "a1b2c3d"}, "not a commit of 40 digits"),
        ({"patch": "0002-none.patch"}, "which is not in the folder"),
        ({"patch": "0001-ten.patch", "switch": ""}, "how to switch it off"),
        ({"pick": "a" * 40}, "0001-ten.patch is in the folder and in no step"),
    ],
)
def test_a_wrong_step_is_refused(upstream: Upstream, changes: dict[str, str], fault: str) -> None:
    assert fault in refusal(upstream.series(STEP | changes), ConfigError)


@pytest.mark.parametrize("key", ["what", "why", "upstream", "tested", "drop"])
def test_a_step_must_say_everything(upstream: Upstream, key: str) -> None:
    step = {name: value for name, value in STEP.items() if name != key}
    folder = upstream.series(step | {"patch": "0001-ten.patch"})
    assert f"missing required field `{key}`" in refusal(folder, ConfigError)


def test_a_digest_follows_what_a_series_does_and_not_what_it_says_of_itself(
    upstream: Upstream,
) -> None:
    folder = upstream.series()
    before = patches.digest(folder)
    toml = (folder / "series.toml").read_text()
    (folder / "series.toml").write_text(toml.replace('tested = "here"', 'tested = "on EFA too"'))
    assert patches.digest(folder) == before
    patch = folder / "0001-ten.patch"
    patch.write_text(patch.read_text() + "\n")
    assert patches.digest(folder) != before


def test_a_digest_follows_the_base_and_the_order_of_the_steps(upstream: Upstream) -> None:
    steps = [STEP | {"pick": digit * 40} for digit in "ab"]
    patch = STEP | {"patch": "0001-ten.patch"}
    both = [patches.digest(upstream.series(*order, patch)) for order in (steps, steps[::-1])]
    base = patches.digest(upstream.series(*steps, patch, base=upstream.base[:8] + "0" * 32))
    assert len({*both, base}) == 3


def test_a_name_that_is_a_series_is_no_beginning_of_others(upstream: Upstream) -> None:
    folder = upstream.series()
    other = shutil.copytree(folder, folder.with_name(f"{folder.name}-other"))
    assert patches.find([f"tool/{folder.name}"]) == [folder]
    assert patches.find([f"tool/{folder.name}-"]) == [other]
    assert patches.find(["tool"]) == [folder, other]


def test_a_second_series_on_a_base_has_a_word_behind_its_folder(upstream: Upstream) -> None:
    folder = upstream.series()
    other = folder.rename(folder.with_name(f"{folder.name}-other"))
    assert next(patches.judge(other)).startswith("applied 0001-ten.patch")


def fetched(upstream: Upstream, text: str, sha256: str = "") -> Path:
    """A series whose only step is a patch that stands in a script of the root itself."""
    patch = (upstream.folder / "0001-ten.patch").read_text()
    patch = patch[patch.index("diff --git") :]
    script = text.replace("@", patch)
    hash_ = commit(upstream.place, "setup.sh", script, "a script that carries the patch")
    folder = upstream.series(STEP)
    (folder / "0001-ten.patch").unlink()
    lines = {
        "name": "TOOL", "git": "https://git.example.invalid/tool", "commit": hash_,
        "path": "setup.sh", "begin": "<<'END'", "end": "END",
        "sha256": sha256 or hashlib.sha256(patch.encode()).hexdigest(),
    }  # fmt: skip
    more = ["[step.fetched]", *(f'{key} = "{value}"' for key, value in lines.items())]
    with (folder / "series.toml").open("a") as stream:
        stream.write("\n".join(more) + "\n")
    return folder


def test_a_patch_can_be_fetched_out_of_a_public_script(upstream: Upstream) -> None:
    folder = fetched(upstream, "#!/bin/sh\ncat >a.patch <<'END'\n@END\ngit apply a.patch\n")
    assert next(patches.judge(folder)).startswith("applied TOOL patch: 1 file changed")
    assert [one.name for one in folder.iterdir()] == ["series.toml"]


@pytest.mark.parametrize(
    ("text", "sha256", "fault"),
    [
        ("cat <<'END'\n@END\n", "0" * 64, f"series.toml records {'0' * 64}"),
        ("cat <<'END'\n@# one more\nEND\n", "", "sha256 is"),
        ("cat <<'STOP'\n@STOP\n", "", "sha256 is nothing"),
    ],
)
def test_a_fetched_patch_that_changed_is_refused(
    upstream: Upstream, text: str, sha256: str, fault: str
) -> None:
    assert fault in refusal(fetched(upstream, text, sha256))


def test_a_fetched_patch_that_cannot_be_had_says_how_to_give_it(upstream: Upstream) -> None:
    folder = fetched(upstream, "cat <<'END'\n@END\n")
    toml = (folder / "series.toml").read_text()
    more = toml.replace('[step.fetched]\nname = "TOOL"', '[step.fetched]\nname = "OTHER"')
    (folder / "series.toml").write_text(more.replace("https://git.example.invalid", "/nowhere"))
    with pytest.raises(Unreadable) as error:
        list(patches.judge(folder))
    assert "SRC_OTHER=" in error.value.remedy


def test_the_command_reports_every_series_and_ends_as_the_worst(
    upstream: Upstream, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.series()
    assert main(["patches"]) == 0
    upstream.series(tree="0" * 40)
    assert main(["patches", "tool"]) == 1
    monkeypatch.setenv("SRC_TOOL", "/nowhere")
    assert main(["patches", f"tool/{upstream.folder.name}"]) == 2
    assert main(["patches", "other"]) == 2
    shown = capsys.readouterr()
    assert "error: the tree is" in shown.err
    assert f"Known: tool/{upstream.folder.name}." in shown.err


@pytest.mark.parametrize("folder", patches.find(), ids=lambda one: f"{one.parent.name}/{one.name}")
def test_what_a_series_has_not_shown_has_its_command_and_the_lines_to_expect(folder: Path) -> None:
    series = patches.load(folder)
    told = any("Not run here" in step.tested for step in series.step)
    assert bool(series.unrun) == told
    for one in series.unrun:
        assert one.needs and one.expect  # noqa: PT018
        for name, profile, rest in re.findall(r"make lane-(\S+) PROFILE=(\S+)(.*)", one.command):
            lane = spec.lane(name)
            arm = re.search(r"ARM=(\S+)", rest)
            assert profile in lane.arms[arm[1] if arm else lane.profiles[profile].arm].contracts
