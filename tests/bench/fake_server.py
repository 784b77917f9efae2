"""The smallest server that a load can be run against: says `max_tokens` words, as fast as it can. For tests.

    python fake_server.py PORT [broken | refuses]

`broken` ends before it listens; `refuses` answers each request with an error.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(500 if "refuses" in sys.argv else 200)
        self.end_headers()
        if "refuses" in sys.argv:
            self.wfile.write(b"no")
            return
        for number in range(asked["max_tokens"]):
            self.say({"choices": [{"delta": {"content": f"{number} "}}]})
        self.say({"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}})

    def say(self, event: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *words: object) -> None:
        pass


if __name__ == "__main__":
    if "broken" in sys.argv:
        sys.exit("this server is broken")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
