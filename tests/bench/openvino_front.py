"""OpenAI's chat API, as much of it as the loads need, in front of OpenVINO GenAI's ContinuousBatchingPipeline.

Runs with the packages of that peer alone: imports nothing of ours. One thread steps the pipeline, one a request reads
its tokens; what a request gets is what the pipeline gave it in that step. A handle's `read` waits with the
interpreter's lock held, so that no step could come: it is called only where there is something to read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openvino_genai


class Batcher:
    """Owns the pipeline, which takes requests at any time, and steps it while there are some."""

    def __init__(self, weights: str, cache_precision: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        settings = {"KV_CACHE_PRECISION": cache_precision, "INFERENCE_NUM_THREADS": threads}
        if cache_precision == "bf16":
            settings["INFERENCE_PRECISION_HINT"] = "bf16"
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(weights, scheduler, "CPU", settings)
        self.tokenizer = self._pipeline.get_tokenizer()
        self._ids = itertools.count()
        self._work = threading.Event()
        self.stepped = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, messages: list[dict], max_tokens: int, ignore_eos: bool):
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        tokens = self.tokenizer.encode(prompt, add_special_tokens=False).input_ids
        config = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=ignore_eos, do_sample=False)
        handle = self._pipeline.add_request(next(self._ids), tokens, config)
        self._work.set()
        return handle, tokens.shape[1]

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                with self.stepped:
                    self.stepped.notify_all()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    batcher: Batcher

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        handle, prompt_tokens = self.batcher.add(asked["messages"], asked["max_tokens"], asked.get("ignore_eos", False))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens, shown = [], ""
        while self.has_more(handle):
            for output in handle.read().values():
                tokens += output.generated_ids
            text = self.batcher.tokenizer.decode(tokens)
            if len(text) > len(shown) and not text.endswith("\ufffd"):
                self.say({"choices": [{"index": 0, "delta": {"content": text[len(shown) :]}}]})
                shown = text
        used = {"prompt_tokens": prompt_tokens, "completion_tokens": len(tokens)}
        self.say({"choices": [], "usage": used})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def has_more(self, handle) -> bool:
        """Waits for tokens; False at the end."""
        with self.batcher.stepped:
            while not handle.can_read():
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    return handle.can_read()
                self.batcher.stepped.wait(1)
        return True

    def say(self, event: dict) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, *words: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    Handler.batcher = Batcher(options.weights, options.cache, options.threads)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
