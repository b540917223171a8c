// A metric's chart with what belongs to it: the choice of metric, node and axes, a legend, the table behind it, and
// downloads. `load` gives the data (state/chart_data.py says what is in them); who made it shows its `element`.

import { button, h, put, unique, write } from "./elements.js";
import { Plot, number, svg, title } from "./plot.js";

export class Chart {
  constructor({ load, close, name, announce }) {
    this.load = load;
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
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    };
    // JupyterLab's shortcuts would take the arrows and Escape.
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
      button("✕", "t-button", close, { "aria-label": "Close the chart" }),
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

  close() {
    put(this.element, "hidden", true);
    this.question += 1;
    this.data = null;
  }

  /** Ask for data with these changes; an answer that another question has overtaken is dropped. */
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
    fill(this.node, ["", ...data.nodes], data.node, (name) => name || "chief");
    put(this.node, "hidden", data.nodes.length < 2);
    this.axes.show(data.by);
    const values = data.lines.flatMap(({ y }) => y);
    this.positive = values.some((value) => value > 0);
    put(this.scales.buttons[1], "aria-disabled", this.positive ? null : "true");
    const known = values.some((value) => value !== null);
    const none = data.by === "epoch" ? "No epoch has ended yet." : "Nothing was reported yet.";
    const more = `${data.shown} of ${data.total} points, with every peak. All: history.to_pandas("${data.by}")`;
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
    const keys = this.data.lines.map(({ name, y }) => {
      const line = svg("line", { class: `t-stroke-${name}`, x1: 1, x2: 21, y1: 4, y2: 4 });
      const sample = svg("svg", { class: "t-sample", viewBox: "0 0 22 8", "aria-hidden": "true" }, line);
      const last = number(y.findLast((value) => value !== null));
      return h("span", { class: "t-key" }, sample, ` ${name} `, h("b", {}, last));
    });
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
    const heads = [by, ...lines.map(({ name }) => name)].map((name) => h("th", { scope: "col" }, title(name)));
    const cells = (x) => this.plot.values(x).map(([, value]) => h("td", {}, number(value)));
    const rows = this.plot.xs.map((x) => h("tr", {}, h("th", { scope: "row" }, String(x)), ...cells(x)));
    const caption = h("caption", { class: "t-unseen" }, `${title(metric)} by ${by}`);
    this.table.replaceChildren(
      h("table", { class: "t-epochs" }, caption, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows)),
    );
  }

  // --- downloads ---

  csv() {
    const { by, lines } = this.data;
    const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const head = [by, ...lines.map(({ metric }) => quoted(metric))];
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

/** Put options into a select, unless it has them already, and choose one. */
function fill(select, names, chosen, text) {
  if (JSON.stringify(names) !== JSON.stringify([...select.options].map((option) => option.value))) {
    select.replaceChildren(...names.map((name) => h("option", { value: name }, text(name))));
  }
  select.value = chosen;
}
