// Elements and numbers. Text is always set as text, so that nothing that a model or a client writes becomes markup.

export const byId = id => document.getElementById(id);

/** Returns a new element. Attributes that are null are left out; `onclick` and the like are listeners. */
export function made(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Returns a new element of SVG. */
export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };

const NONE = "–";
const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** 1234 as 1,234, and from a million on 1.23M. */
export const count = value => value === null || value === undefined ? NONE : value < 1e6 ? plain.format(value) : short.format(value);

export const decimal = value => value === null || value === undefined ? NONE
  : value >= 100 ? count(value) : String(Number(value.toPrecision(value >= 10 ? 3 : 2)));

export const percent = value => value === null || value === undefined ? NONE : `${Number((100 * value).toPrecision(value >= 0.1 ? 3 : 2))} %`;

/** Seconds as milliseconds, so that numbers of one column compare. */
export const milliseconds = seconds => seconds === null || seconds === undefined ? NONE
  : `${seconds < 0.0095 ? Number((1000 * seconds).toPrecision(2)) : plain.format(1000 * seconds)} ms`;

/** Seconds in the unit that fits. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.0095) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  return seconds < 100 ? `${Number(seconds.toPrecision(3))} s` : `${Math.round(seconds / 60)} min`;
}

/** A line over its area, in a box of 100 × 28 that is stretched. `values` may have nulls. */
export function sparkline(values, most = Math.max(...values.map(value => value ?? 0), 1e-9)) {
  const step = 100 / Math.max(1, values.length - 1);
  const points = values.map((value, at) => `${(at * step).toFixed(2)},${(26 - 24 * Math.min(1, (value ?? 0) / most)).toFixed(2)}`);
  const box = drawn("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (points.length > 1) {
    box.append(drawn("path", { class: "under", d: `M0,28L${points.join("L")}L100,28Z` }), drawn("path", { d: `M${points.join("L")}` }));
  }
  return box;
}

/** A bar of a share from 0 to 1, with its number; above `fullAbove` it has the colour of a warning. */
export function meter(share, fullAbove = 0.9) {
  if (share === null || share === undefined) return made("span", {}, NONE);
  const fill = made("span", { class: "fill" });
  fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return made("span", { class: share > fullAbove ? "meter full" : "meter" }, made("span", { class: "track" }, fill), percent(share));
}
