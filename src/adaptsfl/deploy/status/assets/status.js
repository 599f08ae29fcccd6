// A running edge server: shown as the page came with it, then asked for once a second. Text goes in as text only.

const EVERY_MS = 1000;
const TIMEOUT_MS = 5000;
const WORDS = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" };

const known = (write) => (value) => (value === null || value === undefined ? "–" : write(value));
const count = known((value) => value.toLocaleString("en"));
const time = known(seconds);
const rate = known((value) => si(value, "bit/s"));
const per = (unit, scale) => known((value) => `${digits(value / scale)}\u00a0${unit}`);
const flops = per("GFLOPS", 1e9), mbps = per("Mbit/s", 1e6), ms = per("ms", 1e-3);
const size = (value) => si(value, "B");
const last = (points) => (points.length ? points[points.length - 1] : [null, null]);

/** Set text where it differs, so that what somebody selects or a screen reader reads stays as it is. */
function put(node, text, kind) {
  if (node.textContent !== text) node.textContent = text;
  if (kind !== undefined && node.className !== kind) node.className = kind;
}
const write = (id, text) => put(byId(id), text);

// ---- numbers ----------------------------------------------------------------------------------------------------

function drawHead(now) {
  const started = new Date(now.started_at * 1000).toLocaleString("en-GB", WORDS);
  write("run", now.run || "Unnamed run");
  write("since", `Started ${started}, ${seconds(Math.max(0, Math.round(now.now - now.started_at)))} ago.`);
}

function drawProgress(now) {
  const planned = now.rounds_planned;
  const done = planned !== null && now.round >= planned;
  const state = now.waiting_for ? `Waiting for ${now.waiting_for}` : done ? "Done" : "Training";
  put(byId("h-progress"), state, `state ${now.waiting_for ? "waiting" : done ? "done" : "training"}`);
  const bar = byId("bar");
  bar.hidden = planned === null;
  bar.max = planned || 1;
  bar.value = Math.min(now.round, planned || 1);
  const share = planned ? ` of ${count(planned)} (${percent(Math.min(1, now.round / planned))})` : "";
  write("rounds", `Round ${count(now.round)}${share}, block ${count(now.block)}`);
  write("left", remaining(now));
  byId("last-error").hidden = !now.last_error;
  write("last-error", now.last_error);
}

/** The rounds that are left at the pace measured, with their aggregations. */
function remaining(now) {
  const rounds = now.rounds_planned - now.round;
  if (now.rounds_planned === null || now.round_s === null || rounds <= 0) return "";
  const aggregation = now.phases.filter((row) => row.phase.startsWith("b")).reduce((sum, row) => sum + (row.measured_s || 0), 0);
  return `about ${seconds(Math.max(1, Math.round(rounds * (now.round_s + (now.interval ? aggregation / now.interval : 0)))))} left`;
}

function drawCards(now) {
  const there = now.devices.filter((device) => device.state !== "away" && device.state !== "quarantined").length;
  write("present", `${count(there)} of ${count(now.devices.length)}`);
  const ratio = now.round_s !== null && now.predicted_round_s ? `, ${(now.round_s / now.predicted_round_s).toFixed(2)}× that` : "";
  write("round-s", time(now.round_s));
  write("round-s-note", now.predicted_round_s === null ? "a round" : `a round; predicted ${time(now.predicted_round_s)}${ratio}`);
  const [lossRound, loss] = last(now.losses);
  write("loss", known(digits)(loss));
  write("loss-note", lossRound === null ? "training loss" : `training loss, round ${count(lossRound)}`);
  const [round, accuracy] = last(now.evaluations);
  const best = Math.max(...now.evaluations.map((point) => point[1]));
  write("accuracy", known(percent)(accuracy));
  const note = round === null ? "test accuracy" : `test accuracy, round ${count(round)}`;
  write("accuracy-note", accuracy < best ? `${note}; best ${(100 * best).toFixed(1)}\u00a0%` : note);
  write("interval", count(now.interval));
  write("deepest", count(now.deepest));
  write("parts", count(now.micro_batches));
  write("parts-note", now.wire_dtype ? `k, parts of a mini-batch, in ${now.wire_dtype}` : "k, parts of a mini-batch");
  write("received", rate(now.received_bps));
  write("received-note", `received, ${size(now.received_bytes)} in all`);
  write("sent", rate(now.sent_bps));
  write("sent-note", `sent, ${size(now.sent_bytes)} in all`);
}

// ---- tables -----------------------------------------------------------------------------------------------------

/** Fill a table's body; a cell is [text, class]. Rows that are there are kept and changed where they differ. */
function fill(id, rows) {
  const table = byId(id), body = table.tBodies[0];
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, place) => {
    const row = body.rows[place] || body.appendChild(html("tr", { role: "row" }, ...cells.map((_, column) =>
      column ? html("td", { role: "cell", "data-name": names[column] }) : html("th", { role: "rowheader", scope: "row" }))));
    cells.forEach(([text, kind], column) => put(row.cells[column], text, kind || ""));
  });
}

function drawDevices(now) {
  const states = new Map();
  for (const device of now.devices) states.set(device.state, (states.get(device.state) || 0) + 1);
  write("device-note", now.devices.length ? [...states].map(([state, number]) => `${count(number)} ${state}`).join(", ") : "None has come yet.");
  fill("devices", now.devices.map((device) => [
    [device.name],
    [device.state, `state ${device.state}`],
    [count(device.cut)],
    [count(device.rounds) + (device.rounds && device.round < now.round ? `\nlast ${count(device.round)}` : "")],
    [time(device.forward_s)],
    [time(device.backward_s)],
    [count(device.violations), device.violations ? "broken" : ""],
    [device.last_error],
  ]));
}

function drawTimes(now) {
  fill("phases", now.phases.map((row) => [
    [`${row.phase} ${row.title}`],
    [time(row.predicted_s)],
    [time(row.measured_s)],
    [row.predicted_s && row.measured_s !== null ? `${(row.measured_s / row.predicted_s).toFixed(2)}×` : "–"],
  ]));
  byId("phases").hidden = !now.phases.length;
  write("phase-note", now.phases.length ? "a: in every round; b: in every aggregation. Ratio: how many times as long as predicted." : "Nothing is measured yet.");
}

// ---- what is believed -------------------------------------------------------------------------------------------

function drawBelieved(now) {
  const planned = now.server !== null;
  write("believed-note", planned ? `Block ${count(now.block)} was planned with this. It is updated when a block begins.` : "Nothing is planned yet.");
  byId("resources").hidden = !planned;
  drawRounds(now, planned);
  fill("believed", now.devices.filter((device) => device.believed).map(({ name, believed: its }) => [
    [name],
    [`${flops(its.flops)} + ${passes(its)}`],
    ...["uplink", "downlink", "fed_uplink", "fed_downlink"].map((link) => [`${mbps(its[`${link}_bps`])} + ${ms(its[`${link}_s`])}`]),
  ]));
  const its = now.server;
  if (planned) fill("servers", [
    [["edge server’s turn in a round"], [flops(its.flops)], [ms(its.turn_s)]],
    [["link from edge server to fed server"], [mbps(its.to_fed_bps)], [ms(its.to_fed_s)]],
    [["link from fed server to edge server"], [mbps(its.from_fed_bps)], [ms(its.from_fed_s)]],
    [["averaging at the fed server"], [mbps(its.averaging_bps)], [ms(its.averaging_s)]],
  ]);
}

/** The fixed time of a pass: one number where both passes take the same. */
const passes = (its) => (its.forward_s === its.backward_s ? ms(its.forward_s) : `${ms(its.forward_s)} forward, ${ms(its.backward_s)} back`);

function drawRounds(now, planned) {
  const its = now.rounds_believed;
  byId("rounds-believed").hidden = its === null;
  write("rounds-believed-note", its !== null ? "Each range holds eight times of ten. Estimated from the jumps of the training loss when copies are averaged."
    : planned ? "Nothing is estimated: the recipe says how rounds grow, or this policy does not ask." : "");
  if (its === null) return;
  const range = (low, high) => (low === null ? "" : `, between ${digits(low)} and ${digits(high)}`);
  write("relative-rounds", its.relative_rounds === null ? "–" : `${digits(its.relative_rounds)}×`);
  write("relative-rounds-note", `rounds needed with I = ${count(now.interval)}, relative to I = 1${range(its.relative_rounds_low, its.relative_rounds_high)}`);
  write("kappa", digits(its.kappa));
  write("kappa-note", `κ, what drifting copies cost (0.02: little, 1: most)${range(its.kappa_low, its.kappa_high)}`);
  write("averagings", count(its.averagings));
  write("averagings-note", its.averagings ? "averagings that this was learned from" : "averagings seen so far: this is a first guess");
}

// ---- curves -----------------------------------------------------------------------------------------------------

const LOSS = { id: "chart-loss", kind: "loss", title: "Training loss", write: digits, none: "No round is done yet." };
const ACCURACY = { id: "chart-accuracy", kind: "accuracy", title: "Test accuracy", write: percent, none: "Not evaluated yet." };
const drawn = new Map(); // what each chart shows, so that it is drawn anew only for other points or another width
let pointer = null;

function drawCurve(curve, points) {
  const host = byId(curve.id);
  const key = `${host.clientWidth} ${JSON.stringify(points)}`;
  if (drawn.get(host) === key) return;
  drawn.set(host, key);
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  if (ys.every((value) => value === null)) {
    host.replaceChildren(html("p", { class: "empty" }, curve.none));
    return;
  }
  const tipShown = host.querySelector(".tip:not([hidden])") !== null;
  const [low, high] = extent(ys), space = (high - low) / 20;
  const accuracy = curve === ACCURACY;
  const f = frame(host, {
    label: `${curve.title} by round, ${curve.write(last(points.filter((point) => point[1] !== null))[1])} at the end`, height: 220,
    x: { low: Math.min(0, xs[0]), high: Math.max(1, last(points)[0]), title: "rounds" },
    y: accuracy ? { low: Math.max(0, low - space), high: Math.min(1, high + space), write: (v) => `${digits(100 * v)} %` } : { low: low - space, high: high + space },
  });
  const smooth = accuracy || xs.length < 40 ? ys : smoothed(ys, Math.ceil(xs.length / 50));
  if (smooth !== ys) f.canvas.append(svg("path", { class: curve.kind, d: linePath(f, xs, ys), "stroke-width": 1, opacity: 0.35 }));
  f.canvas.append(svg("path", { class: curve.kind, d: linePath(f, xs, smooth), "stroke-width": 2.2, "stroke-linejoin": "round" }));
  if (xs.length < 40) xs.forEach((x, k) => ys[k] !== null && f.canvas.append(svg("circle", { class: curve.kind, cx: f.sx(x), cy: f.sy(ys[k]), r: 2.5 })));
  tips(f, (px) => {
    const k = nearest(xs, f.value(px));
    return [`round ${count(xs[k])}`, ys[k] === null ? "no number" : curve.write(ys[k])];
  }, { ruler: true });
  if (tipShown && pointer) f.canvas.dispatchEvent(new PointerEvent("pointermove", pointer));
}

/** Means over neighbours as far as `reach`; where there is no number, none. */
function smoothed(values, reach) {
  return values.map((value, k) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, k - reach), k + reach + 1).filter((other) => other !== null);
    return near.reduce((sum, other) => sum + other, 0) / near.length;
  });
}

// ---- once a second ----------------------------------------------------------------------------------------------

let shown = data;
let goneSince = null;

function show() {
  const part = goneSince ? "not reachable" : shown.rounds_planned ? `${count(shown.round)} of ${count(shown.rounds_planned)}` : `round ${count(shown.round)}`;
  const title = `${part} – ${shown.run || "AdaptSFL edge server"}`;
  if (document.title !== title) document.title = title;
  for (const draw of [drawHead, drawProgress, drawCards, drawDevices, drawTimes, drawBelieved, drawCurves]) {
    try { draw(shown); } catch (fault) { if (byId("errors").hidden) report(`${draw.name}: ${fault.message}`); }
  }
}

function drawCurves(now) {
  drawCurve(LOSS, now.losses);
  drawCurve(ACCURACY, now.evaluations);
}

async function ask() {
  try {
    const answer = await fetch("status.json", { cache: "no-store", redirect: "error", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!answer.ok) throw new Error(answer.statusText);
    shown = await answer.json();
    goneSince = null;
  } catch {
    goneSince = goneSince || new Date();
  }
  byId("gone").hidden = goneSince === null;
  write("gone", goneSince ? `Not reachable since ${goneSince.toLocaleTimeString("en-GB")}. Shown is how it was before.` : "");
  show();
  setTimeout(ask, EVERY_MS);
}

document.addEventListener("pointermove", (event) => { pointer = { clientX: event.clientX, clientY: event.clientY }; });
window.addEventListener("resize", () => show());
show();
ask();
