"""Hosts of a fleet: as HOSTS= or an inventory names them, with roles, ranks and addresses."""

import itertools
import os
import sys
from pathlib import Path

import pytest

from lanekit import hosts, machine, paths, plan, planning, reading, spec
from lanekit.errors import ConfigError

TWO = spec.profile("p5en-x2")


def fleet(given: str, profile: spec.Profile = TWO) -> tuple[plan.Host, ...]:
    return hosts.fleet(given, profile, "here")[0]


def test_two_addresses_are_a_leader_and_a_worker_with_their_ranks() -> None:
    leader, worker = fleet("ubuntu@10.0.0.1,10.0.0.2:2222")
    assert (leader.role, leader.node_rank, leader.start_rank, leader.ranks) == ("leader", 0, 0, 8)
    assert (worker.role, worker.node_rank, worker.start_rank, worker.ranks) == ("worker", 1, 8, 8)
    assert (leader.ssh, worker.ssh) == ("ubuntu@10.0.0.1", "10.0.0.2:2222")
    # No dot: NCCL prints a host up to its first one, and both would be `10`.
    assert [each.name for each in (leader, worker)] == ["ip-10-0-0-1", "ip-10-0-0-2"]


def test_a_name_of_the_dns_is_known_by_its_first_label() -> None:
    leader, worker = fleet("a.example.com b.example.com")
    assert (leader.name, leader.address) == ("a", "a.example.com")
    assert worker.name == "b"


def test_an_inventory_says_everything_and_its_leader_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(
        '[[host]]\naddress = "10.0.0.1"\nname = "a"\ninterface = "eth1"\nmodels = "/models"\n'
        '[[host]]\naddress = "10.0.0.2"\nname = "b"\nrole = "leader"\nuser = "lane"\nport = 22022\n'
    )
    leader, worker = fleet(str(path))
    assert (leader.name, leader.start_rank, leader.ssh) == ("b", 0, "lane@10.0.0.2:22022")
    assert (worker.name, worker.start_rank) == ("a", 8)
    assert (worker.interface, worker.models) == ("eth1", "/models")


def test_this_machine_needs_no_ssh() -> None:
    leader, worker = fleet("127.0.0.1,10.0.0.2")
    assert (leader.ssh, worker.ssh) == ("", "10.0.0.2")


def test_without_hosts_one_host_is_this_machine_and_two_are_placeholders() -> None:
    (only,), why = hosts.fleet("", spec.profile("cpu"), "here.example.com")
    assert (only.name, only.address, only.ssh, why) == ("here", "127.0.0.1", "", "this machine")
    (leader, worker), why = hosts.fleet("", TWO, "here")
    assert ([leader.name, worker.name], why) == (["host-1", "host-2"], hosts.UNNAMED)


@pytest.mark.parametrize(
    ("given", "message", "remedy"),
    [
        ("a", "has 2 hosts; HOSTS= names 1", "PROFILE="),
        ("a,b,c", "has 2 hosts; HOSTS= names 3", "PROFILE="),
        ("a,a", "two hosts of one name", "its own"),
        ("a.x.com,a.y.com", "two hosts of one name", "its own"),
        ("a,-oProxyCommand=x", "'-oProxyCommand=x' cannot be a name", "spelling"),
        ("a,-l@b", "'-l' cannot be a user", "spelling"),
        ("a,b c:d", "'c:d' is no host", "HOSTS="),
        ("a,b:99999", "99999 is no port", "65535"),
        ("a,b;reboot", "cannot be a name", "spelling"),
        ("./nowhere.toml", "No such file", ""),
        ("/dev/null", "not a regular file", "a TOML file"),  # as /dev/zero is, which has no end
    ],
)
def test_hosts_that_make_no_sense_are_refused(given: str, message: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet(given)
    assert message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[host]]\naddress = "a"\nrole = "leader"\n[[host]]\naddress = "b"\nrole = "leader"\n',
         "2 leaders among 2 hosts"),
        ('[[host]]\naddress = "a"\nrole = "worker"\n[[host]]\naddress = "b"\nrole = "worker"\n',
         "0 leaders among 2 hosts"),
        ('[[host]]\naddress = "a"\nrole = "boss"\n', "boss"),
        ('[[host]]\naddress = "a"\npassword = "x"\n', "unknown key 'password'"),
        ('[[host]]\nname = "a"\n', "address"),
        ('[[host]]\naddress = "a"\nmodels = "models"\n', "no absolute path"),
        ('[[host]]\naddress = "a"\nname = "a.b"\n', "'a.b' cannot be a name"),
    ],
)  # fmt: skip
def test_a_bad_inventory_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        fleet(str(path))


def test_an_inventory_is_small_and_may_be_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "fleet.toml", tmp_path / "link.toml"
    path.write_text('[[host]]\naddress = "a"\n[[host]]\naddress = "b"\n')
    link.symlink_to(path)
    assert [host.name for host in fleet(str(link))] == ["a", "b"]
    with path.open("a") as stream:
        stream.write("#" * reading.LIMIT)
    with pytest.raises(ConfigError, match="larger than"):
        fleet(str(path))


def test_host_names_of_a_plan_are_read_in_both_of_its_shapes() -> None:
    assert hosts.names(["a", "b"]) == hosts.names([{"name": "a"}, {"name": "b"}]) == ["a", "b"]


def made(bare: machine.Machine, lane: str, **options: object) -> plan.Plan:
    given = planning.Options(lane=lane, start=False, **options)  # type: ignore[arg-type]
    return planning.make(given, bare)


def test_torchrun_meets_at_the_leader_with_a_number_for_each_host(
    bare: machine.Machine, checkout: Path
) -> None:
    found = made(bare, "micro", profile="cpu-x2", hosts="10.0.0.1,10.0.0.2", port=2345)
    assert found.launcher == "compose"
    (worker,) = found.cells["decode"].workers
    for rank, command in enumerate((found.cells["decode"].command, worker.command)):
        said = dict(itertools.pairwise(command))
        assert (said["--nnodes"], said["--node-rank"]) == ("2", str(rank))
        assert (said["--master-addr"], said["--master-port"]) == ("10.0.0.1", "2345")
        assert said["--nproc-per-node"] == "1"
    assert worker.host == "ip-10-0-0-2"


LANE = """
ports = ["rpc"]
[roles.leader]
args = ["--rpc=${LANE_LEADER}:${LANE_PORT_RPC}"]
[roles.worker]
args = ["--headless", "--start=${LANE_START_RANK}"]
env = { WHO = "${LANE_HOST}" }
services = ["server"]
"""


@pytest.fixture
def lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The stand-in lane with roles, on a profile of one host and on one of two."""
    standin = Path(__file__).parent / "standin" / "lanes" / "standin"
    folder = tmp_path / "lanes" / "roles"
    folder.mkdir(parents=True)
    top, first, rest = (standin / "lane.toml").read_text().partition("[model]")
    text = (
        top.replace('"standin"', '"roles"', 1).replace('"none"', '"2026-07"') + LANE + first + rest
    )
    text = text.replace('{ cpu = "cpu" }', '{ cpu = "cpu", cpu-x2 = "cpu" }', 1)
    (folder / "lane.toml").write_text(text + '[profiles.cpu-x2]\narm = "sound"\n')
    (folder / "serve.yaml").write_text(
        "services:\n"
        "  server: {command: 'serve ${ROLE_ARGS} ${LANE_ARGS}'}\n"
        "  router: {command: 'route ${LANE_ADDRESSES}'}\n"
    )
    monkeypatch.setattr(paths, "LANES", tmp_path / "lanes")
    return "roles"


def test_a_role_changes_the_command_only_where_there_is_more_than_one_host(
    bare: machine.Machine, checkout: Path, lane: str
) -> None:
    found = made(bare, lane, profile="cpu-x2", hosts="10.0.0.1,10.0.0.2")
    server, router, worker = found.services
    rpc = found.ports["rpc"]
    assert server.command == ("serve", f"--rpc=10.0.0.1:{rpc}")
    assert rpc != found.port
    assert router.command == ("route", "10.0.0.1,10.0.0.2")
    assert worker.command == ("serve", "--headless", "--start=1")
    assert (worker.host, worker.env["WHO"]) == ("ip-10-0-0-2", "ip-10-0-0-2")
    alone = made(
        bare, lane, profile="cpu", server_python=sys.executable, aiperf_python=sys.executable
    )
    assert [each.name for each in alone.services] == ["server", "router"]
    assert alone.services[0].command == ("serve",)


def test_a_roles_own_command_stands_instead(
    bare: machine.Machine, checkout: Path, lane: str
) -> None:
    path = paths.LANES / lane / "lane.toml"
    path.write_text(path.read_text().replace(
        'args = ["--headless", "--start=${LANE_START_RANK}"]',
        'command = ["sshd", "-p", "${LANE_PORT_RPC}"]',
    ))  # fmt: skip
    found = made(bare, lane, profile="cpu-x2", hosts="a,b")
    assert found.services[-1].command == ("sshd", "-p", str(found.ports["rpc"]))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('services = ["server"]', 'services = ["sever"]', "names the service 'sever'"),
        ("${LANE_START_RANK}", "${LANE_START_RNAK}", "LANE_START_RNAK"),
        ("${LANE_HOST}", "${LANE_HOTS}", "LANE_HOTS"),
        ("[roles.worker]", "[roles.wroker]", "wroker"),
        ('["rpc"]', '["../rpc"]', "cannot be a name"),
    ],
)
def test_a_role_that_names_what_is_not_there_is_refused(
    bare: machine.Machine, checkout: Path, lane: str, *, old: str, new: str, message: str
) -> None:
    path = paths.LANES / lane / "lane.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message):
        made(bare, lane, profile="cpu-x2", hosts="a,b")


def test_an_interface_reaches_the_ranks_of_its_host_alone(
    bare: machine.Machine, checkout: Path, tmp_path: Path
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[[host]]\naddress = "a"\ninterface = "eth1"\n[[host]]\naddress = "b"\n')
    cell = made(bare, "micro", profile="cpu-x2", hosts=str(path)).cells["decode"]
    assert cell.env["GLOO_SOCKET_IFNAME"] == cell.env["NCCL_SOCKET_IFNAME"] == "eth1"
    assert "GLOO_SOCKET_IFNAME" not in cell.workers[0].env


def test_a_fleet_is_planned_without_hosts_or_an_engine_and_not_run(
    bare: machine.Machine, checkout: Path
) -> None:
    found = made(bare, "micro", profile="cpu-x2")
    assert "host-2" in plan.render(found)
    with pytest.raises(ConfigError, match="2 hosts and none is named") as caught:
        planning.require_hosts(found)
    assert "HOSTS=" in caught.value.remedy


def test_a_pipe_is_no_inventory() -> None:
    """HOSTS=<(command): its name is that of no file once it is followed."""
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w"), pytest.raises(ConfigError) as caught:
        hosts.read(f"/dev/fd/{reader}")
    assert "not a regular file" in caught.value.message


def test_the_process_launcher_starts_here_alone(bare: machine.Machine, checkout: Path) -> None:
    with pytest.raises(ConfigError, match="on this machine alone, not on b"):
        made(bare, "vllm", profile="cpu", hosts="b", launcher="process")
