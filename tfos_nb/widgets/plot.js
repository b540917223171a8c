// Lines in SVG: axes with ticks, linear or logarithmic, a gap at each null, and the values at the place of the pointer
// or the keyboard. It is independent of clusters and metrics. Colours come from chart.css and follow the page's theme.
// If there are several runs, a line has a `label`, and shares `run`, `title` and `hue` with the other line of its run.
// The lines of a single training differ only by their names.

import { h, put } from "./elements.js";

const HEIGHT = 300;
const MARGIN = { left: 58, right: 18, top: 22, bottom: 40 };
const DOTS_UP_TO = 40; // lines with at most so many points get dots
const NEAR = 0.02; // of the width: how far from a place the value of one of several runs may be
const LEGEND_ROW = 18; // pixels
const STEPS_OF_KEYS = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10 };
const OF_A_PICTURE = [
  "fill", "fill-opacity", "stroke", "stroke-opacity", "stroke-width", "stroke-dasharray", "stroke-linejoin",
  "font-family", "font-size", "text-anchor",
];

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) put(element, name, value);
  element.append(...children);
  return element;
}

export function title(name) {
  const words = name.replaceAll("_", " ");
  return words.slice(0, 1).toUpperCase() + words.slice(1);
}

/** A value as in the panel's tiles. */
export function number(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6)) return String(Number(value.toPrecision(3)));
  return size < 1000 ? value.toFixed(4) : value.toFixed(1);
}

/** At most `most` round numbers between two values. */
export function ticks(low, high, most, whole = false) {
  const rough = high / most - low / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const found = [1, 2, 5, 10].map((part) => part * power).find((step) => step >= rough * 0.999);
  const step = whole ? Math.max(1, found) : found;
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => (first + i) * step);
}

/** Powers of ten, with 2 and 5 between them if they are few. */
export function logTicks(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const powers = Array.from({ length: last - first + 1 }, (_, i) => first + i);
  const every = Math.ceil(powers.length / 7);
  const parts = powers.length <= 4 ? [1, 2, 5] : [1];
  const all = powers.filter((_, i) => i % every === 0).flatMap((power) => parts.map((part) => part * 10 ** power));
  return all.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

/** The lowest and the highest value, with some space around them. */
function widened(values, share) {
  const low = values.reduce((least, value) => Math.min(least, value), Infinity);
  const high = values.reduce((most, value) => Math.max(most, value), -Infinity);
  const more = high > low ? (high / 2 - low / 2) * 2 * share : Math.abs(high) * 0.05 || 0.5;
  return [low - more, high + more];
}

export const labelOf = (line) => line.label || line.name;

/** The classes of what is drawn for a line: "stroke", "dot" or "swatch". */
export function classes(kind, { name, hue }) {
  return hue === undefined ? `t-${kind}-${name}` : `t-${kind}-${name} t-hue-${hue}`;
}

/** The lines of each run, in the order of the lines; without runs, each line is a group. */
export function byRun(lines) {
  const groups = new Map();
  for (const line of lines) {
    const key = line.run ?? line.name;
    groups.set(key, [...(groups.get(key) || []), line]);
  }
  return [...groups.values()];
}

const short = (value) => String(Number(value.toPrecision(6)));

export class Plot {
  constructor() {
    this.data = null; // {by, lines: [{name, x, y, label, run, hue}], recovered}
    this.xs = []; // places that have a value
    this.log = false;
    this.label = "";
    this.place = null; // index in xs of the values that are shown
    this.drawing = svg("svg", { height: HEIGHT, "aria-hidden": "true" });
    this.marks = svg("g");
    this.tip = h("div", { class: "t-tip", hidden: true });
    const listeners = {
      onkeydown: (event) => this.press(event), onpointermove: (event) => this.point(event),
      onpointerleave: () => this.mark(null), onblur: () => this.mark(null),
    };
    const role = { role: "slider", tabindex: 0, "aria-orientation": "horizontal" };
    this.element = h("div", { class: "t-plot", ...role, ...listeners }, this.drawing, this.tip);
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.element);
  }

  /** Draw these lines; `label` names them for a screen reader. */
  show(data, label, log) {
    Object.assign(this, { data, label, log });
    const known = data.lines.flatMap(({ x, y }) => x.filter((_, i) => y[i] !== null));
    this.xs = [...new Set(known)].sort((a, b) => a - b);
    this.draw();
  }

  draw() {
    const width = Math.round(this.element.clientWidth);
    if (!this.data || !width) return;
    put(this.drawing, "width", width);
    put(this.drawing, "viewBox", `0 0 ${width} ${HEIGHT}`);
    const fits = (value) => value !== null && (!this.log || value > 0);
    const ys = this.data.lines.flatMap(({ y }) => y.filter(fits));
    this.marks.replaceChildren();
    this.drawn = ys.length > 0;
    if (!this.drawn) this.drawing.replaceChildren();
    else {
      this.setScales(width, ys);
      const lines = [...this.data.lines].reverse().flatMap((line) => this.line(line, fits)); // the first one on top
      this.drawing.replaceChildren(...this.grid(width), ...this.recoveries(), ...lines, this.marks);
    }
    this.describe();
    this.mark(this.place);
  }

  setScales(width, ys) {
    const at = this.log ? Math.log10 : (value) => value;
    const [left, right] = this.xs.length > 1 ? [this.xs[0], this.xs.at(-1)] : widened(this.xs, 0);
    const [low, high] = widened(ys.map(at), 0.05);
    const [from, to] = [MARGIN.left + 8, width - MARGIN.right - 4];
    const [bottom, top] = [HEIGHT - MARGIN.bottom, MARGIN.top];
    this.across = (x) => from + ((x - left) / (right - left)) * (to - from);
    this.up = (y) => bottom + ((at(y) / 2 - low / 2) / (high / 2 - low / 2)) * (top - bottom); // halved: no overflow
    this.range = { left, right, low: this.log ? 10 ** low : low, high: this.log ? 10 ** high : high };
  }

  grid(width) {
    const { left, right, low, high } = this.range;
    const text = (label, x, y, anchor) => svg("text", { class: "t-tick", x, y, "text-anchor": anchor }, label);
    const made = (this.log ? logTicks(low, high) : ticks(low, high, 7)).flatMap((value) => {
      const y = this.up(value).toFixed(1);
      const ends = { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y };
      return [svg("line", { class: "t-gridline", ...ends }), text(short(value), MARGIN.left - 8, Number(y) + 4, "end")];
    });
    const y = HEIGHT - MARGIN.bottom;
    for (const value of ticks(left, right, Math.max(2, Math.floor(width / 90)), true)) {
      const x = this.across(value).toFixed(1);
      made.push(svg("line", { class: "t-tickmark", x1: x, x2: x, y1: y, y2: y + 4 }));
      made.push(text(short(value), x, y + 18, "middle"));
    }
    return [...made, text(title(this.data.by), width - MARGIN.right, HEIGHT - 4, "end")];
  }

  recoveries() {
    return this.data.recovered.flatMap((value) => {
      const x = this.across(value).toFixed(1);
      const line = svg("line", { class: "t-recovered", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
      return [line, svg("text", { class: "t-tick", x, y: MARGIN.top - 7, "text-anchor": "middle" }, "recovered")];
    });
  }

  /** A line, split at its gaps; a single point is a dot. */
  line(drawn, fits) {
    const { x, y } = drawn;
    const pieces = [[]];
    x.forEach((value, i) => {
      if (fits(y[i])) pieces.at(-1).push([this.across(value).toFixed(1), this.up(y[i]).toFixed(1)]);
      else if (pieces.at(-1).length) pieces.push([]);
    });
    const dots = x.length <= DOTS_UP_TO ? pieces : pieces.filter((piece) => piece.length === 1);
    const strokes = pieces.filter((piece) => piece.length > 1).map((piece) => {
      const points = piece.map((point) => point.join(",")).join(" ");
      return svg("polyline", { class: classes("stroke", drawn), points });
    });
    const css = classes("dot", drawn);
    return [...strokes, ...dots.flat().map(([cx, cy]) => svg("circle", { class: css, cx, cy, r: 2.6 }))];
  }

  /** Describe the drawing to a screen reader. */
  describe() {
    const { by, lines, recovered } = this.data;
    const known = lines.map((line) => {
      const values = line.y.filter((value) => value !== null);
      return `${labelOf(line)} from ${number(values[0])} to ${number(values.at(-1))}`;
    });
    const lost = recovered.map((x) => `the cluster recovered after ${by} ${Math.floor(x)}`);
    const told = this.drawn ? `${[...known, ...lost].join("; ")}. The arrow keys read the values.` : "no values yet";
    put(this.element, "aria-label", `${this.label} by ${by}: ${told}`);
    put(this.element, "aria-valuemin", this.xs[0] ?? 0);
    put(this.element, "aria-valuemax", this.xs.at(-1) ?? 0);
  }

  // --- the values at a place ---

  /** Pairs of a line and its value there, or null. */
  values(x) {
    return this.data.lines.map((line) => [line, line.y[line.x.lastIndexOf(x)] ?? null]);
  }

  /** Like values(), but for several runs the nearest value, since their steps were reported at different places. */
  valuesNear(x) {
    const room = (this.xs.at(-1) - this.xs[0]) * NEAR;
    return this.values(x).map(([line, value]) => {
      if (value !== null || line.run === undefined || this.data.by !== "step") return [line, value];
      const distance = (i) => (line.y[i] === null ? Infinity : Math.abs(line.x[i] - x));
      const nearest = line.x.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0);
      return [line, distance(nearest) <= room ? line.y[nearest] : null];
    });
  }

  point(event) {
    if (!this.drawn) return;
    const x = event.clientX - this.element.getBoundingClientRect().left;
    const distance = (place) => Math.abs(this.across(this.xs[place]) - x);
    this.mark(this.xs.reduce((best, _, place) => (distance(place) < distance(best) ? place : best), 0));
  }

  press(event) {
    const last = this.drawn ? this.xs.length - 1 : -1;
    const step = STEPS_OF_KEYS[event.key];
    if (last < 0 || (step === undefined && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    event.stopPropagation();
    const here = this.place ?? (step > 0 ? -1 : last + 1);
    this.mark(event.key === "Home" ? 0 : event.key === "End" ? last : Math.min(last, Math.max(0, here + step)));
  }

  /** Mark the values at a place; null marks none. */
  mark(place) {
    this.place = this.drawn && place !== null ? Math.min(place, this.xs.length - 1) : null;
    put(this.tip, "hidden", this.place === null);
    this.marks.replaceChildren();
    const at = this.place === null ? this.xs.at(-1) ?? 0 : this.xs[this.place];
    const found = this.data ? this.valuesNear(at).filter(([, value]) => value !== null) : [];
    const told = found.map(([line, value]) => `${labelOf(line)} ${number(value)}`).join(", ");
    put(this.element, "aria-valuenow", at);
    put(this.element, "aria-valuetext", told && `${this.data.by} ${at}: ${told}`);
    if (this.place === null) return;
    const x = this.across(at);
    this.marks.append(svg("line", { class: "t-cross", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    for (const [line, value] of found.filter(([, one]) => !this.log || one > 0)) {
      this.marks.append(svg("circle", { class: `${classes("dot", line)} t-marked`, cx: x, cy: this.up(value), r: 4.5 }));
    }
    this.tip.replaceChildren(h("div", { class: "t-dim" }, `${title(this.data.by)} ${at}`), ...this.tipRows(found));
    const left = x > this.element.clientWidth / 2 ? x - 12 - this.tip.offsetWidth : x + 12;
    this.tip.style.left = `${left}px`;
  }

  /** A row for each line, or for each run if there are several. */
  tipRows(found) {
    const values = new Map(found);
    return byRun([...values.keys()]).map((lines) => {
      const numbers = lines.map((line) => h(line === lines[0] ? "b" : "span", {}, number(values.get(line))));
      return h("div", {}, h("i", { class: classes("swatch", lines[0]) }), `${lines[0].title || labelOf(lines[0])} `, ...numbers);
    });
  }

  /** The drawing as a separate picture, with the page's colours and background. */
  picture() {
    this.marks.replaceChildren();
    const legend = this.legend();
    this.drawing.append(legend.element);
    const copy = this.drawing.cloneNode(true);
    const [mine, theirs] = [this.drawing, copy].map((root) => [...root.querySelectorAll("*")]);
    mine.forEach((element, i) => {
      const style = getComputedStyle(element);
      for (const name of OF_A_PICTURE) theirs[i].setAttribute(name, style.getPropertyValue(name));
      theirs[i].removeAttribute("class");
    });
    legend.element.remove();
    const [width, height] = [Number(this.drawing.getAttribute("width")), HEIGHT + legend.height];
    const fill = getComputedStyle(this.element.closest(".tfos-panel") || this.element).backgroundColor;
    copy.prepend(svg("title", {}, this.element.getAttribute("aria-label")), svg("rect", { width, height, fill }));
    copy.removeAttribute("aria-hidden");
    put(copy, "role", "img");
    put(copy, "height", height);
    put(copy, "viewBox", `0 0 ${width} ${height}`);
    return { text: new XMLSerializer().serializeToString(copy), width, height };
  }

  /** The legend of a separate picture, below its axes: the names of the runs, if there are several. */
  legend() {
    const element = svg("g");
    const lines = this.data.lines.filter(({ run }) => run !== undefined);
    const keys = byRun(lines).map(([line]) => [line, line.title]);
    if (lines.some(({ name }) => name === "validation")) keys.push([{ name: "validation", hue: "none" }, "validation"]);
    keys.forEach(([line, text], i) => {
      const y = HEIGHT + 12 + i * LEGEND_ROW;
      const ends = { x1: MARGIN.left, x2: MARGIN.left + 24, y1: y - 4, y2: y - 4 };
      element.append(svg("line", { class: classes("stroke", line), ...ends }));
      element.append(svg("text", { class: "t-tick", x: MARGIN.left + 32, y }, text));
    });
    return { element, height: keys.length ? keys.length * LEGEND_ROW + 8 : 0 };
  }

  close() {
    this.watch.disconnect();
  }
}
