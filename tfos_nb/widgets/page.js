// Code that the pages of a cluster and of recorded runs share: times, the order of rows, and the screen reader's texts.

import { h, write } from "./elements.js";

const SPOKEN_EVERY = 5000; // milliseconds between two announcements

export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

/** A time for a narrow column: in one unit. */
export function about(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 100) return `${whole} s`;
  return whole < 6000 ? `${Math.round(whole / 60)} min` : `${Math.round(whole / 3600)} h`;
}

/** The order of two values of a column. */
export function compare(a, b, down) {
  const missing = (value) => value === null || value === undefined || Number.isNaN(value);
  if (missing(a) || missing(b)) return missing(a) - missing(b); // unknown values come last in either direction
  const order = typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
  return down ? -order : order;
}

export function pill(text = "", tone = "idle") {
  return h("span", { class: `t-pill t-${tone}` }, text);
}

/** Tells a screen reader what has changed, not more often than a user can listen to. */
export class Announcer {
  constructor() {
    this.element = h("div", { class: "t-unseen", role: "status", "aria-live": "polite" });
    this.spoken = -Infinity;
    this.timer = null;
  }

  say(text) {
    this.waiting = text;
    const wait = this.spoken + SPOKEN_EVERY - performance.now();
    if (wait <= 0) this.speak();
    else if (this.timer === null) this.timer = setTimeout(() => this.speak(), wait);
  }

  speak() {
    clearTimeout(this.timer);
    this.timer = null;
    this.spoken = performance.now();
    write(this.element, this.waiting);
  }

  close() {
    clearTimeout(this.timer);
  }
}

/** Otherwise JupyterLab's shortcuts would take the arrows, the space bar and letters: an "a" would add a cell. */
export function keepKeys(event) {
  const runs = event.key === "Enter" && event.shiftKey;
  if (!event.ctrlKey && !event.metaKey && !event.altKey && !runs) event.stopPropagation();
}
