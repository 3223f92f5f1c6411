// A trajectory: its conversation, and its tokens in the colors of one of their values.
const NAMES = {
  advantages: "advantage", rollout_log_probs: "log-prob, rollout", old_log_probs: "log-prob, trainer", ref_log_prob: "log-prob, reference",
  entropys: "entropy", response_mask: "mask", ratio: "ratio trainer / rollout",
  token_age: "age of the weights", turn_of_token: "turn", values: "value of the critic", token_level_rewards: "reward", returns: "return", token_level_scores: "score",
};
// Values whose sign, or distance from a middle, matters; for others more color means more or less.
const MIDDLE = { advantages: 0, ratio: 1, values: 0, token_level_rewards: 0, returns: 0, token_level_scores: 0 };
const DISCRETE = ["response_mask", "turn_of_token", "token_age"];
const MOST_TOKENS = 6000;

async function showTrajectory(main, page) {
  const { run, step } = page.place();
  const row = state.number("row", 0);
  const sample = await ask(`sample/${run.id}/${step}/${row}`);
  const by = state.get("by", colorings(sample)[0][0]);
  const place = sample.members.indexOf(row);
  const neighbor = (move, label) => {
    const other = sample.members[place + move];
    return el("button", { disabled: other === undefined, onclick: () => state.set({ row: other }) }, label);
  };
  const detail = el("div", { class: "panel mono", role: "status", "aria-live": "polite" }, "Choose a token to read its values.");

  main.append(
    el("div", { class: "bar" },
      el("strong", {}, `Row ${row}, score ${number(sample.score)}, ${sample.ids.length} tokens`),
      neighbor(-1, "← in the group"), neighbor(1, "in the group →"),
      el("a", { href: state.link({ view: "group" }) }, `Group ${sample.group} (${sample.members.length})`)),
    el("div", { class: "two" },
      el("section", { "aria-label": "Conversation" }, el("h2", {}, "Conversation"), conversation(sample), facts(sample)),
      el("section", { "aria-label": "Tokens", class: "sticky" }, el("h2", {}, "Tokens"),
        el("div", { class: "bar" }, coloringControl(sample, by)), detail,
        el("div", { class: "panel" }, strip(sample, by, MOST_TOKENS, detail)))));
}

function conversation(sample) {
  const messages = sample.messages.length ? sample.messages.slice() : [{ role: "prompt", content: sample.prompt }];
  const hasAnswer = messages.some((message) => message.role === "assistant");
  if (!hasAnswer) messages.push({ role: "assistant", content: sample.response });
  return el("div", {}, messages.map((message) => {
    const parts = [textOf(message.content)];
    if (message.tool_calls) parts.push(JSON.stringify(message.tool_calls, null, 1));
    const isModel = message.role === "assistant";
    return el("article", { class: "message" + (isModel ? " assistant" : "") },
      el("h3", {}, message.role + (message.name ? " " + message.name : "")), el("pre", {}, parts.filter(Boolean).join("\n")));
  }));
}

function textOf(content) {
  if (typeof content === "string") return content;
  return content === null || content === undefined ? "" : JSON.stringify(content, null, 1);
}

function facts(sample) {
  const rows = Object.entries(sample.fields).filter(([name]) => name !== "agent_info")
    .map(([name, value]) => [name, el("code", {}, typeof value === "string" ? value : JSON.stringify(value))]);
  return el("details", { open: true }, el("summary", {}, "Reward and data"), table(["Field", "Value"], rows));
}

// The values that the tokens of a sample can be colored by.
function colorings(sample) {
  const names = Object.keys(sample.tokens);
  if (names.includes("rollout_log_probs") && names.includes("old_log_probs")) names.push("ratio");
  const order = Object.keys(NAMES);
  const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  names.sort((one, other) => rank(one) - rank(other));
  return names.map((name) => [name, NAMES[name] || name]);
}

function coloringControl(sample, by, values = learnedValues(sample, by)) {
  const legend = el("span", { class: "scale", "aria-hidden": "true" });
  legend.style.background = `linear-gradient(90deg, ${colorOf(by, least(values), values)}, ${colorOf(by, (least(values) + most(values)) / 2, values)}, ${colorOf(by, most(values), values)})`;
  const range = values.length ? [number(least(values), 3), legend, number(most(values), 3)] : ["no values"];
  return el("span", { class: "bar" }, select("Color by", colorings(sample), by, (value) => state.set({ by: value })), range);
}

function valuesOf(sample, by) {
  if (by !== "ratio") return sample.tokens[by] || [];
  const rollout = sample.tokens.rollout_log_probs;
  return sample.tokens.old_log_probs.map((value, place) =>
    value === null || rollout[place] === null ? null : Math.exp(value - rollout[place]));
}

// The values of the tokens that are learned from, which set the scale of the colors.
function learnedValues(sample, by) {
  const mask = sample.tokens.response_mask || [];
  return valuesOf(sample, by).filter((value, place) => value !== null && (by === "response_mask" || mask[place] !== 0));
}

function colorOf(by, value, values) {
  if (value === null || value === undefined || !values.length) return "transparent";
  if (DISCRETE.includes(by)) {
    const color = COLORS[((Math.round(value) % COLORS.length) + COLORS.length) % COLORS.length];
    return value < 0 || (by === "response_mask" && value === 0) ? "transparent" : color + "55";
  }
  const middle = MIDDLE[by];
  if (middle === undefined) {
    // Log-probs: the least likely token stands out. Entropy: the most uncertain one.
    const [low, high] = [least(values), most(values)];
    const share = high > low ? (value - low) / (high - low) : 0;
    const strength = by.includes("log_prob") ? 1 - share : share;
    return `rgba(190, 80, 170, ${(0.65 * strength).toFixed(3)})`;
  }
  const reach = Math.max(most(values) - middle, middle - least(values), 1e-12);
  const share = (value - middle) / reach;
  return share < 0 ? `rgba(217, 98, 43, ${(-0.65 * share).toFixed(3)})` : `rgba(47, 111, 208, ${(0.65 * share).toFixed(3)})`;
}

// The tokens as text. With `detail` they can be chosen by pointer and arrow keys.
function strip(sample, by, limit, detail = null, known = learnedValues(sample, by)) {
  const values = valuesOf(sample, by);
  const mask = sample.tokens.response_mask || [];
  const box = el("div", { class: "strip", tabindex: detail ? 0 : null, role: detail ? "group" : null,
    "aria-label": detail ? "Tokens of the response. Arrow keys choose one." : null });
  if (detail) box.append(el("span", { class: "prompt" }, sample.prompt_pieces.join("")));
  const spans = [];
  const addUntil = (end) => {
    for (let place = spans.length; place < Math.min(end, sample.pieces.length); place++) {
      const span = el("span", { class: mask[place] === 0 ? "masked" : null, "data-place": place }, sample.pieces[place] || "∅");
      if (by === "response_mask" || mask[place] !== 0) colored(span, colorOf(by, values[place], known));
      spans.push(span);
      box.append(span);
    }
  };
  addUntil(limit);
  if (sample.pieces.length > limit) {
    const more = el("button", { onclick: () => { more.remove(); addUntil(Infinity); } }, `${sample.pieces.length - limit} more tokens`);
    box.append(more);
  }
  if (!detail) return box;

  let chosen = -1;
  const choose = (place) => {
    if (place < 0 || place >= spans.length) return;
    if (spans[chosen]) spans[chosen].classList.remove("shown");
    chosen = place;
    spans[place].classList.add("shown");
    const parts = [`token ${place}: ${JSON.stringify(sample.pieces[place])} (id ${sample.ids[place]})`];
    for (const [name, label] of colorings(sample)) parts.push(`${label} ${number(valuesOf(sample, name)[place], 6)}`);
    detail.textContent = parts.join(" · ");
  };
  const placeOf = (event) => (event.target.dataset && event.target.dataset.place !== undefined ? Number(event.target.dataset.place) : -1);
  box.addEventListener("pointerover", (event) => choose(placeOf(event)));
  box.addEventListener("click", (event) => choose(placeOf(event)));
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(spans.length - 1, chosen + move)));
    spans[chosen].scrollIntoView({ block: "nearest" });
  });
  return box;
}
