// The chat: streams answers, and measures when their tokens arrive in the browser.

import { byId, count, decimal, drawn, duration, made } from "./dom.js";
import { allowDialog, ask, read } from "./server.js";

const DEMO = "moestro-demo"; // continues Python, and cannot chat
const DEMO_PROMPT = "def read_file(path):\n";
const MOST_BARS = 400;

let history = []; // messages of the conversation
let running = null; // AbortController of the answer under way

export function startChat() {
  byId("composer").addEventListener("submit", event => { event.preventDefault(); send(); });
  byId("prompt").addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  byId("chat").addEventListener("keydown", event => { if (event.key === "Escape") running?.abort(); });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  byId("api").addEventListener("change", showApi);
  loadModels();
}

/** Fills the list of models, once there is one; the page calls it again until then. */
export async function loadModels() {
  const list = byId("model");
  if (list.options.length) return;
  const { data } = await read("v1/models").catch(() => ({ data: [] }));
  if (list.options.length) return;
  list.append(...data.map(model => made("option", { value: model.id }, model.id)));
  if (data[0]?.id !== DEMO) return;
  byId("api").value = "completion";
  byId("max-tokens").value = 96;
  if (!byId("prompt").value) byId("prompt").value = DEMO_PROMPT;
  showApi();
}

const isChat = () => byId("api").value === "chat";

function showApi() {
  byId("composer").classList.toggle("completion-mode", !isChat());
  byId("system").closest("label").hidden = !isChat();
  byId("prompt").placeholder = isChat() ? "Message (Enter sends, Shift+Enter breaks the line)"
    : "Text to continue (Enter sends, Shift+Enter breaks the line)";
}

function clear() {
  running?.abort();
  history = [];
  byId("conversation").replaceChildren(byId("welcome") ?? made("p", { class: "empty", id: "welcome" }, "A new conversation."));
  byId("prompt").focus();
}

async function send() {
  const text = byId("prompt").value;
  if (running || !text.trim()) return;
  allowDialog();
  byId("welcome")?.remove();
  byId("prompt").value = "";
  const view = new AnswerView(text);
  setRunning(new AbortController());
  try {
    await stream(text, view);
  } catch (error) {
    if (error.name === "AbortError") view.end("stopped");
    else view.fail(error.message);
  } finally {
    running.abort(); // of an answer that failed, the rest is not wanted
    setRunning(null);
  }
  if (isChat() && view.text) {
    history.push({ role: "user", content: text }, { role: "assistant", content: view.text });
  } else if (!view.text && !byId("prompt").value) {
    byId("prompt").value = text; // it got no answer, and is easily sent again
  }
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
  byId("conversation").setAttribute("aria-busy", Boolean(controller)); // screen readers read a whole answer
  byId("prompt").focus();
}

function bodyOf(text) {
  const number = id => byId(id).value === "" ? undefined : Number(byId(id).value);
  const body = {
    model: byId("model").value || undefined, max_tokens: number("max-tokens"), temperature: number("temperature"),
    seed: number("seed"), stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if (!isChat()) return { ...body, prompt: text };
  const system = byId("system").value.trim();
  return { ...body, messages: [...(system ? [{ role: "system", content: system }] : []), ...history, { role: "user", content: text }] };
}

async function stream(text, view) {
  const { signal } = running;
  const options = () => ({
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(bodyOf(text)), onsend: () => view.begin(),
  });
  let answer = await ask(isChat() ? "v1/chat/completions" : "v1/completions", options());
  if (!answer.ok) {
    const { error = {} } = await answer.json().catch(() => ({}));
    if (error.code !== "no_chat_template") throw new Error(error.message ?? `The server answered with status ${answer.status}.`);
    byId("api").value = "completion"; // such a model continues texts
    showApi();
    answer = await ask("v1/completions", options());
  }
  view.heads(answer.headers);
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    view.take(event);
  }
  view.end();
}

/** The events of a stream, decoded. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/** One question and its answer in the conversation. */
class AnswerView {
  constructor(question) {
    this.text = "";
    this.usage = null;
    this.gaps = []; // seconds before each token but the first ones
    this.numTokens = this.numFirst = 0;
    this.body = made("p", { class: "text" });
    this.reasoning = made("p");
    this.reasoningBox = made("details", { hidden: "" }, made("summary", {}, "Reasoning"), this.reasoning);
    this.timings = made("div", { class: "timings" });
    this.node = made("article", { class: `message answer running ${isChat() ? "" : "completion"}`, "aria-label": "Answer" },
      this.reasoningBox, this.body, this.timings);
    this.timings.append(made("dl", {}, item("TTFT", "…")));
    byId("conversation").append(
      made("article", { class: `message user ${isChat() ? "" : "completion"}`, "aria-label": "Prompt" }, made("p", { class: "text" }, question)),
      this.node);
    this.scroll(true);
  }

  begin() { this.sentAt = performance.now(); }

  heads(headers) {
    this.engine = headers.get("x-moestro-engine");
    this.reason = headers.get("x-moestro-reason");
    this.requestId = headers.get("x-request-id");
  }

  /** Takes in a chunk of a chat or a completion. */
  take(chunk) {
    const now = performance.now(), choice = chunk.choices?.[0];
    this.usage = chunk.usage ?? this.usage;
    const delta = choice?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    const calls = (delta.tool_calls ?? []).map(({ function: called }) => (called?.name ? `\n${called.name} ` : "") + (called?.arguments ?? ""));
    const gained = (choice?.text ?? delta.content ?? "") + calls.join("");
    this.finish = choice?.finish_reason ?? this.finish;
    if (gained || thought) this.arrived(now, chunk.usage?.completion_tokens);
    if (thought) {
      this.reasoningBox.hidden = false;
      this.reasoning.append(thought);
    }
    if (gained) {
      this.text += gained;
      this.body.append(gained);
    }
    this.scroll(false);
  }

  /** Notes when tokens came: their number if the server counts them, otherwise one a chunk. */
  arrived(now, counted) {
    const num = Math.max(1, (counted ?? this.numTokens + 1) - this.numTokens);
    this.numTokens += num;
    if (this.firstAt === undefined) {
      this.firstAt = now;
      this.numFirst = num;
      this.showTimings();
    } else {
      const gap = (now - this.lastAt) / 1000 / num;
      for (let at = 0; at < num; at++) this.gaps.push(gap);
      if (now - (this.shownAt ?? 0) > 200) this.showTimings();
    }
    this.lastAt = now;
  }

  showTimings() {
    this.shownAt = performance.now();
    const sorted = [...this.gaps].sort((a, b) => a - b);
    const at = share => sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const num = this.usage?.completion_tokens ?? this.numTokens;
    const { prompt_tokens: prompt, prompt_tokens_details: tiers } = this.usage ?? {};
    const cached = tiers?.cached_tokens ? `, ${count(tiers.cached_tokens)} cached` : "";
    const copied = tiers?.host_cached_tokens ? `, ${count(tiers.host_cached_tokens)} of them from host memory` : "";
    const items = [
      item("TTFT", duration(this.firstAt === undefined ? null : (this.firstAt - this.sentAt) / 1000)),
      item("ITL", `${duration(at(0.5))}, P95 ${duration(at(0.95))}`),
      item("tokens/s", decimal(seconds > 0 ? (num - this.numFirst) / seconds : null)),
      item("tokens", count(num)),
    ];
    if (prompt !== undefined) items.push(item("prompt", `${count(prompt)}${cached}${copied}`));
    if (this.ending) items.push(item("end", this.ending));
    if (this.engine) items.push(item("engine", this.reason ? `${this.engine}: ${this.reason}` : this.engine, "why"));
    if (this.engine && this.requestId) items.push(item("request", this.requestId, "why"));
    this.timings.replaceChildren(made("dl", {}, ...items));
    if (this.gaps.length > 1) this.timings.append(bars(this.gaps, at(0.5)));
  }

  end(ending = this.finish ?? "") {
    this.ending = ending;
    this.node.classList.remove("running");
    this.node.dataset.ended = "";
    this.showTimings();
    this.scroll(false);
  }

  fail(message) {
    this.body.append(made("span", { class: "failed", role: "alert" }, (this.text ? "\n" : "") + message));
    this.end("error");
  }

  scroll(isForced) {
    const box = byId("conversation");
    if (isForced || box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
  }
}

const item = (name, value, kind) => made("div", { class: kind }, made("dt", {}, name), made("dd", {}, value));

/** A bar for the gap before each token; of long answers, for the longest of some neighbours. */
function bars(gaps, median) {
  const each = Math.ceil(gaps.length / MOST_BARS);
  const shown = Array.from({ length: Math.ceil(gaps.length / each) }, (_, at) => Math.max(...gaps.slice(at * each, (at + 1) * each)));
  const most = Math.max(...shown);
  const box = drawn("svg", {
    class: "gaps", viewBox: `0 0 ${Math.max(shown.length, 40)} 30`, preserveAspectRatio: "none", role: "img",
    "aria-label": `Gap before each token, ${duration(most)} at most`,
  });
  for (const [at, gap] of shown.entries()) {
    const height = Math.max(1, 30 * gap / most);
    box.append(drawn("rect", { x: at + 0.12, y: 30 - height, width: 0.76, height, class: gap > 3 * median ? "slow" : null }));
  }
  return box;
}
