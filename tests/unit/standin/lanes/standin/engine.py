"""A stand-in for an engine: answers every POST with one token; forks a child, as engines do."""

import http.server
import subprocess
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    """One token for everybody."""

    def do_POST(self) -> None:
        """Answer a completion."""
        body = b'{"usage": {"completion_tokens": 1}}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if "--die" in sys.argv:
    sys.exit("engine: no such device")
if "--chatty" in sys.argv:
    subprocess.Popen(["sh", "-c", "while true; do echo filling the disk; done"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
