// The table of recorded runs, for anywidget. The kernel sends one dictionary (described in runs/data.py) and, if
// asked, the curves of the chosen runs and their differences. Text from outside becomes text nodes, never markup.
//
// render() sends nothing: a message sent from it would go to the kernel's busy shell and delay all later ones.

import { Chart, sample } from "./chart.js";
import { button, h, put, unique, write } from "./elements.js";
import { keepIn } from "./keeper.js";
import { Announcer, compare, duration, keepKeys, pill } from "./page.js";
import { number, title } from "./plot.js";

const HUES = 10; // colours in chart.css, which limit the runs in one chart
const WITHIN = 120_000; // milliseconds for the kernel to answer: it may have to read a store
const NO_KERNEL = "The kernel that listed these runs has ended: run %tfos_runs again.";
const AS_SAVED = "This table is as it was when the notebook was saved: run %tfos_runs for curves and newer runs.";
const KINDS = { arguments: "argument", plan: "plan", versions: "version" };

function when(seconds) {
  const date = new Date(seconds * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const day = [date.getFullYear(), two(date.getMonth() + 1), two(date.getDate())].join("-");
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

/** An argument or a metric as the table shows it. */
function shown(value, metric) {
  if (typeof value !== "number") return value ?? "";
  return metric ? number(value) : String(Number(value.toPrecision(6)));
}

/** Values of a column for sorting: numbers if all values are, else texts. */
function sortable(values) {
  const known = values.filter((value) => value !== null && value !== "");
  if (known.every((value) => typeof value === "number")) return values.map((value) => (value === "" ? null : value));
  return values.map((value) => (value === null || value === "" ? null : String(value)));
}

const FIXED = [
  { title: "Run", value: (run) => `${run.name} ${run.id}`, down: false },
  { title: "Outcome", value: (run) => run.outcome, down: false },
  { title: "Started", value: (run) => run.started, text: (run) => when(run.started), down: true },
  { title: "Took", css: "t-num", value: (run) => run.seconds, text: (run) => duration(run.seconds), down: true },
  { title: "Epochs", css: "t-num", value: (run) => run.epochs, text: (run) => String(run.epochs), down: true },
  { title: "Workers", css: "t-num", value: (run) => run.workers, text: (run) => shown(run.workers), down: true },
];

function columnsOf(data) {
  const metrics = data.metrics.map((name, i) => ({
    title: title(name), css: "t-num", value: (run) => run.metrics[i], text: (run) => shown(run.metrics[i], true), down: false,
  }));
  const numeric = (i) => data.runs.every((run) => [null, "number"].includes(run.arguments[i] && typeof run.arguments[i]));
  const given = data.arguments.map((name, i) => ({
    title: name, css: numeric(i) ? "t-num" : "", value: (run) => run.arguments[i], text: (run) => shown(run.arguments[i]),
    down: false,
  }));
  return [...FIXED, ...metrics, ...given];
}

/** One run in the table. Its colour is shown while it is chosen. */
class RunRow {
  constructor(run, columns, choose) {
    this.run = run;
    this.box = h("input", { type: "checkbox", onchange: () => choose(this, this.box.checked) });
    put(this.box, "aria-label", `${run.name} ${run.id}`);
    this.swatch = h("i", { class: "t-swatch-training t-chosen", hidden: true });
    const id = h("span", { class: "t-second t-mono" }, run.id);
    const name = h("span", { class: "t-names" }, h("span", { class: "t-who" }, run.name), id);
    const label = h("label", { class: "t-pick", title: `${run.name} ${run.id}` }, this.box, name, this.swatch);
    const others = columns.slice(2).map((column) => {
      const text = column.text(run);
      return h("td", { class: column.css || null, title: text.length > 24 ? text : null }, text);
    });
    const outcome = h("td", {}, pill(run.outcome, run.tone));
    this.element = h("tr", {}, h("th", { scope: "row" }, label), outcome, ...others);
  }

  show(hue) {
    this.box.checked = hue !== undefined;
    put(this.element, "class", hue === undefined ? null : "t-picked");
    put(this.swatch, "hidden", hue === undefined);
    put(this.swatch, "class", hue === undefined ? "t-chosen" : `t-swatch-training t-chosen t-hue-${hue}`);
  }
}

/** The rows, in the order of a column, without those that the filter hides. */
class RunTable {
  constructor(choose, tell) {
    this.choose = choose;
    this.tell = tell;
    this.rows = [];
    this.columns = [];
    this.sorted = { column: "Started", down: true };
    this.head = h("tr");
    this.body = h("tbody", { onkeydown: (event) => this.walk(event) });
    const caption = h("caption", { class: "t-unseen" }, "Recorded runs; the boxes choose those to compare");
    const table = h("table", { class: "t-nodes t-runs" }, caption, h("thead", {}, this.head), this.body);
    this.element = h("div", { class: "t-scroll t-all", tabindex: 0, role: "region", "aria-label": "Runs" }, table);
  }

  show(data) {
    this.columns = columnsOf(data);
    this.rows = data.runs.map((run) => new RunRow(run, this.columns, this.choose));
    this.heads = this.columns.map((column) => {
      const press = button(column.title, "t-sort", () => this.sortBy(column), { title: `sort by ${column.title}` });
      return h("th", { scope: "col", class: column.css || null }, press);
    });
    this.head.replaceChildren(...this.heads);
    this.order();
  }

  sortBy(column) {
    const again = this.sorted.column === column.title;
    this.sorted = { column: column.title, down: again ? !this.sorted.down : column.down };
    this.order();
    this.tell(`sorted by ${column.title}, ${this.sorted.down ? "highest" : "lowest"} first`);
  }

  order() {
    const column = this.columns.find((one) => one.title === this.sorted.column) || this.columns[2];
    const { down } = this.sorted;
    const values = sortable(this.rows.map(({ run }) => column.value(run)));
    const value = new Map(this.rows.map((row, i) => [row, values[i]]));
    this.rows.sort((a, b) => compare(value.get(a), value.get(b), down));
    this.columns.forEach((one, i) => {
      put(this.heads[i], "aria-sort", one === column ? (down ? "descending" : "ascending") : null);
    });
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    this.body.replaceChildren(...this.rows.map((row) => row.element));
    if (focused) focused.focus({ preventScroll: true });
  }

  /** Hide the rows that lack one of these words; return how many remain. */
  filter(words) {
    const left = this.rows.filter(({ run, element }) => {
      const fits = words.every((word) => run.search.includes(word));
      put(element, "hidden", !fits);
      return fits;
    });
    return left.length;
  }

  /** Move from checkbox to checkbox by the arrow keys. */
  walk(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const boxes = this.rows.filter(({ element }) => !element.hidden).map(({ box }) => box);
    const next = boxes[boxes.indexOf(event.target) + step];
    event.preventDefault();
    if (next) next.focus();
  }
}

/** Below the chart: the facts of one run, or the differences of several. */
class About {
  constructor() {
    this.element = h("div", { hidden: true });
  }

  clear() {
    put(this.element, "hidden", true);
  }

  show(parts) {
    this.element.replaceChildren(...parts);
    put(this.element, "hidden", !parts.length);
  }

  showRun(run, { facts, error }) {
    const first = [["Run", `${run.name} ${run.id}`], ["Started", `${when(run.started)}, took ${duration(run.seconds)}`]];
    const rows = [...first, ...facts].map(([name, text]) => {
      return h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "t-why" }, text));
    });
    const caption = h("caption", { class: "t-unseen" }, "Facts of the run");
    const table = h("table", { class: "t-epochs t-facts" }, caption, h("tbody", {}, ...rows));
    this.show([...this.failure(run, error), h("div", { class: "t-scroll" }, table)]);
  }

  failure(run, [first, rest]) {
    if (!first) return [];
    const trace = h("pre", { class: "t-trace", tabindex: 0 }, rest);
    const folded = rest ? [h("details", {}, h("summary", {}, "traceback"), trace)] : [];
    return [h("div", { class: `t-say t-${run.outcome === "failed" ? "bad" : "warn"}` }, first, ...folded)];
  }

  showDifferences(runs, hues, rows) {
    if (!rows.length) {
      this.show([h("div", { class: "t-foot" }, "These runs have the same arguments, plan and versions.")]);
      return;
    }
    const heads = runs.map((run) => {
      const line = sample({ name: "training", hue: hues.get(run.id) });
      return h("th", { scope: "col" }, line, ` ${run.name} `, h("span", { class: "t-mono" }, run.id));
    });
    const body = rows.map(([kind, name, values]) => {
      const what = h("th", { scope: "row" }, `${name} `, h("span", { class: "t-dim" }, KINDS[kind]));
      return h("tr", {}, what, ...values.map((value) => h("td", {}, value || "—")));
    });
    const caption = h("caption", { class: "t-unseen" }, "What these runs differ in");
    const head = h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Different in"), ...heads));
    const table = h("table", { class: "t-epochs t-differences" }, caption, head, h("tbody", {}, ...body));
    this.show([h("div", { class: "t-scroll" }, table)]);
  }
}

class RunsPage {
  constructor(model) {
    this.model = model;
    this.data = { runs: [] };
    this.hues = new Map(); // colours of the chosen runs, by id
    this.answers = new Map(); // handlers of the kernel's answers, by the number of the question
    this.asked = 0;
    this.announcer = new Announcer();
    this.table = new RunTable((row, chosen) => this.choose(row, chosen), (text) => this.announcer.say(text));
    this.about = new About();
    this.chart = new Chart({
      load: (question) => this.loadChart(question), name: () => this.chosenName(), whole: "run.to_pandas",
      announce: (text) => this.announcer.say(text),
    });
    this.heard = (message) => this.hear(message);
    model.on("msg:custom", this.heard);
    const attributes = { class: "tfos-panel t-recorded", "aria-label": "Runs", onkeydown: keepKeys };
    this.root = h("section", attributes, ...this.parts());
  }

  parts() {
    this.count = h("span", { class: "t-dim" });
    this.place = h("span", { class: "t-dim t-mono t-place" });
    this.refresh = button("↻ Refresh", "t-button", () => this.renew());
    const end = h("span", { class: "t-end" }, this.refresh);
    const head = h("div", { class: "t-head" }, h("b", { class: "t-name" }, "Runs"), this.count, this.place, end);
    this.message = h("div", { class: "t-say t-warn", hidden: true });
    this.empty = h("div", { class: "t-say", hidden: true });
    const keys = (event) => event.key === "Escape" && this.clearFilter(event);
    const hint = { type: "search", placeholder: "Filter", "aria-label": "Filter the runs", title: "words of a run's name, id, outcome, arguments or metrics" };
    this.words = h("input", { ...hint, id: unique("filter"), oninput: () => this.filter(), onkeydown: keys });
    this.found = h("span", { class: "t-dim" });
    this.picked = h("span", { class: "t-dim" });
    this.none = button("Clear", "t-button", () => this.chooseNone(), { hidden: true, "aria-label": "Choose none" });
    this.bar = h("div", { class: "t-logbar" }, this.words, this.found, h("span", { class: "t-grow" }), this.picked, this.none);
    this.notes = h("div");
    return [
      head, this.message, this.empty, this.bar, this.table.element, this.chart.element, this.about.element, this.notes,
      this.announcer.element,
    ];
  }

  show(data) {
    if (!data || !data.runs) return;
    const named = (values) => Object.fromEntries(data.fields.map((field, i) => [field, values[i]]));
    this.data = { ...data, runs: data.runs.map(named) };
    const { total, runs } = this.data;
    write(this.count, total > runs.length ? `the newest ${runs.length} of ${total} runs` : `${total} run${total === 1 ? "" : "s"}`);
    write(this.place, data.place);
    put(this.refresh, "hidden", Boolean(data.saved));
    write(this.empty, data.empty);
    put(this.empty, "hidden", !data.empty);
    for (const part of [this.bar, this.table.element]) put(part, "hidden", !runs.length);
    const notes = [...(data.saved ? [AS_SAVED] : []), ...data.notes];
    this.notes.replaceChildren(...notes.map((text) => h("div", { class: "t-foot" }, text)));
    this.table.show(this.data);
    const known = new Set(runs.map(({ id }) => id));
    for (const id of this.hues.keys()) if (!known.has(id)) this.hues.delete(id);
    this.filter();
    this.mark();
  }

  tell(text) {
    write(this.message, text || "");
    put(this.message, "hidden", !text);
    if (text) this.announcer.say(text);
  }

  // --- choice of runs ---

  filter() {
    const words = this.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const left = this.table.filter(words);
    write(this.found, words.length ? `${left} of ${this.data.runs.length}` : "");
  }

  clearFilter(event) {
    event.stopPropagation();
    this.words.value = "";
    this.filter();
  }

  get chosen() {
    return [...this.hues.keys()].map((id) => this.data.runs.find((run) => run.id === id));
  }

  chosenName() {
    const runs = this.chosen;
    return runs.length === 1 ? `${runs[0].name} ${runs[0].id}` : "runs";
  }

  choose(row, chosen) {
    const taken = new Set(this.hues.values());
    const free = Array.from({ length: HUES }, (_, i) => i).find((hue) => !taken.has(hue));
    if (!chosen) this.hues.delete(row.run.id);
    else if (free === undefined) this.tell(`At most ${HUES} runs fit in one chart: choose fewer.`);
    else this.hues.set(row.run.id, free);
    if (free !== undefined || !chosen) this.tell("");
    this.mark();
    this.compare();
  }

  chooseNone() {
    this.hues.clear();
    this.words.focus({ preventScroll: true });
    this.mark();
    this.compare();
  }

  mark() {
    for (const row of this.table.rows) row.show(this.hues.get(row.run.id));
    const { size } = this.hues;
    write(this.picked, size ? `${size} chosen` : "choose runs to see and compare their curves");
    put(this.none, "hidden", !size);
  }

  // --- requests to the kernel ---

  /** Show the curves of the chosen runs, and their facts or differences. */
  compare() {
    if (this.hues.size) {
      this.chart.renew();
      return;
    }
    this.chart.close();
    this.about.clear();
  }

  async loadChart({ metric, by }) {
    const { question } = this.chart;
    const runs = this.chosen;
    const answer = await this.ask({ kind: "curves", runs: runs.map(({ id }) => id), metric, by });
    if (question !== this.chart.question) return {};
    const chart = answer.chart || { message: answer.message };
    const bare = !chart.metrics;
    if (bare) this.chart.data = null;
    for (const part of [this.chart.element.firstChild, this.chart.plot.element]) put(part, "hidden", bare);
    if (answer.differences) this.about.showDifferences(runs, this.hues, answer.differences);
    else if (answer.facts) this.about.showRun(runs[0], answer);
    else this.about.clear();
    return bare ? chart : { ...chart, lines: chart.lines.map((line) => this.named(line)) };
  }

  /** Give a line its name and colour, if there are several runs. */
  named(line) {
    if (line.run === undefined) return line;
    const run = this.data.runs.find(({ id }) => id === line.run);
    const name = `${run.name} ${run.id}`;
    return { ...line, title: name, label: line.name === "validation" ? `${name}, validation` : name, hue: this.hues.get(run.id) };
  }

  async renew() {
    if (this.refresh.getAttribute("aria-disabled")) return;
    put(this.refresh, "aria-disabled", "true");
    write(this.refresh, "Reading…");
    const answer = await this.ask({ kind: "refresh" });
    put(this.refresh, "aria-disabled", null);
    write(this.refresh, "↻ Refresh");
    this.tell(answer.message);
    if (!answer.message) this.announcer.say(this.count.textContent);
    this.compare();
  }

  ask(question) {
    if (this.data.saved) return Promise.resolve({ message: AS_SAVED });
    this.asked += 1;
    const { asked } = this;
    return new Promise((done) => {
      const late = () => this.answers.delete(asked) && done({ message: "The kernel has not answered." });
      this.answers.set(asked, done);
      setTimeout(late, WITHIN);
      try {
        this.model.send({ ...question, asked });
      } catch {
        this.answers.delete(asked);
        done({ message: NO_KERNEL }); // a widget whose kernel was restarted cannot send
      }
    });
  }

  /** Handle the kernel's answer to a question of this page. */
  hear(message) {
    if (!message || !this.answers.has(message.asked)) return;
    this.answers.get(message.asked)(message.data);
    this.answers.delete(message.asked);
  }

  close() {
    this.chart.destroy();
    this.model.off("msg:custom", this.heard);
    this.announcer.close();
  }
}

function initialize({ model }) {
  return keepIn(model, "table", (data) => ({ ...data, saved: true }));
}

function render({ model, el }) {
  const page = new RunsPage(model);
  const show = () => page.show(model.get("table"));
  el.append(page.root);
  model.on("change:table", show);
  show();
  return () => {
    model.off("change:table", show);
    page.close();
  };
}

export default { initialize, render };
