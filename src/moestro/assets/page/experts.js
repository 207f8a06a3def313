// The load of experts by layer, as a heat map: a row for each layer, a column for each expert.

import { byId, count, decimal, setText } from "./dom.js";

const HOTTEST = 3; // times the layer's mean; all above has the same colour
const LABEL_PX = 34; // of the layers' numbers
let shown = null; // the answer's `experts`
let cursor = null; // [row, column]

export function startExperts() {
  const map = byId("heat-map");
  map.addEventListener("pointermove", event => { cursor = cellAt(event); draw(); });
  map.addEventListener("keydown", move);
  map.addEventListener("focus", () => { cursor ??= [0, 0]; draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(draw).observe(map.parentElement);
}

/** Shows the load of experts; `experts` is null while nothing was counted. */
export function showExperts(sample) {
  byId("experts").hidden = !sample.has_experts;
  if (!sample.has_experts) return;
  shown = sample.experts;
  byId("heat-map").hidden = !shown;
  byId("experts").querySelector(".legend").hidden = !shown;
  if (!shown) {
    setText(byId("expert-summary"), "");
    setText(byId("heat-readout"), "No engine has counted a token at its experts yet.");
    return;
  }
  const balance = shown.relative.map(layer => 1 / Math.max(...layer, 1));
  const worst = balance.indexOf(Math.min(...balance));
  setText(byId("expert-summary"), `${shown.layers.length} layers × ${shown.relative[0].length} experts, window of ${count(shown.num_steps)} steps; `
    + `mean over largest ${decimal(balance.reduce((a, b) => a + b, 0) / balance.length)}, least ${decimal(balance[worst])} in layer ${shown.layers[worst]}`);
  draw();
}

function move(event) {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const step = steps[event.key];
  if (!step || !shown) return;
  event.preventDefault();
  const [row, column] = cursor ?? [0, 0];
  cursor = [(row + step[0] + shown.relative.length) % shown.relative.length, (column + step[1] + shown.relative[0].length) % shown.relative[0].length];
  draw();
}

function cellAt(event) {
  if (!shown) return null;
  const box = event.target.getBoundingClientRect(), numRows = shown.relative.length, numColumns = shown.relative[0].length;
  const row = Math.floor((event.clientY - box.top) / box.height * numRows);
  const column = Math.floor((event.clientX - box.left - LABEL_PX) / (box.width - LABEL_PX) * numColumns);
  return row >= 0 && row < numRows && column >= 0 && column < numColumns ? [row, column] : null;
}

function draw() {
  const map = byId("heat-map");
  if (!shown || !map.clientWidth) return;
  const { relative } = shown, colours = palette();
  const cell = (map.clientWidth - LABEL_PX) / relative[0].length;
  const height = Math.max(7, Math.min(30, Math.round(cell * 0.7)));
  const context = sized(map, map.clientWidth, height * relative.length);
  const gap = cell > 9 ? 1.5 : cell > 4 ? 0.5 : 0;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  const labelled = Math.ceil(13 / height);
  relative.forEach((layer, row) => {
    context.fillStyle = colours.soft;
    if (row % labelled === 0) context.fillText(`${shown.layers[row]}`, 2, (row + 0.5) * height);
    layer.forEach((value, column) => {
      context.fillStyle = colours.of(value);
      context.fillRect(LABEL_PX + column * cell, row * height, cell - gap, height - gap);
    });
  });
  if (cursor) {
    context.strokeStyle = colours.text;
    context.lineWidth = 2;
    context.strokeRect(LABEL_PX + cursor[1] * cell - 1, cursor[0] * height - 1, cell + 2 - gap, height + 2 - gap);
  }
  const scale = byId("heat-scale");
  const bar = sized(scale, scale.clientWidth, 10);
  for (let x = 0; x < scale.clientWidth; x++) { bar.fillStyle = colours.of(HOTTEST * x / scale.clientWidth); bar.fillRect(x, 0, 1, 10); }
  readOut();
}

function sized(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

function readOut() {
  const map = byId("heat-map");
  map.setAttribute("aria-label", `Load of ${shown.relative[0].length} experts in ${shown.layers.length} layers`);
  if (!cursor) return setText(byId("heat-readout"), "Point at a cell, or focus the map and use the arrow keys.");
  const [row, column] = cursor, value = shown.relative[row]?.[column];
  if (value === undefined) return;
  setText(byId("heat-readout"), `Layer ${shown.layers[row]}, expert ${column}: ${decimal(value)} × the layer's mean, ${decimal(value * shown.tokens[row])} tokens a step`);
}

/** Colours from cool (no load) over neutral (the mean) to hot. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const channels = name => style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map(part => parseInt(part, 16));
  const [low, mid, high] = ["--heat-low", "--heat-mid", "--heat-high"].map(channels);
  const between = (from, to, share) => `rgb(${from.map((value, at) => Math.round(value + (to[at] - value) * share)).join()})`;
  return {
    of: value => value < 1 ? between(low, mid, value) : between(mid, high, Math.min(1, (value - 1) / (HOTTEST - 1))),
    text: style.getPropertyValue("--text"), soft: style.getPropertyValue("--soft"),
  };
}
