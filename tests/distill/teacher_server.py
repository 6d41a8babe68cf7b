"""A teacher's server for tests: vLLM's ``/v1/models`` and ``/v1/completions`` with ``prompt_logprobs``, answered by a
real model, with faults on order."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from distill.teachers import Teachers
from k3rl.chat import load_renderer
from k3rl.models import load_model
from rollout.native import NativeEngine


class TeacherServer:
    """``fault`` is what the next answers have: none, 'short', 'shifted', 'few', 'refused', 'busy', 'html' or 'plain'.
    `stop` and `start` keep the port."""

    def __init__(self, model, name="teacher", texts=None):
        self.engine = NativeEngine(load_model(model), max_slots=1, max_context=2048, eos_token_ids=())
        self.teachers = Teachers([model], "cpu", 2048)
        self.renderer, self.name, self.texts = load_renderer("k3-nano"), name, texts or {}
        self.fault, self.answered, self.lock = "", 0, threading.Lock()
        self.port = 0
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(200, {"data": [{"id": server.name}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    self.answer(*server.completion(body))

            def answer(self, code, content):
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            allow_reuse_address = True

        self.http = Server(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def stop(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def completion(self, body):
        ids = body["prompt"]
        assert body["model"] == self.name
        self.answered += 1
        if self.fault == "refused":
            return 400, {"error": {"message": "prompt is longer than the model's context"}}
        if self.fault == "busy" and self.answered % 2:
            return 503, {"error": {"message": "warming up"}}
        if self.fault == "html":
            return 200, b"<html>gateway</html>"
        if self.fault == "plain":
            return 200, {"choices": [{"text": "x"}]}
        row = self.engine.score([ids], [1])[0]
        entries = [None, *({str(t): self.entry(t, p)} for t, p in zip(ids[1:], row, strict=True))]
        if body["prompt_logprobs"] and self.fault != "few":
            self.add_likeliest(entries, ids, body["prompt_logprobs"])
        if self.fault == "short":
            entries = entries[:-1]
        if self.fault == "shifted":
            entries = [None, None, *entries[1:-1]]
        return 200, {"choices": [{"text": "x", "prompt_logprobs": entries}]}

    def add_likeliest(self, entries, ids, k):
        (found,) = self.teachers.distributions([(0, ids, 1)], k)
        for entry, tokens, logprobs in zip(entries[1:], found.ids, found.top, strict=True):
            for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
                entry.setdefault(str(token), self.entry(token, logprob))

    def entry(self, token, logprob):
        return {
            "logprob": logprob,
            "rank": 1,
            "decoded_token": self.texts.get(token, self.renderer.decode([token])),
        }
