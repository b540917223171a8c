// A metric's chart with its controls: the choice of metric, node and axes, a legend, a table of the values, and
// downloads. It shows one training or several runs. `load` returns the data (described in state/chart_data.py), `whole`
// is Python code that returns all points. The caller puts `element` into the page. Without `close`, there is no such
// button.

import { button, h, put, unique, write } from "./elements.js";
import { Plot, byRun, classes, labelOf, number, svg, title } from "./plot.js";

const ROWS_OF_VALUES = 1000;

export class Chart {
  constructor({ load, close, name, announce, whole = "history.to_pandas" }) {
    this.load = load;
    this.whole = whole;
    this.name = name;
    this.announce = announce;
    this.asked = { metric: "", node: "", by: "" };
    this.data = null;
    this.question = 0;
    this.log = false;
    this.plot = new Plot();
    this.said = h("div", { class: "t-foot", hidden: true });
    this.table = h("div", { class: "t-values", tabindex: 0, role: "region", hidden: true, id: unique("values") });
    const keys = (event) => {
      if (event.key !== "Escape" || !close) return;
      event.stopPropagation();
      close();
    };
    // Otherwise JupyterLab's shortcuts would take the arrow keys and Escape.
    const attributes = { role: "group", "data-lm-suppress-shortcuts": "true", onkeydown: keys, hidden: true };
    const parts = [this.bar(close), this.plot.element, this.said, this.table];
    this.element = h("div", { class: "t-chart", id: unique("chart"), ...attributes }, ...parts);
  }

  bar(close) {
    this.metric = h("select", { "aria-label": "Metric", onchange: () => this.ask({ metric: this.metric.value }) });
    this.node = h("select", { "aria-label": "Node", onchange: () => this.ask({ node: this.node.value }) });
    this.legend = h("span", { class: "t-keys" });
    this.axes = this.choice("x axis", ["epoch", "step"], (by) => this.ask({ by }));
    this.scales = this.choice("y axis", ["linear", "log"], (scale) => this.scale(scale));
    const folds = { "aria-expanded": "false", "aria-controls": this.table.id };
    this.tabled = button("Table", "t-button", () => this.toggleTable(), folds);
    const downloads = { CSV: () => this.saveCsv(), SVG: () => this.saveSvg(), PNG: () => this.savePng() };
    const saves = Object.entries(downloads).map(([kind, save]) => {
      return button(kind, "t-button", () => this.data && save(), { "aria-label": `Download as ${kind}` });
    });
    return h(
      "div", { class: "t-chartbar" }, this.metric, this.node, this.legend, h("span", { class: "t-grow" }),
      this.axes.element, this.scales.element, h("span", { class: "t-group" }, this.tabled, ...saves),
      ...(close ? [button("✕", "t-button", close, { "aria-label": "Close the chart" })] : []),
    );
  }

  choice(label, names, choose) {
    const one = (name) => button(title(name), "t-button", () => choose(name), { "aria-pressed": "false" });
    const buttons = names.map(one);
    const show = (chosen) => buttons.forEach((one, i) => put(one, "aria-pressed", String(names[i] === chosen)));
    return { element: h("span", { class: "t-group", role: "group", "aria-label": label }, ...buttons), buttons, show };
  }

  get shown() {
    return !this.element.hidden;
  }

  /** Show a metric of a node; without a node, the chief's. */
  open(metric, node = "") {
    put(this.element, "hidden", null);
    this.plot.element.focus({ preventScroll: true });
    return this.ask({ metric, node });
  }

  /** Show the current data, and leave the focus where it is. */
  renew() {
    put(this.element, "hidden", null);
    return this.ask();
  }

  close() {
    put(this.element, "hidden", true);
    this.question += 1;
    this.data = null;
  }

  /** Request data with these changes; an answer is dropped if a newer request was made. */
  async ask(changes = {}) {
    Object.assign(this.asked, changes);
    this.question += 1;
    const question = this.question;
    if (!this.data) this.say("Waiting for the numbers…");
    const answer = await this.load({ ...this.asked });
    if (question !== this.question || !this.shown) return;
    if (answer.metrics) this.show(answer);
    else this.say(answer.message);
  }

  say(text) {
    if (text && text !== this.said.textContent) this.announce(text);
    write(this.said, text);
    put(this.said, "hidden", !text);
  }

  show(data) {
    this.data = data;
    fill(this.metric, data.metrics, data.metric, title);
    const { nodes = [], node = "" } = data;
    fill(this.node, ["", ...nodes], node, (name) => name || "chief");
    put(this.node, "hidden", nodes.length < 2);
    put(this.element, "class", data.lines.some(({ run }) => run !== undefined) ? "t-chart t-several" : "t-chart");
    this.axes.show(data.by);
    const values = data.lines.flatMap(({ y }) => y);
    this.positive = values.some((value) => value > 0);
    put(this.scales.buttons[1], "aria-disabled", this.positive ? null : "true");
    const known = values.some((value) => value !== null);
    const none = data.by === "epoch" ? "No epoch has ended yet." : "Nothing was reported yet.";
    const more = `${data.shown} of ${data.total} points, with every peak. All: ${this.whole}("${data.by}")`;
    this.say(!known ? none : data.shown < data.total ? more : "");
    this.showLegend();
    this.draw();
    if (!this.table.hidden) this.fillTable();
  }

  draw() {
    const log = this.log && this.positive;
    this.scales.show(log ? "log" : "linear");
    const whose = this.data.node || this.name();
    put(this.element, "aria-label", `Chart of ${title(this.data.metric)}`);
    put(this.table, "aria-label", `Values of ${title(this.data.metric)}`);
    this.plot.show(this.data, `${title(this.data.metric)} of ${whose}`, log);
  }

  scale(scale) {
    if (!this.data || (scale === "log" && !this.positive)) return;
    this.log = scale === "log";
    this.draw();
  }

  showLegend() {
    const keys = byRun(this.data.lines).map((lines) => {
      const last = number(lines[0].y.findLast((value) => value !== null));
      return h("span", { class: "t-key" }, sample(lines[0]), ` ${lines[0].title || labelOf(lines[0])} `, h("b", {}, last));
    });
    const several = this.data.lines.some(({ run, name }) => run !== undefined && name === "validation");
    if (several) keys.push(h("span", { class: "t-key" }, sample({ name: "validation", hue: "none" }), " validation"));
    this.legend.replaceChildren(...keys);
  }

  toggleTable() {
    const open = this.table.hidden;
    put(this.tabled, "aria-expanded", String(open));
    put(this.table, "hidden", !open);
    if (open && this.data) this.fillTable();
  }

  fillTable() {
    const { by, lines, metric } = this.data;
    const names = [title(by), ...lines.map((line) => line.label || title(line.name))];
    const heads = names.map((name) => h("th", { scope: "col" }, name));
    const cells = (x) => this.plot.values(x).map(([, value]) => h("td", {}, number(value)));
    const xs = this.plot.xs.slice(0, ROWS_OF_VALUES);
    const rows = xs.map((x) => h("tr", {}, h("th", { scope: "row" }, String(x)), ...cells(x)));
    const cut = `the first ${xs.length} of ${this.plot.xs.length} rows; CSV has all`;
    const caption = h("caption", { class: "t-unseen" }, `${title(metric)} by ${by}`);
    this.table.replaceChildren(
      h("table", { class: "t-epochs" }, caption, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows)),
      ...(xs.length < this.plot.xs.length ? [h("div", { class: "t-foot" }, cut)] : []),
    );
  }

  // --- downloads ---

  csv() {
    const { by, lines } = this.data;
    const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const head = [by, ...lines.map(({ metric, title: run }) => quoted(run === undefined ? metric : `${run} ${metric}`))];
    const rows = this.plot.xs.map((x) => [x, ...this.plot.values(x).map(([, value]) => value ?? "")]);
    return [head, ...rows].map((row) => `${row.join(",")}\n`).join("");
  }

  save(blob, kind) {
    const url = URL.createObjectURL(blob);
    const file = `${this.name()}-${this.data.metric}-by-${this.data.by}.${kind}`.replace(/[^\w.-]+/g, "-");
    h("a", { href: url, download: file }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  saveCsv() {
    this.save(new Blob([this.csv()], { type: "text/csv" }), "csv");
  }

  saveSvg() {
    this.save(new Blob([this.plot.picture().text], { type: "image/svg+xml" }), "svg");
  }

  async savePng() {
    const { text, width, height } = this.plot.picture();
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const canvas = h("canvas", { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    canvas.toBlob((blob) => this.save(blob, "png"));
  }

  destroy() {
    this.plot.close();
  }
}

/** A short piece of a line, for a legend. */
export function sample(line) {
  const drawn = svg("line", { class: classes("stroke", line), x1: 1, x2: 21, y1: 4, y2: 4 });
  return svg("svg", { class: "t-sample", viewBox: "0 0 22 8", "aria-hidden": "true" }, drawn);
}

/** Put options into a select, unless it has them already, and select one. */
function fill(select, names, chosen, text) {
  if (JSON.stringify(names) !== JSON.stringify([...select.options].map((option) => option.value))) {
    select.replaceChildren(...names.map((name) => h("option", { value: name }, text(name))));
  }
  select.value = chosen;
}
