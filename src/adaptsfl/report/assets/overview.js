// All policies side by side: learning, and where the time goes.

const hidden = new Set(); // indices of policies switched off; printed all the same
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

function drawPolicies() {
  byId("policies").replaceChildren(...data.series.map((series, index) => {
    const button = html("button", { type: "button", "aria-pressed": String(!hidden.has(index)) }, swatch(series.colour, series.dash), series.label);
    button.addEventListener("click", () => {
      if (!hidden.delete(index)) hidden.add(index);
      button.setAttribute("aria-pressed", String(!hidden.has(index)));
      for (const part of document.querySelectorAll(`[data-series="${index}"]`)) part.classList.toggle("off", hidden.has(index));
    });
    return button;
  }));
}

const part = (index, ...children) => svg("g", { "data-series": index, class: hidden.has(index) ? "off" : null }, ...children);

function drawAccuracy() {
  const [value, axis] = [chosen("value"), chosen("axis")];
  const curves = data.series.map((series) => series[value][axis]);
  const accuracy = value === "accuracies";
  const seeds = (series) => (accuracy ? series.seeds[axis] : []);
  const longest = Math.max(1e-9, ...curves.flatMap((c) => c.x), ...data.series.flatMap((s) => seeds(s).flatMap((line) => line.x)));
  const [low, high] = extent(curves.flatMap((c) => c.y.flatMap((y, k) => (c.spread ? [y - c.spread[k], y + c.spread[k]] : [y]))));
  const time = axis === "seconds" ? timeAxis(longest) : { scale: 1, title: "rounds" };
  const f = frame(byId("chart-accuracy"), {
    label: `${accuracy ? "Test accuracy" : "Test loss"} against ${axis === "seconds" ? data.time : "rounds"}, one line per policy: ${data.series.map((s) => s.label).join(", ")}`,
    height: 380, interactive: true, left: 50,
    x: { low: 0, high: longest, ...time },
    y: { low: accuracy ? Math.max(0, low - 0.02) : low, high: accuracy ? Math.min(1, high + 0.02) : high, write: accuracy ? (v) => `${digits(100 * v)} %` : digits },
  });
  if (accuracy) {
    for (const target of data.targets) {
      if (f.sy(target) < f.top || f.sy(target) > f.height - f.bottom) continue;
      f.canvas.append(svg("line", { class: "target", x1: f.left, x2: f.width - f.right, y1: f.sy(target), y2: f.sy(target) }),
        svg("text", { x: f.width - f.right, y: f.sy(target) - 4, "text-anchor": "end" }, `target ${digits(100 * target)} %`));
    }
  }
  // Ours comes first in the data, and last here: on top.
  data.series.forEach((_, place) => {
    const index = data.series.length - 1 - place;
    const [series, c] = [data.series[index], curves[index]];
    const look = { fill: "none", stroke: series.colour, "stroke-dasharray": series.dash, "stroke-linejoin": "round" };
    const band = c.spread && c.x.length
      ? svg("path", { fill: series.colour, opacity: 0.2, d: bandPath(f, c.x, c.y.map((y, k) => y - c.spread[k]), c.y.map((y, k) => y + c.spread[k])) })
      : null;
    f.canvas.append(part(index, band,
      ...seeds(series).map((line) => svg("path", { ...look, d: linePath(f, line.x, line.y), "stroke-width": 0.8, opacity: 0.45 })),
      svg("path", { ...look, d: linePath(f, c.x, c.y), "stroke-width": 2.4 })));
  });
  const write = accuracy ? percent : digits;
  tips(f, (px) => {
    const x = f.value(px);
    const lines = curves.map((c, index) => {
      if (hidden.has(index) || !c.x.length || x < c.x[0] - longest / 50 || x > c.x[c.x.length - 1] + longest / 50) return null;
      const k = nearest(c.x, x);
      return [swatch(data.series[index].colour, data.series[index].dash), `${data.series[index].label}: ${write(c.y[k])}${c.spread ? ` ± ${write(c.spread[k])}` : ""}`];
    }).filter(Boolean);
    return [axis === "seconds" ? seconds(x) : `round ${Math.round(x)}`, ...lines];
  }, { ruler: true, keys: true });
}

const usedPhases = data.phases.filter((phase) => data.series.some((series) => series.phases[phase.key] > 0));

function drawPhases() {
  for (const keys of document.querySelectorAll(".phase-keys")) {
    const shown = usedPhases.filter((phase) => phase.key.startsWith(keys.dataset.only || ""));
    keys.replaceChildren(...shown.map((phase) => html("span", {}, swatch(phase.colour), `${phase.key} ${phase.title}`)));
  }
  const per = chosen("per");
  const totals = data.series.map((series) => usedPhases.reduce((sum, phase) => sum + series.phases[phase.key], 0));
  const factors = data.series.map((series, k) => (per === "run" ? 1 : 1 / ((per === "round" ? series.rounds : totals[k]) || 1)));
  const longest = per === "share" ? 1 : Math.max(1e-9, ...totals.map((total, k) => total * factors[k]));
  const row = 50;
  const f = frame(byId("chart-phases"), {
    label: `Seconds by phase, one bar per policy: ${data.series.map((s, k) => `${s.label} ${seconds(totals[k])}`).join(", ")}`,
    height: row * data.series.length + 44, left: 2, top: 0,
    x: per === "share" ? { low: 0, high: 1, write: (v) => `${digits(100 * v)} %` } : { low: 0, high: longest, ...timeAxis(longest) },
    y: { low: 0, high: 1, bare: true },
  });
  data.series.forEach((series, index) => {
    const y = row * index;
    const total = per === "share" ? "" : `: ${seconds(totals[index] * factors[index])}${per === "round" ? " per round" : ""}`;
    const bars = [svg("text", { class: "name", x: 2, y: y + 15 }, svg("tspan", { class: "strong" }, series.label), total)];
    let from = 0;
    for (const phase of usedPhases) {
      const length = series.phases[phase.key] * factors[index];
      bars.push(svg("rect", { x: f.sx(from), y: y + 21, width: Math.max(0, f.sx(from + length) - f.sx(from)), height: 22, fill: phase.colour }));
      from += length;
    }
    f.canvas.append(part(index, ...bars));
  });
  tips(f, (px, py) => {
    const index = Math.floor(py / row);
    const series = data.series[index];
    if (!series || hidden.has(index)) return null;
    return [series.label, ...usedPhases.map((phase) => [swatch(phase.colour),
      `${phase.title}: ${seconds(series.phases[phase.key])} (${percent(series.phases[phase.key] / (totals[index] || 1))})`])];
  });
}
