"""A rank that says who it is and what it was given; the first one answers completions."""

import http.server
import os
import socket
import sys
import threading

RANK = os.environ["OMPI_COMM_WORLD_RANK"]
ANSWER = b'{"usage": {"completion_tokens": 1}}'


class Handler(http.server.BaseHTTPRequestHandler):
    """One token for everybody."""

    def do_POST(self) -> None:
        """Answer."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)


said = " ".join(f"{name}={os.environ.get(name)}" for name in ("HOME", "LANE_SAID"))
print(f"rank {RANK} on {socket.gethostname()}: {said}", flush=True)
if RANK == "0":
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
threading.Event().wait()
