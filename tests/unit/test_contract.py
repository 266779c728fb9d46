"""Contracts are strict data: what does not fit is refused by name, and told what would."""

import re
from pathlib import Path

import pytest

from lanekit import contract, paths, spec
from lanekit.errors import ConfigError

RULE = """
[rule.one]
why = "w"
literal = 'abc '
pattern = 'abc (?P<x>\\d+)'
needs = "line"
source = "s"
versions = ["v"]
remedy = "r"
"""
CONTRACT = """
name = "c"
version = 1
title = "t"
fabric = "efa"
proves = "p"
unproven = []
required = ["one"]
"""


def loaded(folder: Path, rules: str = RULE, text: str = CONTRACT) -> contract.Contract:
    (folder / "rules.toml").write_text(rules)
    (folder / "c.toml").write_text(text)
    return contract.load("c", folder)


def test_a_good_pair_loads(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    assert [(x.id, x.severity) for x in contract.bound(found, tmp_path)] == [("one", "required")]


def test_a_rule_of_servers_is_bound_where_one_served(tmp_path: Path) -> None:
    other = RULE.replace("rule.one", "rule.two")
    text = CONTRACT + 'served = ["two"]\n'
    found = loaded(tmp_path, RULE + other, text)
    assert [x.id for x in contract.bound(found, tmp_path)] == ["one"]
    assert [x.id for x in contract.bound(found, tmp_path, served=True)] == ["one", "two"]
    with pytest.raises(ConfigError, match="no rule named 'two'"):
        loaded(tmp_path, RULE, text)
    program = loaded(tmp_path, RULE + other, text.replace("served", "batch"))
    assert [x.id for x in contract.bound(program, tmp_path, served=True)] == ["one"]
    assert [x.id for x in contract.bound(program, tmp_path, batch=True)] == ["one", "two"]


def test_a_noted_rule_that_is_needed_is_bound_once(tmp_path: Path) -> None:
    other = RULE.replace("rule.one", "rule.two")
    found = loaded(tmp_path, RULE + other, CONTRACT + 'served = ["two"]\nnoted = ["two"]\n')
    for served, severity in ((False, "noted"), (True, "required")):
        rules = contract.bound(found, tmp_path, served=served)
        assert [(x.id, x.severity) for x in rules] == [("one", "required"), ("two", severity)]


ENGINE = """
name = "e"
version = 1
title = "t"
proves = "p"
extends = "c"
required = ["two"]
unproven = ["u"]
"""


def extended(folder: Path, base: str = CONTRACT, text: str = ENGINE) -> contract.Contract:
    (folder / "rules.toml").write_text(RULE + RULE.replace("rule.one", "rule.two"))
    (folder / "c.toml").write_text(base)
    (folder / "e.toml").write_text(text)
    return contract.load("e", folder)


def test_an_engine_s_contract_needs_what_its_buffer_s_does(tmp_path: Path) -> None:
    found = extended(tmp_path, CONTRACT.replace("= []", '= ["b"]') + 'served = ["two"]\n')
    assert (found.name, found.fabric, found.required) == ("e", "efa", ("one", "two"))
    assert (found.unproven, found.served) == (("b", "u"), ())
    before = contract.digest("e", tmp_path)
    (tmp_path / "c.toml").write_text(CONTRACT.replace("version = 1", "version = 2"))
    assert contract.digest("e", tmp_path) != before


def test_a_drop_is_judged_by_a_contract_that_extends_its_own_and_by_no_other(
    tmp_path: Path,
) -> None:
    extended(tmp_path)
    assert contract.judging("c", "e", tmp_path) == "e"
    assert contract.judging("e", "c", tmp_path) == "e", "never by less than it was made for"
    assert contract.judging("c", "c", tmp_path) == "c"
    assert contract.judging("", "c", tmp_path) == ""


@pytest.mark.parametrize(
    ("base", "text"),
    [
        (CONTRACT, ENGINE.replace('extends = "c"', 'extends = "nonesuch"')),
        (CONTRACT, ENGINE.replace('extends = "c"', 'extends = "e"')),
        (CONTRACT, ENGINE + 'fabric = "efa"\n'),
        (ENGINE.replace('"e"', '"c"').replace('extends = "c"', 'extends = "e"'), ENGINE),
    ],
)
def test_a_contract_that_cannot_be_extended_is_refused(
    tmp_path: Path, base: str, text: str
) -> None:
    with pytest.raises(ConfigError, match="cannot extend"):
        extended(tmp_path, base, text)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("needs = ", "need = ", "unknown key 'need'"),
        ('"line"', '"ranky"', "Invalid enum value 'ranky'"),
        ("(?P<x>", "(?P<x", "bad pattern"),
        ("'abc '", "'abd '", "literal does not stand in its pattern"),
        ("'abc '", "''", "literal does not stand in its pattern"),
        ('needs = "line"', 'needs = "line"\nexpect = { y = "1" }', "does not capture"),
        ('needs = "line"', 'needs = "line"\nexpect = { x = "$cpus" }', "'$cpus' is not known"),
        ('why = "w"', "why = 3", "Expected `str`"),
        ('remedy = "r"', "", "missing required field `remedy`"),
        ('needs = "line"', 'needs = "line"\nphase = "later"', "Invalid enum value 'later'"),
    ],
)
def test_a_bad_rule_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, RULE.replace(old, new))
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('["one"]', '["two"]', "no rule named 'two'"),
        ('["one"]', "[]", "require at least one rule"),
        ('"c"', '"d"', "named as its file is"),
        ('"efa"', '"ib"', "Invalid enum value 'ib'"),
        ('fabric = "efa"', "", "have a fabric"),
        ("version", "versions", "unknown key 'versions'"),
    ],
)
def test_a_bad_contract_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text=CONTRACT.replace(old, new, 1))
    assert says in caught.value.message


def test_an_unknown_contract_lists_the_known(tmp_path: Path) -> None:
    loaded(tmp_path)
    with pytest.raises(ConfigError) as caught:
        contract.load("nonesuch", tmp_path)
    assert "Known contracts: c." in caught.value.remedy


def test_the_digest_covers_the_rules(tmp_path: Path) -> None:
    loaded(tmp_path)
    before = contract.digest("c", tmp_path)
    loaded(tmp_path, RULE.replace('"r"', '"other"'))
    assert contract.digest("c", tmp_path) != before


def test_every_contract_a_lane_or_a_foreign_drop_names_exists_and_fits_its_profile() -> None:
    pairs = [(name, where) for x in contract.foreign() for where, name in x.contracts.items()]
    for lane in spec.lane_names():
        arms = spec.lane(lane).arms.values()
        pairs += [(name, where) for arm in arms for where, name in arm.contracts.items()]
    for name, where in pairs:
        assert contract.load(name).fabric == spec.profile(where).fabric.kind, (name, where)


def test_rules_say_where_they_come_from() -> None:
    for name, rule in contract.rules().items():
        assert rule.source.strip(), name
        assert rule.remedy.strip(), name
        assert rule.versions, name


def test_no_pattern_can_take_forever() -> None:
    """No nested repetition, the shape that makes a regular expression exponential."""
    for name, rule in contract.rules().items():
        assert not re.search(r"[*+]\)[*+]", rule.pattern), name


def test_contracts_stand_where_the_checkout_says() -> None:
    assert paths.CONTRACTS.is_dir()
    assert {"cpu", "v2-efa-proxy", "v2-nvlink"} <= set(contract.names())
