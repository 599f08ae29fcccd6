"use strict";
// Primitives: elements, numbers as people read them, axes, tips. All text goes in as text, never as HTML.

window.addEventListener("error", (event) => report(event.message));
window.addEventListener("unhandledrejection", (event) => report(String(event.reason)));

function report(message) {
  const box = document.getElementById("errors");
  box.hidden = false;
  box.textContent += `This page has a fault: ${message} `;
}

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function make(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
const html = (tag, attributes, ...children) => make(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  make(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// ---- numbers ----------------------------------------------------------------------------------------------------

const UNITS = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];

function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 1) return `${digits(value * 1e3)} ms`;
  if (value < 60) return `${digits(value)} s`;
  const whole = Math.round(value);
  const [large, first, small, second] = UNITS.find((unit) => whole >= unit[0]);
  return `${Math.floor(whole / large).toLocaleString("en")} ${first} ${Math.floor((whole % large) / small)} ${second}`;
}

function digits(value, count = 3) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(count - 1).replace("e+", "e");
  return Number(value.toPrecision(Math.max(count, Math.ceil(Math.log10(size + 1))))).toLocaleString("en", { maximumFractionDigits: 6 });
}

function si(value, unit) {
  const prefixes = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const [scale, prefix] = prefixes.find((entry) => value >= entry[0]) || [1, ""];
  return `${digits(value / scale)} ${prefix}${unit}`;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** The unit in which an axis of seconds is written. */
function timeAxis(longest) {
  const [scale, name] = [[86400, "days"], [3600, "hours"], [60, "minutes"], [1, "seconds"]].find(([unit]) => longest >= 2 * unit) || [1e-3, "milliseconds"];
  return { scale, title: `${data.time} (${name})` };
}

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.72);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, k) => Number(((first + k) * step).toPrecision(12)));
}

/** Round numbers on a logarithmic axis: a few per decade, or one for several. */
function decades(low, high) {
  const factors = high / low > 100 ? [1] : [1, 2, 5], step = Math.ceil(Math.log10(high / low) / 5);
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  return Array.from({ length: last - first + 1 }, (_, k) => (k % step ? [] : factors.map((factor) => factor * 10 ** (first + k)))).flat()
    .filter((tick) => tick >= low && tick <= high);
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  return low === high ? [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2] : [low, high];
}

// ---- frames -----------------------------------------------------------------------------------------------------

let printWidth = 0; // while printing, charts have a width of their own

/** An SVG with axes: `x` and `y` are {low, high, title, scale, write}; sx and sy turn values into pixels. */
function frame(host, { label, height, x, y, left = 46, right = 10, bottom = 38, top = 10, interactive = false }) {
  const paper = printWidth && host.closest(".small") ? printWidth / 2.2 : printWidth;
  const width = Math.max(240, paper || host.clientWidth || 640);
  const canvas = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, tabindex: interactive ? 0 : null });
  const sx = (value) => left + ((value - x.low) / (x.high - x.low)) * (width - left - right);
  const sy = (value) => height - bottom - ((value - y.low) / (y.high - y.low)) * (height - bottom - top);
  const scale = x.scale || 1;
  const back = svg("g", { "aria-hidden": "true" });
  for (const tick of x.ticks || ticks(x.low / scale, x.high / scale, Math.max(4, (width - left) / 90))) {
    const at = sx(tick * scale);
    back.append(svg("line", { class: "grid", x1: at, x2: at, y1: height - bottom, y2: height - bottom + 4 }),
      svg("text", { x: at, y: height - bottom + 17, "text-anchor": "middle" }, (x.write || digits)(tick)));
  }
  if (x.title) back.append(svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, x.title));
  if (!y.bare) {
    for (const tick of y.ticks || ticks(y.low, y.high, Math.max(3, (height - bottom) / 45))) {
      if (y.whole && !Number.isInteger(tick)) continue;
      back.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: sy(tick), y2: sy(tick) }),
        svg("text", { x: left - 6, y: sy(tick) + 4, "text-anchor": "end" }, (y.write || digits)(tick)));
    }
  }
  canvas.append(back);
  host.replaceChildren(canvas);
  return { canvas, sx, sy, width, height, left, right, top, bottom, host,
    value: (pixel) => x.low + ((pixel - left) / (width - left - right)) * (x.high - x.low) };
}

/** A line through x and y that breaks where y is null; stepped: each value holds until the next x. */
function linePath(f, xs, ys, stepped = false) {
  let path = "", pen = false;
  ys.forEach((value, k) => {
    if (value === null) { pen = false; return; }
    path += `${pen ? "L" : "M"}${f.sx(xs[k]).toFixed(1)} ${f.sy(value).toFixed(1)}`;
    if (stepped) path += `H${f.sx(xs[k + 1]).toFixed(1)}`;
    pen = true;
  });
  return path;
}

/** The area between two lines over x, as far as both are known. */
function bandPath(f, xs, lows, highs) {
  const known = xs.map((_, k) => k).filter((k) => lows[k] !== null && highs[k] !== null);
  if (!known.length) return "";
  const back = [...known].reverse();
  const [x, rx] = [known, back].map((ks) => ks.map((k) => xs[k]));
  return `${linePath(f, x, known.map((k) => highs[k]))}L${linePath(f, rx, back.map((k) => lows[k])).slice(1)}Z`;
}

const box = (x, y, width, height) => `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}h${(-width).toFixed(1)}z`;

/** A small sample of a colour, as a line with its dash or as a square. */
function swatch(colour, dash) {
  const mark = dash === undefined
    ? svg("rect", { width: 12, height: 12, y: 1, rx: 2, fill: colour, class: colour ? null : "absent" })
    : svg("line", { x1: 0, x2: 22, y1: 7, y2: 7, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash });
  return svg("svg", { width: dash === undefined ? 12 : 22, height: 14, "aria-hidden": "true", class: "swatch" }, mark);
}

// ---- tips -------------------------------------------------------------------------------------------------------

/** Show what `describe(px, py)` returns ([heading, ...lines]; a line is text, or [swatch, text]) beside the pointer. */
function tips(f, describe, { ruler = false, keys = false } = {}) {
  const tip = html("div", { class: "tip", role: "status", hidden: "" });
  const line = ruler ? svg("line", { class: "ruler", y1: f.top, y2: f.height - f.bottom, visibility: "hidden" }) : null;
  if (line) f.canvas.append(line);
  f.host.append(tip);
  const hide = () => { tip.hidden = true; if (line) line.setAttribute("visibility", "hidden"); };
  const show = (px, py) => {
    const inside = px >= f.left - 1 && px <= f.width - f.right + 1;
    const content = inside ? describe(px, py) : null;
    if (!content) { hide(); return; }
    const [heading, ...lines] = content;
    tip.replaceChildren(html("b", {}, heading), ...lines.map((entry) => html("div", {}, ...[].concat(entry))));
    tip.hidden = false;
    if (line) { line.setAttribute("x1", px); line.setAttribute("x2", px); line.setAttribute("visibility", "visible"); }
    const zoom = f.host.clientWidth / f.width;
    const leftSide = px * zoom + 16 + tip.offsetWidth > f.host.clientWidth;
    tip.style.left = `${Math.max(0, leftSide ? px * zoom - tip.offsetWidth - 14 : px * zoom + 14)}px`;
    tip.style.top = `${Math.max(0, Math.min(py * zoom + 10, f.host.clientHeight - tip.offsetHeight))}px`;
  };
  f.canvas.addEventListener("pointermove", (event) => {
    const bounds = f.canvas.getBoundingClientRect();
    show(((event.clientX - bounds.left) * f.width) / bounds.width, ((event.clientY - bounds.top) * f.height) / bounds.height);
  });
  f.canvas.addEventListener("pointerleave", hide);
  if (!keys) return;
  let at = (f.left + f.width - f.right) / 2;
  f.canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    at = Math.min(f.width - f.right, Math.max(f.left, at + (step * (f.width - f.left - f.right)) / 60));
    show(at, f.top);
  });
  f.canvas.addEventListener("blur", hide);
}

/** The index of the sorted value nearest to `value`. */
function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle; else low = middle;
  }
  return value - sorted[low] <= sorted[high] - value ? low : high;
}
