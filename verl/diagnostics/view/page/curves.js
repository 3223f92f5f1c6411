// Curves: one small chart for each metric, all chosen runs over one another.
const FIRST = [
  "critic/score/mean", "val-core/", "actor/entropy", "actor/kl_loss", "actor/pg_loss", "train/loss", "val/loss",
  "actor/grad_norm", "response_length/mean", "response_length/clip_ratio", "groups/flat_share",
  "training/rollout_probs_diff_mean", "timing_s/step", "perf/throughput", "num_turns/mean",
];
const WIDTH = 340;
const HEIGHT = 150;
const MARGIN = { left: 44, right: 8, top: 8, bottom: 20 };
const MOST_CHARTS = 60;

async function showCurves(main, page) {
  const chosen = page.chosenRuns();
  const curves = await Promise.all(chosen.map((run) => ask("curves/" + run.id)));
  const names = [...new Set(curves.flatMap((curve) => Object.keys(curve.metrics)))];
  const wanted = state.get("metric", "");
  const smooth = state.number("smooth", 0);

  const found = wanted ? names.filter((name) => name.includes(wanted)) : firstOf(names);
  const field = el("input", { type: "search", list: "metrics", placeholder: "part of a name", value: wanted,
    onchange: (event) => state.set({ metric: event.target.value || null }) });
  const bar = el("div", { class: "bar" },
    labelled("Metric", field),
    el("datalist", { id: "metrics" }, names.sort().map((name) => el("option", { value: name }))),
    labelled("Smooth", el("input", { type: "range", min: 0, max: 20, value: smooth,
      onchange: (event) => state.set({ smooth: event.target.value }) })),
    el("span", { class: "quiet" }, found.length + " of " + names.length + " metrics"));

  const charts = found.slice(0, MOST_CHARTS).map((name) => {
    const lines = [];
    curves.forEach((curve, place) => {
      if (!curve.metrics[name]) return;
      const points = [];
      curve.metrics[name].forEach((value, at) => {
        if (value !== null) points.push([curve.steps[at], value]);
      });
      if (points.length) lines.push({ run: chosen[place], points: smoothed(points, smooth) });
    });
    return chart(name, lines);
  });
  main.append(bar, el("div", { class: "charts" }, charts));
  if (!charts.length) main.append(el("p", { class: "quiet" }, "No metric has this in its name."));
}

function firstOf(names) {
  const found = [];
  for (const wanted of FIRST) found.push(...names.filter((name) => name === wanted || (wanted.endsWith("/") && name.startsWith(wanted))));
  return found;
}

function smoothed(points, width) {
  if (!width) return points;
  return points.map(([step], at) => {
    const near = points.slice(Math.max(0, at - width), at + width + 1);
    return [step, near.reduce((sum, point) => sum + point[1], 0) / near.length];
  });
}

function chart(name, lines) {
  const all = lines.flatMap((line) => line.points);
  const xs = all.map((point) => point[0]);
  const ys = all.map((point) => point[1]);
  let [lowX, highX, lowY, highY] = [least(xs), most(xs), least(ys), most(ys)];
  if (lowX === highX) highX = lowX + 1;
  if (lowY === highY) [lowY, highY] = [lowY - 0.5, highY + 0.5];
  const x = (step) => MARGIN.left + (step - lowX) / (highX - lowX) * (WIDTH - MARGIN.left - MARGIN.right);
  const y = (value) => HEIGHT - MARGIN.bottom - (value - lowY) / (highY - lowY) * (HEIGHT - MARGIN.top - MARGIN.bottom);

  const svg = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0,
    "aria-label": describe(name, lines) + " Use the arrow keys to read values." });
  for (const value of [lowY, (lowY + highY) / 2, highY]) {
    svg.append(el("line", { class: "axis", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y(value), y2: y(value) }));
    svg.append(el("text", { class: "tick", x: MARGIN.left - 5, y: y(value) + 3, "text-anchor": "end" }, number(value, 3)));
  }
  for (const [step, anchor] of [[lowX, "start"], [highX, "end"]]) {
    svg.append(el("text", { class: "tick", x: x(step), y: HEIGHT - 5, "text-anchor": anchor }, number(step, 6)));
  }
  for (const line of lines) {
    const path = line.points.map(([step, value], at) => (at ? "L" : "M") + x(step).toFixed(1) + " " + y(value).toFixed(1)).join("");
    svg.append(el("path", { d: path, fill: "none", stroke: line.run.color, "stroke-width": 1.8, "stroke-linejoin": "round" }));
    if (line.points.length === 1) svg.append(el("circle", { cx: x(line.points[0][0]), cy: y(line.points[0][1]), r: 3, fill: line.run.color }));
  }

  const cross = el("line", { class: "cross", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  const output = el("output", {}, latest(lines));
  svg.append(cross);
  const steps = [...new Set(xs)].sort((a, b) => a - b);
  let shown = steps.length - 1;
  const showAt = (place) => {
    shown = Math.max(0, Math.min(steps.length - 1, place));
    cross.setAttribute("x1", x(steps[shown]));
    cross.setAttribute("x2", x(steps[shown]));
    cross.setAttribute("visibility", "visible");
    output.textContent = "step " + steps[shown] + ": " + lines.map((line) => {
      const point = line.points.find((each) => each[0] === steps[shown]);
      return (lines.length > 1 ? line.run.name + " " : "") + number(point ? point[1] : null);
    }).join(", ");
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const step = lowX + ((event.clientX - box.left) / box.width * WIDTH - MARGIN.left) / (WIDTH - MARGIN.left - MARGIN.right) * (highX - lowX);
    let nearest = 0;
    steps.forEach((each, place) => { if (Math.abs(each - step) < Math.abs(steps[nearest] - step)) nearest = place; });
    showAt(nearest);
  });
  svg.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    output.textContent = latest(lines);
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    showAt(shown + move);
  });
  return el("figure", { class: "chart" }, el("figcaption", {}, name), svg, output);
}

function describe(name, lines) {
  return name + ": " + lines.map((line) => {
    const last = line.points[line.points.length - 1];
    return line.run.name + " from " + number(line.points[0][1]) + " to " + number(last[1]);
  }).join("; ") + ".";
}

function latest(lines) {
  return lines.map((line) => (lines.length > 1 ? line.run.name + " " : "last: ") + number(line.points[line.points.length - 1][1])).join(", ");
}

function least(values) {
  return values.reduce((one, other) => Math.min(one, other), Infinity);
}

function most(values) {
  return values.reduce((one, other) => Math.max(one, other), -Infinity);
}
