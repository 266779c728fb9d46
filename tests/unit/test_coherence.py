"""The coherence gate: each rule with the smallest answers that it alone refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lanekit import answers, coherence
from lanekit.answers import Answer, Answers, Ask, Header, Prompt, Tolerance
from lanekit.errors import Unreadable
from lanekit.verdict import Check

ASK = Ask(
    batches=(1, 3),
    tokens=4,
    logprobs=2,
    seed=0,
    deadline_s=9,
    prompt=tuple(Prompt(name, name) for name in ("a", "b", "c")),
)
ALLOWED = Tolerance(logprob=0.5, outliers=0.1, far=1.5, decisive=4)
HEADER = Header(
    questions=answers.digest(ASK),
    lane="vllm",
    arm="graph",
    profile="h200x2",
    model="built:m",
    dummy_weights=False,
    drop="d",
)


def answer(prompt: str, batch: int, *, first: float = -0.1, second: float = -3.0) -> Answer:
    """Four tokens that lead by 2.9 nats; token n of prompt `a` is `a0`, `a1` ..."""
    tokens = tuple(f"{prompt}{n}" for n in range(ASK.tokens))
    return Answer(
        prompt=prompt,
        batch=batch,
        tokens=tokens,
        logprobs=(first,) * len(tokens),
        top=tuple({token: first, "x": second} for token in tokens),
        prompt_tokens=5,
    )


def sound(arm: str = "graph", **look: float) -> Answers:
    """Every question answered as it should be."""
    found = [answer(prompt.id, batch, **look) for batch, prompt in ASK.places()]
    return Answers(msgspec.structs.replace(HEADER, arm=arm), tuple(found))


def edited(was: Answers, place: tuple[str, int], **change: Any) -> Answers:
    """One answer says something else."""
    found = [
        msgspec.structs.replace(each, **change) if each.place == place else each
        for each in was.answers
    ]
    return Answers(was.header, tuple(found))


def moved(was: Answer, position: int, top: dict[str, float | None]) -> dict[str, Any]:
    """What an answer says once `top` stands at a position: its first token is the one sampled."""
    token = next(iter(top))

    def put(into: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
        return (*into[:position], value, *into[position + 1 :])

    return {
        "tokens": put(was.tokens, token),
        "logprobs": put(was.logprobs, top[token]),
        "top": put(was.top, top),
    }


def judged(
    ours: Answers | None,
    theirs: Answers | None = None,
    reference: str = "dense-graph",
    untrue: str = "",
) -> dict[str, Check]:
    gate = coherence.Gate(ASK, ALLOWED, reference, ours, theirs, untrue)
    return {check.id: check for check in coherence.checks(gate)}


def bad(found: dict[str, Check]) -> list[str]:
    return [name for name, each in found.items() if each.outcome == "failed"]


DENSE = sound("dense-graph")


def test_the_same_answers_are_met_and_say_how_much_was_compared() -> None:
    found = judged(sound(), DENSE)
    assert {each.outcome for each in found.values()} == {"met"}
    assert {each.severity for each in found.values()} == {"required"}
    assert "16 positions compared (16 decisive), worst 0.000" in found["answers-reference"].actual


def test_no_answers_are_refuted() -> None:
    assert bad(judged(None, DENSE)) == ["answers"]


A3 = ("a", 3)
HELD = answer(*A3)
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "an error": ({"error": "HTTP 500: "}, "HTTP 500"),
    "a token too few": ({"tokens": HELD.tokens[:3]}, "3 tokens, 4 asked"),
    "no top list": ({"top": HELD.top[:3]}, "4 asked"),
    "NaN": ({"logprobs": (*HELD.logprobs[:3], None)}, "no finite number"),
    "NaN among the others": (moved(HELD, 2, {"a2": -0.1, "x": None}), "no finite number"),
    "one token changed": ({"tokens": ("q", *HELD.tokens[1:])}, "not the most probable"),
    "not greedy": (moved(HELD, 1, {"a1": -3.0, "x": -0.1}), "not the most probable"),
    "an empty top list": ({"top": ({}, *HELD.top[1:])}, "no finite number"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_answer_that_is_none_is_refuted(what: str) -> None:
    change, says = BROKEN[what]
    found = judged(edited(sound(), A3, **change), DENSE)
    assert bad(found) == ["answers"]
    assert says in found["answers"].actual
    assert "a in a batch of 3" in found["answers"].actual


def test_a_missing_prompt_is_named() -> None:
    ours = sound()
    found = judged(Answers(ours.header, ours.answers[:-1]), DENSE)
    assert bad(found) == ["answers"]
    assert found["answers"].missing == ("c in a batch of 3",)


def test_an_answer_too_many_is_refuted() -> None:
    ours = sound()
    assert bad(judged(Answers(ours.header, (*ours.answers, ours.answers[0])), DENSE)) == ["answers"]


def test_other_questions_than_today_s_could_not_be_checked() -> None:
    header = msgspec.structs.replace(HEADER, questions="other")
    found = judged(Answers(header, sound().answers), DENSE)
    assert [(x.id, x.outcome, x.severity) for x in found.values()] == [
        ("answers", "unchecked", "required")
    ]


def alike(dummy: bool, change: Callable[[Answer], dict[str, Any]]) -> Check:
    header = msgspec.structs.replace(HEADER, dummy_weights=dummy)
    found = [msgspec.structs.replace(each, **change(each)) for each in sound().answers]
    return judged(Answers(header, tuple(found)))["answers-alike"]


def same(_was: Answer) -> dict[str, Any]:
    held = answer("z", 1)
    return {"tokens": held.tokens, "top": held.top}


def stuck(was: Answer) -> dict[str, Any]:
    one = was.prompt
    return {"tokens": (one,) * 4, "top": ({one: -0.1, "x": -3.0},) * 4}


@pytest.mark.parametrize("garbage", [same, stuck])
def test_the_same_answer_to_everything_is_refuted_but_for_dummy_weights(
    garbage: Callable[[Answer], dict[str, Any]],
) -> None:
    assert alike(False, garbage).outcome == "failed"
    found = alike(True, garbage)
    assert (found.outcome, found.severity) == ("unchecked", "noted")


def test_one_stuck_answer_of_three_is_no_garbage() -> None:
    assert alike(False, lambda was: stuck(was) if was.prompt == "a" else {}).outcome == "met"


def test_an_answer_that_depends_on_its_batch_is_refuted() -> None:
    ours = edited(sound(), A3, **moved(HELD, 0, {"q": -0.1, "a0": -3.0}))
    found = judged(ours, None, reference="")
    assert bad(found) == ["answers-batches"]
    assert "a in a batch of 3, position 0" in found["answers-batches"].actual


# c is asked once, so the batch rule cannot see it
C3 = ("c", 3)
LAST = answer(*C3)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (moved(LAST, 3, {"c3": -0.59, "x": -3.0}), "met"),  # 0.49 nats
        (moved(LAST, 3, {"c3": -1.5, "x": -3.0}), "met"),  # 1.4, one of 16: an outlier
        (moved(LAST, 3, {"c3": -1.7, "x": -3.0}), "failed"),  # 1.6: too far
        (moved(LAST, 3, {"c3": -0.1, "y": -0.9}), "failed"),  # y: at most -3.0 there
        (moved(LAST, 0, {"q": -0.1, "x": -3.0}), "failed"),  # another token where it leads
    ],
)
def test_how_far_a_logprob_may_be_from_the_reference(change: dict[str, Any], outcome: str) -> None:
    assert judged(edited(sound(), C3, **change), DENSE)["answers-reference"].outcome == outcome


def test_two_outliers_are_more_than_a_tenth_of_the_positions() -> None:
    far: dict[str, float | None] = {"c3": -0.7, "x": -3.0}
    one = edited(sound(), C3, **moved(LAST, 3, far))
    assert judged(one, DENSE)["answers-reference"].outcome == "met"
    two = edited(one, ("b", 3), **moved(answer("b", 3), 3, {"b3": -0.7, "x": -3.0}))
    found = judged(two, DENSE)["answers-reference"]
    assert found.outcome == "failed"
    assert "2 beyond 0.5" in found.actual


def test_after_a_near_tie_nothing_more_is_compared() -> None:
    near = edited(DENSE, C3, **moved(LAST, 1, {"c1": -0.7, "q": -0.8}))
    ours = edited(sound(), C3, **moved(LAST, 1, {"q": -0.7, "c1": -0.8}))
    after = next(each for each in ours.answers if each.place == C3)
    ours = edited(ours, C3, **moved(after, 2, {"w": -0.1, "x": -3.0}))
    found = judged(ours, near)["answers-reference"]
    assert found.outcome == "met"
    assert "14 positions compared (13 decisive), worst 0.100 nats" in found.actual


@pytest.mark.parametrize(("dummy", "severity"), [(True, "noted"), (False, "required")])
def test_a_flat_model_proves_nothing(dummy: bool, severity: str) -> None:
    """Of a model without weights nothing else is to be had."""
    flat = sound(first=-1.0, second=-1.1)
    ours, theirs = (
        Answers(msgspec.structs.replace(x.header, dummy_weights=dummy), flat.answers)
        for x in (flat, DENSE)
    )
    found = judged(ours, theirs)
    for name in ("answers-batches", "answers-reference"):
        assert (found[name].outcome, found[name].severity) == ("unchecked", severity)
        assert "too few decisive" in found[name].actual


def test_a_flat_model_can_still_be_refuted() -> None:
    flat = sound(first=-1.0, second=-1.1)
    ours = edited(flat, C3, **moved(LAST, 0, {"c0": -4.0, "x": -4.1}))
    assert bad(judged(ours, Answers(DENSE.header, flat.answers))) == ["answers-reference"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("model", "built:other"), ("profile", "cpu"), ("lane", "sglang"), ("dummy_weights", True),
     ("questions", "other"), ("arm", "dense")],
)  # fmt: skip
def test_a_reference_of_something_else_is_refuted(key: str, value: object) -> None:
    header = msgspec.structs.replace(DENSE.header, **{key: value})
    found = judged(sound(), Answers(header, DENSE.answers))
    assert bad(found) == ["answers-reference"]
    assert str(value) in found["answers-reference"].actual


def test_a_reference_that_was_tokenized_otherwise_is_refuted() -> None:
    found = judged(edited(sound(), C3, prompt_tokens=6), DENSE)
    assert "6 prompt tokens, 5 there" in found["answers-reference"].actual
    assert bad(found) == ["answers-reference"]


def test_a_broken_reference_is_no_reference() -> None:
    found = judged(sound(), edited(DENSE, C3, error="HTTP 500"))["answers-reference"]
    assert (found.outcome, found.severity) == ("unchecked", "required")


def test_without_a_reference_it_says_not_compared() -> None:
    found = judged(sound())["answers-reference"]
    assert (found.outcome, found.severity) == ("unchecked", "noted")
    assert found.actual == "not compared: no answers of arm dense-graph were at hand"


def test_a_reference_that_is_not_the_planned_file_is_refuted() -> None:
    assert bad(judged(sound(), DENSE, untrue="another file")) == ["answers-reference"]
    assert bad(judged(sound(), None, untrue="another file")) == ["answers-reference"]


def test_a_reference_arm_is_compared_with_nobody() -> None:
    found = judged(sound(), None, reference="")["answers-reference"]
    assert (found.outcome, found.severity) == ("met", "noted")


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    held = edited(sound(), A3, **moved(HELD, 0, {"a0": -0.1, "x": None}))
    path = tmp_path / "answers.jsonl"
    path.write_bytes(answers.encode(held.header, held.answers))
    assert answers.read(path) == held


@pytest.mark.parametrize("text", [b"", b"{}\n", b'{"kind":"answer","prompt":"a","batch":1}\n',
                                  b"\xff", b"[" * 9999])  # fmt: skip
def test_a_file_of_no_answers_is_unreadable(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(text)
    with pytest.raises(Unreadable):
        answers.read(path)


def test_a_reply_of_vllm_is_parsed() -> None:
    said = {
        "tokens": ["token_id:7", "token_id:9"],
        "token_logprobs": [-0.123456, float("nan")],
        "top_logprobs": [{"token_id:7": -0.123456, "token_id:1": -2}, {"token_id:9": float("inf")}],
    }
    reply = {"choices": [{"text": "hi", "logprobs": said}], "usage": {"prompt_tokens": 3}}
    found = answers.parse("a", 1, reply)
    assert found.tokens == ("7", "9")
    assert found.logprobs == (-0.1235, None)
    assert found.top == ({"7": -0.1235, "1": -2.0}, {"9": None})
    assert (found.prompt_tokens, found.error) == (3, "")


@pytest.mark.parametrize("reply", [None, {}, {"choices": []}, {"choices": [{"text": "hi"}]},
                                   {"choices": [{"logprobs": None}]}])  # fmt: skip
def test_a_reply_without_logprobs_is_an_error_not_an_answer(reply: object) -> None:
    assert answers.parse("a", 1, reply).error


def test_the_gate_s_file_holds_together() -> None:
    held = answers.questions()
    names = [each.id for each in held.ask.prompt]
    assert len(set(names)) == len(names) == max(held.ask.batches)
    assert not {1, 2, 4, 8, 16, 24, 32} & {n for n in held.ask.batches if n > 1}
    assert len({each.text * each.times for each in held.ask.prompt}) == len(names) - 1, "one twice"
    assert 0 < held.tolerance.logprob < held.tolerance.far
    assert len(held.ask.places()) == 31


def test_an_engine_without_logprobs_could_not_be_checked_and_one_silent_answer_is_refuted() -> None:
    silent = answers.parse("a", 3, {"choices": [{"text": "hi"}]}).error
    one = judged(edited(sound(), A3, error=silent), DENSE)["answers"]
    assert one.outcome == "failed"
    every = tuple(msgspec.structs.replace(each, error=silent) for each in sound().answers)
    found = judged(Answers(HEADER, every), DENSE)["answers"]
    assert (found.outcome, found.severity) == ("unchecked", "required")
    assert bad(judged(Answers(HEADER, ()), DENSE)) == ["answers"]


def one(*tops: dict[str, float | None]) -> Answer:
    """An answer of as many tokens as lists; the first of each list is the token."""
    return Answer(
        prompt="p",
        batch=1,
        tokens=tuple(next(iter(top)) for top in tops),
        logprobs=tuple(next(iter(top.values())) for top in tops),
        top=tops,
    )


@pytest.mark.parametrize(("lead", "decisive"), [(1.0, 0), (1.125, 1), (0.9, 0)])
def test_a_lead_of_twice_the_tolerance_is_not_yet_decisive(lead: float, decisive: int) -> None:
    held = one({"a": -0.5, "b": -0.5 - lead})
    assert coherence.apart(held, held, ALLOWED).decisive == decisive


def test_a_single_listed_token_leads_by_nothing() -> None:
    narrow = msgspec.structs.replace(ALLOWED, logprob=0.1)
    assert coherence.apart(one({"a": -9.0}), one({"a": -9.0}), narrow).decisive == 0


@pytest.mark.parametrize(
    ("ours", "worst"),
    [
        ({"a": -1.0, "b": -2.0, "c": -4.0}, 0.0),
        ({"a": -1.0, "b": -2.25, "c": -4.0}, 0.25),
        ({"a": -1.0, "b": -2.0, "d": -3.5}, 0.5),  # d is at most -4.0 there
        ({"a": -1.0, "b": -2.0, "d": -4.5}, 0.5),  # c is at most -4.5 here
        ({"a": -1.0, "b": -2.0}, 0.0),  # c may be -4.0 here as well
        ({"a": -1.0, "b": -5.0}, 3.0),
        ({"d": -0.5, "e": -1.0}, 3.5),  # nothing in common
    ],
)
def test_how_far_two_lists_are_apart_at_least(ours: dict[str, float | None], worst: float) -> None:
    held: dict[str, float | None] = {"a": -1.0, "b": -2.0, "c": -4.0}
    for left, right in ((held, ours), (ours, held)):
        assert coherence.apart(one(left), one(right), ALLOWED).worst == pytest.approx(worst)


def test_exactly_the_tolerance_is_inside() -> None:
    held, ours = one({"a": -1.0, "b": -4.0}), one({"a": -1.5, "b": -4.0})
    found = coherence.apart(held, ours, ALLOWED)
    assert (found.worst, found.off) == (0.5, ())


def test_exactly_as_far_and_as_many_as_allowed_is_inside() -> None:
    edge = Tolerance(logprob=0.5, outliers=1 / 16, far=1.5, decisive=16)
    ours = edited(sound(), C3, **moved(LAST, 3, {"c3": -1.6, "x": -3.0}))
    gate = coherence.Gate(ASK, edge, "dense-graph", ours, DENSE)
    found = {each.id: each for each in coherence.checks(gate)}["answers-reference"]
    assert (found.outcome, found.severity) == ("met", "required"), found.actual
    assert "worst 1.500 nats, 1 beyond 0.5" in found.actual


def test_half_of_the_prompts_may_be_stuck_and_two_prompts_may_agree() -> None:
    prompts = tuple(Prompt(name, name) for name in "abcd")
    asked = msgspec.structs.replace(ASK, batches=(4,), prompt=prompts)
    header = msgspec.structs.replace(HEADER, questions=answers.digest(asked))

    def alike_of(*words: str) -> Check:
        found = []
        for prompt, word in zip(prompts, words, strict=True):
            names = [word] * 4 if word.isupper() else [f"{word}{n}" for n in range(4)]
            tops: list[dict[str, float | None]] = [{name: -0.1, "x": -3.0} for name in names]
            held = one(*tops)
            found.append(msgspec.structs.replace(held, prompt=prompt.id, batch=4))
        gate = coherence.Gate(asked, ALLOWED, "", Answers(header, tuple(found)), None)
        return {each.id: each for each in coherence.checks(gate)}["answers-alike"]

    assert alike_of("A", "B", "c", "d").outcome == "met"
    assert ", 2 of them one token for ever" in alike_of("A", "B", "c", "d").actual
    assert alike_of("A", "B", "C", "d").outcome == "failed"
    assert alike_of("a", "a", "a", "d").outcome == "met"
    assert alike_of("a", "a", "a", "a").outcome == "failed"
    assert "for ever" not in alike_of("a", "b", "c", "d").actual


def test_a_lone_prompt_is_not_garbage_for_being_alone() -> None:
    asked = msgspec.structs.replace(ASK, batches=(1,))
    header = msgspec.structs.replace(HEADER, questions=answers.digest(asked))
    gate = coherence.Gate(asked, ALLOWED, "", Answers(header, (answer("a", 1),)), None)
    assert {each.id: each.outcome for each in coherence.checks(gate)}["answers-alike"] == "met"


def test_only_what_is_not_met_says_what_to_do() -> None:
    assert {each.remedy for each in judged(sound(), DENSE).values()} == {""}
    assert judged(None)["answers"].remedy
