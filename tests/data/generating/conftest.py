"""A small OpenAI-compatible server around a tiny target, with faults to order."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from outrider.data.answers import Decoding, Request
from outrider.data.local_answers import answers
from outrider.data.sampling import Sampling
from outrider.data.target import Target

NUM_ROWS = 30


@pytest.fixture(scope="session")
def root(make_model, make_tokenizer, tmp_path_factory):
    """Files of a tiny target, and prompts for it."""
    root = tmp_path_factory.mktemp("served")
    make_model().save_pretrained(root / "target")
    make_tokenizer().save_pretrained(root / "target")
    with (root / "prompts.jsonl").open("w") as file:
        for number in range(NUM_ROWS):
            text = "tell me a story about a fox " * (1 + number % 4)
            file.write(json.dumps({"id": f"r{number}", "prompt": f"{text}{number}"}) + "\n")
    return root


class SmallServer(ThreadingHTTPServer):
    """Answers with a target; `faults` says what goes wrong, by the number of the request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, target, name, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.target, self.name = target, name
        self.lock = threading.Lock()
        self.reset()

    def reset(self):
        self.faults, self.change = {}, lambda reply, body: reply
        self.refused, self.forms = (), ("completions", "chat/completions")
        self.returns_ids, self.served, self.key = True, [self.name], None
        self.is_dead = False
        self.num_asked, self.num_at_once, self.most_at_once = 0, 0, 0
        self.answered, self.bodies, self.times = Counter(), [], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address):
        """A client that was killed is no news."""

    def reply(self, path, body):
        tokenizer = self.target.tokenizer
        ids = body.get("prompt")
        if ids is None:
            ids = tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, return_dict=False
            )
        request = Request(str(body["seed"]), [], Sampling(temperature=body["temperature"]), {})
        decoding = Decoding(max_new_tokens=body["max_tokens"])
        with self.lock:
            (answer,) = answers(self.target, [(request, ids)], decoding)
        drawn = answer.answer_ids
        shown = drawn[:-1] if answer.finish == "stop" else drawn
        text = tokenizer.decode(shown, skip_special_tokens=body.get("skip_special_tokens", True))
        choice = {"index": 0, "finish_reason": answer.finish}
        choice |= {"message": {"content": text}} if "chat" in path else {"text": text}
        if body.get("return_token_ids") and self.returns_ids:
            choice |= {"token_ids": drawn, "prompt_token_ids": ids}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(drawn)}
        return {"model": body["model"], "choices": [choice], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Quiet."""

    def say(self, status, content, **headers):
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(raw)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(raw)

    def complain(self, status, message, **headers):
        self.say(status, {"error": {"message": message}}, **headers)

    def do_GET(self):
        server = self.server
        if server.key and self.headers["authorization"] != f"Bearer {server.key}":
            self.complain(401, "wrong key")
        elif self.path == "/v1/models":
            self.say(200, {"data": [{"id": name} for name in server.served]})
        elif self.path == "/version":
            self.say(200, {"version": "small-1"})
        else:
            self.complain(404, "no such page")

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            number, server.num_asked = server.num_asked, server.num_asked + 1
            server.num_at_once += 1
            server.most_at_once = max(server.most_at_once, server.num_at_once)
            server.bodies.append(body)
            server.times.append(time.monotonic())
        try:
            self.answer(body, server.faults.get(number))
        finally:
            server.num_at_once -= 1

    def answer(self, body, fault):
        server, path = self.server, self.path.removeprefix("/v1/")
        unknown = next((name for name in server.refused if name in body), None)
        if path not in server.forms:
            self.complain(404, "Not Found")
        elif unknown:
            self.complain(400, f"unrecognized field: {unknown}")
        elif fault == "drop" or server.is_dead:
            self.close_connection = True
        elif fault == "busy":
            self.complain(429, "too many requests", retry_after="1")
        elif fault in (500, 502, 503):
            self.complain(fault, "down")
        elif fault == "not JSON":
            self.say(200, b"<html>")
        else:
            if fault == "slow":
                time.sleep(5)
            raw = json.dumps(server.change(server.reply(path, body), body)).encode()
            if fault == "cut":
                self.send_response(200)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw[: len(raw) // 2])
                self.close_connection = True
                return
            if server.is_dead:
                self.close_connection = True
                return
            with server.lock:
                server.answered[body["seed"]] += 1
            self.say(200, raw)


class Place:
    """An address at which a server runs, is killed, and runs again."""

    def __init__(self, root):
        self.target, self.name = Target.load(str(root / "target")), str(root / "target")
        self.server = None
        self.start()

    def start(self):
        port = self.server.server_port if self.server else 0
        self.server = SmallServer(self.target, self.name, port)
        serve = {"target": self.server.serve_forever, "kwargs": {"poll_interval": 0.02}}
        self.thread = threading.Thread(**serve)
        self.thread.start()

    def kill(self):
        """Nothing listens any more, and what is under way is dropped."""
        self.server.is_dead = True
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture(scope="module")
def place(root):
    made = Place(root)
    yield made
    made.kill()


@pytest.fixture
def server(place):
    place.server.reset()
    return place.server
