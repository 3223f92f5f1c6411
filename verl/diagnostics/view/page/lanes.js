// Time: the phases of the driver and the work of every rank in one step, as lanes.
const BAR = 18;

async function showLanes(main, page) {
  const { run, step } = page.place();
  const answer = await ask(`lanes/${run.id}/${step}`);
  const end = Math.max(answer.end_s, ...answer.lanes.flatMap((lane) => lane.spans.map((span) => span[3])));
  main.append(el("h2", {}, `Step ${step}: ${seconds(answer.end_s)}`));
  if (!answer.lanes.length) main.append(el("p", { class: "quiet" }, "This step has no spans."));
  const colors = new Map();
  const colorOf = (name) => {
    if (!colors.has(name)) colors.set(name, COLORS[colors.size % COLORS.length]);
    return colors.get(name);
  };

  for (const lane of answer.lanes) {
    const rows = [...new Set(lane.spans.map((span) => span[1]))];
    const idle = answer.end_s ? 1 - lane.busy_s / answer.end_s : 0;
    const section = el("section", { class: "lane" },
      el("h3", {}, lane.name, el("span", { class: "quiet" },
        `works ${seconds(lane.busy_s)}, idle ${Math.round(100 * idle)} % `, meter(1 - idle))));
    for (const row of rows) section.append(laneOf(lane.name, row, lane.spans.filter((span) => span[1] === row), end, colorOf));
    main.append(section);
  }

  const spans = answer.lanes.flatMap((lane) => lane.spans.map((span) => [lane.name, span]));
  spans.sort((one, other) => (other[1][3] - other[1][2]) - (one[1][3] - one[1][2]));
  main.append(el("details", {}, el("summary", {}, "The longest spans as a table"),
    table(["Process", "Span", "Row", "Start", "Takes"], spans.slice(0, 60).map(([name, [what, row, from, to]]) =>
      [name, what, row, seconds(from), seconds(to - from)]))));
}

function meter(share) {
  const fill = el("i");
  fill.style.width = Math.round(100 * Math.max(0, Math.min(1, share))) + "%";
  return el("span", { class: "meter", "aria-hidden": "true" }, fill);
}

function laneOf(process, row, spans, end, colorOf) {
  const depths = [];
  const placed = spans.map((span) => {
    let depth = depths.findIndex((until) => until <= span[2] + 1e-9);
    if (depth < 0) depth = depths.push(0) - 1;
    depths[depth] = span[3];
    return [span, depth];
  });
  const track = el("div", { class: "track", role: "img",
    "aria-label": `${process}, ${row}: ` + spans.slice(0, 12).map((span) => `${span[0]} ${seconds(span[3] - span[2])}`).join(", ") });
  track.style.height = depths.length * (BAR + 2) + 4 + "px";
  for (const [[name, , from, to], depth] of placed) {
    const start = Math.max(0, from);
    const bar = el("div", { class: "span", title: `${name}: ${seconds(to - from)}, from ${seconds(from)}` }, name);
    bar.style.left = start / end * 100 + "%";
    bar.style.width = Math.max(0.1, (to - start) / end * 100) + "%";
    bar.style.top = 2 + depth * (BAR + 2) + "px";
    bar.style.height = BAR + "px";
    bar.style.backgroundColor = colorOf(name) + "aa";
    track.append(bar);
  }
  return el("div", { class: "lane-row" }, el("span", { class: "quiet" }, row), track);
}
