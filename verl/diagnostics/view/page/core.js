// Data, state, and elements. Texts of samples reach the page by textContent alone.
const embedded = document.getElementById("data").textContent.trim();
const given = embedded ? JSON.parse(embedded) : null;
const token = new URLSearchParams(location.search).get("token") || "";
const EVERY_MS = 3000;
const COLORS = ["#2f6fd0", "#d9622b", "#2a9162", "#9a4fc2", "#b8901a", "#c2407c", "#1a93a8", "#7a7a74"];

class AnswerError extends Error {}

// Ask the server, or look into the file that `--export` wrote.
async function ask(question) {
  let answer;
  if (given) {
    answer = given[question];
    if (answer === undefined) {
      throw new AnswerError("This file does not hold that part of the run (" + question + "). Open it with verl view.");
    }
  } else {
    let reply;
    try {
      reply = await fetch("/api/" + question, { headers: { "X-Verl-Token": token } });
    } catch {
      throw new AnswerError("verl view no longer runs. Start it again.");
    }
    if (reply.status === 403) throw new AnswerError("Open the address that verl view printed.");
    answer = await reply.json();
  }
  if (answer && answer.error) throw new AnswerError(answer.error);
  return answer;
}

// The state of the page is its address after "#", so that a view can be shared and gone back to.
const state = {
  read() {
    return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  },
  get(name, otherwise) {
    const value = this.read()[name];
    return value === undefined ? otherwise : value;
  },
  number(name, otherwise) {
    const value = Number(this.get(name, NaN));
    return Number.isFinite(value) ? value : otherwise;
  },
  link(changes) {
    const values = { ...this.read(), ...changes };
    for (const name of Object.keys(values)) if (values[name] === null) delete values[name];
    return "#" + new URLSearchParams(values);
  },
  set(changes, replace = false) {
    const link = this.link(changes);
    if (link === location.hash) return;
    if (replace) {
      history.replaceState(null, "", link);
      window.dispatchEvent(new HashChangeEvent("hashchange"));
    } else {
      location.hash = link;
    }
  },
};

// Make an element: attributes by name, functions as listeners, strings as text.
function el(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "path", "line", "rect", "text", "g", "circle", "title"].includes(tag);
  const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.replace(/^on/, ""), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function colored(element, color, property = "backgroundColor") {
  element.style[property] = color;
  return element;
}

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

function seconds(value) {
  if (value >= 1) return number(value, 3) + " s";
  return number(value * 1000, 3) + " ms";
}

function labelled(text, control) {
  return el("label", {}, text, control);
}

function select(label, options, value, onChange) {
  const control = el("select", { onchange: (event) => onChange(event.target.value) });
  for (const [key, text] of options) {
    const option = el("option", { value: key }, text);
    option.selected = String(key) === String(value);
    control.append(option);
  }
  return labelled(label, control);
}

function checkbox(label, isOn, onChange) {
  const control = el("input", { type: "checkbox", onchange: (event) => onChange(event.target.checked) });
  control.checked = isOn;
  return labelled(label, control);
}

function table(head, rows, caption) {
  return el("table", { class: "plain" },
    caption ? el("caption", { class: "quiet" }, caption) : null,
    el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, place) =>
      el(place ? "td" : "th", { class: typeof cell === "number" ? "number" : null, scope: place ? null : "row" },
        typeof cell === "number" ? number(cell) : cell))))));
}
