"""A stand-in for an engine: answers every POST with one token; forks a child, as engines do."""

import http.server
import itertools
import json
import signal
import subprocess
import sys

COUNT = itertools.count()  # the first answered one is the harness's own question


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
        choice = {"text": " token", "index": 0, "finish_reason": "length", "logprobs": None}
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
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
