"""A drop is readable at every moment, and says how far the run came."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from lanekit import drop, machine, plan, planning
from lanekit.errors import ConfigError, LaneError, Unreadable
from lanekit.manifest import Process


@pytest.fixture
def made(bare: machine.Machine, tmp_path: Path) -> plan.Plan:
    return planning.make(planning.Options(lane="vllm", results=str(tmp_path)), bare)


def test_a_new_drop_is_readable_and_planned(made: plan.Plan) -> None:
    path = drop.Drop.create(made).path
    manifest = drop.read(path)
    assert manifest.state == "planned"
    assert manifest.row.cells == ("c4", "c8", "c32")
    assert manifest.plan["contract"] == "cpu"
    assert manifest.runner is not None


def test_a_process_is_on_disk_before_the_run_goes_on(made: plan.Plan) -> None:
    new = drop.Drop.create(made)
    new.started(Process(pid=4711, started=1.0, what="server"))
    assert drop.read(new.path).processes == [Process(pid=4711, started=1.0, what="server")]


def test_sealing_records_every_file_but_manifest_and_verdict(made: plan.Plan) -> None:
    new = drop.Drop.create(made)
    new.log("here", "server").write_text("line\n")
    (new.path / drop.VERDICT).write_text("{}")
    new.seal()
    manifest = drop.read(new.path)
    assert manifest.state == "complete"
    assert manifest.ended
    assert manifest.files == {"logs/here-server.log": hashlib.sha256(b"line\n").hexdigest()}


def test_secrets_never_enter_a_drop(made: plan.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_write_me")
    new = drop.Drop.create(made)
    assert "hf_do_not_write_me" not in (new.path / drop.MANIFEST).read_text()


def test_secrets_given_by_hand_and_in_addresses_are_hidden(
    bare: machine.Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://someone:pa55@proxy:3128")
    given = planning.Options(
        lane="vllm",
        results=str(tmp_path),
        env=("AWS_SECRET_ACCESS_KEY=do-not-write",),
        torch_index="https://u:tok3n@index/simple",
    )
    secret = planning.make(given, bare)
    written = (drop.Drop.create(secret).path / drop.MANIFEST).read_text() + plan.render(secret)
    assert not [word for word in ("do-not-write", "pa55", "tok3n") if word in written]
    assert "AWS_SECRET_ACCESS_KEY" in written
    assert secret.services[0].env["AWS_SECRET_ACCESS_KEY"] == "do-not-write"


def test_a_results_folder_that_cannot_be_written_is_refused(
    bare: machine.Machine, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for results in ("file", "file/below", "/dev/null"):
        with pytest.raises(ConfigError, match="is no folder that can be written") as caught:
            planning.make(planning.Options(lane="vllm", results=str(tmp_path / results)), bare)
        assert "RESULTS=" in caught.value.remedy
    made = planning.make(planning.Options(lane="vllm", results=str(tmp_path / "later")), bare)
    (tmp_path / "later").write_text("")
    with pytest.raises(ConfigError, match="cannot write the drop") as caught:
        drop.Drop.create(made)
    assert "RESULTS=" in caught.value.remedy


def test_a_failed_write_keeps_what_stood_there(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    drop.atomic(path, b"old")
    (tmp_path / ".manifest.json.tmp").mkdir()  # the scratch file cannot be opened
    with pytest.raises((LaneError, OSError)):
        drop.atomic(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("text", ["", "{", "\0" * 100, "[]", '{"schema": 1}'])
def test_a_broken_manifest_is_unreadable(tmp_path: Path, text: str) -> None:
    (tmp_path / drop.MANIFEST).write_text(text)
    with pytest.raises(Unreadable, match=r"manifest\.json"):
        drop.read(tmp_path)


def test_a_manifest_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / drop.MANIFEST)
    with pytest.raises(Unreadable, match="not a regular file"):
        drop.read(tmp_path)


def test_a_manifest_of_another_schema_is_unreadable(made: plan.Plan) -> None:
    path = drop.Drop.create(made).path
    content = json.loads((path / drop.MANIFEST).read_text())
    (path / drop.MANIFEST).write_text(json.dumps({**content, "schema": 99}))
    with pytest.raises(Unreadable, match="schema 99, this harness reads 1"):
        drop.read(path)
