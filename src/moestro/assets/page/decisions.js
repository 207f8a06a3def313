// The decisions of the router for the newest requests: the engine, the score of each engine, the reason and the outcome.

import { byId, count, decimal, made, meter, milliseconds, setText } from "./dom.js";
import { read } from "./server.js";

const NUM = 100;
const nodes = new Map(); // by request; an open one stays open
let traces = [];
let tokenTimes = new Map(); // by engine, seconds to compute a prompt token

export function startDecisions() {
  byId("find").addEventListener("input", show);
}

/** Learns how long each engine takes for a prompt token, which gives delays their milliseconds. */
export function learnTokenTimes({ engines }) {
  tokenTimes = new Map(engines.filter(engine => engine.prompt_token_s).map(engine => [engine.name, engine.prompt_token_s]));
}

/** Reads the newest decisions, unless the list is paused. */
export async function readDecisions() {
  if (byId("pause").checked) return;
  ({ decisions: traces } = await read(`admin/decisions?limit=${NUM}`));
  show();
}

function show() {
  const wanted = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = traces.filter(trace => wanted.every(word => wordsOf(trace).includes(word)));
  const list = byId("decision-list"), kept = new Set(found.map(trace => trace.request_id));
  for (const [id, node] of nodes) if (!kept.has(id)) { node.remove(); nodes.delete(id); }
  list.querySelector(".empty")?.remove();
  found.forEach((trace, at) => {
    const node = nodeOf(trace);
    if (list.children[at] !== node) list.insertBefore(node, list.children[at] ?? null);
  });
  if (!found.length) list.append(made("p", { class: "empty" }, traces.length ? "No request matches." : "No request has been decided yet."));
  showShares(found);
  setText(byId("decision-count"), `${count(found.length)} of the newest ${count(traces.length)}`);
}

/** Shows how many of the decisions went to each engine, the most first. */
function showShares(found) {
  const numbers = new Map();
  for (const trace of found) numbers.set(last(trace).engine, (numbers.get(last(trace).engine) ?? 0) + 1);
  const sorted = [...numbers].sort(([a, most], [b, least]) => least - most || a.localeCompare(b));
  byId("decision-shares").replaceChildren(...sorted.map(([engine, number]) => made("div", { class: "share" },
    made("dt", {}, engine), made("dd", {}, meter(number / found.length, 1), made("span", { class: "note" }, count(number))))));
}

// --- scores

const NANOSECONDS = / in ns ([-+\d.e]+)/, TOKENS = "delay in prompt tokens";

/** A score or a difference of scores, in milliseconds where the policy counts time, or tokens that an engine computes. */
function scored(attempt, score, engine = attempt.engine) {
  if (NANOSECONDS.test(attempt.reason)) return milliseconds(score / 1e9);
  const seconds = tokenTimes.get(engine);
  return attempt.reason.includes(TOKENS) && seconds ? `${milliseconds(score * seconds)} (${decimal(score)} tokens)` : decimal(score);
}

function reasonOf(attempt) {
  const reason = attempt.reason.replace(NANOSECONDS, (_, score) => ` ${milliseconds(score / 1e9)}`);
  const seconds = tokenTimes.get(attempt.engine);
  return reason.includes(TOKENS) && seconds && attempt.score !== null
    ? reason.replace(/delay in prompt tokens [-+\d.e]+/, `delay ${milliseconds(attempt.score * seconds)} (${decimal(attempt.score)} prompt tokens)`) : reason;
}

/** The best candidate that was not chosen, with the distance of its score; empty without one. */
function runnerUp(attempt) {
  const other = attempt.candidates.find(each => each.engine !== attempt.engine && each.score !== null);
  if (!other || attempt.score === null) return "";
  const distance = other.score - attempt.score;
  return `then ${other.engine}${distance ? ` ${distance > 0 ? "+" : "−"}${scored(attempt, Math.abs(distance), other.engine)}` : ", equal"}`;
}

const last = trace => trace.attempts.at(-1);
const wordsOf = trace => [trace.request_id, trace.policy, trace.status ?? "running", ...trace.attempts.flatMap(each => [each.engine, each.reason, each.because])]
  .join(" ").toLowerCase();

/** The element of a trace: made once, and written again when the trace changes. */
function nodeOf(trace) {
  let node = nodes.get(trace.request_id);
  if (!node) {
    node = made("details", { class: "decision", ontoggle: () => fill(node) });
    node.append(made("summary"), made("div", { class: "inside" }));
    nodes.set(trace.request_id, node);
  }
  const version = `${trace.time} ${trace.attempts.length} ${trace.status} ${trace.seconds}`;
  node.trace = trace;
  if (node.version !== version) {
    node.version = version;
    node.firstChild.replaceChildren(...summaryOf(trace));
    fill(node);
  }
  return node;
}

const fill = node => node.open && node.lastChild.replaceChildren(...insideOf(node.trace));

function summaryOf(trace) {
  const attempt = last(trace), { engine, hit_tokens: hits } = attempt, reason = reasonOf(attempt), retries = trace.attempts.length - 1;
  const share = trace.prompt_tokens ? `${Math.round(100 * hits / trace.prompt_tokens)} % hit` : "";
  return [
    made("span", { class: "time" }, new Date(1000 * trace.time).toLocaleTimeString([], { hour12: false })),
    made("span", { class: "id", title: trace.request_id }, trace.request_id),
    made("span", { class: "engine" }, engine),
    made("span", { class: "reason", title: reason }, (retries ? `retried ${retries === 1 ? "once" : `${retries} times`}; ` : "") + reason),
    made("span", { class: "runner", title: runnerUp(attempt) }, runnerUp(attempt)),
    made("span", { class: "hits" }, share),
    outcome(trace),
  ];
}

function outcome(trace) {
  if (trace.status === null) return made("span", { class: "outcome" }, "running");
  return made("span", { class: `outcome ${trace.status < 400 ? "ok" : "failed"}` },
    `${trace.status === 499 ? "client left" : trace.status}, ${milliseconds(trace.seconds)}`);
}

function insideOf(trace) {
  const parts = trace.attempts.flatMap((attempt, at) => [
    made("h3", {}, `${at ? `Retry ${at}: ` : ""}to ${attempt.engine}: ${reasonOf(attempt)}`),
    ...(attempt.because ? [made("p", { class: "note" }, `because ${attempt.because}`)] : []),
    made("div", { class: "scroll" }, table(attempt, trace.prompt_tokens)),
    made("p", { class: "note" }, verdict(attempt)),
    ...Object.entries(attempt.not_compared ?? {}).map(([figure, engines]) =>
      made("p", { class: "note" }, `No engine was compared by ${figure}, which ${engines.join(", ")} had not reported.`)),
  ]);
  const usage = Object.entries(trace.usage).map(([name, value]) => `${count(value)} ${name.replaceAll("_", " ")}`).join(", ");
  const facts = [`request ${trace.request_id}`, `policy ${trace.policy}`, `${count(trace.prompt_tokens)} prompt tokens as the router counts them`, usage && `answered with ${usage}`];
  return [...parts, made("p", { class: "note" }, facts.filter(Boolean).join("; "))];
}

function verdict(attempt) {
  const more = attempt.num_candidates > attempt.candidates.length ? ` The best ${attempt.candidates.length} of ${attempt.num_candidates} engines are shown.` : "";
  if (attempt.regret === null) return `A lower score is better.${more}`;
  const text = attempt.regret > 0 ? `A filter, an affinity or a draw passed over an engine that is better by ${scored(attempt, attempt.regret)}.`
    : attempt.regret < 0 ? `The runner-up is worse by ${scored(attempt, -attempt.regret)}.` : "Another engine has the same score.";
  return `A lower score is better. ${text}${more}`;
}

function table(attempt, promptTokens) {
  const scores = attempt.candidates.map(each => each.score).filter(score => score !== null);
  const most = Math.max(...scores.map(Math.abs), 1e-12);
  const rows = attempt.candidates.map(each => {
    const fill = made("span", { class: "fill" });
    fill.style.width = `${100 * Math.abs(each.score ?? 0) / most}%`;
    const isChosen = each.engine === attempt.engine;
    return made("tr", { class: isChosen ? "chosen" : null },
      made("td", {}, isChosen ? `${each.engine} ✓` : each.engine),
      made("td", {}, each.score === null ? "no score" : made("span", { class: "score" }, made("span", { class: "track" }, fill), scored(attempt, each.score, each.engine))),
      made("td", { class: "number" }, `${count(each.hit_tokens)} of ${count(promptTokens)}${each.host_tokens ? `, ${count(each.host_tokens)} in host memory` : ""}`));
  });
  const head = ["Engine", "Score", "Expected hit tokens"].map((name, at) => made("th", { scope: "col", class: at === 2 ? "number" : null }, name));
  return made("table", {}, made("thead", {}, made("tr", {}, ...head)), made("tbody", {}, ...rows));
}
