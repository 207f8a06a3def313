// The engines now, and in the last minutes: tiles of the whole, and a row of each engine.

import { byId, count, decimal, duration, made, meter, percent, setText, sparkline } from "./dom.js";
import { sum } from "./figures.js";
import { allowDialog, plane, program, read } from "./server.js";

const RECENT_S = 10, MINUTE_S = 60;
const isRoute = program === "route";
// The engines of a router count all hits themselves; answers name them only where engine and client want it.
const counts = engine => isRoute && Number.isInteger(engine.load.num_queried_tokens) && Number.isInteger(engine.load.num_hit_tokens);
const cached = engine => counts(engine) ? engine.load.num_hit_tokens : engine.num_cached_tokens;
const prompts = engine => counts(engine) ? engine.load.num_queried_tokens : engine.num_prompt_tokens;
const running = engine => engine.load.num_running ?? (isRoute ? engine.num_in_flight : null);

/** Shows the whole, and each engine. */
export function showEngines(history) {
  const now = history.last;
  if (!now) return;
  setText(byId("policy"), [now.mode && `mode ${now.mode}`, now.engines.length > 1 || isRoute ? `routed by ${now.policy}` : ""].filter(Boolean).join(", "));
  showTiles(history);
  showTable(history);
}

// --- tiles

const TILES = [
  {
    name: "Requests", is: now => [count(now.num_requests), isRoute ? "in flight" : "under way"], series: h => h.series(s => s.num_requests),
    detail: now => `${count(sum(now, running))} run, ${count(sum(now, e => e.load.num_waiting))} wait`,
  },
  {
    name: "Tokens out", is: (_, h) => [decimal(h.rate(s => sum(s, e => e.num_generated_tokens), RECENT_S)), "/s"],
    series: h => h.rates(s => sum(s, e => e.num_generated_tokens)),
    detail: (_, h) => isRoute ? "as the engines report" : `in ${decimal(h.rate(s => sum(s, prompts), RECENT_S))}/s`,
  },
  {
    name: "Decisions", isShown: isRoute, is: (_, h) => [decimal(h.rate(s => sum(s, e => e.num_requests), RECENT_S)), "/s"],
    series: h => h.rates(s => sum(s, e => e.num_requests)),
    detail: (_, h) => `${count(h.gained(s => s.num_retried, MINUTE_S))} retried in a minute`,
  },
  latency(isRoute ? "First byte" : "TTFT", s => s.first_token_s),
  { ...latency("ITL", s => s.gap_s), isShown: !isRoute },
  {
    name: "Prefix hits", is: (_, h) => {
      const all = h.gained(s => sum(s, prompts), MINUTE_S);
      return [all ? percent(h.gained(s => sum(s, cached), MINUTE_S) / all) : "–", ""];
    },
    series: h => h.rates(s => sum(s, cached)), detail: (_, h) => {
      const host = h.gained(s => sum(s, e => e.load.num_host_hit_tokens), MINUTE_S);
      return `of tokens in a minute${host ? `, ${percent(host / h.gained(s => sum(s, prompts), MINUTE_S))} from host memory` : ""}`;
    },
  },
  {
    name: "KV in use", is: now => [percent(mean(now)), ""], series: h => h.series(mean), most: 1,
    detail: now => now.engines.length > 1 ? `fullest ${percent(Math.max(...now.engines.map(e => e.load.kv_usage ?? 0)))}` : "of the blocks",
  },
  {
    name: "Preemptions", isShown: !isRoute, is: (_, h) => [count(h.gained(s => sum(s, e => e.load.num_preemptions), MINUTE_S)), "in a minute"],
    series: h => h.rates(s => sum(s, e => e.load.num_preemptions)), detail: now => `${count(sum(now, e => e.load.num_preemptions))} in all`,
  },
  {
    name: "Overload", is: (_, h) => [count(h.gained(s => s.num_overload, MINUTE_S)), "in a minute"],
    series: h => h.rates(s => s.num_overload), detail: now => `${count(now.num_overload)} found no room in all`,
  },
  {
    name: "Client errors", is: (_, h) => [count(h.gained(s => s.num_client_errors, MINUTE_S)), "in a minute"],
    series: h => h.rates(s => s.num_client_errors), detail: now => `${count(now.num_client_errors)} in all`,
  },
];

function latency(name, of) {
  return {
    name, is: (_, h) => {
      const found = h.percentiles(of, [0.5], MINUTE_S);
      return [duration(found?.[0]), "median"];
    },
    series: h => h.samples.slice(1).map((sample, at) => meanOf(of(h.samples[at]), of(sample))),
    detail: (_, h) => {
      const found = h.percentiles(of, [0.95, 0.99], MINUTE_S);
      return found ? `P95 ${duration(found[0])}, P99 ${duration(found[1])}` : "none in the last minute";
    },
  };
}

/** The mean of the durations between two samples, by the middles of their buckets; null if there were none. */
function meanOf(old, now) {
  if (!old || !now) return null;
  let num = 0, total = 0;
  now.counts.forEach((value, at) => {
    const gained = Math.max(0, value - (old.counts[at] ?? 0));
    num += gained;
    total += gained * (at < now.bounds.length ? ((at ? now.bounds[at - 1] : 0) + now.bounds[at]) / 2 : now.bounds.at(-1));
  });
  return num ? total / num : null;
}

const mean = sample => {
  const known = sample.engines.map(e => e.load.kv_usage).filter(value => value !== undefined);
  return known.length ? known.reduce((all, value) => all + value, 0) / known.length : null;
};

function showTiles(history) {
  const now = history.last;
  byId("tiles").replaceChildren(...TILES.filter(tile => tile.isShown ?? true).map(tile => {
    const [value, unit] = tile.is(now, history);
    return made("div", { class: "tile" }, made("span", { class: "name" }, tile.name),
      made("span", { class: "value" }, value, " ", made("small", {}, unit)),
      made("span", { class: "detail" }, tile.detail(now, history)), sparkline(tile.series(history), tile.most));
  }));
}

// --- table

const GOOD = new Set(["up"]), WAITING = new Set(["draining", "suspected", "probing", "busy", "unchecked"]);
const known = (history, of) => history.last.engines.some(engine => of(engine) !== null && of(engine) !== undefined);

// Columns: heading, function (engine, history) -> content, and whether any engine has it.
const COLUMNS = [
  ["Engine", engine => engine.name, () => true, "name"],
  ["State", state, () => true],
  [isRoute ? "In flight" : "Running", e => count(isRoute ? e.num_in_flight : e.load.num_running), () => true, "number"],
  ["Running", e => count(e.load.num_running), h => isRoute && known(h, e => e.load.num_running), "number"],
  ["Waiting", e => count(e.load.num_waiting), h => known(h, e => e.load.num_waiting), "number"],
  ["To prefill", e => count(e.load.queued_prefill_tokens), h => known(h, e => e.load.queued_prefill_tokens), "number"],
  ["KV", e => meter(e.load.kv_usage), h => known(h, e => e.load.kv_usage)],
  ["Prefix hits", (e, h) => ratio(h, e.name), () => true, "number"],
  ["Tokens/s", (e, h) => decimal(h.rate(s => own(s, e.name)?.num_generated_tokens, RECENT_S)), h => known(h, e => e.num_generated_tokens), "number"],
  ["Requests", e => count(e.num_requests), () => true, "number"],
  ["Preemptions", e => count(e.load.num_preemptions), () => !isRoute, "number"],
  ["Expert pressure", e => decimal(e.load.expert_pressure), h => known(h, e => e.load.expert_pressure), "number"],
  [isRoute ? "In flight, last minutes" : "Running, last minutes", (e, h) => sparkline(h.series(s => {
    const then = own(s, e.name);
    return then ? running(then) : null;
  })), () => true, "wide"],
];

const own = (sample, name) => sample.engines.find(engine => engine.name === name);

function ratio(history, name) {
  const of = total => history.gained(sample => own(sample, name) && total(own(sample, name)), MINUTE_S);
  const all = of(prompts);
  return all ? percent(of(cached) / all) : "–";
}

function state(engine) {
  const kind = GOOD.has(engine.condition) ? "good" : WAITING.has(engine.condition) ? "warn" : "bad";
  const breaker = engine.breaker && engine.breaker !== "closed" && engine.breaker !== engine.condition ? `, breaker ${engine.breaker}` : "";
  return made("span", { class: `badge ${kind}` }, made("span", { class: "dot", "aria-hidden": "true" }), engine.condition + breaker);
}

// --- rows, and what operators do with an engine

const canDrain = isRoute && plane === "operators";
const rows = new Map(); // by engine; a row keeps its button, and the button keeps the focus
let addresses = new Map(); // by engine, where the operators' port tells them

/** Learns the addresses of the engines, and why some are unreachable. */
export async function readAddresses() {
  if (canDrain) addresses = new Map((await read("admin/engines")).engines.map(engine => [engine.name, engine]));
}

function showTable(history) {
  const columns = COLUMNS.filter(([, , isShown]) => isShown(history));
  const head = byId("engine-table").tHead.rows[0];
  const names = [...columns.map(([name]) => name), ...(canDrain ? ["Action"] : [])];
  if ([...head.cells].map(cell => cell.textContent).join() !== names.join()) {
    head.replaceChildren(...names.map((name, at) => made("th", { scope: "col", class: columns[at]?.[3] }, name)));
  }
  const { engines } = history.last;
  for (const [name, row] of rows) {
    if (!own(history.last, name)) { row.node.remove(); rows.delete(name); }
  }
  for (const engine of engines) {
    if (!rows.has(engine.name)) rows.set(engine.name, newRow(engine.name));
    const { node, action } = rows.get(engine.name);
    for (const cell of [...node.cells]) if (cell !== action) cell.remove();
    node.prepend(...columns.map(([name, of, , kind]) => made("td", { class: kind, "data-label": name }, of(engine, history))));
    if (action) showAction(action.firstChild, engine);
    showAddress(node.cells, addresses.get(engine.name));
  }
}

function newRow(name) {
  const node = made("tr");
  const action = canDrain ? made("td", { "data-label": "Action" }, made("button", { type: "button", class: "quiet", onclick: () => turn(name) })) : null;
  if (action) node.append(action);
  byId("engine-table").tBodies[0].append(node);
  return { node, action };
}

function showAddress([name, condition], address) {
  if (!address) return;
  if (address.url !== `http://${address.name}`) name.append(made("div", { class: "note" }, address.url));
  if (address.cause && address.condition !== "up") condition.append(made("div", { class: "note" }, address.cause));
}

function showAction(button, engine) {
  const isDraining = engine.condition === "draining";
  button.dataset.action = isDraining ? "resume" : "drain";
  setText(button, isDraining ? "Resume" : "Drain");
  button.setAttribute("aria-label", `${button.textContent} ${engine.name}`);
}

/** Drains an engine, or sends it requests again. */
async function turn(name) {
  const button = rows.get(name).action.firstChild, { action } = button.dataset;
  allowDialog();
  button.disabled = true;
  try {
    const { condition } = await read(`admin/engines/${encodeURIComponent(name)}/${action}`, { method: "POST" });
    setText(byId("engine-note"), `${name} is ${condition}.`);
    showAction(button, { name, condition });
  } catch (error) {
    setText(byId("engine-note"), error.message);
  } finally {
    button.disabled = false;
    button.focus();
  }
}
