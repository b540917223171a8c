// The live panel of a cluster, for anywidget. The kernel sends one dictionary (described in model.py) at each change.
// This file shows it, counts the time in between, and updates the page in place: focus, selection, the search and the
// log's scroll position stay. Text from outside becomes text nodes, never markup.
//
// render() sends nothing: a message sent from it would go to the kernel's busy shell and delay all later ones.

import { Chart } from "./chart.js";
import { button, h, put, unique, write } from "./elements.js";
import { keepIn } from "./keeper.js";
import { Announcer, about, compare, duration, keepKeys, pill } from "./page.js";

const LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"; // as in curves.py
const OVERDUE_AFTER = 8; // the kernel sends something every 5 seconds while the cluster runs
const NO_NEWS_AFTER = 15;
const SHOWN_OF_MANY = 5;
const ORDER_HOLDS = 5000; // milliseconds in which rows keep their places
const TABS_UP_TO = 8;
const LOG_LINES = 1000;
const LOG_EVERY = 1; // seconds
const ANSWER_WITHIN = 8000; // milliseconds for the Jupyter server to answer
const GONE = 410; // the status by which the Jupyter server says that the kernel has ended
const KERNEL_GONE = "The kernel that held this cluster has ended, and the cluster with it.";
const CHART_EVERY = 2; // seconds between two requests of an open chart
const CHART_WITHIN = 120_000; // milliseconds for a busy kernel to answer by a message
const SECOND_PRESS_AFTER = 1000; // milliseconds: a double click is one press
const TROUBLE = ["slow", "silent", "stuck", "loss is NaN", "failed", "lost"];
const SIGNS = { bad: "✕", warn: "!" };

// --- words: the page itself writes only times ---

function clock(seconds) {
  return new Date(seconds * 1000).toTimeString().slice(0, 8);
}

/** The number in "21.4 k" or "2.3 GB", to sort by. */
function magnitude(text) {
  const found = /^([-+\d.e]+) ?(k|M|G)?/.exec(text || "");
  return found ? parseFloat(found[1]) * ({ k: 1e3, M: 1e6, G: 1e9 }[found[2]] || 1) : null;
}

// --- small drawings ---

/** A thin bar. Without a known share, its empty track stays, so that nothing moves when a share comes. */
class Bar {
  constructor() {
    this.fill = h("div");
    this.element = h("div", { class: "t-track" }, this.fill);
  }

  show(percent, tone, label, text) {
    const known = percent !== null && percent !== undefined;
    put(this.element, "class", `t-track t-${tone}`);
    put(this.element, "role", known ? "progressbar" : null);
    put(this.element, "aria-label", known ? label : null);
    put(this.element, "aria-valuemin", known ? 0 : null);
    put(this.element, "aria-valuemax", known ? 100 : null);
    put(this.element, "aria-valuenow", known ? percent : null);
    put(this.element, "aria-valuetext", known ? text : null);
    const width = `${known ? percent : 0}%`;
    if (this.fill.style.width !== width) this.fill.style.width = width;
  }
}

/** A curve from its quantised points; a "~" is a gap. */
class Curve {
  constructor() {
    this.element = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const attributes = { class: "t-curve", viewBox: "0 0 100 16", preserveAspectRatio: "none", "aria-hidden": "true" };
    for (const [name, value] of Object.entries(attributes)) this.element.setAttribute(name, value);
    this.points = null;
  }

  show(points) {
    if (points === this.points) return;
    this.points = points;
    const last = Math.max(1, points.length - 1);
    const lines = [[]];
    [...points].forEach((point, i) => {
      const level = LEVELS.indexOf(point);
      if (level < 0) lines.push([]);
      else lines[lines.length - 1].push(`${((i * 100) / last).toFixed(1)},${(14.5 - (level * 13) / 63).toFixed(1)}`);
    });
    this.element.replaceChildren(
      ...lines.filter((line) => line.length > 1).map((line) => {
        const drawn = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
        drawn.setAttribute("points", line.join(" "));
        return drawn;
      }),
    );
  }
}

/** One number above the table. A press on a metric opens its chart. */
class Tile {
  constructor(key, openChart) {
    this.label = h("span", { class: "t-label" });
    this.value = h("b", {}, "—");
    this.key = key;
    this.bar = key === "epoch" || key === "feed" ? new Bar() : null;
    this.curve = key === "loss" || key === "metric" ? new Curve() : null;
    const css = this.bar ? "t-tile t-wide" : this.curve ? "t-tile t-opens" : "t-tile";
    const below = this.bar ? [this.bar.element] : this.curve ? [this.curve.element] : [];
    const attributes = { class: css, hidden: true };
    const opens = { ...attributes, type: "button", "aria-expanded": "false", onclick: () => openChart(this) };
    this.element = h(this.curve ? "button" : "div", this.curve ? opens : attributes, this.label, this.value, ...below);
    this.metric = "";
  }

  show(tile) {
    put(this.element, "hidden", !tile);
    if (!tile) return;
    const [, label, value, percent, tone, curve, metric] = tile;
    this.metric = metric;
    write(this.label, label);
    put(this.label, "title", label);
    write(this.value, value || "—");
    if (this.bar) this.bar.show(percent, tone, this.key, `${label}: ${value}`);
    if (this.curve) this.curve.show(curve[0] || "");
    const range = curve.length ? `${label}: lowest ${curve[1]}, highest ${curve[2]}` : null;
    put(this.element, "title", this.curve ? `${range || label} (opens the chart)` : range);
  }
}

// --- the Jupyter server ---

/** The base URL of the page's Jupyter server; null in a front end that has none. */
function baseUrl() {
  const config = document.getElementById("jupyter-config-data");
  let base = document.body.dataset.baseUrl;
  try {
    base = (config && JSON.parse(config.textContent).baseUrl) || base;
  } catch {
    // not JupyterLab's configuration
  }
  return base ? base.replace(/\/*$/, "/") : null;
}

/**
 * Ask the Jupyter server. Return {data} with its answer, {timeout} if it has none yet, or {gone} with its message if
 * the kernel has ended. Return null if there is no server, no such route, or no kernel behind it: another way may work.
 */
async function ask(path, method = "GET") {
  const base = baseUrl();
  if (base === null) return null;
  const cookie = /(?:^|;\s*)_xsrf=([^;]+)/.exec(document.cookie);
  const headers = method === "POST" && cookie ? { "X-XSRFToken": decodeURIComponent(cookie[1]) } : {};
  try {
    const signal = AbortSignal.timeout(ANSWER_WITHIN);
    const answer = await fetch(`${base}tfos-nb/${path}`, { method, headers, signal, credentials: "same-origin" });
    if (answer.status === 504) return { timeout: true };
    if (!answer.ok && answer.status !== GONE) return null;
    const text = await answer.text();
    const data = text ? JSON.parse(text) : {};
    return answer.ok ? { data } : { gone: data.message || KERNEL_GONE };
  } catch (error) {
    if (error.name === "TimeoutError") return { timeout: true };
    return null;
  }
}

// --- the Stop button ---

/** Asks the cluster to stop, by HTTP or else by a message; a second press cancels. The kernel decides which it is. */
class Stop {
  constructor(panel) {
    this.panel = panel;
    this.element = button("■ Stop", "t-button t-stop", () => this.press(), { hidden: true });
    this.reset();
  }

  reset() {
    this.presses = 0;
    this.busy = false;
  }

  show() {
    const { stoppable, status } = this.panel.data;
    if (!stoppable && this.panel.hasFocus(this.element)) this.panel.root.focus({ preventScroll: true });
    put(this.element, "hidden", !stoppable);
    const stopping = this.presses > 0 || status === "STOPPING";
    const going = this.busy || this.presses > 1;
    write(this.element, going ? (this.presses > 1 ? "Cancelling…" : "Stopping…") : stopping ? "Cancel now" : "■ Stop");
    put(this.element, "aria-disabled", going);
  }

  async press() {
    if (this.busy || this.presses > 1) return;
    const pressed = this.panel.data.id;
    this.busy = true;
    this.presses += 1;
    this.show();
    const pause = new Promise((done) => setTimeout(done, SECOND_PRESS_AFTER));
    const [arrived, said] = await this.send(pressed);
    await pause;
    if (this.panel.data.id !== pressed) return;
    this.busy = false;
    if (!arrived) this.presses -= 1;
    this.panel.tell(said);
    this.show();
  }

  /** Send the press by HTTP or by a message; return whether it arrived, as far as is known, and the text to show. */
  async send(id) {
    const answer = await ask(`api/clusters/${encodeURIComponent(id)}/stop`, "POST");
    if (answer && answer.data) return [true, answer.data.said || ""];
    // The press may have arrived or not. A message would then count as a second press, so the user decides.
    if (answer && answer.timeout) return [false, "The Jupyter server has not answered yet."];
    if (answer) return [false, answer.gone];
    try {
      await this.panel.model.send({ kind: "stop" });
      return [true, ""];
    } catch {
      return [false, KERNEL_GONE]; // a widget whose kernel was restarted cannot send
    }
  }
}

// --- the table of nodes ---

const second = (css = "") => h("span", { class: `t-second ${css}` });
const METRICS = [0, 1, 2, 3]; // the loss and three others

/** Columns: title, css, direction of the head's first press, value to sort by, and name in data.room. */
const COLUMNS = [
  { title: "Node", css: "t-c-node", down: false, value: (node) => node.name },
  { title: "State", css: "t-c-state", down: false, value: (node) => node.urgency },
  { title: "Epoch · step", css: "t-c-step", down: false, value: (node) => node.far },
  ...METRICS.map((i) => ({
    metric: i, room: `metric${i}`, css: "t-c-metric", down: true, value: (node) => magnitude(node.metrics[i]),
  })),
  { title: "Rows/s", css: "t-num t-c-rate", down: false, value: (node) => magnitude(node.rate) },
  { title: "Time left", room: "left", css: "t-num t-c-left", down: true, value: (node) => node.left },
  { title: "GPU", css: "t-c-gpu", down: false, value: (node) => (node.gpu ? mean(node.gpu[1]) : null) },
  { title: "CPU · mem", room: "cpu", css: "t-num t-c-cpu", down: true, value: (node) => magnitude(node.cpu) },
  { title: "Heartbeat", css: "t-num t-c-beat", down: true, value: (node) => node.beat },
];

/** The mean; NaN without numbers, which means unknown. */
function mean(numbers) {
  return numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
}

class Row {
  constructor(name, openLog, openChart) {
    this.who = button(name, "t-link t-who", () => openLog(name), { title: `${name}: show its log` });
    this.where = second("t-mono");
    this.state = pill();
    this.epoch = h("span", { class: "t-dim" });
    this.step = h("span");
    this.bar = new Bar();
    this.metrics = METRICS.map(() => ({ value: h("span"), curve: new Curve() }));
    this.rate = h("span");
    this.left = h("span");
    this.gpu = { name: h("abbr"), used: h("span"), bar: new Bar(), memory: second() };
    this.cpu = { percent: h("span"), memory: second() };
    this.beat = h("span");
    const contents = [
      [this.who, this.where],
      [this.state],
      [this.epoch, this.step, this.bar.element],
      ...this.metrics.map((metric) => [metric.value, metric.curve.element]),
      [this.rate],
      [this.left],
      [h("div", { class: "t-both" }, this.gpu.name, this.gpu.used), this.gpu.bar.element, this.gpu.memory],
      [this.cpu.percent, this.cpu.memory],
      [this.beat],
    ];
    const tag = (i) => (i ? "td" : "th");
    this.cells = COLUMNS.map(({ css }, i) => h(tag(i), { class: css, scope: i ? null : "row" }, ...contents[i]));
    // Only the pointer can open a chart by a metric's cell. By keyboard, a tile's chart has a choice of the node.
    METRICS.forEach((i) => this.cells[3 + i].addEventListener("click", () => openChart(this.node.name, i)));
    this.gpu.cell = this.cells[COLUMNS.findIndex(({ title }) => title === "GPU")];
    this.element = h("tr", {}, ...this.cells);
  }

  show(node, data) {
    this.node = node;
    const where = [node.host, node.executor].filter(Boolean).join(" · ");
    write(this.where, where);
    put(this.where, "title", where && `host ${node.host}${data.domain}, executor ${node.executor}`);
    write(this.state, node.word);
    put(this.state, "class", `t-pill t-${node.tone}`);
    put(this.state, "title", node.detail || null);
    this.showSteps(node);
    this.metrics.forEach(({ value, curve }, i) => {
      write(value, node.metrics[i] || "");
      const drawn = node.curves[i] || [];
      curve.show(drawn[0] || "");
      put(curve.element, "hidden", !drawn[0]);
      const cell = this.cells[3 + i];
      const range = drawn.length > 1 ? `: lowest ${drawn[1]}, highest ${drawn[2]}` : "";
      put(cell, "title", node.metrics[i] ? `${data.metrics[i]}${range} (opens the chart)` : null);
    });
    write(this.rate, node.rate);
    this.showGpu(node, data);
    write(this.cpu.percent, node.cpu);
    write(this.cpu.memory, node.memory);
  }

  showSteps(node) {
    const told = node.detail || node.step || (node.epoch ? "" : "—");
    write(this.step, told);
    put(this.step, "title", node.detail || null);
    write(this.epoch, node.detail ? "" : node.epoch && node.step ? `${node.epoch} · ` : node.epoch);
    this.bar.show(node.percent, node.tone, `steps of ${node.name}`, `epoch ${node.epoch}, step ${node.step}`);
  }

  showGpu(node, data) {
    const [place, percents, memory] = node.gpu || [null, [], ""];
    const [name, short] = node.gpu ? [data.gpuNames[place], data.gpuShort[place]] : ["", ""];
    const used = percents.length ? Math.round(mean(percents)) : null;
    put(this.gpu.bar.element, "hidden", used === null);
    this.gpu.bar.show(used, "run", `GPU use of ${node.name}`, `${name || "GPU"}: ${used} percent`);
    write(this.gpu.name, node.gpu ? short || memory : "no GPU");
    write(this.gpu.used, used === null ? "" : `${used}%`);
    write(this.gpu.memory, short ? memory : "");
    put(this.gpu.name, "title", short && short !== name ? name : null);
    const each = percents.length > 1 ? `: ${percents.map((percent) => `${percent}%`).join(", ")}` : "";
    put(this.gpu.cell, "title", node.gpu ? `${name || "GPU"}${each}` : null);
  }

  /** Update the age of the last heartbeat and the time left. */
  tick(since) {
    const { beat, left, word } = this.node;
    // The kernel sent the age at that time. It sends nothing new of a healthy node for seconds, while heartbeats go on.
    const stale = beat !== null && (word === "silent" || since > OVERDUE_AFTER);
    const told = beat === null ? "" : stale ? `stale ${about(beat + since)}` : beat < 1.5 ? "now" : about(beat);
    write(this.beat, told);
    put(this.beat, "class", stale ? "t-stale" : "t-dim");
    put(this.beat, "title", told && `last heartbeat: ${told.replace("stale ", "")}${told === "now" ? "" : " ago"}`);
    write(this.left, left === null ? "" : `~ ${about(left - since)}`);
  }
}

class Table {
  constructor(panel) {
    this.panel = panel;
    this.rows = new Map();
    this.sorted = null; // {column, down}, or null for the kernel's order
    this.all = false;
    this.order = { key: "", names: [], at: -Infinity };
    this.heads = COLUMNS.map((column) => this.head(column));
    this.caption = h("caption", { class: "t-unseen" });
    this.body = h("tbody");
    this.table = h("table", {}, this.caption, h("thead", {}, h("tr", {}, ...this.heads)), this.body);
    this.scroll = h("div", { class: "t-scroll" }, this.table);
    this.told = h("span");
    this.more = button("Show all", "t-button", () => this.toggle(), { "aria-expanded": "false" });
    this.foot = h("div", { class: "t-foot", hidden: true }, this.told, this.more);
    this.element = h("div", {}, this.scroll, this.foot);
  }

  head(column) {
    const press = button(column.title || "", "t-sort", () => this.sortBy(column));
    return h("th", { scope: "col", class: column.css }, press);
  }

  sortBy(column) {
    const again = this.sorted && this.sorted.column === column;
    if (again && this.sorted.down !== column.down) this.sorted = null;
    else this.sorted = { column, down: again ? !column.down : column.down };
    this.heads.forEach((head, i) => {
      const here = this.sorted && this.sorted.column === COLUMNS[i];
      put(head, "aria-sort", here ? (this.sorted.down ? "descending" : "ascending") : null);
    });
    this.order.at = -Infinity;
    this.show(this.panel.data, this.nodes);
  }

  toggle() {
    this.all = !this.all;
    put(this.more, "aria-expanded", String(this.all));
    this.show(this.panel.data, this.nodes);
  }

  show(data, nodes) {
    this.nodes = nodes;
    const many = data.cells !== "";
    const total = data.roles.reduce((sum, [, , count]) => sum + count, 0);
    const shown = this.choose(this.arrange(nodes, many), many);
    this.place(shown, data);
    this.showColumns(data);
    put(this.scroll, "class", many && this.all ? "t-scroll t-all" : "t-scroll");
    put(this.scroll, "tabindex", many && this.all ? 0 : null);
    put(this.scroll, "role", many && this.all ? "region" : null);
    put(this.scroll, "aria-label", many && this.all ? "all nodes" : null);
    const by = this.sorted ? "first by the column chosen" : "to look at first";
    const part = nodes.length < total ? `${nodes.length} to look at first of ${total} nodes` : `${total} nodes`;
    write(this.told, this.all ? part : `The ${shown.length} ${by}, of ${total} nodes`);
    write(this.more, this.all ? `Show ${SHOWN_OF_MANY}` : `Show ${nodes.length < total ? nodes.length : "all"}`);
    put(this.foot, "hidden", !many);
    write(this.caption, many ? `${data.name}: ${this.told.textContent}` : `${data.name}: the nodes`);
  }

  /** Order the nodes; while nothing in particular has changed, they keep their places for a while. */
  arrange(nodes, many) {
    if (!many && !this.sorted) return nodes;
    const trouble = nodes.filter((node) => node.urgency < 2).map((node) => node.name);
    const key = JSON.stringify([this.sorted && [COLUMNS.indexOf(this.sorted.column), this.sorted.down], trouble]);
    const now = performance.now();
    if (key === this.order.key && now - this.order.at < ORDER_HOLDS) {
      const places = new Map(this.order.names.map((name, i) => [name, i]));
      const place = (node) => places.get(node.name) ?? Infinity;
      return [...nodes].sort((a, b) => (place(a) === place(b) ? 0 : place(a) - place(b)));
    }
    let ordered = nodes;
    if (this.sorted) {
      const { column, down } = this.sorted;
      ordered = [...nodes].sort((a, b) => compare(column.value(a), column.value(b), down));
    }
    this.order = { key, names: ordered.map((node) => node.name), at: now };
    return ordered;
  }

  /** Return the first few of many nodes, and the one that has the focus. */
  choose(ordered, many) {
    if (!many || this.all) return ordered;
    return ordered.filter((node, i) => i < SHOWN_OF_MANY || this.panel.hasFocus(this.rows.get(node.name)?.element));
  }

  /** Put the rows into this order, moving as few as necessary. */
  place(shown, data) {
    const focused = this.panel.focused();
    const names = new Set(shown.map((node) => node.name));
    for (const [name, row] of this.rows) {
      if (!names.has(name)) {
        row.element.remove();
        this.rows.delete(name);
      }
    }
    let next = this.body.firstElementChild;
    for (const node of shown) {
      if (!this.rows.has(node.name)) this.rows.set(node.name, this.row(node.name));
      const row = this.rows.get(node.name);
      row.show(node, data);
      row.tick(this.panel.since());
      if (row.element === next) next = next.nextElementSibling;
      else this.body.insertBefore(row.element, next);
    }
    const moved = focused && this.body.contains(focused) && this.panel.focused() !== focused;
    if (moved) focused.focus({ preventScroll: true });
  }

  row(name) {
    const openChart = (node, i) => this.panel.openChart(this.panel.data.charts[i], node);
    return new Row(name, (node) => this.panel.log.open(node), openChart);
  }

  /** Show the columns that have values. */
  showColumns(data) {
    const planned = data.status === "PLANNED";
    const kind = planned ? " t-planned" : data.ended ? " t-ended" : "";
    put(this.table, "class", `t-nodes${data.gpus ? " t-gpus" : ""}${kind}`);
    const gone = COLUMNS.map(({ metric, css }) => {
      if (metric !== undefined) return metric >= data.metrics.length;
      if (css.includes("t-c-gpu")) return !data.gpus;
      if (data.ended && css.includes("t-c-cpu") && !this.nodes.some((node) => node.cpu || node.memory)) return true;
      return (planned && !/node|step/.test(css)) || (data.ended && /rate|left|beat/.test(css));
    });
    COLUMNS.forEach(({ metric, title, room, css }, i) => {
      const text = metric === undefined ? title : data.metrics[metric] || "";
      write(this.heads[i].firstElementChild, planned && i === 2 ? "Slot" : text);
      put(this.heads[i].firstElementChild, "title", `sort by ${text.toLowerCase()}`);
      const from = data.room[room] ? ` t-from${data.room[room]}` : "";
      for (const cell of [this.heads[i], ...[...this.rows.values()].map((row) => row.cells[i])]) {
        put(cell, "class", `${css}${from}${gone[i] ? " t-gone" : ""}`);
      }
    });
  }

  tick(since) {
    for (const row of this.rows.values()) row.tick(since);
  }
}

// --- a cell for each of many nodes ---

class Grid {
  constructor() {
    this.grid = h("div", { class: "t-grid", role: "img" });
    this.legend = h("div", { class: "t-legend", "aria-hidden": "true" });
    this.element = h("div", { class: "t-many", hidden: true }, this.grid, this.legend);
    this.cells = "";
    this.names = "";
  }

  show(data, names) {
    put(this.element, "hidden", !data.cells || data.status === "PLANNED");
    const joined = names.join(" ");
    if (data.cells === this.cells && joined === this.names) return;
    const few = names.length <= 128;
    put(this.grid, "class", few ? "t-grid" : "t-grid t-dense");
    while (this.grid.childElementCount > names.length) this.grid.lastElementChild.remove();
    while (this.grid.childElementCount < names.length) this.grid.append(h("span"));
    const counts = new Map();
    names.forEach((name, i) => {
      const [word, tone] = data.states[data.cells.charCodeAt(i) - 97] || ["", "idle"];
      counts.set(word, (counts.get(word) || 0) + 1);
      if (data.cells[i] === this.cells[i] && joined === this.names) return;
      const cell = this.grid.children[i];
      put(cell, "class", `t-cell t-${tone}`);
      put(cell, "title", `${name} ${word}`);
      write(cell, [SIGNS[tone], few && name.replace(/^worker:/, "").replace(":", " ")].filter(Boolean).join(" "));
    });
    this.cells = data.cells;
    this.names = joined;
    this.tell(data, names.length, [...counts].sort((a, b) => b[1] - a[1]));
  }

  tell(data, total, counts) {
    const tones = new Map(data.states);
    put(this.grid, "aria-label", `${total} nodes: ${counts.map(([word, n]) => `${n} ${word}`).join(", ")}`);
    write(this.legend, counts.map(([word, n]) => `${n} ${word} ${SIGNS[tones.get(word)] || ""}`.trim()).join("  ·  "));
  }
}

// --- the log ---

/** Add the new lines of a tail of the same log to the known lines; the tail may also go further back. */
export function mergeLines(known, tail) {
  const keys = known.map((line) => JSON.stringify(line));
  const fresh = tail.map((line) => JSON.stringify(line));
  if (!keys.length || !fresh.length) return keys.length ? known : tail;
  for (let shared = Math.min(keys.length, fresh.length); shared > 0; shared -= 1) {
    if (keys.slice(-shared).every((key, i) => key === fresh[i])) return [...known, ...tail.slice(shared)];
  }
  const place = fresh.lastIndexOf(keys.at(-1));
  if (place >= keys.length && keys.every((key, i) => key === fresh[place - keys.length + 1 + i])) return tail;
  return keys.includes(fresh.at(-1)) ? known : [...known, ...tail];
}

class Log {
  constructor(panel) {
    this.panel = panel;
    this.lines = new Map([["", []]]); // by node; "" has those of all nodes
    this.following = true; // scroll to the end, until the reader scrolls up
    this.size = "";
    this.shown = [];
    this.node = "";
    this.names = null;
    this.wait = 0;
    const id = unique("log");
    const list = { class: "t-tabs", role: "tablist", "aria-label": "Log", onkeydown: (event) => this.move(event) };
    this.tabs = h("div", list);
    this.choice = h("select", { "aria-label": "Log of", onchange: () => this.open(this.choice.value) });
    const search = { type: "search", placeholder: "Search the log", "aria-label": "Search the log" };
    this.search = h("input", { ...search, oninput: () => this.seek(), spellcheck: "false" });
    this.found = h("span", { class: "t-found" });
    this.copier = button("Copy", "t-button", () => this.copy());
    this.traces = h("pre", { class: "t-trace t-stacks", id: unique("stacks"), tabindex: 0, role: "region", hidden: true });
    const folds = { "aria-expanded": "false", "aria-controls": this.traces.id, title: "Where each program is now" };
    this.stacker = button("Stacks", "t-button", () => this.toggleStacks(), folds);
    this.stacks = {}; // by node, as the nodes last reported them
    this.bar = h(
      "div", { class: "t-logbar" }, h("span", { class: "t-dim" }, "Log"), this.choice, this.tabs,
      h("span", { class: "t-grow" }), this.found, this.search, this.stacker, this.copier,
    );
    const scrolls = { role: "tabpanel", tabindex: 0, "aria-live": "off", onscroll: () => this.look() };
    this.body = h("div", { class: "t-log", id, ...scrolls });
    this.watch = new ResizeObserver(() => this.look());
    this.watch.observe(this.body);
    this.element = h("div", {}, this.bar, this.traces, this.body);
  }

  show(data, names) {
    put(this.element, "hidden", data.status === "PLANNED");
    put(this.stacker, "hidden", data.ended || !data.id);
    this.name(names);
    this.take("", data.log);
    // If the server gives no more lines, use this node's lines in the tail of the whole cluster's log.
    if (this.node && !this.served) this.take(this.node, data.log.filter(([, node]) => node === this.node));
    this.draw();
  }

  /** Make a tab for each node, or a select if there are many. */
  name(names) {
    if (names.join(" ") === this.names) return;
    this.names = names.join(" ");
    const few = names.length <= TABS_UP_TO;
    put(this.tabs, "hidden", !few);
    put(this.choice, "hidden", few);
    if (this.node && !names.includes(this.node)) this.node = "";
    const all = ["", ...names];
    this.tabs.replaceChildren(...(few ? all.map((name) => this.tab(name)) : []));
    this.choice.replaceChildren(...(few ? [] : all.map((name) => h("option", { value: name }, name || "all nodes"))));
    this.mark();
  }

  tab(name) {
    const attributes = { role: "tab", "aria-controls": this.body.id, "data-node": name };
    return button(name || "All", "t-tab", () => this.open(name), attributes);
  }

  mark() {
    for (const tab of this.tabs.children) {
      const chosen = tab.dataset.node === this.node;
      put(tab, "aria-selected", String(chosen));
      put(tab, "tabindex", chosen ? 0 : -1);
    }
    this.choice.value = this.node;
    put(this.body, "role", this.tabs.hidden ? "region" : "tabpanel");
    put(this.body, "aria-label", `log of ${this.node || "all nodes"}`);
  }

  move(event) {
    const tabs = [...this.tabs.children];
    const here = tabs.findIndex((tab) => tab.dataset.node === this.node);
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const next = tabs[(to + tabs.length) % tabs.length];
    next.focus();
    this.open(next.dataset.node);
  }

  open(node) {
    this.node = node;
    this.served = false;
    this.mark();
    const tail = this.panel.data.log;
    if (node) this.take(node, tail.filter((line) => line[1] === node));
    this.draw(true);
    this.writeStacks();
    this.poll();
  }

  /** Show the stacks of the chosen node or of all nodes, or hide them. */
  async toggleStacks() {
    const opens = this.traces.hidden;
    put(this.stacker, "aria-expanded", String(opens));
    put(this.traces, "hidden", !opens);
    if (!opens) return;
    this.stacks = { "": "Asking the nodes…" };
    this.writeStacks();
    const answer = await this.panel.question("stacks");
    this.stacks = answer.stacks || { "": answer.message };
    this.writeStacks();
  }

  writeStacks() {
    const all = Object.entries(this.stacks);
    const said = this.node in this.stacks ? [[this.node, this.stacks[this.node]]] : all;
    put(this.traces, "aria-label", `stacks of ${this.node || "all nodes"}`);
    write(this.traces, said.map(([node, text]) => (node ? `${node}\n${text}` : text)).join("\n\n"));
  }

  /** Ask the server for more lines of this node than a message holds. */
  async poll() {
    const { node } = this;
    this.wait = LOG_EVERY;
    if (!node || !this.panel.data.id) return;
    const path = `api/clusters/${encodeURIComponent(this.panel.data.id)}/log?node=${encodeURIComponent(node)}`;
    const answer = await ask(path);
    const lines = answer && answer.data && answer.data.lines;
    this.served = Array.isArray(lines);
    if (!this.served) this.wait = Infinity; // show only the tail, until the tab is opened again
    else if (this.node === node && this.panel.open) {
      this.take(node, lines);
      this.draw();
    }
  }

  tick() {
    if (!this.node || this.panel.data.ended || document.hidden || !this.body.offsetParent) return;
    this.wait -= 1;
    if (this.wait <= 0) this.poll();
  }

  take(node, tail) {
    const merged = mergeLines(this.lines.get(node) || [], tail);
    this.lines.set(node, node === this.node ? merged : merged.slice(-LOG_LINES));
  }

  /** Update the shown lines: append new ones, and remove old ones at the top. */
  draw(anew = false) {
    const lines = this.lines.get(this.node) || [];
    const { body } = this;
    this.look();
    if (anew) this.following = true;
    const first = this.shown[0];
    const same = first !== undefined && lines[0] === first && lines[this.shown.length - 1] === this.shown.at(-1);
    const kept = same && !anew;
    if (kept && lines.length === this.shown.length) return;
    if (!kept) body.replaceChildren();
    body.append(...lines.slice(kept ? this.shown.length : 0).map((line) => this.line(line)));
    this.shown = lines;
    if (this.following) this.trim(lines);
    this.filter();
  }

  /** Check whether the reader is at the end. If only a change of size has moved the text, keep following the end. */
  look() {
    const { scrollHeight, scrollTop, clientWidth, clientHeight } = this.body;
    const size = `${clientWidth} ${clientHeight}`;
    if (size === this.size) this.following = scrollHeight - scrollTop - clientHeight < 8;
    this.size = size;
    this.follow();
  }

  follow() {
    if (this.following) this.body.scrollTop = this.body.scrollHeight;
  }

  /** Drop old lines, while the reader is at the end. */
  trim(lines) {
    if (lines.length <= LOG_LINES) return;
    this.shown = lines.slice(-LOG_LINES);
    this.lines.set(this.node, this.shown);
    while (this.body.childElementCount > LOG_LINES) this.body.firstElementChild.remove();
  }

  line([time, node, text]) {
    const who = this.node ? [] : [h("b", {}, node), "  "];
    const stamp = h("span", { title: new Date(time * 1000).toLocaleString() }, clock(time));
    return h("div", { class: "t-line" }, stamp, " ", ...who, text);
  }

  /** Filter again, as the reader types. */
  seek() {
    this.look();
    this.filter();
  }

  filter() {
    const wanted = this.search.value.trim().toLowerCase();
    let found = 0;
    for (const line of this.body.children) {
      const fits = !wanted || line.textContent.toLowerCase().includes(wanted);
      found += fits;
      if (line.hidden === fits) line.hidden = !fits;
    }
    write(this.found, wanted ? `${found} of ${this.body.childElementCount}` : "");
    this.follow();
  }

  async copy() {
    const lines = [...this.body.children].filter((line) => !line.hidden).map((line) => line.textContent);
    let done = true;
    try {
      await navigator.clipboard.writeText(lines.join("\n"));
    } catch {
      done = copyBySelection(lines.join("\n"));
    }
    write(this.copier, done ? "Copied" : "Failed");
    setTimeout(() => write(this.copier, "Copy"), 1500);
  }
}

/** Copy a text on pages that are not served by HTTPS. */
function copyBySelection(text) {
  const area = h("textarea", { style: "position:fixed;opacity:0" });
  const focused = document.activeElement;
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (focused) focused.focus({ preventScroll: true });
  return done;
}

// --- the panel ---

class Panel {
  constructor(model) {
    this.model = model;
    this.data = {};
    this.open = true;
    this.received = performance.now();
    this.zero = null;
    this.key = null;
    this.table = new Table(this);
    this.grid = new Grid();
    this.log = new Log(this);
    this.stop = new Stop(this);
    this.announcer = new Announcer();
    const openChart = (tile) => this.openChart(tile.metric, "", tile.element);
    this.tiles = ["epoch", "feed", "loss", "metric", "rate", "left"].map((key) => new Tile(key, openChart));
    this.answers = new Map(); // handlers of the kernel's answers, by the number of the question
    this.asked = 0;
    this.chartIn = 0; // seconds until an open chart asks again
    this.chart = new Chart({
      load: (question) => this.loadChart(question), close: () => this.closeChart(), name: () => this.data.name,
      announce: (text) => this.announcer.say(text),
    });
    for (const tile of this.tiles.filter(({ curve }) => curve)) put(tile.element, "aria-controls", this.chart.element.id);
    this.heard = (message) => this.hear(message);
    model.on("msg:custom", this.heard);
    this.root = h("section", { class: "tfos-panel t-live", tabindex: -1, onkeydown: keepKeys }, ...this.parts());
    this.timer = setInterval(() => this.second(), 1000);
  }

  parts() {
    const id = unique("plan");
    this.name = h("b", { class: "t-name" });
    this.state = pill();
    this.size = h("span", { class: "t-dim" });
    this.generation = h("span", { class: "t-dim" });
    this.elapsed = h("span", { class: "t-dim" });
    this.plan = h("pre", { class: "t-plan", id, hidden: true, tabindex: 0 });
    const folds = { "aria-expanded": "false", "aria-controls": id };
    this.planButton = button("Plan", "t-button", () => this.togglePlan(), folds);
    this.board = button("TensorBoard ↗", "t-button", () => this.openTensorBoard());
    const end = h("span", { class: "t-end" }, this.elapsed, this.planButton, this.board, this.stop.element);
    const head = h("div", { class: "t-head" }, this.name, this.state, this.size, this.generation, end);
    this.message = h("div", { class: "t-say", hidden: true });
    this.note = h("div", { class: "t-foot", hidden: true });
    this.sums = h("div", { class: "t-sum" }, ...this.tiles.map((tile) => tile.element));
    return [
      head, this.message, this.plan, this.saying(), this.sums, this.chart.element, this.grid.element, this.table.element, this.log.element,
      this.note, this.announcer.element,
    ];
  }

  saying() {
    this.who = h("b");
    this.said = h("span");
    this.first = h("div", { hidden: true });
    this.own = { where: h("span", { class: "t-dim" }), code: h("code") };
    this.own.element = h("div", { class: "t-own t-bad", hidden: true }, this.own.where, this.own.code);
    this.aside = h("div", { class: "t-dim", hidden: true });
    this.trace = h("pre", { class: "t-trace", tabindex: 0 });
    this.folded = h("details", { hidden: true }, h("summary", {}, "traceback"), this.trace);
    const parts = [this.who, this.said, this.first, this.own.element, this.aside, this.folded];
    this.say = h("div", { class: "t-say" }, ...parts);
    return this.say;
  }

  show(data) {
    if (!data || !data.status) return;
    if (data.id !== this.data.id) this.stop.reset();
    if (data.id !== this.data.id && this.chart.shown) this.closeChart();
    const ends = data.ended && !this.data.ended;
    if (data.said !== this.data.said) this.tell(data.said);
    this.data = data;
    this.received = performance.now();
    const names = data.roles.flatMap(([role, first, count]) =>
      first === null ? [role] : Array.from({ length: count }, (_, i) => `${role}:${first + i}`),
    );
    this.showHead(data);
    this.showSaying(data);
    const tiles = new Map(data.tiles.map((tile) => [tile[0], tile]));
    put(this.sums, "hidden", !data.tiles.length);
    for (const tile of this.tiles) tile.show(tiles.get(tile.key));
    if (ends && this.chart.shown) this.chart.ask();
    this.grid.show(data, names);
    this.table.show(data, data.nodes.map((values) => this.node(values)));
    this.log.show(data, names);
    this.announce(data);
    this.tick();
  }

  /** Give a node's values their names; urgency and far are for sorting. */
  node(values) {
    const node = Object.fromEntries(this.data.fields.map((field, i) => [field, values[i]]));
    [node.word, node.tone] = this.data.states[node.state];
    if (typeof node.curves === "string") node.curves = node.curves.split(" ").map((points) => [points]);
    node.urgency = { bad: 0, warn: 1 }[node.tone] ?? 2;
    node.far = node.epoch || node.step ? parseInt(node.epoch || 0, 10) * 1e9 + parseInt(node.step || 0, 10) : null;
    return node;
  }

  showHead(data) {
    put(this.root, "aria-label", `TensorFlow cluster ${data.name}`);
    write(this.name, data.name);
    write(this.state, data.word);
    put(this.state, "class", `t-pill t-${data.tone}`);
    write(this.size, data.size);
    write(this.generation, data.generation > 1 ? `generation ${data.generation}` : "");
    put(this.size, "title", data.master || null);
    put(this.planButton, "hidden", !data.plan);
    write(this.plan, data.plan);
    put(this.board, "hidden", !data.tensorboard || !data.id);
    put(this.board, "title", data.tensorboard || null);
    this.stop.show();
    write(this.note, data.note);
    put(this.note, "hidden", !data.note);
  }

  showSaying(data) {
    const failed = data.status === "FAILED";
    const [who, cause] = failed && data.error ? split(data.sentence) : ["", data.sentence];
    write(this.who, who);
    write(this.said, cause);
    const also = !failed && !data.ended && data.status !== "RECOVERING" ? data.error : "";
    write(this.first, also);
    put(this.first, "hidden", !also);
    write(this.own.where, data.own[0] || "");
    write(this.own.code, data.own[1] || "");
    put(this.own.element, "hidden", !data.own.length);
    write(this.aside, data.aside);
    put(this.aside, "hidden", !data.aside);
    write(this.trace, data.trace);
    put(this.folded, "hidden", !data.trace);
    const wrong = data.nodes.some((values) => TROUBLE.includes(data.states[values[3]][0]));
    const warn = data.status === "RECOVERING" || (wrong && !data.ended);
    put(this.say, "class", `t-say${failed ? " t-bad" : warn ? " t-warn" : ""}`);
  }

  /** Announce a change of state; a step, a number or an epoch is not a change of state. */
  announce(data) {
    const words = data.nodes.map((values) => [values[0], data.states[values[3]][0]]);
    const names = words.filter(([, word]) => TROUBLE.includes(word) && word !== "slow").map(([name]) => name).sort();
    const key = JSON.stringify([data.status, data.word, data.generation, names]);
    if (this.key !== null && key !== this.key) this.announcer.say(`${data.name}: ${data.word}. ${data.sentence}`);
    this.key = key;
  }

  /** Show the answer to a press of the user. */
  tell(...parts) {
    const text = parts.filter(Boolean);
    this.message.replaceChildren(...text);
    put(this.message, "hidden", !text.length);
    if (text.length) this.announcer.say(this.message.textContent);
  }

  togglePlan() {
    const shown = this.planButton.getAttribute("aria-expanded") !== "true";
    put(this.planButton, "aria-expanded", String(shown));
    put(this.plan, "hidden", !shown);
  }

  async openTensorBoard() {
    const url = `${baseUrl()}tfos-nb/tb/${encodeURIComponent(this.data.id)}/`; // the last slash is required
    const answer = await ask("api/version");
    if (answer === null || !answer.data) {
      this.tell("This page cannot reach TensorBoard by itself: run %tfos_tensorboard in a cell.");
      return;
    }
    const link = h("a", { href: url, target: "_blank", rel: "noopener" }, "TensorBoard");
    this.tell(link, " opens in another tab.");
    link.click();
  }

  // --- the chart ---

  /** Open the chart of a metric; pressed again, close it. */
  openChart(metric, node = "", opener = null) {
    if (!metric) return;
    const { asked, shown } = this.chart;
    if (shown && asked.metric === metric && asked.node === node) {
      this.closeChart();
      return;
    }
    this.opener = opener;
    this.chartIn = CHART_EVERY;
    this.chart.open(metric, node);
    this.markTiles();
  }

  closeChart() {
    const within = this.hasFocus(this.chart.element);
    this.chart.close();
    this.markTiles();
    if (within) (this.opener || this.root).focus({ preventScroll: true });
  }

  markTiles() {
    const { asked, shown } = this.chart;
    for (const { element, curve, metric } of this.tiles) {
      if (curve) put(element, "aria-expanded", String(shown && asked.metric === metric && !asked.node));
    }
  }

  /** Request a chart's numbers from the Jupyter server, which answers while a cell blocks, or else from the kernel. */
  loadChart(question) {
    this.markTiles();
    return this.question("curves", question);
  }

  /** Ask the cluster for curves or stacks, by HTTP or else by a message to the kernel. */
  async question(kind, question = {}) {
    const query = new URLSearchParams(question);
    const answer = await ask(`api/clusters/${encodeURIComponent(this.data.id)}/${kind}?${query}`);
    if (answer && answer.data) return answer.data;
    if (answer) return { message: answer.gone || "The Jupyter server has not answered yet." };
    this.asked += 1;
    const asked = this.asked;
    return new Promise((done) => {
      const late = () => this.answers.delete(asked) && done({ message: "The kernel has not answered." });
      this.answers.set(asked, done);
      setTimeout(late, CHART_WITHIN);
      try {
        this.model.send({ kind, asked, ...question });
      } catch {
        this.answers.delete(asked);
        done({ message: KERNEL_GONE }); // a widget whose kernel was restarted cannot send
      }
    });
  }

  /** Handle the kernel's answer to a question of this page. */
  hear(message) {
    if (!message || !["curves", "stacks"].includes(message.kind) || !this.answers.has(message.asked)) return;
    this.answers.get(message.asked)(message.data);
    this.answers.delete(message.asked);
  }

  tickChart() {
    const resting = !this.chart.shown || this.data.ended || document.hidden || !this.chart.element.offsetParent;
    if (resting || this.answers.size) return;
    this.chartIn -= 1;
    if (this.chartIn > 0) return;
    this.chartIn = CHART_EVERY;
    this.chart.ask();
  }

  focused() {
    return this.root.getRootNode().activeElement;
  }

  hasFocus(element) {
    const focused = this.focused();
    return Boolean(focused && element && element.contains(focused));
  }

  /** Seconds since the kernel's last message. */
  since() {
    return (performance.now() - this.received) / 1000;
  }

  second() {
    this.tick();
    this.log.tick();
    this.tickChart();
  }

  tick() {
    if (!this.data.status) return;
    const since = this.data.ended ? 0 : this.since();
    write(this.elapsed, this.time(since));
    const left = this.tiles[5];
    if (this.data.left !== null && !this.data.ended) write(left.value, `~ ${duration(Math.round(this.data.left - since))}`);
    this.table.tick(since);
  }

  /** Count the elapsed time evenly: a slightly late message does not set it back. */
  time(since) {
    const { elapsed, ended } = this.data;
    if (elapsed === null) return "";
    if (ended) return duration(elapsed);
    if (since > NO_NEWS_AFTER) return `no news from the kernel for ${duration(since)}`;
    const zero = this.received - elapsed * 1000;
    if (this.zero === null || Math.abs(zero - this.zero) > 1500) this.zero = zero;
    return duration((performance.now() - this.zero) / 1000);
  }

  close() {
    this.open = false;
    clearInterval(this.timer);
    this.log.watch.disconnect();
    this.chart.destroy();
    this.model.off("msg:custom", this.heard);
    this.announcer.close();
  }
}

function split(sentence) {
  const place = sentence.indexOf(": ");
  return place < 0 ? [sentence, ""] : [sentence.slice(0, place), sentence.slice(place)];
}

// --- the notebook's file ---

/** The cluster's data for the file: times do not advance, and there are no buttons that need the kernel. */
function still(data) {
  const sentence = `When this notebook was saved, ${new Date().toLocaleString()}: ${data.sentence}`;
  return { ...data, ended: true, stoppable: false, tensorboard: "", left: null, said: "", note: "", saved: true, sentence };
}

function initialize({ model }) {
  return keepIn(model, "cluster", still);
}

function render({ model, el }) {
  const panel = new Panel(model);
  const show = () => panel.show(model.get("cluster"));
  el.append(panel.root);
  model.on("change:cluster", show);
  show();
  return () => {
    model.off("change:cluster", show);
    panel.close();
  };
}

export default { initialize, render };
