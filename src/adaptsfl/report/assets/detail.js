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
  const often = (k) => (plan.interval[k] === null ? "never averaged" : `averaged every ${plan.interval[k]} rounds`)
    + (plan.wire[k] && plan.wire[k] !== "float32" ? `, sent as ${plan.wire[k]}` : "")
    + (plan.parts[k] > 1 ? `, in ${plan.parts[k]} parts` : "");
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
  byId("cut-note").textContent = `Above, rounds between two averagings, and the deepest cut; below, after which layer every device’s model is cut.${some}${sent(plan)}`;
}

/** In which types of numbers and in how many parts mini-batches were sent; nothing to say if always exact and whole. */
function sent(plan) {
  const count = (values, write) => [...new Set(values)].map((value) => `${write(value)} in ${values.filter((other) => other === value).length}`).join(", ");
  const types = plan.wire.some((name) => name && name !== "float32") ? ` Numbers were sent as ${count(plan.wire, (name) => name || "the recipe says")} of ${plan.wire.length} blocks.` : "";
  const parts = plan.parts.some((k) => k > 1) ? ` Mini-batches went through a round in one part or more: ${count(plan.parts, (k) => `${k}`)} of ${plan.parts.length} blocks.` : "";
  return types + parts;
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
  const bottom = 18 + row * now.devices.length;
  const keys = ["a1", "a2", "a4", "a5"];
  const paths = keys.map(() => "");
  const half = now.parts > 1 ? (row - GAP) / 2 : 0; // phases of a device overlap: computing above, sending below
  now.devices.forEach((name, r) => {
    keys.forEach((_, k) => {
      const [from, to] = now.bars[r][k];
      const top = 18 + r * row + 1 + (k === 1 || k === 2 ? half : 0);
      paths[k] += box(f.sx(from), top, f.sx(to) - f.sx(from), half || row - GAP);
    });
    if (r % Math.ceil(11 / row) === 0) f.canvas.append(svg("text", { x: f.left - 6, y: 18 + r * row + row / 2 + 4, "text-anchor": "end" }, clip(name)));
  });
  f.canvas.append(svg("path", { d: box(f.sx(now.start), 14, Math.max(1.5, f.sx(now.end) - f.sx(now.start)), bottom - 14), fill: phaseColour("a3"), opacity: half ? 0.35 : 1 }));
  f.canvas.append(svg("text", { x: (f.sx(now.start) + f.sx(now.end)) / 2, y: 10, "text-anchor": "middle" }, "server"));
  keys.forEach((key, k) => f.canvas.append(svg("path", { d: paths[k], fill: phaseColour(key) })));
  tips(f, (px, py) => {
    const r = Math.floor((py - 18) / row);
    if (r < 0 || r >= now.devices.length) return null;
    const [forward, upload, download, backward] = now.bars[r].map(([from, to]) => to - from);
    const times = [["a1", forward], ["a2", upload], ["a3", now.end - now.start], ["a4", download], ["a5", backward]];
    const waiting = now.parts > 1 ? `from the first of ${now.parts} parts to the last`
      : `waits ${seconds(Math.max(0, now.start - forward - upload))} for others before the server's turn`;
    return [`${now.devices[r]}, cut after layer ${now.cuts[r]} (${detail.layers[now.cuts[r] - 1]})`,
      ...times.map(([key, value]) => [swatch(phaseColour(key)), `${data.phases.find((phase) => phase.key === key).title}: ${seconds(value)}`]),
      waiting];
  });
  byId("block-name").textContent = `${now.block}`;
  const some = now.devices.length < now.of ? ` ${now.devices.length} of ${now.of} devices are shown, the slowest among them.` : "";
  const gaps = half ? `Mini-batches go through it in ${now.parts} parts that overlap: computing is above, sending below.` : "Gaps are waiting.";
  byId("lane-note").textContent = `Block ${now.block} as its plan saw it, with the resources measured when it began: ${seconds(now.length)} for a round. ${gaps}${some}`;
}

/** For lines in steps: both edges of every block, and its value at both. What was believed holds until the next plan. */
const held = (edges) => edges.slice(0, -1).flatMap((edge, k) => [edge, edges[k + 1]]);
const twice = (values) => values.flatMap((value) => [value, value]);

function drawEstimates() {
  const { edges, charts } = detail.estimates;
  const host = byId("charts-estimates");
  if (!charts.length) {
    host.replaceChildren(html("p", { class: "note" }, "Nothing: this policy does not ask."));
    return;
  }
  const end = edges[edges.length - 1] || 1;
  const x = held(edges);
  host.replaceChildren(...charts.map((chart) => html("div", {}, html("h4", {}, chart.title), html("div", { class: "chart" }))));
  charts.forEach((chart, index) => {
    const banded = chart.low && chart.high;
    const [low, high] = extent([...chart.values, ...(banded ? [...chart.low, ...chart.high] : [])]);
    const f = frame(host.children[index].lastChild, {
      label: `${chart.title} over ${data.time}, ${detail.label}`, height: 150, left: 52,
      x: { low: 0, high: end, ...timeAxis(end) }, y: { low: low > 0 && low < high / 2 ? 0 : low, high },
    });
    if (banded) f.canvas.append(svg("path", { fill: colourOf(), opacity: 0.2, d: bandPath(f, x, twice(chart.low), twice(chart.high)) }));
    f.canvas.append(svg("path", { fill: "none", stroke: colourOf(), "stroke-width": 1.8, "stroke-linejoin": "round", d: linePath(f, x, twice(chart.values)) }));
    tips(f, (px) => {
      const k = Math.min(chart.values.length - 1, Math.max(0, edges.findIndex((edge) => edge > f.value(px)) - 1));
      const range = banded ? [`between ${digits(chart.low[k], 3)} and ${digits(chart.high[k], 3)}, eight times of ten`] : [];
      return [`planned after ${seconds(edges[k])}`, digits(chart.values[k], 4), ...range];
    }, { ruler: true });
  });
}

// ---- the fleet --------------------------------------------------------------------------------------------------

const FLEET_COLOUR = "#5b8fb9";
const MOST_SINGLE = 12; // of more devices, shares are shaded: single lines would hide each other
const amount = (value, unit) => (value === null ? "–" : `${digits(value)}\u00a0${unit}`);
const chosenDevice = () => Number(byId("choose-device").value) - 1; // -1 for the median

function drawFleet() {
  const { resources, of } = detail.fleet;
  const changing = resources.filter((resource) => resource.lines);
  const overTime = changing.length > 0 && chosen("fleet") === "time";
  byId("fleet-note").textContent = resources.length
    ? `${of} devices as measured in “${detail.label}”: what its plans were made with.` : "No resources were recorded.";
  byId("fleet-controls").hidden = !changing.length;
  byId("choose-device").closest("label").hidden = !overTime;
  const host = byId("charts-fleet"), shown = overTime ? changing : resources;
  host.replaceChildren(...shown.map(({ title, unit }) => html("div", {}, html("h4", {}, `${title}, ${unit}`), html("div", { class: "chart" }))));
  shown.forEach((resource, index) => (overTime ? drawOverTime : drawSpread)(host.children[index].lastChild, resource));
  byId("fleet-time-note").textContent = overTime ? timeNote(resources) : resources.length ? "How many devices have how much, on average over blocks." : "";
  drawDeviceTable();
  drawServerTable();
}

/** A resource of the fleet when blocks were planned: thin lines or shaded shares for devices, a thick line for one or the median. */
function drawOverTime(host, { title, unit, lines, quantiles }) {
  const { edges, names, blocks } = detail.fleet;
  const end = edges[edges.length - 1] || 1;
  const pick = chosenDevice(), median = quantiles[2];
  const known = [...lines, ...quantiles].flat().filter((value) => value !== null);
  const [lowest, highest] = extent(known), least = (lowest + highest) / 100; // so that noise does not look like a change
  const [low, high] = highest - lowest < 2 * least ? [lowest - least, highest + least] : [lowest, highest];
  // Devices may differ by decades, and the slow ones decide.
  const logarithmic = Math.min(...known) > 0 && high > 4 * low;
  const place = (value) => (value === null ? null : logarithmic ? Math.log10(value) : value);
  const f = frame(host, {
    label: `${title} over ${data.time}, ${detail.label}: between ${amount(low, unit)} and ${amount(high, unit)}`, height: 150, left: 52,
    x: { low: 0, high: end, ...timeAxis(end) },
    y: logarithmic ? { low: place(low), high: place(high), ticks: decades(low, high).map(place), write: (v) => digits(10 ** v) } : { low: low < high / 2 ? 0 : low, high },
  });
  const path = (values) => linePath(f, edges, values.map(place), true);
  const x = held(edges), shade = (low, high) => bandPath(f, x, twice(low.map(place)), twice(high.map(place)));
  const behind = lines.length <= MOST_SINGLE
    ? [svg("path", { fill: "none", stroke: FLEET_COLOUR, "stroke-width": 1, opacity: 0.8, d: lines.map(path).join("") })]
    : [[0, 4, 0.2], [1, 3, 0.35]].map(([low, high, opacity]) => svg("path", { fill: FLEET_COLOUR, opacity, d: shade(quantiles[low], quantiles[high]) }));
  f.canvas.append(...behind, svg("path", { class: "ink", "stroke-width": 1.8, d: path(pick < 0 ? median : lines[pick]) }));
  tips(f, (px) => {
    const k = Math.min(blocks.length - 1, Math.max(0, edges.findIndex((edge) => edge > f.value(px)) - 1));
    const there = lines.map((line, device) => [line[k], names[device]]).filter(([value]) => value !== null).sort((one, other) => one[0] - other[0]);
    const ends = there.length ? [there[0], there[there.length - 1]].map(([value, name], which) => `${which ? "highest" : "lowest"} ${amount(value, unit)}, ${name}`) : [];
    return [`block ${blocks[k]}, planned after ${seconds(edges[k])}`, ...(pick < 0 ? [] : [`${names[pick]}: ${lines[pick][k] === null ? "not there" : amount(lines[pick][k], unit)}`]),
      `median ${amount(median[k], unit)}`, ...(there.length > 1 ? ends : [])];
  }, { ruler: true });
}

function timeNote(resources) {
  const { names, of, blocks, of_blocks: all } = detail.fleet;
  const pick = chosenDevice(), single = names.length <= MOST_SINGLE;
  const same = resources.filter((resource) => !resource.lines).map((resource) => resource.title);
  return [`${single ? "Thin lines are devices" : "Shaded are all devices, and darker eight of ten"}; the thick line is ${pick < 0 ? "the median" : names[pick]}.`,
    names.length < of ? `${names.length} of ${of} devices can be chosen.` : "", blocks.length < all ? `${blocks.length} of ${all} blocks are drawn.` : "",
    same.length ? `Not drawn, for it did not change: ${same.join(", ")}.` : ""].filter(Boolean).join(" ");
}

function drawSpread(host, { title, unit, edges, counts }) {
  const [low, high] = [edges[0], edges[edges.length - 1]];
  const f = frame(host, {
    label: `Histogram of ${title} over devices, from ${amount(low, unit)} to ${amount(high, unit)}`, height: 140, left: 30,
    x: { low, high, title: unit }, y: { low: 0, high: Math.max(1, ...counts), whole: true },
  });
  const bars = counts.map((count, k) => box(f.sx(edges[k]) + 0.5, f.sy(count), f.sx(edges[k + 1]) - f.sx(edges[k]) - 1, f.sy(0) - f.sy(count)));
  f.canvas.append(svg("path", { d: bars.join(""), fill: FLEET_COLOUR }));
  tips(f, (px) => {
    const k = Math.min(counts.length - 1, Math.max(0, edges.findIndex((edge) => edge > f.value(px)) - 1));
    return [`${counts[k]} device${counts[k] === 1 ? "" : "s"}`, `${amount(edges[k], unit)} to ${amount(edges[k + 1], unit)}`];
  });
}

function tableOf(headings, rows) {
  return html("table", {}, html("thead", {}, html("tr", {}, ...headings.map((text) => html("th", { scope: "col" }, text)))),
    html("tbody", {}, ...rows.map(([name, ...cells]) => html("tr", {}, html("th", { scope: "row" }, name), ...cells.map((text) => html("td", {}, text))))));
}

function drawDeviceTable() {
  const { devices, of, resources } = detail.fleet;
  const first = devices.length < of ? `device (${devices.length} of ${of})` : "device";
  byId("fleet-table").replaceChildren(tableOf([first, ...resources.map((resource) => resource.title)],
    devices.map((name, k) => [name, ...resources.map(({ values, unit }) => amount(values[k], unit))])));
}

function drawServerTable() {
  const { columns, rows } = detail.fleet.servers;
  const fixed = (value) => (value ? ` +\u00a0${amount(value, "ms")}` : "");
  byId("server-table").replaceChildren(tableOf(["rate and fixed time", ...columns],
    rows.map(({ title, unit, rates, fixed_ms: ms }) => [title, ...rates.map((rate, k) => (rate === null ? amount(ms[k], "ms") : amount(rate, unit) + fixed(ms[k])))])));
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
  byId("choose-device").replaceChildren(...["median of all", ...detail.fleet.names].map((name, index) => html("option", { value: index }, name)));
}

for (const name of ["value", "axis"]) for (const input of document.getElementsByName(name)) input.addEventListener("change", () => draw([drawAccuracy]));
for (const input of document.getElementsByName("per")) input.addEventListener("change", () => draw([drawPhases]));
byId("choose-run").append(...data.details.map((entry, index) => html("option", { value: index }, entry.label)));
byId("choose-run").addEventListener("change", (event) => { chooseRun(Number(event.target.value)); draw(details); });
byId("choose-block").addEventListener("input", () => draw([drawLanes]));
for (const input of [...document.getElementsByName("fleet"), byId("choose-device")]) input.addEventListener("change", () => draw([drawFleet]));
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
