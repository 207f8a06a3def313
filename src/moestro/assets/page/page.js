// Starts the page: its tabs, and the loops that read figures while the page is seen.

import { loadModels, startChat } from "./chat.js";
import { learnTokenTimes, readDecisions, startDecisions } from "./decisions.js";
import { byId, setText } from "./dom.js";
import { readAddresses, showEngines } from "./engines.js";
import { showExperts, startExperts } from "./experts.js";
import { History } from "./figures.js";
import { changeKey, plane, program, read } from "./server.js";

const FIGURES_MS = 1000, EXPERTS_EVERY = 5, DECISIONS_MS = 2000;
const isRoute = program === "route", isOperators = plane === "operators";
const VIEWS = isOperators ? ["engines", "decisions"] : ["chat", "engines"];

const history = new History();
let view = VIEWS[0];
let numReads = 0;

function start() {
  setText(byId("program"), program + (isOperators ? ", operators" : ""));
  document.title = `Moestro ${program}${isOperators ? ", operators" : ""}`;
  for (const name of VIEWS) {
    byId(`tab-${name}`).hidden = false;
    byId(`tab-${name}`).addEventListener("click", () => open(name));
  }
  document.querySelector("[role=tablist]").addEventListener("keydown", moveTab);
  addEventListener("hashchange", () => open(location.hash.slice(1)));
  byId("key-button").addEventListener("click", () => changeKey().then(tick).catch(() => {}));
  if (!isOperators) startChat();
  startExperts();
  startDecisions();
  open(location.hash.slice(1) || view, { isFirst: true });
  repeat(tick, FIGURES_MS);
  if (isOperators) repeat(() => view === "decisions" && readDecisions(), DECISIONS_MS);
}

// --- tabs

function open(name, { isFirst = false } = {}) {
  if (!VIEWS.includes(name)) name = VIEWS[0];
  view = name;
  for (const each of VIEWS) {
    const tab = byId(`tab-${each}`), isOpen = each === name;
    tab.setAttribute("aria-selected", isOpen);
    tab.tabIndex = isOpen ? 0 : -1;
    byId(each).hidden = !isOpen;
  }
  if (location.hash.slice(1) !== name && !(isFirst && name === VIEWS[0])) window.history.replaceState(null, "", `#${name}`);
  if (name === "chat" && isFirst && matchMedia("(pointer: fine)").matches) byId("prompt").focus();
  numReads = 0; // the load of experts comes with the first figures
  if (!isFirst) refresh();
}

function moveTab(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const to = step ? VIEWS[(VIEWS.indexOf(view) + step + VIEWS.length) % VIEWS.length] : { Home: VIEWS[0], End: VIEWS.at(-1) }[event.key];
  if (!to) return;
  event.preventDefault();
  open(to);
  byId(`tab-${to}`).focus();
}

// --- data

/** Calls a function again and again, with a pause between two calls; not while the page is hidden. */
async function repeat(work, pauseMs) {
  for (;;) {
    if (!document.hidden) await Promise.resolve().then(work).catch(error => showState("bad", error.message));
    await new Promise(resolve => setTimeout(resolve, pauseMs));
  }
}

const refresh = () => (view === "decisions" ? readDecisions() : tick()).catch(error => showState("bad", error.message));

async function tick() {
  const withExperts = view === "engines" && numReads++ % EXPERTS_EVERY === 0;
  const sample = await read(`statistics${withExperts ? "?experts=true" : ""}`);
  history.add(sample);
  learnTokenTimes(sample);
  if (withExperts && isOperators) await readAddresses();
  showServer(sample);
  if (view === "engines") {
    showEngines(history);
    if (withExperts) showExperts(sample);
  }
  if (!isOperators) await loadModels();
}

function showServer(sample) {
  setText(byId("program"), `${program} ${sample.version}${isOperators ? ", operators" : ""}`);
  const { length } = sample.engines, up = sample.engines.filter(engine => engine.condition === "up").length;
  showState(up === length ? "good" : up ? "warn" : "bad", `${up} of ${length} ${length === 1 ? "engine" : "engines"} up`);
  const port = isOperators ? sample.clients_port : sample.operators_port;
  const link = byId("other-plane");
  link.hidden = !port;
  if (!port) return;
  link.href = `${location.protocol}//${location.hostname}:${port}/`;
  setText(link, isOperators ? "Chat" : isRoute ? "Decisions and drains" : "Decisions");
  link.title = `On port ${port}${isOperators ? "" : ", which may be open on the server's own machine alone"}`;
}

function showState(kind, text) {
  byId("state").className = kind;
  setText(byId("state-text"), text);
}

start();
