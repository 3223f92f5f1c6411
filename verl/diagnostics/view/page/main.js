// The page: tabs, the choice of run and step, and the view that the address names.
const VIEWS = [
  ["overview", "Overview", showOverview], ["curves", "Curves", showCurves], ["time", "Time", showLanes],
  ["samples", "Samples", showSamples], ["group", "Group", showGroup], ["trajectory", "Trajectory", showTrajectory],
  ["plan", "Plan", showPlan],
];
const OF_ALL_STEPS = ["overview", "curves", "plan"];

const page = {
  runs: [],
  drawn: "",

  // The runs whose curves are drawn.
  chosenRuns() {
    const off = state.get("off", "").split(",");
    const chosen = this.runs.filter((run) => !off.includes(String(run.id)));
    return chosen.length ? chosen : this.runs;
  },

  // The run and the step that a view of one step shows.
  place() {
    const run = this.runs[state.number("run", 0)] || this.runs[0];
    const newest = run.kept[run.kept.length - 1];
    if (newest === undefined) throw new AnswerError("No step of this run has its samples on disk yet.");
    const step = state.number("step", newest);
    return { run, step };
  },
};

function drawControls() {
  const view = state.get("view", "overview");
  document.getElementById("tabs").replaceChildren(...VIEWS.map(([name, label]) =>
    el("a", { href: state.link({ view: name }), "aria-current": name === view ? "page" : null }, label)));
  const controls = document.getElementById("controls");
  const parts = [];
  if (view === "curves") {
    const off = new Set(state.get("off", "").split(",").filter(Boolean));
    for (const run of page.runs) {
      const box = checkbox("", !off.has(String(run.id)), (isOn) => {
        if (isOn) off.delete(String(run.id)); else off.add(String(run.id));
        state.set({ off: [...off].join(",") || null });
      });
      box.append(colored(el("span", { class: "swatch" }), run.color), run.name);
      parts.push(box);
    }
  } else if (view !== "overview") {
    const number = state.number("run", 0);
    const run = page.runs[number] || page.runs[0];
    parts.push(select("Run", page.runs.map((each) => [each.id, each.name]), number, (value) => state.set({ run: value, step: null, row: null })));
    if (!OF_ALL_STEPS.includes(view) && run.kept.length) {
      const steps = run.kept;
      const step = state.number("step", steps[steps.length - 1]);
      const place = steps.indexOf(step);
      const go = (to) => state.set({ step: steps[Math.max(0, Math.min(steps.length - 1, to))] });
      parts.push(el("button", { "aria-label": "Previous step", disabled: place <= 0, onclick: () => go(place - 1) }, "‹"));
      parts.push(select("Step", steps.map((each) => [each, each]), step, (value) => state.set({ step: value })));
      parts.push(el("button", { "aria-label": "Next step", disabled: place >= steps.length - 1, onclick: () => go(place + 1) }, "›"));
    }
  }
  controls.replaceChildren(...parts);
  controls.hidden = !parts.length;
  const names = page.runs.map((run) => `${run.state}, step ${run.steps}` + (run.total_steps ? ` of ${run.total_steps}` : ""));
  document.getElementById("state").textContent = names.join(" · ");
}

async function draw() {
  const view = VIEWS.find(([name]) => name === state.get("view", "overview")) || VIEWS[0];
  const address = location.hash;
  const problem = document.getElementById("problem");
  drawControls();
  const fresh = document.createDocumentFragment();
  try {
    await view[2](fresh, page);
    problem.hidden = true;
  } catch (error) {
    if (!(error instanceof AnswerError)) throw error;
    problem.hidden = false;
    problem.textContent = error.message;
  }
  if (location.hash !== address) return; // another view was asked for meanwhile
  const main = document.getElementById("main");
  main.replaceChildren(fresh);
  document.title = `${view[1]} – verl view`;
  main.dataset.drawn = view[0]; // for tests
}

async function showOverview(main) {
  for (const run of page.runs) {
    const advice = await ask("advice/" + run.id);
    main.append(el("section", { class: "panel", "aria-label": run.name },
      el("h2", {}, colored(el("span", { class: "swatch" }), run.color), " ", run.name),
      el("p", { class: "quiet" }, `${run.state}, step ${run.steps}` + (run.total_steps ? ` of ${run.total_steps}` : "") +
        `; ${run.device}, ${run.ranks} rank${run.ranks === 1 ? "" : "s"}; samples of ${run.kept.length} steps; `, el("code", {}, run.folder)),
      advice.map((finding) => el("div", { class: "finding" },
        el("span", { class: "kind " + finding.kind }, finding.kind),
        finding.metric ? el("a", { href: state.link({ view: "curves", metric: finding.metric }) }, finding.title) : el("strong", {}, finding.title),
        el("p", {}, finding.text))),
      advice.length ? null : el("p", {}, "Nothing to report."),
      el("details", {}, el("summary", {}, "Versions and events"),
        table(["Package", "Version"], Object.entries(run.versions)),
        table(["Step", "Event", "Text"], run.events.map((event) => [String(event.step), event.event, event.text || ""])))));
  }
  const notes = given ? given.notes : [];
  main.append(notes.map((note) => el("p", { class: "quiet" }, note)));
}

async function showPlan(main) {
  const run = page.runs[state.number("run", 0)] || page.runs[0];
  const plan = await ask("plan/" + run.id);
  main.append(el("h2", {}, "Predicted before the run"),
    plan.text ? el("pre", { class: "panel" }, plan.text) : el("p", { class: "quiet" }, "No plan: " + plan.problem),
    el("h2", {}, "Measured"),
    table(["Metric", "Largest"], Object.entries(plan.measured)));
}

async function refresh() {
  const runs = await ask("runs");
  const drawn = JSON.stringify(runs.map((run) => [run.steps, run.kept, run.state, run.damage, run.events.length]));
  page.runs = runs.map((run) => ({ ...run, color: COLORS[run.id % COLORS.length] }));
  const changed = drawn !== page.drawn;
  page.drawn = drawn;
  return changed;
}

async function poll() {
  try {
    const changed = await refresh();
    const isTyping = document.activeElement && ["INPUT", "SELECT"].includes(document.activeElement.tagName);
    if (changed && !isTyping) {
      if (OF_ALL_STEPS.includes(state.get("view", "overview"))) await draw(); else drawControls();
    }
  } catch (error) {
    if (!(error instanceof AnswerError)) throw error;
    const problem = document.getElementById("problem");
    problem.hidden = false;
    problem.textContent = error.message;
  }
}

async function begin() {
  try {
    await refresh();
  } catch (error) {
    if (!(error instanceof AnswerError)) throw error;
    document.getElementById("main").replaceChildren(el("p", {}, error.message));
    return;
  }
  window.addEventListener("hashchange", draw);
  await draw();
  if (!given) setInterval(poll, EVERY_MS);
}

begin();
