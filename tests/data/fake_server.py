"""Speaks the endpoints of a server that selftest and profile use, and misbehaves on request.

    python fake_server.py --port N [--attention-backend NAME] [...ignored]

Environment: FAKE_STEP_MS per decode step and backend (`flashinfer=4,flashinfer_mla_fp8=1`);
FAKE_BOOT_S; FAKE_MODE: ok, exit (at boot), refuse (as our backend does), die (at the first long
request), wrong (other tokens), garbage (no JSON), hang (never healthy), each for one backend or
path alone where one is named: `die@flashinfer_mla_fp8`, `refuse@native`. FAKE_CHILD=FILE starts a
grandchild in a session of its own that sleeps, and writes its pid to FILE. FAKE_TRACE=FILE is what
/start_profile copies.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

words = sys.argv[1:]


def flag(name, default=None):
    return words[words.index(name) + 1] if name in words else default


backend = flag("--attention-backend", "flashinfer")
path = os.environ.get("SGLANG_FP8MLA_DECODE_PATH", "")
mode, _, where = os.environ.get("FAKE_MODE", "ok").partition("@")
if where and where not in (backend, path):
    mode = "ok"
steps = dict(pair.split("=") for pair in os.environ.get("FAKE_STEP_MS", "").split(",") if pair)
step_s = float(steps.get(backend, 1)) / 1e3
born = time.monotonic()
profile = {}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def reply(self, code, body=b""):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path != "/health":
            self.reply(404)
        elif mode == "hang" or time.monotonic() - born < float(os.environ.get("FAKE_BOOT_S", 0)):
            self.reply(503)
        else:
            self.reply(200)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization", "") != os.environ.get("FAKE_AUTHORIZATION", ""):
            return self.reply(401, b"Unauthorized")
        if self.path == "/generate":
            return self.generate(json.loads(body))
        if self.path == "/start_profile":
            profile.update(json.loads(body))
            self.reply(200, b"Start profiling.\n")
        elif self.path == "/stop_profile":
            self.reply(200 if profile else 500)
        else:
            self.reply(404)
        return None

    def generate(self, body):
        count = body["sampling_params"]["max_new_tokens"]
        if mode == "die" and count > 1:
            print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(9)
        if mode == "garbage":
            return self.reply(200, b"<html>not what you asked for</html>")
        time.sleep(step_s * count)
        salt = 1 if mode == "wrong" else 0
        answers = [
            {"output_ids": [(sum(ids[:50]) + i * 31 + salt) % 32000 for i in range(count)]}
            for ids in body["input_ids"]
        ]
        if profile:
            os.makedirs(profile["output_dir"], exist_ok=True)
            if os.environ.get("FAKE_TRACE"):
                name = "1790000000.5-TP-0-DECODE.trace.json.gz"
                shutil.copy(os.environ["FAKE_TRACE"], os.path.join(profile["output_dir"], name))
            profile.clear()
        return self.reply(200, json.dumps(answers).encode())


if os.environ.get("FAKE_CHILD"):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(os.environ["FAKE_CHILD"], "w") as file:
        file.write(str(child.pid))
if mode == "exit":
    print("OSError: no such model", flush=True)
    sys.exit(3)
if mode == "refuse":
    print(
        "sglang_fp8mla.errors.IncompatibleEnvironment: native: needs SM90, found SM80", flush=True
    )
    sys.exit(1)
if backend != "flashinfer":
    print(f"[2026-11-29] decode path: {path or 'auto'}, because it was asked for", flush=True)
server = ThreadingHTTPServer(("127.0.0.1", int(flag("--port"))), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    time.sleep(60)
