"""A stand-in for an engine: answers every POST with one token; forks a child, as engines do."""

import http.server
import itertools
import json
import os
import signal
import subprocess
import sys
import zlib

COUNT = itertools.count()  # the first answered one is the harness's own question


def logprobs(prompt: str, tokens: int) -> dict[str, list[object]]:
    """What an engine says of its tokens: one of its own for every prompt and place."""
    salt = "other" if "--otherwise" in sys.argv else ""
    names = [f"token_id:{zlib.crc32(f'{salt}{prompt}{n}'.encode())}" for n in range(tokens)]
    top: list[object] = [{name: -0.125, "token_id:1": -4.5} for name in names]
    return {"tokens": [*names], "token_logprobs": [-0.125] * tokens, "top_logprobs": top}


class Handler(http.server.BaseHTTPRequestHandler):
    """One token for everybody, streamed to those who ask for a stream."""

    def do_POST(self) -> None:
        """Answer a completion."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = next(COUNT)
        if isinstance(asked["prompt"], list):
            print(f"engine: prompt of {len(asked['prompt'])} tokens", flush=True)
        if "--short" in sys.argv and len(asked["prompt"]) > 64:
            self.send_error(400)
            return
        if "--flaky" in sys.argv and number and number % 5 == 0:
            self.send_error(500)
            return
        if "--once" in sys.argv and number > 3:
            os._exit(3)
        if "--nan" in sys.argv and str(asked["prompt"]).startswith("STOP"):
            self.send_error(500, "Out of range float values are not JSON compliant")
            return
        choice = {"text": " token", "index": 0, "finish_reason": "length", "logprobs": None}
        if asked.get("logprobs"):
            choice["logprobs"] = logprobs(asked["prompt"], asked["max_tokens"])
        answer = {"id": "x", "object": "text_completion", "created": 0, "model": "none"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = json.dumps({**answer, "choices": [choice], "usage": usage}).encode()
        if asked.get("stream"):
            chunk = json.dumps({**answer, "choices": [choice]}).encode()
            body = b"data: " + chunk + b"\n\ndata: " + chunk + b"\n\ndata: [DONE]\n\n"
        self.send_response(200)
        kind = "text/event-stream" if asked.get("stream") else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if "--die" in sys.argv:
    sys.exit("engine: no such device")
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--chatty" in sys.argv:
    subprocess.Popen(["sh", "-c", "while true; do echo filling the disk; done"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.ThreadingHTTPServer.request_queue_size = 64  # the gate comes with 20 at once
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
