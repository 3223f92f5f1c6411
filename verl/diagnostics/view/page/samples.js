// Samples: a table that draws only the rows in sight, and the group of one prompt side by side.
const ROW = 30;
const COLUMNS = [
  ["row", "Row", "4.5rem"], ["group", "Group", "6rem"], ["score", "Score", "5.5rem"], ["advantage", "Advantage", "6rem"],
  ["length", "Tokens", "5rem"], ["mismatch", "Mismatch", "6rem"], ["prompt", "Prompt", "minmax(10rem, 2fr)"],
  ["response", "Response", "minmax(12rem, 3fr)"],
];
const NUMBERS = ["row", "score", "advantage", "length", "mismatch"];

async function showSamples(main, page) {
  const { run, step } = page.place();
  const answer = await ask(`samples/${run.id}/${step}`);
  if (!answer.rows) {
    main.append(el("p", { class: "quiet" }, `Step ${step} has no samples: it did not end, or it was supervised fine-tuning.`));
    return;
  }
  const columns = { ...answer.columns, row: Array.from({ length: answer.rows }, (_, row) => row) };
  const shown = COLUMNS.filter(([name]) => columns[name]);
  const sort = state.get("sort", "row");
  const down = state.get("order", "up") === "down";
  const text = state.get("text", "").toLowerCase();
  const only = state.get("only", "");

  let rows = columns.row;
  if (text) rows = rows.filter((row) => [columns.prompt, columns.response, columns.group].some((column) => column[row].toLowerCase().includes(text)));
  if (only === "flat") rows = rows.filter((row) => columns.flat[row]);
  if (only === "clipped") rows = rows.filter((row) => columns.clipped[row]);
  rows = sorted(rows, columns[sort] || columns.row, down);

  const preset = (label, changes) => el("button", { onclick: () => state.set(changes),
    "aria-pressed": String(Object.entries(changes).every(([name, value]) => state.get(name, null) === value)) }, label);
  main.append(el("div", { class: "bar" },
    labelled("Search", el("input", { type: "search", value: state.get("text", ""), placeholder: "in texts, or a group",
      onchange: (event) => state.set({ text: event.target.value || null }) })),
    select("Show", [["", "all"], ["flat", "groups without variance"], ["clipped", "cut off"]], only, (value) => state.set({ only: value || null })),
    preset("Worst", { sort: "score", order: "up" }), preset("Best", { sort: "score", order: "down" }),
    preset("Longest", { sort: "length", order: "down" }),
    columns.mismatch ? preset("Largest mismatch", { sort: "mismatch", order: "down" }) : null,
    el("span", { class: "quiet", role: "status" }, `${rows.length} of ${answer.rows} samples`)));
  main.append(virtualTable(rows, columns, shown, sort, down));
}

function sorted(rows, values, down) {
  const sign = down ? -1 : 1;
  return rows.slice().sort((one, other) => {
    const [a, b] = [values[one], values[other]];
    if (a === b) return one - other;
    if (a === null) return 1;
    if (b === null) return -1;
    return (a < b ? -1 : 1) * sign;
  });
}

function virtualTable(rows, columns, shown, sort, down) {
  const template = shown.map((column) => column[2]).join(" ");
  const head = el("div", { class: "row head", role: "row", "aria-rowindex": 1 }, shown.map(([name, label]) =>
    el("div", { class: "cell" + (NUMBERS.includes(name) ? " number" : ""), role: "columnheader", "aria-sort": name === sort ? (down ? "descending" : "ascending") : "none" },
      el("button", { onclick: () => state.set({ sort: name, order: name === sort && !down ? "down" : "up" }) },
        label + (name === sort ? (down ? " ↓" : " ↑") : "")))));
  head.style.gridTemplateColumns = template;
  const body = el("div", { role: "rowgroup" });
  body.style.height = rows.length * ROW + "px";
  body.style.position = "relative";
  const grid = el("div", { class: "grid", role: "grid", tabindex: 0, "aria-label": "Samples. Arrow keys choose a row, Enter opens it.",
    "aria-rowcount": rows.length + 1, "aria-colcount": shown.length }, head, body);

  let chosen = Math.max(0, rows.indexOf(state.number("row", rows[0])));
  const open = (place) => state.set({ view: "trajectory", row: rows[place] });
  const drawn = new Map(); // place -> its row
  const rowAt = (place) => {
    const row = rows[place];
    const cells = shown.map(([name]) => {
      const value = columns[name][row];
      const badges = name === "response" ? badgesOf(columns, row) : null;
      const isNumber = NUMBERS.includes(name);
      return el("div", { class: "cell" + (isNumber ? " number" : ""), role: "gridcell" }, badges, isNumber ? number(value) : value.replace(/\s+/g, " "));
    });
    const line = el("div", { class: "row", role: "row", id: "row-" + place, "aria-rowindex": place + 2, onclick: () => open(place) }, cells);
    line.style.top = place * ROW + "px";
    line.style.gridTemplateColumns = template;
    return line;
  };
  // Only rows that come into sight are made; those that leave it go.
  const draw = () => {
    const first = Math.max(0, Math.floor(grid.scrollTop / ROW) - 8);
    const last = Math.min(rows.length, first + Math.ceil(grid.clientHeight / ROW) + 18);
    for (const [place, line] of drawn) {
      if (place >= first && place < last) continue;
      line.remove();
      drawn.delete(place);
    }
    const fresh = document.createDocumentFragment();
    for (let place = first; place < last; place++) {
      if (!drawn.has(place)) {
        drawn.set(place, rowAt(place));
        fresh.append(drawn.get(place));
      }
      drawn.get(place).setAttribute("aria-selected", String(place === chosen));
    }
    body.append(fresh);
    grid.setAttribute("aria-activedescendant", "row-" + chosen);
  };
  let isDue = false;
  grid.addEventListener("scroll", () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      draw();
    });
  }, { passive: true });
  grid.addEventListener("keydown", (event) => {
    if (event.target !== grid) return;
    const page = Math.floor(grid.clientHeight / ROW) - 2;
    const move = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -rows.length, End: rows.length }[event.key];
    if (event.key === "Enter") open(chosen);
    if (move === undefined) return;
    event.preventDefault();
    chosen = Math.max(0, Math.min(rows.length - 1, chosen + move));
    const top = chosen * ROW;
    if (top < grid.scrollTop) grid.scrollTop = top;
    if (top + 2 * ROW > grid.scrollTop + grid.clientHeight) grid.scrollTop = top + 2 * ROW - grid.clientHeight;
    draw();
  });
  requestAnimationFrame(() => {
    grid.scrollTop = Math.max(0, chosen * ROW - grid.clientHeight / 2);
    draw();
  });
  return grid;
}

function badgesOf(columns, row) {
  const badges = [];
  if (columns.clipped[row]) badges.push(el("span", { class: "badge" }, "cut off"));
  if (columns.flat[row]) badges.push(el("span", { class: "badge" }, "no variance"));
  return badges;
}

const MOST_MEMBERS = 32;

async function showGroup(main, page) {
  const { run, step } = page.place();
  const row = state.number("row", 0);
  const first = await ask(`sample/${run.id}/${step}/${row}`);
  const numbers = first.members.slice(0, MOST_MEMBERS);
  const members = await Promise.all(numbers.map((each) => ask(`sample/${run.id}/${step}/${each}`)));
  const by = state.get("by", colorings(first)[0][0]);
  const scale = members.flatMap((sample) => learnedValues(sample, by));
  main.append(
    el("h2", {}, `Group ${first.group}: ${first.members.length} samples`),
    el("pre", { class: "panel" }, first.prompt),
    el("div", { class: "bar" }, coloringControl(first, by, scale)),
    el("div", { class: "members", tabindex: 0, role: "region", "aria-label": "Samples of the group, side by side" }, members.map((sample) =>
      el("article", { class: "panel member" + (sample.row === row ? " shown" : ""), "aria-label": "Sample " + sample.row },
        el("h3", {}, el("a", { href: state.link({ view: "trajectory", row: sample.row }) }, `Row ${sample.row}`),
          ` score ${number(sample.score)}, ${sample.ids.length} tokens`),
        strip(sample, by, 1500, null, scale)))));
  if (first.members.length > MOST_MEMBERS) main.append(el("p", { class: "quiet" }, `The first ${MOST_MEMBERS} are shown.`));
}
