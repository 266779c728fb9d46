"""Ask a server the coherence gate's questions, batch after batch, over HTTP."""

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import requests

from lanekit.answers import Answer, Ask, Prompt, parse

POLL_S = 0.2


def ask(url: str, model: str, wanted: Ask, watch: Callable[[], None]) -> list[Answer]:
    """Every answer, in the order of the questions; a failed request is an answer with an error.

    watch: called while waiting; what it raises ends the gate.
    """
    deadline = time.monotonic() + wanted.deadline_s
    found: list[Answer] = []
    pool = concurrent.futures.ThreadPoolExecutor(max(wanted.batches, default=1))
    try:
        for batch in wanted.batches:
            waiting = [
                pool.submit(_one, url, _body(model, wanted, each), each.id, batch, deadline)
                for each in wanted.prompt[:batch]
            ]
            while concurrent.futures.wait(waiting, timeout=POLL_S).not_done:
                watch()
            got = [each.result() for each in waiting]
            if any(each.error for each in got):
                time.sleep(POLL_S)  # a server that died is not yet gone when its requests fail
                watch()
            found += got
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # the server's end ends what still waits
    return found


def _body(model: str, wanted: Ask, prompt: Prompt) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt.text * prompt.times,
        "max_tokens": wanted.tokens,
        "temperature": 0,
        "seed": wanted.seed,
        "logprobs": wanted.logprobs,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,  # two tokens may spell the same text
    }


def _one(url: str, body: dict[str, Any], prompt: str, batch: int, deadline: float) -> Answer:
    try:
        with requests.Session() as session:
            session.trust_env = False  # a proxy must not stand between us and loopback
            left = max(deadline - time.monotonic(), 0.001)
            reply = session.post(f"{url}/v1/completions", json=body, timeout=left)
        if not reply.ok:
            return Answer(prompt, batch, error=f"HTTP {reply.status_code}: {reply.text[:200]}")
        return parse(prompt, batch, reply.json())
    except (requests.RequestException, ValueError) as error:
        return Answer(prompt, batch, error=f"{type(error).__name__}: {error}"[:300])
