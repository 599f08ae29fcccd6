// One run: its plan, its blocks, one round of it, its estimates, its fleet.

const GAP = 3;
let detail = data.details[0];
const colourOf = () => data.series[detail.series].colour;
const phaseColour = (key) => data.phases.find((phase) => phase.key === key).colour;
const clip = (name, length = 13) => (name.length > length ? `${name.slice(0, length - 1)}…` : name);
const nameSpace = (names, host) => Math.min(host.clientWidth < 500 ? 84 : 110, 16 + 7 * Math.max(3, ...names.map((name) => Math.min(13, name.length))));

/** The run's shallowest cut light, its deepest dark, evenly told apart: anchors of ColorBrewer's YlGnBu. */
function depthColour(cut, [shallowest, deepest]) {
  const anchors = [[199, 233, 160], [88, 193, 190], [33, 145, 192], [34, 94, 168], [16, 46, 128]];
  const at = deepest > shallowest ? ((cut - shallowest) / (deepest - shallowest)) * (anchors.length - 1) : 2;
  const low = Math.min(anchors.length - 2, Math.floor(at));
  return `rgb(${anchors[low].map((value, k) => Math.round(value + (anchors[low + 1][k] - value) * (at - low))).join(",")})`;
}

function readCuts() {
  const plan = detail.plan;
  if (!plan.values) {
    const raw = Uint8Array.from(atob(plan.cuts), (letter) => letter.charCodeAt(0));
    plan.values = plan.bytes === 2 ? Uint16Array.from({ length: raw.length / 2 }, (_, k) => raw[2 * k] + 256 * raw[2 * k + 1]) : raw;
  }
  return plan.values;
}

function drawPlan() {
  const { plan } = detail;
  const end = plan.edges[plan.edges.length - 1] || 1;
  const left = nameSpace(plan.rows, byId("chart-cuts"));
  const x = { low: 0, high: end, ...timeAxis(end) };
  const highest = Math.max(1, ...plan.interval.map((value) => value || 0), ...plan.deepest);
  const f = frame(byId("chart-interval"), {
    label: `Interval I and deepest cut over ${data.time}, ${detail.label}`, height: 170, left, bottom: 20, interactive: true,
    x: { ...x, title: "" }, y: { low: 0, high: highest * 1.05, whole: true },
  });
  f.canvas.append(
    svg("path", { fill: "none", stroke: colourOf(), "stroke-width": 2.2, d: linePath(f, plan.edges, plan.interval, true) }),
    svg("path", { class: "ink", "stroke-width": 1.2, "stroke-dasharray": "4 3", d: linePath(f, plan.edges, plan.deepest, true) }));
  const column = (px) => Math.min(plan.block.length - 1, Math.max(0, plan.edges.findIndex((edge) => edge > f.value(px)) - 1));
  const often = (k) => (plan.interval[k] === null ? "never averaged" : `averaged every ${plan.interval[k]} rounds`);
  tips(f, (px) => [`block ${plan.block[column(px)]}, ${seconds(f.value(px))}`, often(column(px)), `deepest cut ${plan.deepest[column(px)]}`], { ruler: true, keys: true });
  drawCuts(x, left, column, often);
}

function drawCuts(x, left, column, often) {
  const { plan } = detail;
  const values = readCuts();
  const columns = plan.block.length;
  const row = Math.max(5, Math.min(18, 420 / plan.rows.length));
  const f = frame(byId("chart-cuts"), {
    label: `Cut of every device over ${data.time}, ${detail.label}; one row per device`, height: row * plan.rows.length + 44, left, top: 4,
    x, y: { low: 0, high: 1, bare: true },
  });
  const paths = new Map();
  plan.rows.forEach((name, r) => {
    for (let from = 0, to; from < columns; from = to) { // columns with equal cuts are one box
      const cut = values[r * columns + from];
      for (to = from + 1; to < columns && values[r * columns + to] === cut;) to += 1;
      const [start, stop] = [f.sx(plan.edges[from]), f.sx(plan.edges[to])];
      paths.set(cut, (paths.get(cut) || "") + box(start, 4 + r * row, stop - start, row - (row > 8 ? 1 : 0)));
    }
    if (r % Math.ceil(11 / row) === 0) f.canvas.append(svg("text", { x: left - 6, y: 4 + r * row + row / 2 + 4, "text-anchor": "end" }, clip(name)));
  });
  const cuts = [...paths.keys()].sort((a, b) => a - b);
  const range = [cuts.find((cut) => cut > 0), cuts[cuts.length - 1]];
  const colour = (cut) => (cut ? depthColour(cut, range) : null);
  for (const cut of cuts) f.canvas.append(svg("path", { d: paths.get(cut), fill: colour(cut), class: cut ? "crisp" : "crisp absent" }));
  tips(f, (px, py) => {
    const r = Math.floor((py - 4) / row);
    if (r < 0 || r >= plan.rows.length) return null;
    const cut = values[r * columns + column(px)];
    return [plan.rows[r], `block ${plan.block[column(px)]}, ${seconds(f.value(px))}`, cut ? `cut after layer ${cut} (${detail.layers[cut - 1]})` : "not there", often(column(px))];
  });
  byId("cut-keys").replaceChildren(html("span", {}, swatch(colourOf(), ""), "interval I"), deepestKey(),
    ...cuts.map((cut) => html("span", {}, swatch(colour(cut)), cut ? `${cut} ${detail.layers[cut - 1]}` : "not there")));
  const some = plan.rows.length < plan.devices ? ` ${plan.rows.length} of ${plan.devices} devices are shown.` : "";
  byId("cut-note").textContent = `Above, rounds between two averagings, and the deepest cut; below, after which layer every device’s model is cut.${some}`;
}

function deepestKey() {
  const line = svg("line", { class: "ink", x2: 22, y1: 7, y2: 7, "stroke-width": 1.4, "stroke-dasharray": "4 3" });
  return html("span", {}, svg("svg", { width: 22, height: 14, "aria-hidden": "true" }, line), "deepest cut");
}

function drawBlocks() {
  const { blocks } = detail;
  const count = blocks.block.length;
  const totals = blocks.block.map((_, k) => usedPhases.reduce((sum, phase) => sum + blocks.seconds[phase.key][k], 0));
  const f = frame(byId("chart-blocks"), {
    label: `Seconds by phase of every block, ${detail.label}`, height: 260, left: 54,
    x: { low: 0, high: count, ticks: [], title: "block" },
    y: { low: 0, high: Math.max(1e-9, ...totals, ...blocks.predicted) * 1.03, write: (v) => (v ? seconds(v) : "0") },
  });
  const base = blocks.block.map(() => 0);
  for (const phase of usedPhases) {
    let path = "";
    blocks.seconds[phase.key].forEach((value, k) => {
      const width = f.sx(k + 1) - f.sx(k);
      if (value > 0) path += box(f.sx(k), f.sy(base[k] + value), width * 0.86, f.sy(base[k]) - f.sy(base[k] + value));
      base[k] += value;
    });
    f.canvas.append(svg("path", { d: path, fill: phase.colour }));
  }
  let guessed = "";
  blocks.predicted.forEach((value, k) => { if (value !== null) guessed += `M${f.sx(k).toFixed(1)} ${f.sy(value).toFixed(1)}H${f.sx(k + 0.86).toFixed(1)}`; });
  f.canvas.append(svg("path", { class: "ink", "stroke-width": 1.6, d: guessed }));
  for (const k of new Set(ticks(0, count - 1, f.width / 90).map(Math.round))) {
    f.canvas.append(svg("text", { x: f.sx(k + 0.43), y: f.height - f.bottom + 17, "text-anchor": "middle" }, String(blocks.block[k])));
  }
  tips(f, (px) => {
    const k = Math.min(count - 1, Math.max(0, Math.floor(f.value(px))));
    return [`block ${blocks.block[k]}: ${blocks.rounds[k]} rounds in ${seconds(totals[k])}`,
      `planned ${blocks.predicted[k] === null ? "–" : seconds(blocks.predicted[k])}; held up by ${blocks.bottleneck[k]}`,
      ...usedPhases.map((phase) => [swatch(phase.colour), `${phase.title}: ${seconds(blocks.seconds[phase.key][k])}`])];
  });
  const some = count < blocks.of ? ` ${count} of ${blocks.of} blocks are shown.` : "";
  byId("block-note").textContent = `Seconds of the rounds between two decisions, by phase; the stroke is what the plan predicted.${some}`;
}

function drawLanes() {
  const host = byId("chart-lanes");
  byId("lane-controls").hidden = !detail.timelines.length;
  byId("lane-note").textContent = "";
  if (!detail.timelines.length) {
    host.replaceChildren(html("p", { class: "note" }, "Nothing to draw: devices take turns under this policy, or their resources were not recorded."));
    return;
  }
  const now = detail.timelines[Math.min(Number(byId("choose-block").value), detail.timelines.length - 1)];
  const row = Math.max(9, Math.min(20, 460 / now.devices.length));
  const f = frame(host, {
    label: `One round of block ${now.block}, ${detail.label}: ${seconds(now.length)}, the server starts after ${seconds(now.start)}`,
    height: row * now.devices.length + 58, left: nameSpace(now.devices, host), top: 18,
    x: { low: 0, high: now.length, ...timeAxis(now.length), title: timeAxis(now.length).title.replace(data.time, "time since the round began") },
    y: { low: 0, high: 1, bare: true },
  });
  const back = now.start + now.server;
  const bottom = 18 + row * now.devices.length;
  const keys = ["a1", "a2", "a4", "a5"];
  const paths = keys.map(() => "");
  now.devices.forEach((name, r) => {
    const [forward, upload, download] = now.parts[r];
    const starts = [0, forward, back, back + download];
    keys.forEach((_, k) => { paths[k] += box(f.sx(starts[k]), 18 + r * row + 1, f.sx(now.parts[r][k]) - f.sx(0), row - GAP); });
    if (r % Math.ceil(11 / row) === 0) f.canvas.append(svg("text", { x: f.left - 6, y: 18 + r * row + row / 2 + 4, "text-anchor": "end" }, clip(name)));
  });
  f.canvas.append(svg("path", { d: box(f.sx(now.start), 14, Math.max(1.5, f.sx(back) - f.sx(now.start)), bottom - 14), fill: phaseColour("a3") }));
  f.canvas.append(svg("text", { x: (f.sx(now.start) + f.sx(back)) / 2, y: 10, "text-anchor": "middle" }, "server"));
  keys.forEach((key, k) => f.canvas.append(svg("path", { d: paths[k], fill: phaseColour(key) })));
  tips(f, (px, py) => {
    const r = Math.floor((py - 18) / row);
    if (r < 0 || r >= now.devices.length) return null;
    const [forward, upload, download, backward] = now.parts[r];
    const times = [["a1", forward], ["a2", upload], ["a3", now.server], ["a4", download], ["a5", backward]];
    return [`${now.devices[r]}, cut after layer ${now.cuts[r]} (${detail.layers[now.cuts[r] - 1]})`,
      ...times.map(([key, value]) => [swatch(phaseColour(key)), `${data.phases.find((phase) => phase.key === key).title}: ${seconds(value)}`]),
      `waits ${seconds(Math.max(0, now.start - forward - upload))} for others before the server's turn`];
  });
  byId("block-name").textContent = `${now.block}`;
  const some = now.devices.length < now.of ? ` ${now.devices.length} of ${now.of} devices are shown, the slowest among them.` : "";
  byId("lane-note").textContent = `Block ${now.block} as its plan saw it, with the resources measured when it began: ${seconds(now.length)} for a round. Gaps are waiting.${some}`;
}

function drawEstimates() {
  const { x, charts } = detail.estimates;
  const host = byId("charts-estimates");
  if (!charts.length) {
    host.replaceChildren(html("p", { class: "note" }, "Nothing: this policy does not ask."));
    return;
  }
  const end = x[x.length - 1] || 1;
  host.replaceChildren(...charts.map((chart) => html("div", {}, html("h4", {}, chart.title), html("div", { class: "chart" }))));
  charts.forEach((chart, index) => {
    const banded = chart.low && chart.high;
    const [low, high] = extent([...chart.values, ...(banded ? [...chart.low, ...chart.high] : [])]);
    const f = frame(host.children[index].lastChild, {
      label: `${chart.title} over ${data.time}, ${detail.label}`, height: 150, left: 52,
      x: { low: 0, high: end, ...timeAxis(end) }, y: { low: low > 0 && low < high / 2 ? 0 : low, high },
    });
    if (banded) f.canvas.append(svg("path", { fill: colourOf(), opacity: 0.2, d: bandPath(f, x, chart.low, chart.high) }));
    f.canvas.append(svg("path", { fill: "none", stroke: colourOf(), "stroke-width": 1.8, "stroke-linejoin": "round", d: linePath(f, x, chart.values) }));
    tips(f, (px) => {
      const k = nearest(x, f.value(px));
      const range = banded ? [`between ${digits(chart.low[k], 3)} and ${digits(chart.high[k], 3)}, eight times of ten`] : [];
      return [seconds(x[k]), digits(chart.values[k], 4), ...range];
    }, { ruler: true });
  });
}

function drawFleet() {
  const { devices, of, rates } = detail.fleet;
  byId("fleet-note").textContent = rates.length
    ? `${of} devices as measured in “${detail.label}”; rates are means over its blocks.` : "No resources were recorded.";
  const host = byId("charts-fleet");
  host.replaceChildren(...rates.map((rate) => html("div", {}, html("h4", {}, rate.title), html("div", { class: "chart" }))));
  rates.forEach((rate, index) => {
    const [low, high] = [rate.edges[0], rate.edges[rate.edges.length - 1]];
    const scale = [1e12, 1e9, 1e6, 1e3, 1].find((unit) => high >= unit) || 1;
    const f = frame(host.children[index].lastChild, {
      label: `Histogram of ${rate.title} over devices, from ${si(low, rate.unit)} to ${si(high, rate.unit)}`, height: 140, left: 30,
      x: { low, high, scale, title: si(scale, rate.unit).replace(/^\S+ /, "") }, y: { low: 0, high: Math.max(1, ...rate.counts), whole: true },
    });
    const bars = rate.counts.map((count, k) => box(f.sx(rate.edges[k]) + 0.5, f.sy(count), f.sx(rate.edges[k + 1]) - f.sx(rate.edges[k]) - 1, f.sy(0) - f.sy(count)));
    f.canvas.append(svg("path", { d: bars.join(""), fill: "#5b8fb9" }));
    tips(f, (px) => {
      const k = Math.min(rate.counts.length - 1, Math.max(0, rate.edges.findIndex((edge) => edge > f.value(px)) - 1));
      return [`${rate.counts[k]} device${rate.counts[k] === 1 ? "" : "s"}`, `${si(rate.edges[k], rate.unit)} to ${si(rate.edges[k + 1], rate.unit)}`];
    });
  });
  const cells = devices.map((name, k) => html("tr", {}, html("th", { scope: "row" }, name),
    ...rates.map((rate) => html("td", {}, rate.values[k] === null ? "–" : si(rate.values[k], rate.unit)))));
  byId("fleet-table").replaceChildren(html("table", {},
    html("thead", {}, html("tr", {}, html("th", { scope: "col" }, devices.length < of ? `device (${devices.length} of ${of})` : "device"), ...rates.map((rate) => html("th", { scope: "col" }, rate.title)))),
    html("tbody", {}, ...cells)));
}

// ---- everything together ----------------------------------------------------------------------------------------

const overview = [drawPolicies, drawAccuracy, drawPhases];
const details = [drawPlan, drawBlocks, drawLanes, drawEstimates, drawFleet];

/** Draw each view; one that fails leaves the others alone. */
function draw(views) {
  for (const view of views) {
    try { view(); } catch (error) { report(`${view.name}: ${error.message}`); }
  }
}

function drawAll() {
  draw(overview);
  if (detail) draw(details);
}

function chooseRun(index) {
  detail = data.details[index];
  byId("run-name").textContent = `: ${detail.label}`;
  byId("choose-block").max = Math.max(0, detail.timelines.length - 1);
  byId("choose-block").value = Math.floor(detail.timelines.length / 2);
}

for (const name of ["value", "axis"]) for (const input of document.getElementsByName(name)) input.addEventListener("change", () => draw([drawAccuracy]));
for (const input of document.getElementsByName("per")) input.addEventListener("change", () => draw([drawPhases]));
byId("choose-run").append(...data.details.map((entry, index) => html("option", { value: index }, entry.label)));
byId("choose-run").addEventListener("change", (event) => { chooseRun(Number(event.target.value)); draw(details); });
byId("choose-block").addEventListener("input", () => draw([drawLanes]));
if (detail) chooseRun(0);
else for (const id of ["run", "fleet"]) byId(id).hidden = true;
drawAll();

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width || printWidth) return;
  width = window.innerWidth;
  requestAnimationFrame(drawAll);
});
window.addEventListener("beforeprint", () => {
  printWidth = 700;
  for (const element of document.querySelectorAll("details")) element.open = true;
  drawAll();
});
window.addEventListener("afterprint", () => { printWidth = 0; drawAll(); });
