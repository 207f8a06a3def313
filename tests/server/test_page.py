"""The page at `/` in headless Chromium, before fake engines and through the router."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from gateway.test_command import ROUTE
from support.browser import chromium, needs_chromium
from support.running import (
    PATIENCE_S,
    Running,
    call,
    call_admin,
    chat,
    is_idle,
    open_stream,
    wait_until,
)

from moestro.web.page import PAGE_PATHS

KEY, ADMIN_KEY = "client-key", "admin-key"
PATIENCE_MS = 1000 * PATIENCE_S


# --- without a browser


def test_each_file_is_served_with_its_policy(fake):
    for path in PAGE_PATHS:
        for ask in (call, call_admin):
            reply = ask(fake, "GET", path)
            assert (reply.status, reply.headers["x-content-type-options"]) == (200, "nosniff"), path
            assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    assert call(fake, "GET", "/page/none.js").status == 404
    assert b'data-program="serve" data-plane="clients"' in call(fake, "GET", "/").body
    assert b'data-program="serve" data-plane="operators"' in call_admin(fake, "GET", "/").body


def test_the_figures_count_requests_and_tokens(fake):
    before = call(fake, "GET", "/statistics").json
    assert (before["program"], before["mode"], before["has_experts"]) == ("serve", "fused", False)
    assert before["operators_port"] == fake.admin_port
    chat(fake, "one two three", max_tokens=8)
    after = call_admin(fake, "GET", "/statistics?experts=true").json
    [old], [new] = before["engines"], after["engines"]
    assert new["num_generated_tokens"] - old["num_generated_tokens"] == 8
    assert new["num_prompt_tokens"] > old["num_prompt_tokens"]
    assert new["num_requests"] == old["num_requests"] + 1
    assert sum(after["gap_s"]["counts"]) == sum(before["gap_s"]["counts"]) + 7
    assert after["time_s"] > before["time_s"]
    assert after["experts"] is None
    assert call(fake, "GET", "/statistics?experts=maybe").status == 400


def test_the_operators_port_shows_the_decisions(fake):
    answer_id = chat(fake, max_tokens=1).json["id"]
    found = call_admin(fake, "GET", "/admin/decisions?limit=1").json["decisions"]
    assert [each["request_id"] for each in found] == [f"{answer_id}-0"]
    assert found[0]["attempts"][0]["candidates"][0]["engine"] == "engine 0"
    assert found[0].get("events", []) == []


def test_the_operators_port_answers_its_own_page_alone(fake):
    own = f"http://127.0.0.1:{fake.admin_port}"
    assert call_admin(fake, "GET", "/statistics", Origin=own).status == 200
    for origin in ("http://evil.example", fake.url, "null"):
        assert call_admin(fake, "GET", "/statistics", Origin=origin).status == 403


# --- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def routed(fake, tmp_path_factory) -> Iterator[Running]:
    """A router before the same server under two names, with a key for clients and one for operators."""
    engines = ("--engine", f"left={fake.url}", "--engine", f"right={fake.url.replace('127.0.0.1', 'localhost')}")
    keys = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY)
    running = Running((*ROUTE, *engines, *keys), tmp_path_factory.mktemp("page"))
    found = re.search(r"http://127\.0\.0\.1:(\d+)/admin/engines", running.text)
    assert found is not None
    running.admin_port = int(found[1])
    yield running
    running.kill()


@contextlib.contextmanager
def opened(browser, url: str, *, key: str | None = None, **context: Any) -> Iterator[Any]:
    """The page at `url` in a context of its own. No script may fail, and no policy may be violated."""
    faults: list[str] = []
    made = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | context)
    made.set_default_timeout(PATIENCE_MS)
    page = made.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    try:
        page.goto(url)
        if key is not None:
            give_key(page, key)
        yield page
    finally:
        made.close()
    assert not [fault for fault in faults if not re.match("Failed to load resource.* status of (401|503)", fault)]


def give_key(page, key: str) -> None:
    page.locator("#key").fill(key)
    page.locator("#key").press("Enter")
    page.locator("#key-dialog").wait_for(state="hidden")


def operators_url(running: Running) -> str:
    return f"http://127.0.0.1:{running.admin_port}/"


@needs_chromium
def test_the_page_of_a_router_shows_the_tokens_and_hits_that_engines_report(browser, routed):
    body = {"prompt": "a b c d e f g h " * 20, "max_tokens": 40}
    with opened(browser, f"{routed.url}#engines", key=KEY) as page:
        row = page.locator("#engine-table tbody tr").first
        row.wait_for()
        for _ in range(3):
            assert call(routed, "POST", "/v1/completions", body, Authorization=f"Bearer {KEY}").status == 200
        row.locator("td[data-label='Tokens/s']").filter(has_text=re.compile("[1-9]")).wait_for()
        tiles = page.locator(".tile")
        assert tiles.filter(has_text="Client errors").count() == tiles.filter(has_text="Overload").count() == 1
        assert tiles.filter(has_text="Tokens out").count() == 1


def ask(page, text: str, *, max_tokens: int = 24, api: str = "chat") -> Any:
    """Send a prompt, and return the element of its answer."""
    page.locator("#model option").first.wait_for(state="attached")
    page.locator("#api").select_option(api)
    page.locator("#options").evaluate("box => { box.open = true; }")
    page.locator("#max-tokens").fill(str(max_tokens))
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    return page.locator(".message.answer").last


def figure(answer, name: str) -> str:
    return answer.locator(f"dl > div:has(dt:text-is('{name}')) dd").inner_text()


@needs_chromium
@pytest.mark.parametrize("api", ["chat", "completion"])
def test_an_answer_streams_to_its_end_and_shows_when_its_tokens_came(browser, fake, api):
    with opened(browser, fake.url) as page:
        answer = ask(page, "one two three four <b>five</b>", api=api)
        page.locator(".answer[data-ended]").wait_for()
        assert "<b>five</b>" in answer.locator(".text").inner_text(), "markup of a model stays text"
        assert figure(answer, "end") in ("length", "stop")
        assert 1 < int(figure(answer, "tokens")) <= 24
        assert re.fullmatch(r"[\d.]+ m?s", figure(answer, "TTFT"))
        assert re.fullmatch(r"[\d.]+ m?s, P95 [\d.]+ m?s", figure(answer, "ITL"))
        assert float(figure(answer, "tokens/s").replace(",", "")) > 0
        assert answer.locator(".gaps rect").count() > 1
        assert page.locator("#prompt").input_value() == ""


@needs_chromium
def test_a_conversation_goes_on_and_escape_stops_an_answer(browser, fake):
    with opened(browser, fake.url) as page:
        sent: list[dict[str, Any]] = []
        page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
        ask(page, "first", max_tokens=2)
        page.locator(".answer[data-ended]").wait_for()
        ask(page, "second", max_tokens=2)
        page.locator(".answer[data-ended]").nth(1).wait_for()
        answer = ask(page, "third", max_tokens=3000, api="completion")
        answer.locator(".gaps").wait_for()
        page.keyboard.press("Escape")
        page.locator(".answer[data-ended]").nth(2).wait_for()
        assert figure(answer, "end") == "stopped"
        assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
    wait_until(lambda: is_idle(fake))


@needs_chromium
def test_a_refusal_is_shown(browser, fake):
    with opened(browser, fake.url) as page:
        page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(status=503, json={"error": {"message": "No room."}})
        )
        assert ask(page, "hello").locator("[role=alert]").inner_text() == "No room."


@needs_chromium
def test_the_live_views_follow_the_requests(browser, fake):
    with opened(browser, f"{fake.url}#engines") as page:
        row = page.locator("#engine-table tbody tr").first
        row.wait_for()
        streams = [open_stream(fake, max_tokens=2000) for _ in range(2)]
        running = row.locator("td[data-label=Running]")
        running.filter(has_text=re.compile("^2$")).wait_for()
        assert "2 run" in page.locator(".tile", has_text="Requests").inner_text()
        assert row.locator("td[data-label=KV]").inner_text() == "3.1 %"
        row.locator("td[data-label='Tokens/s']").filter(has_text=re.compile("[1-9]")).wait_for()
        for stream in streams:
            stream.close()
        running.filter(has_text=re.compile("^0$")).wait_for()
        assert page.locator("#state-text").inner_text() == "1 of 1 engine up"
        assert page.locator("#experts").is_hidden(), "the fake network is dense"


EXPERTS = {"layers": [1, 2], "tokens": [4.0, 2.0], "relative": [[1, 0.5, 2.5, 0], [1, 1, 1, 1]], "num_steps": 80.0}


@needs_chromium
def test_the_heat_map_of_experts_can_be_read_by_keyboard(browser, fake):
    figures = call(fake, "GET", "/statistics").json | {"has_experts": True, "experts": EXPERTS}
    with opened(browser, "about:blank") as page:
        page.route("**/statistics*", lambda route: route.fulfill(json=figures))
        page.goto(f"{fake.url}#engines")
        page.locator("#heat-map").wait_for()
        assert "2 layers \N{MULTIPLICATION SIGN} 4 experts" in page.locator("#expert-summary").inner_text()
        page.locator("#heat-map").focus()
        for key in ("ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        expected = "Layer 1, expert 2: 2.5 \N{MULTIPLICATION SIGN} the layer's mean, 10 tokens a step"
        assert page.locator("#heat-readout").inner_text() == expected
        pixel = "[...document.querySelector('#heat-map').getContext('2d').getImageData({}, 8, 1, 1).data].join()"
        width = page.locator("#heat-map").evaluate("map => map.width")
        hot, even = (page.evaluate(pixel.format(34 + int((width - 34) * share))) for share in (0.6, 0.1))
        assert hot != even


@needs_chromium
def test_the_page_is_used_by_keyboard_alone(browser, fake):
    with opened(browser, fake.url) as page:
        page.locator("#model option").first.wait_for(state="attached")
        page.locator("#tab-chat").focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == "tab-engines"
        assert page.locator("#engines").is_visible()
        page.keyboard.press("ArrowLeft")
        assert page.locator("#chat").is_visible()
        for _ in range(8):
            if page.evaluate("document.activeElement.id") == "prompt":
                break
            page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.keyboard.press("Control+A")
        page.keyboard.type("by hand")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("and foot")
        page.keyboard.press("Enter")
        page.locator(".answer[data-ended]").wait_for()
        assert page.locator(".message.user .text").inner_text() == "by hand\nand foot"
        for _ in range(12):  # round: all that can be pressed is reached, and shows that it has the focus
            page.keyboard.press("Tab")
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert page.evaluate(f"document.activeElement === document.body || {outline} !== 'none'")


CONTRAST = """() => {
  const channels = colour => colour.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 10.3 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = node => {
    for (let at = node; at; at = at.parentElement) {
      const found = channels(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0.99) return found;
    }
  };
  return [...document.querySelectorAll("body *")].filter(node => node.checkVisibility() && [...node.childNodes].some(
    child => child.nodeType === 3 && child.data.trim())).map(node => {
    const [a, b] = [luminance(channels(getComputedStyle(node).color)), luminance(ground(node))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), node.textContent.slice(0, 40)];
  }).filter(([contrast]) => contrast < 4.5);
}"""


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_text_is_readable_and_fits(browser, fake, scheme, width):
    with opened(browser, fake.url, color_scheme=scheme, viewport={"width": width, "height": 740}) as page:
        ask(page, "word " * 60 + "x" * 200, max_tokens=8)
        page.locator(".answer[data-ended]").wait_for()
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) > 384) is (scheme == "light")
        for tab, ready in (("chat", ".gaps"), ("engines", "#engine-table tbody tr")):
            page.locator(f"#tab-{tab}").click()
            page.locator(ready).first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(CONTRAST) == []


@needs_chromium
def test_the_router_asks_for_the_key_of_clients_and_shows_why_it_chose(browser, routed):
    with opened(browser, routed.url) as page:
        dialog = page.locator("#key-dialog")
        dialog.wait_for()
        page.locator("#key").fill("wrong")
        page.locator("#key").press("Enter")
        page.locator("#key-text", has_text="does not accept").wait_for()
        give_key(page, KEY)
        answer = ask(page, "hello there", max_tokens=4)
        page.locator(".answer[data-ended]").wait_for()
        assert re.match(r"(left|right): .+", figure(answer, "engine"))
        page.locator("#tab-engines").click()
        page.locator("#engine-table tbody tr").nth(1).wait_for()
        assert page.locator("#engine-table button").count() == 0, "clients cannot drain"
        assert page.locator("#other-plane").get_attribute("href") == operators_url(routed)
        assert page.evaluate("Object.values(sessionStorage)") == [KEY]
        assert page.evaluate("localStorage.length + document.cookie.length") == 0


@needs_chromium
def test_an_engine_is_drained_with_the_admin_key_and_not_without(browser, routed):
    def condition() -> str:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        return call_admin(routed, "GET", "/admin/engines/left", **headers).json["condition"]

    with opened(browser, operators_url(routed)) as page:
        page.locator("#key-dialog").wait_for()
        page.locator("#key-cancel").click()
        page.locator("#state.bad", has_text="A key is needed").wait_for()
        assert page.locator("#engine-table button").count() == 0
        page.locator("#key-button").click()
        page.locator("#key").fill(KEY)
        page.locator("#key").press("Enter")
        page.locator("#key-text", has_text="does not accept").wait_for()
        give_key(page, ADMIN_KEY)
        page.get_by_role("button", name="Drain left").press("Enter")
        page.get_by_role("button", name="Resume left").wait_for()
        assert condition() == "draining"
        page.locator("tr", has_text="left").locator(".badge.warn", has_text="draining").wait_for()
        assert page.locator("#state-text").inner_text() == "1 of 2 engines up"
        page.get_by_role("button", name="Resume left").press("Enter")
        page.locator("tr", has_text="left").locator(".badge.good").wait_for()
        assert condition() == "up"


@needs_chromium
@pytest.mark.parametrize("width", [375, 1280])
def test_decisions_show_scores_reasons_and_outcomes(browser, routed, width):
    key = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "a b c", "max_tokens": 2}
    for name in ("first", "second"):
        assert call(routed, "POST", "/v1/completions", body, X_Request_Id=f"{name}-{width}", **key).status == 200
    with opened(
        browser, f"{operators_url(routed)}#decisions", key=ADMIN_KEY, viewport={"width": width, "height": 740}
    ) as page:
        page.locator("#find").fill(f"first-{width}")
        decision = page.locator(".decision")
        decision.locator("summary").press("Enter")
        decision.locator("tbody tr").nth(1).wait_for()  # A detail is written after it has opened.
        assert decision.locator("tbody tr").count() == 2
        assert decision.locator("tr.chosen").count() == 1
        assert "score" in decision.inner_text()
        runner = decision.locator(".runner")
        assert re.match(r"then (left|right)( .[\d.]|, equal)", runner.text_content())
        assert runner.is_visible() == (width > 700)
        assert re.search(r"200, [\d,.]+ ms", decision.locator(".outcome").inner_text())
        (share,) = page.locator("#decision-shares .share").all()
        assert re.fullmatch(r"(left|right)\s+100 %\s+1", share.inner_text())
        assert "200" in decision.locator(".outcome").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        with page.expect_response("**/admin/decisions*") as again:
            pass
        again.value.finished()  # an open one stays open when the list is read again
        assert decision.get_attribute("open") is not None
        assert page.evaluate(CONTRAST) == []
