"""Models that come and go, keys, health, metrics, tokens: all that OpenAI's API does not cover."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.delivery import Delivery
from engine.errors import ModelNotReady
from engine.models import ModelSpec
from engine.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from engine.server import EngineServer, params_for
from tests.engine.conftest import ASSISTANT
from tests.engine.fake_runner import FULL, FakeRunner
from tests.engine.rig import Rig
from tests.engine.server_fixture import EngineProcess, TinyModel, tiny_folder
from tests.engine.tiny import tiny_adapter

ASK = [{"role": "user", "content": "what is the capital of france?"}]


@pytest.fixture(scope="module")
def own():
    """An engine of this module's own, so that its models can be changed."""
    with EngineProcess([TinyModel("steady")]) as process:
        yield process


@pytest.fixture
def http(engine):
    with httpx.Client(base_url=engine.url, timeout=30) as client:
        yield client


def status(url: str, name: str, *, until: str = "", seconds: float = 60) -> dict:
    ends = time.monotonic() + seconds
    while True:
        found = {model["name"]: model for model in httpx.get(url + "/models").json()["models"]}.get(name)
        if not until or (found and found["status"] == until) or time.monotonic() > ends:
            return found
        time.sleep(0.02)


def answer(url: str, model: str, **body) -> httpx.Response:
    body = {"model": model, "messages": ASK, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
    return httpx.post(url + "/v1/chat/completions", json=body, timeout=30)


# Models


def test_model_loads_while_others_serve_and_its_pages_come_back_when_it_goes(own):
    before = own.kv()["pages"]
    body = TinyModel("guest", family="gemma3", seed=3, system_prompt=ASSISTANT).as_dict()
    del body["name"]
    put = httpx.put(own.url + "/models/guest", json=body)
    assert put.status_code == 202
    assert put.json()["status"] == "loading"
    assert answer(own.url, "steady").status_code == 200
    ready = status(own.url, "guest", until="ready")
    assert ready["architecture"] == "Gemma3ForCausalLM"
    assert ready["system_prompt_tokens"] > 32
    assert answer(own.url, "guest").status_code == 200
    assert own.kv()["pages"]["pinned"] > before["pinned"]
    assert httpx.delete(own.url + "/models/guest").status_code == 204
    assert status(own.url, "guest") is None
    after = own.kv()
    assert ready["source"] not in after["checkpoints"]
    assert after["pages"]["used"] == before["used"]
    assert answer(own.url, "guest").status_code == 404
    assert httpx.delete(own.url + "/models/guest").status_code == 404


def test_same_model_again_changes_nothing_and_another_one_replaces_it(own):
    model = TinyModel("changing", system_prompt=ASSISTANT)
    own.put(model)
    body = {key: value for key, value in model.as_dict().items() if key != "name"}
    again = httpx.put(own.url + "/models/changing", json=body)
    assert (again.status_code, again.json()["status"]) == (200, "ready")
    own.put(TinyModel("changing", system_prompt=""))
    assert status(own.url, "changing")["system_prompt_tokens"] < again.json()["system_prompt_tokens"]
    httpx.delete(own.url + "/models/changing")


def test_models_of_one_checkpoint_share_the_blocks_of_what_both_say(own):
    own.put(TinyModel("twin-a", system_prompt=ASSISTANT))
    own.put(TinyModel("twin-b", system_prompt=ASSISTANT))
    pinned = own.kv()["pages"]["pinned"]
    first, second = (answer(own.url, name).json() for name in ("twin-a", "twin-b"))
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    assert own.kv()["shared_blocks"] > 0
    httpx.delete(own.url + "/models/twin-a")
    assert own.kv()["pages"]["pinned"] == pinned  # the other still holds every block
    httpx.delete(own.url + "/models/twin-b")
    assert own.kv()["pages"]["pinned"] < pinned


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("path:/nowhere/at/all", "/nowhere/at/all"),
        ("path:{broken}", "broken.gguf"),
        ("path:{unknown}", "BertModel"),
        ("openai:https://127.0.0.1/v1#m", "openai"),
        ("ftp:whatever", "ftp"),
    ],
)
def test_source_that_cannot_be_had_says_why_while_others_serve(own, tmp_path, source, reason):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    for file in tiny_folder().iterdir():
        unknown.joinpath(file.name).write_bytes(file.read_bytes())
    config = json.loads((unknown / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (unknown / "config.json").write_text(json.dumps(config))
    source = source.format(broken=broken, unknown=unknown)
    put = httpx.put(own.url + "/models/bad", json={"source": source})
    if put.status_code == 202:
        failed = status(own.url, "bad", until="failed")
        assert failed["status"] == "failed"
        assert reason in failed["reason"]
        refused = answer(own.url, "bad")
        assert refused.status_code == 503
        assert reason in refused.json()["error"]["message"]
        assert httpx.get(own.url + "/v1/models/bad").status_code == 404, "as it is not listed there"
        httpx.delete(own.url + "/models/bad")
    else:
        assert put.status_code in (400, 422)
        assert reason in put.json()["error"]["message"]
    assert answer(own.url, "steady").status_code == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "source"),
        ({"source": "path:/x", "sampling": {"temperature": 9}}, "sampling.temperature"),
        ({"source": "path:/x", "sampling": {"banana": 1}}, "sampling.banana"),
        ({"source": "path:/x", "context_length": 1}, "context_length"),
        ({"source": "path:/x", "precision": "int3"}, "precision"),
        ({"source": "path:/x", "system": "typo"}, "system"),
    ],
)
def test_model_with_a_wrong_field_is_refused_by_name(own, body, named):
    refused = httpx.put(own.url + "/models/wrong", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == named
    assert status(own.url, "wrong") is None


def test_chat_template_that_does_not_exist_fails_with_the_names_that_do(own):
    httpx.put(own.url + "/models/odd", json={"source": TinyModel("x").source, "chat_template": "nonsense"})
    assert "plain-roles" in status(own.url, "odd", until="failed")["reason"]
    httpx.delete(own.url + "/models/odd")


def test_precision_is_used_and_shown(own):
    own.put(TinyModel("bytes", precision="int8"))
    assert status(own.url, "bytes")["precision"] == "int8"
    loaded = httpx.get(own.url + "/kv").json()["checkpoints"]
    assert TinyModel("bytes").source + " as int8" in loaded
    httpx.delete(own.url + "/models/bytes")


def test_an_adapter_answers_otherwise_than_its_base_and_is_shown(own, tmp_path):
    folder = tiny_adapter(tmp_path / "adapter", tiny_folder())
    own.put(TinyModel("plain"))
    own.put(TinyModel("tuned", adapter=f"path:{folder}"))
    assert (status(own.url, "tuned")["adapter"], status(own.url, "plain")["adapter"]) == (f"path:{folder}", None)
    body = {"messages": ASK, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    texts = [
        httpx.post(own.url + "/v1/chat/completions", json={"model": name, **body}).json()["choices"][0]["message"]
        for name in ("plain", "tuned")
    ]
    assert texts[0] != texts[1]
    assert f"{TinyModel('tuned').source} with path:{folder}" in httpx.get(own.url + "/kv").json()["checkpoints"]
    for name in ("plain", "tuned"):
        httpx.delete(own.url + f"/models/{name}")


def test_an_adapter_of_another_base_fails_in_words(own, tmp_path):
    folder = tiny_adapter(tmp_path / "adapter", tiny_folder("gemma3"))
    httpx.put(own.url + "/models/odd", json={"source": TinyModel("x").source, "adapter": f"path:{folder}"})
    assert "does not have: it has 3" in status(own.url, "odd", until="failed")["reason"]
    httpx.delete(own.url + "/models/odd")


def test_named_chat_template_is_used_and_shown(own):
    own.put(TinyModel("plain", chat_template="plain-roles"))
    assert status(own.url, "plain")["chat_format"] == "plain-roles"
    counts = {
        name: httpx.post(own.url + "/tokenize", json={"model": name, "messages": ASK}).json()["count"]
        for name in ("plain", "steady")
    }
    assert counts["plain"] != counts["steady"]
    httpx.delete(own.url + "/models/plain")


def test_stop_strings_of_the_chat_format_are_added_to_those_of_the_request():
    runner, spec = SimpleNamespace(vocab_size=100), ModelSpec("m", "path:/x", context_length=50)
    ask = ChatRequest(model="m", messages=ASK, stop="end")
    params = params_for(ask, runner, spec, [1, 2], max_tokens=None, stop=("\nUser:",))
    assert params.stop == ("end", "\nUser:")


def test_model_removed_while_it_answers_ends_the_answer_with_an_error(own):
    own.put(TinyModel("leaving", seed=5))
    body = {"model": "leaving", "messages": ASK, "max_tokens": 1800, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", own.url + "/v1/chat/completions", json=body, timeout=30) as stream:
        lines = stream.iter_lines()
        next(lines)
        httpx.delete(own.url + "/models/leaving")
        events = [line for line in lines if line]
    assert "error" in json.loads(events[-2].removeprefix("data: "))
    assert own.kv()["pages"]["used"] == own.kv()["pages"]["pinned"]


def test_name_may_hold_a_slash_but_no_control_character(own):
    source = TinyModel("x").source
    assert httpx.put(own.url + "/models/team/one", json={"source": source}).status_code in (200, 202)
    assert status(own.url, "team/one", until="ready")["status"] == "ready"
    assert httpx.delete(own.url + "/models/team/one").status_code == 204
    assert httpx.put(own.url + "/models/a%09b", json={"source": source}).status_code == 400


# Figures


def test_health_names_the_thread_and_the_models(http):
    health = http.get("/health")
    assert health.status_code == 200
    assert health.json()["engine_thread"] == "alive"
    assert health.json()["models"]["briefed"] == "ready"


def samples(url: str, model: str) -> dict[str, float]:
    """Of one model, and those that belong to none."""
    text = httpx.get(url + "/metrics").text
    return {
        sample.name.removeprefix("paged_arena:"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("model_name", model) == model
    }


def test_metrics_have_the_names_of_vllm_under_our_prefix(engine):
    answer(engine.url, "briefed")
    assert set(samples(engine.url, "briefed")) >= {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "request_success_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_prompt_tokens_count",
        "request_generation_tokens_count",
    }


def test_an_answer_of_eight_tokens_moves_the_metrics_by_what_it_is(engine):
    answer(engine.url, "briefed")
    before = samples(engine.url, "briefed")
    used = answer(engine.url, "briefed", max_tokens=8).json()["usage"]
    after = samples(engine.url, "briefed")
    moved = {name: round(after[name] - before[name]) for name in after if name.endswith(("_total", "_count"))}
    assert moved["generation_tokens_total"] == 8
    assert moved["time_to_first_token_seconds_count"] == 1
    assert moved["inter_token_latency_seconds_count"] == 7
    assert moved["e2e_request_latency_seconds_count"] == 1
    assert moved["prompt_tokens_total"] == moved["prefix_cache_queries_total"] == used["prompt_tokens"]
    assert moved["prefix_cache_hits_total"] == used["prompt_tokens_details"]["cached_tokens"] > 0
    assert 0 < after["kv_cache_usage_perc"] < 1


def test_names_that_nobody_registered_leave_no_trace_in_the_metrics(http, engine):
    answer(engine.url, "made-up-name")
    assert "made-up-name" not in http.get("/metrics").text


def test_kv_adds_up(http):
    pages = http.get("/kv").json()["pages"]
    assert pages["used"] + pages["cached"] + pages["free"] == pages["total"]


@pytest.mark.parametrize("text", ["naïve café, 你好 🦊", "", "<|im_end|>", "a " * 3000])
def test_tokens_there_and_back(http, text):
    tokens = http.post("/tokenize", json={"model": "llama", "prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 2048
    assert http.post("/detokenize", json={"model": "llama", "tokens": tokens["tokens"]}).json()["prompt"] == text


def test_chat_is_counted_as_it_would_be_sent(http, engine):
    count = http.post("/tokenize", json={"model": "briefed", "messages": ASK}).json()["count"]
    assert count == answer(engine.url, "briefed").json()["usage"]["prompt_tokens"]


def test_chat_of_a_model_without_system_prompt_has_no_system_message(http):
    text = "<|im_start|>user\n" + ASK[0]["content"] + "<|im_end|>\n<|im_start|>assistant\n"
    as_text = http.post("/tokenize", json={"model": "llama", "prompt": text}).json()
    assert http.post("/tokenize", json={"model": "llama", "messages": ASK}).json() == as_text


def test_control_token_in_a_message_is_text(http):
    ask = [{"role": "user", "content": "<|im_end|>"}]
    tokens = http.post("/tokenize", json={"model": "llama", "messages": ask}).json()["tokens"]
    control = http.post("/tokenize", json={"model": "llama", "prompt": "<|im_end|>"}).json()["tokens"]
    assert len(control) == 1
    assert tokens.count(control[0]) == 1  # the template's own


@pytest.mark.parametrize(
    ("method", "path", "status_code"),
    [("GET", "/nothing", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/kv", 405)],
)
def test_wrong_address_has_an_error_of_the_same_shape(http, method, path, status_code):
    refused = http.request(method, path)
    assert refused.status_code == status_code
    assert path in refused.json()["error"]["message"]


def test_openapi_describes_the_requests(http):
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "ModelRequest"} <= set(schemas)
    assert "min_p" in schemas["ChatRequest"]["properties"]


def test_openapi_says_of_every_route_that_its_errors_have_one_shape(http):
    routes = [
        (path, method, route["responses"])
        for path, methods in http.get("/openapi.json").json()["paths"].items()
        for method, route in methods.items()
    ]
    assert len(routes) > 15
    for path, method, responses in routes:
        schema = {"$ref": "#/components/schemas/ErrorBody"}
        assert responses["4XX"]["content"]["application/json"]["schema"] == schema, (path, method)
        assert "422" not in responses, (path, method)


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("/v1/chat/completions", {"application/json", "text/event-stream"}),
        ("/metrics", {"text/plain"}),
        ("/kv/pages", {"application/octet-stream"}),
        ("/version", {"application/json"}),
    ],
)
def test_openapi_says_what_sort_of_answer_comes(http, path, kinds):
    ((_, route),) = http.get("/openapi.json").json()["paths"][path].items()
    assert set(route["responses"]["200"]["content"]) == kinds


def test_version_is_that_of_the_distribution(http):
    assert http.get("/version").json() == {"version": version("paged-arena")}


# Who may ask


@pytest.fixture(scope="module")
def locked():
    with EngineProcess([TinyModel("m")], api_key="user-key", admin_key="boss-key") as process:
        yield process


@pytest.mark.parametrize(
    ("method", "path", "key", "status_code"),
    [
        ("GET", "/v1/models", None, 401),
        ("GET", "/v1/models", "wrong", 401),
        ("GET", "/v1/models", "user-key", 200),
        ("GET", "/v1/models", "boss-key", 200),
        ("GET", "/kv", None, 401),
        ("GET", "/metrics", None, 401),
        ("GET", "/openapi.json", None, 401),
        ("GET", "/models", "user-key", 401),
        ("GET", "/models", "boss-key", 200),
        ("PUT", "/models/x", "user-key", 401),
        ("DELETE", "/models/m", "user-key", 401),
        ("POST", "/models/m/sleep", "user-key", 401),
        ("GET", "/health", None, 200),
    ],
)
def test_key_opens_what_it_is_for(locked, method, path, key, status_code):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.request(
        method, locked.url + path, headers=headers, json={"source": "path:/x"} if method == "PUT" else None
    )
    assert answer.status_code == status_code
    if status_code == 401:
        assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("header", ["user-key", "Basic user-key", "Bearer", "Bearer user-key extra", "Bearer \xff"])
def test_key_in_another_form_opens_nothing(locked, header):
    headers = {"Authorization": header.encode("latin-1")}
    assert httpx.get(locked.url + "/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("path", ["v1/completions", "v1/chat/completions", "tokenize", "detokenize"])
def test_the_name_of_the_only_model_may_be_left_out(locked, path):
    body = {"v1/chat/completions": {"messages": ASK}, "detokenize": {"tokens": [8]}}.get(path, {"prompt": "the"})
    answer = httpx.post(f"{locked.url}/{path}", json=body, headers={"Authorization": "Bearer user-key"}, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", "m") == "m"


def test_without_a_key_a_foreign_host_name_is_refused(http):
    assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 401
    assert http.get("/v1/models", headers={"Host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status_code"),
    [
        ({"Origin": "https://evil.example"}, 401),
        ({"Origin": "null"}, 401),
        ({"Sec-Fetch-Site": "cross-site"}, 401),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"}, 401),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "http://localhost:8001", "Host": "localhost:8001"}, 200),
    ],
)
def test_without_a_key_what_a_page_of_another_site_sends_is_not_done(own, headers, status_code):
    assert httpx.post(own.url + "/tokenize", json={"prompt": "the"}, headers=headers).status_code == status_code
    if status_code == 401:
        assert httpx.post(own.url + "/models/steady/sleep", headers=headers).status_code == 401
        assert status(own.url, "steady")["status"] == "ready"
    assert httpx.get(own.url + "/v1/models", headers=headers).status_code == 200


# Rude clients


@pytest.mark.parametrize("announced", [True, False])
def test_body_over_the_limit_is_refused_unread(http, announced):
    def pieces():
        for _ in range(12):
            yield b" " * 1024 * 1024

    content = b" " * 12 * 1024 * 1024 if announced else pieces()
    try:
        refused = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    except (httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
        return  # the connection was closed on it: as good
    assert refused.status_code == 413
    assert "8,388,608" in refused.json()["error"]["message"]


def test_head_without_an_end_is_not_read_to_the_end(engine):
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection, pytest.raises(OSError):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        for _ in range(32):
            connection.sendall(b"x" * 2**20)


def test_client_that_offers_another_protocol_is_answered_in_this_one(http):
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQCAAAAAAIAAAAA"}
    for headers in (offer, {}):
        assert http.post("/tokenize", json={"model": "llama", "prompt": "the"}, headers=headers).status_code == 200


def test_connections_that_say_nothing_or_half_a_request_hurt_nobody(engine):
    address = engine.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((address[0], int(address[1]))) for _ in range(50)]
    for connection in idle[:25]:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    assert answer(engine.url, "llama").status_code == 200
    for connection in idle:
        connection.close()
    assert answer(engine.url, "llama").status_code == 200


def test_reader_that_stops_reading_gets_everything_later_and_delays_nobody(engine):
    body = json.dumps({"model": "llama", "messages": ASK, "max_tokens": 600, "ignore_eos": True, "stream": True})
    host, port = engine.url.removeprefix("http://").split(":")
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect((host, int(port)))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    slow.sendall((head + "Content-Type: application/json\r\n\r\n" + body).encode())
    time.sleep(1)
    assert answer(engine.url, "llama").status_code == 200
    received = b""
    while data := slow.recv(65536):
        received += data
    slow.close()
    assert received.rstrip().endswith(b"0") and b"data: [DONE]" in received
    assert re.search(rb'"finish_reason":"length"', received)


def test_queue_that_is_full_says_so():
    with EngineProcess([TinyModel("m")], max_waiting=2, max_sequences=1, kv_memory_bytes="4MiB") as engine:
        answers: list[httpx.Response] = []
        ask = [
            threading.Thread(target=lambda: answers.append(answer(engine.url, "m", max_tokens=300))) for _ in range(8)
        ]
        for thread in ask:
            thread.start()
        for thread in ask:
            thread.join()
        refused = [each for each in answers if each.status_code == 429]
        assert refused and len(refused) < 8
        assert refused[0].json()["error"]["code"] == "queue_full"
        assert {each.status_code for each in answers} == {200, 429}


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_model_replaced_while_a_prompt_is_tokenised_is_not_asked_with_the_tokens_of_the_old(route):
    """As when the loop is busy with something else between the tokens and their submission."""
    rig = Rig({"a": FakeRunner(FULL, "a"), "b": FakeRunner(FULL, "b")})
    rig.put("x", "a")
    server = EngineServer(rig.engine, rig.config)
    tokenised = server._tokenised

    async def slowly(encode, *, characters):
        tokens = await tokenised(encode, characters=characters)
        rig.put("x", "b")
        return tokens

    async def ask() -> None:
        server.delivery, server._tokenised = Delivery(asyncio.get_running_loop()), slowly
        body = {"chat": ChatRequest(model="x", messages=ASK), "complete": CompletionRequest(model="x", prompt="fox")}
        generation = await getattr(server, route)(body[route], SimpleNamespace(state=SimpleNamespace(request_id="1")))
        await generation({}, None, None)

    with pytest.raises(ModelNotReady, match="was replaced"):
        asyncio.run(asyncio.wait_for(ask(), 10))


def test_a_request_without_max_tokens_is_given_all_the_room_that_it_can_have():
    """Where the pool is the bound, that is less for what does not share the system prompt."""
    rig = Rig({"a": FakeRunner(FULL, "a")}, pages=60)
    rig.put("a", system_prompt="You answer in one short sentence. ")
    server, request = EngineServer(rig.engine, rig.config), SimpleNamespace(state=SimpleNamespace(request_id="1"))
    server.delivery = None
    own = [{"role": "system", "content": "You rhyme."}, *ASK]
    lengths = []
    for asked in ({"messages": ASK}, {"messages": own}, {"messages": ASK, "cache_salt": "one"}):
        (ask,) = asyncio.run(server.chat(ChatRequest(**asked), request)).asks
        events = []
        rig.engine.submit(ask.model, ask.prompt_ids, ask.params, events.append, ask.terms, ask.runner)
        rig.drain()
        assert (events[-1].finish_reason, events[-1].error) == ("length", None)
        lengths.append(events[-1].prompt_tokens + events[-1].completion_tokens)
    assert lengths[0] == rig.engine.runner_of("a")[1].context_length > lengths[1] == lengths[2]


class CountingThreads(ThreadPoolExecutor):
    tasks = 0

    def submit(self, *args, **kwargs):
        self.tasks += 1
        return super().submit(*args, **kwargs)


@pytest.mark.parametrize(
    ("route", "body", "tasks"),
    [
        ("chat", ChatRequest(messages=ASK), 0),
        ("chat", ChatRequest(messages=[{"role": "user", "content": ""}] * 100), 1),
        ("tokenize", TokenizeRequest(messages=[{"role": "user", "content": ""}] * 100), 1),
        ("tokenize", TokenizeRequest(prompt="!? " * 1000, return_token_strs=True), 1),
        ("detokenize", DetokenizeRequest(tokens=[70] * 100), 0),
        ("detokenize", DetokenizeRequest(tokens=[70] * 1000), 1),
        ("complete", CompletionRequest(prompt=[70] * 1000), 1),
        ("complete", CompletionRequest(prompt="!? " * 1000, echo=True), 1),
        ("complete", CompletionRequest(prompt=[[70] * 100] * 10, echo=True), 2),
    ],
)
def test_work_on_many_tokens_or_messages_is_done_off_the_event_loop(route, body, tasks):
    rig = Rig({"a": FakeRunner(FULL, "a", context_length=20_000)}, pages=4000)
    rig.put("a")
    server = EngineServer(rig.engine, rig.config)
    server.delivery, server.tokenising = None, CountingThreads(1)
    request = (SimpleNamespace(state=SimpleNamespace(request_id="1")),) if route in ("chat", "complete") else ()
    asyncio.run(getattr(server, route)(body, *request))
    assert server.tokenising.tasks == tasks
    server.tokenising.shutdown()


def test_model_sleeps_and_wakes_over_http(own):
    body = TinyModel("drowsy/one", family="gemma3", seed=4, system_prompt=ASSISTANT)
    own.put(body)
    said = answer(own.url, body.name).json()["choices"][0]["message"]
    asleep = httpx.post(own.url + f"/models/{body.name}/sleep")
    assert (asleep.status_code, asleep.json()["status"]) == (200, "sleeping")
    refused = answer(own.url, body.name)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_asleep")
    assert refused.headers["x-should-retry"] == "false"
    assert body.source not in own.kv()["checkpoints"] and own.kv()["models"][body.name]["pages_pinned"] == 0
    assert httpx.get(own.url + "/health").json()["models"][body.name] == "sleeping"
    assert httpx.post(own.url + f"/models/{body.name}/wake").status_code == 202
    status(own.url, body.name, until="ready")
    assert answer(own.url, body.name).json()["choices"][0]["message"] == said
    assert httpx.post(own.url + f"/models/{body.name}/wake").status_code == 200
    assert httpx.post(own.url + "/models/nobody/sleep").status_code == 404
    httpx.delete(own.url + f"/models/{body.name}")
