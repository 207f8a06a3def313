"""Which paths clients can reach: a list, each path in one spelling. Engines' own administration is in no spelling."""

from __future__ import annotations

import pytest
from gateway.rig import CHAT, FakeEngine, Rig, looped, request_bytes, rig, settings_of

from moestro.errors import ConfigError
from moestro.gateway.clients.paths import OWN_PATHS

# What changes or stops an engine, of vLLM and SGLang.
ADMINISTRATION = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"),
    *("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/flush_cache", "/shutdown", "/pause"),
    *("/update_weights_from_disk", "/release_memory_occupation", "/start_profile", "/abort_request", "/server_info"),
    *("/v1/files", "/admin/engines", "/admin/decisions", "/v1"),
)


def encoded(text: str, at: int) -> str:
    return f"{text[:at]}%{ord(text[at]):02x}{text[at + 1 :]}"


# Other spellings of a path, each of which some server takes for the path itself.
SPELLINGS = {
    "an encoded letter": lambda path: encoded(path, len(path) - 1),
    "an encoded letter, twice": lambda path: encoded(path, len(path) - 1).replace("%", "%25"),
    "an encoded slash": lambda path: "/%2f" + path[1:],
    "encoded slashes and dots": lambda path: "/v1/responses/..%2f.." + path,
    "two slashes": lambda path: "/" + path,
    "two slashes within": lambda path: "/v1/" + path,
    "a slash at the end": lambda path: path + "/",
    "a parameter": lambda path: path + ";x=1",
    "a parameter within": lambda path: "/;x" + path,
    "a segment up": lambda path: "/v1/x/../.." + path,
    "a segment up, from an open tree": lambda path: "/v1/responses/../.." + path,
    "a segment up, from a model's name": lambda path: "/v1/models/../.." + path,
    "a segment up, encoded": lambda path: "/v1/x/%2e%2e/%2E%2E" + path,
    "this segment": lambda path: "/." + path,
    "this segment at the end": lambda path: path + "/.",
    "a backslash": lambda path: path + "\\",
    "a backslash, encoded": lambda path: "/%5c" + path[1:],
    "a zero byte": lambda path: path + "%00",
    "a line feed": lambda path: path + "%0a",
    "half an escape": lambda path: path + "%",
    "a fragment": lambda path: path + "#x",
    "a fragment in the query": lambda path: path + "?x#y",
    "the absolute form": lambda path: "http://x" + path,
    "another scheme": lambda path: "file://" + path,
}


async def ask(it: Rig, target: str, method: str = "POST"):
    caller = await it.caller()
    caller.send(request_bytes(target, b"{}", method))
    answer = await caller.answer()
    caller.hang_up()
    return answer


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
@looped
async def test_engines_administration_is_reached_in_no_spelling(spell):
    engine = FakeEngine("e")
    async with rig(engine) as it:
        for path in ADMINISTRATION:
            for method in ("POST", "GET"):
                assert (await ask(it, spell(path), method)).status in (400, 404), (method, spell(path))
        assert not engine.received


@looped
async def test_a_wrong_base_url_is_answered_with_what_to_do():
    async with rig(FakeEngine("e")) as it:
        answer = await it.call("/chat/completions", method="POST")
        assert (answer.status, answer.code) == (404, "not_found")
        assert b"base URL lacks /v1: add it at the end." in answer.body
        answer = await it.call("/v1/v1/messages", method="POST")
        assert b"leave it out of the base URL." in answer.body


@pytest.mark.parametrize("path", ADMINISTRATION)
@looped
async def test_engines_administration_is_not_found_whatever_the_case_of_its_letters(path):
    engine = FakeEngine("e")
    async with rig(engine) as it:
        for spelt in (path, path.upper(), path.title()):
            answer = await ask(it, spelt)
            assert (answer.status, answer.code) == (404, "not_found")
        assert not engine.received


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
@looped
async def test_a_path_that_can_be_read_in_two_ways_is_refused_with_what_to_send(spell):
    engine = FakeEngine("e")
    async with rig(engine) as it:
        for path in (CHAT, "/tokenize", "/health", "/v1/models"):
            answer = await ask(it, spell(path))
            assert (answer.status, answer.code) == (400, "ambiguous_path"), spell(path)
            assert "Send the path alone" in answer.json["error"]["message"]
        assert not engine.received


@pytest.mark.parametrize("line", ["OPTIONS *", "CONNECT x:443", "GET x:443"])
@looped
async def test_a_target_that_is_no_path_is_refused(line):
    engine = FakeEngine("e")
    async with rig(engine) as it:
        caller = await it.caller()
        caller.send(f"{line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await caller.answer()).status == 400
        assert not engine.received


@pytest.mark.parametrize(
    "target",
    [
        *(
            CHAT,
            "/v1/completions?a=%2F..;b=//&c=\\",
            "/v1/embeddings",
            "/v1/responses?x=1",
            "/v1/messages/count_tokens",
        ),
        *("/v1/messages", "/v1/score", "/v1/rerank", "/v2/rerank", "/rerank", "/score", "/pooling", "/classify"),
        *("/tokenize", "/detokenize", "/generate", "/v1/audio/transcriptions", "/v1/responses/resp_1/cancel"),
        *("/mine", "/v1/tree/a:b@c,d/e~f", "/v1/tree/..hidden/a..b"),
    ],
)
@looped
async def test_apis_that_answer_prompts_are_sent_on_as_they_came(target):
    engine = FakeEngine("e")
    async with rig(engine, open_path=("/mine", "/v1/tree/*")) as it:
        assert (await ask(it, target)).status == 200
        assert engine.received[0].target == target


@looped
async def test_an_open_tree_is_what_is_below_it():
    engine = FakeEngine("e")
    async with rig(engine, open_path=("/a/*",)) as it:
        for target, status in (("/a", 404), ("/a/b", 200), ("/a/b/c", 200), ("/ab", 404), ("/b/a/c", 404)):
            assert (await ask(it, target)).status == status, target


@pytest.mark.parametrize(
    "path",
    [
        "x",
        "/a/",
        "//a",
        "/a%20b",
        "/a/../b",
        "/a?x",
        "/a*",
        "/*/a",
        "/health",
        "/v1/models",
        "/v1/models/x",
        "/v1/models/*",
    ],
)
def test_a_path_that_can_never_be_requested_cannot_be_opened(path):
    with pytest.raises(ConfigError, match=r"--open-path \S+ must"):
        settings_of(open_path=(path,))


@pytest.mark.parametrize(
    ("path", "wrong", "allow"),
    [
        (CHAT, ("GET", "HEAD", "PUT", "DELETE", "TRACE"), "OPTIONS, POST"),
        ("/generate", ("GET", "PATCH"), "OPTIONS, POST, PUT"),
        ("/get_model_info", ("POST",), "GET, HEAD, OPTIONS"),
        ("/v1/responses/resp_1", ("PUT", "PATCH"), "DELETE, GET, HEAD, OPTIONS, POST"),
        ("/v1/models", ("POST", "OPTIONS", "DELETE"), "GET, HEAD"),
        ("/v1/models/m", ("POST",), "GET, HEAD"),
        ("/metrics", ("POST", "DELETE"), "GET, HEAD"),
        ("/version", ("POST",), "GET, HEAD"),
        ("/health", ("POST", "OPTIONS"), "GET, HEAD"),
        ("/ping", ("PUT",), "GET, HEAD, POST"),
    ],
)
@looped
async def test_a_wrong_method_hears_which_are_right_and_the_connection_goes_on(path, wrong, allow):
    engine = FakeEngine("e")
    async with rig(engine) as it:
        caller = await it.caller()
        for method in wrong:
            caller.ask(path, method=method)
            answer = await caller.answer(is_head=method == "HEAD")
            assert (answer.status, answer.headers["allow"]) == (405, allow)
            if method != "HEAD":
                assert answer.code == "method_not_allowed"
        assert not engine.received


@looped
async def test_a_browsers_question_whether_it_may_ask_is_for_the_engine():
    engine = FakeEngine("e")
    async with rig(engine) as it:
        answer = await it.call(CHAT, method="OPTIONS", Origin="http://a", Access_Control_Request_Method="POST")
        assert answer.status == 200
        assert engine.received[0].method == "OPTIONS"


@looped
async def test_a_models_name_may_have_any_characters():
    engine = FakeEngine("e")
    engine.models = ("x/y", "a b;ü")
    async with rig(engine) as it:
        await it.until(lambda: len(it.app.shared.fleet.models.names_of(0)) == 2)
        for name, found in (("x/y", "x/y"), ("x%2Fy", "x/y"), ("a%20b%3B%C3%BC", "a b;ü")):
            assert (await it.call(f"/v1/models/{name}", method="GET")).json["id"] == found
        assert (await it.call("/v1/models/x%252Fy", method="GET")).code == "model_not_found"


@looped
async def test_the_document_of_the_router_has_its_paths_and_those_of_engines():
    async with rig(FakeEngine("e"), api_key=("k1",), open_path=("/mine", "/tree/*")) as it:
        answer = await it.call("/openapi.json", method="GET")
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        document = answer.json
        assert document["openapi"] == "3.1.0"
        own = {path for path in OWN_PATHS if not path.startswith("/page/")}
        assert own | {"/v1/chat/completions", "/v1/messages", "/mine", "/v1/models/{name}"} <= document["paths"].keys()
        assert "post" in document["paths"]["/v1/chat/completions"]
        for path, operations in document["paths"].items():
            for method in operations:
                plain = path.replace("{name}", "m")
                answered = await it.call(plain, method=method.upper(), X_Api_Key="k1")
                assert answered.status not in (404, 405) or "{name}" in path, (method, path)
        page = await it.call("/docs", method="GET")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
