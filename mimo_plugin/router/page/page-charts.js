// SPDX-License-Identifier: Apache-2.0
// What has been over the last minutes, and small charts of it.

import { known } from "./page-words.js";

export const SPAN_S = 300;
const STEP_S = 2;
const RATE_S = 10; // requests are counted over this time
const WINDOW_S = 60; // hits and first tokens over this
const KEPT = 400;
const SVG = "http://www.w3.org/2000/svg";

export function quantile(values, q) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

// Decisions that were seen, newest first, each with its latest state.
export class Decisions {
  constructor() {
    this.all = [];
  }

  static key(one) {
    return `${one.request} ${one.time_s}`;
  }

  merge(news) {
    const by = new Map(this.all.map((one) => [Decisions.key(one), one]));
    for (const one of news) by.set(Decisions.key(one), one);
    this.all = [...by.values()].sort((a, b) => b.time_s - a.time_s).slice(0, KEPT);
  }

  firstTokens(from_s, to_s) {
    const came = (one) => one.time_s + one.ttft_s;
    return this.all
      .filter((one) => known(one.ttft_s) && came(one) > from_s && came(one) <= to_s)
      .map((one) => one.ttft_s);
  }

  // Requests that waited for their first token then; null: not all answers tell when that came.
  waiting(time_s) {
    const begun = this.all.filter((one) => one.time_s <= time_s && one.target);
    if (begun.some((one) => one.status > 0 && one.status < 400 && !known(one.ttft_s))) return null;
    return begun.filter((one) => known(one.ttft_s) && time_s < one.time_s + one.ttft_s).length;
  }

  within(from_s, to_s) {
    return this.all.filter((one) => one.time_s > from_s && one.time_s <= to_s);
  }
}

// Samples of the last minutes: {time_s, requests_per_s, hit_rate, ttft_s, in_flight}; null: none.
export class History {
  constructor() {
    this.samples = [];
    this.marks = []; // sums of all that targets counted since the page was opened
    this.counted = new Map(); // of each target, as it was last
    this.sum = { requests: 0, hit_tokens: 0, prompt_tokens: 0 };
  }

  // Where decisions reach back to before the page was opened, they tell what was.
  seed(decisions, now_s) {
    const oldest_s = decisions.all.at(-1)?.time_s ?? now_s;
    let time_s = now_s - SPAN_S + STEP_S;
    for (; time_s < now_s - STEP_S / 2; time_s += STEP_S) {
      if (time_s < oldest_s) continue;
      const begun = decisions.within(time_s - RATE_S, time_s).length;
      let hit = 0;
      let prompt = 0;
      for (const one of decisions.within(time_s - WINDOW_S, time_s)) {
        hit += one.actual_hit_tokens ?? one.hit_tokens ?? 0;
        prompt += one.prompt_tokens ?? 0;
      }
      this.samples.push({
        time_s,
        requests_per_s: begun / RATE_S,
        hit_rate: prompt > 0 ? hit / prompt : null,
        ttft_s: quantile(decisions.firstTokens(time_s - WINDOW_S, time_s), 0.5),
        in_flight: decisions.waiting(time_s),
      });
    }
  }

  add(targets, decisions, now_s) {
    for (const target of targets) {
      const before = this.counted.get(target.name);
      this.counted.set(target.name, target);
      if (!before) continue;
      const again = target.requests < before.requests; // counts from 0 again
      for (const field of Object.keys(this.sum)) {
        const more = (target[field] ?? 0) - (again ? 0 : (before[field] ?? 0));
        this.sum[field] += Math.max(0, more);
      }
    }
    this.marks.push({ time_s: now_s, ...this.sum });
    while (this.marks.length > 2 && this.marks[1].time_s < now_s - WINDOW_S) this.marks.shift();
    const prompt = this.since("prompt_tokens", WINDOW_S, now_s);
    const sample = {
      time_s: now_s,
      requests_per_s: this.perSecond(now_s),
      hit_rate: prompt > 0 ? this.since("hit_tokens", WINDOW_S, now_s) / prompt : null,
      ttft_s: quantile(decisions.firstTokens(now_s - WINDOW_S, now_s), 0.5),
      in_flight: targets.reduce((all, target) => all + (target.in_flight ?? 0), 0),
    };
    if (this.marks.length < 4) {
      // The counters of two glances say little; decisions may know more.
      const last = this.samples.at(-1);
      sample.requests_per_s = last?.requests_per_s ?? sample.requests_per_s;
      sample.hit_rate ??= last?.hit_rate ?? null;
    }
    this.samples.push(sample);
    this.samples = this.samples.filter((one) => one.time_s > now_s - SPAN_S);
    return sample;
  }

  mark(ago_s, now_s) {
    return this.marks.find((one) => one.time_s >= now_s - ago_s) ?? this.marks.at(-1);
  }

  since(field, ago_s, now_s) {
    return this.marks.at(-1)[field] - this.mark(ago_s, now_s)[field];
  }

  perSecond(now_s) {
    const first = this.mark(RATE_S, now_s);
    const taken_s = now_s - first.time_s;
    return taken_s > 0 ? this.since("requests", RATE_S, now_s) / taken_s : null;
  }
}

// The next of 1, 2, 5, 10, 20, …
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value * 0.999);
}

function draw(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

// Lines of points without holes: a hole is a null, or a time without samples.
function runs(samples, field) {
  const found = [];
  let before_s = -Infinity;
  for (const sample of samples) {
    const value = sample[field];
    if (known(value)) {
      if (sample.time_s - before_s > 5 * STEP_S) found.push([]);
      found.at(-1).push([sample.time_s, value]);
      before_s = sample.time_s;
    } else {
      before_s = -Infinity;
    }
  }
  return found;
}

export class Chart {
  // `place`: an element with role img; `words`: value -> text; `top`: fixed upper end of the scale.
  constructor(place, field, title, words, top = null) {
    Object.assign(this, { place, field, title, words, top, now_s: 0, samples: [], at: null });
    this.svg = draw("svg", { "aria-hidden": "true", focusable: "false" });
    this.scale = document.createElement("span");
    this.scale.className = "scale";
    this.read = document.createElement("span");
    this.read.className = "read";
    place.append(this.svg, this.scale, this.read);
    place.addEventListener("pointermove", (event) => this.point(event));
    place.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.render()).observe(place);
  }

  update(samples, now_s) {
    this.samples = samples;
    this.now_s = now_s;
    this.render();
  }

  point(event) {
    this.at = event === null ? null : event.clientX - this.place.getBoundingClientRect().left;
    this.render();
  }

  render() {
    const width = this.place.clientWidth;
    const height = this.place.clientHeight;
    const lines = runs(this.samples, this.field);
    const points = lines.flat();
    const highest = Math.max(0, ...points.map(([, value]) => value));
    const top = this.top ?? niceTop(highest);
    const x = (time_s) => width - 4 - ((this.now_s - time_s) / SPAN_S) * (width - 4);
    const y = (value) => height - 1 - (Math.min(value, top) / top) * (height - 6);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const nodes = [
      draw("path", { class: "grid", d: `M0 ${y(top)}H${width}` }),
      draw("path", { class: "base", d: `M0 ${height - 0.5}H${width}` }),
    ];
    for (const line of lines) {
      const path = line.map(([t, v]) => `${x(t).toFixed(1)} ${y(v).toFixed(1)}`).join("L");
      const [from, to] = [x(line[0][0]).toFixed(1), x(line.at(-1)[0]).toFixed(1)];
      nodes.push(draw("path", { class: "area", d: `M${from} ${height}L${path}L${to} ${height}Z` }));
      nodes.push(draw("path", { class: "line", d: `M${path}` }));
    }
    const last = points.at(-1);
    if (last) nodes.push(draw("circle", { class: "last", cx: x(last[0]), cy: y(last[1]), r: 3 }));
    this.read.textContent = "";
    if (this.at !== null && points.length > 0) {
      const distance = ([time_s]) => Math.abs(x(time_s) - this.at);
      const near = points.reduce((a, b) => (distance(b) < distance(a) ? b : a));
      nodes.push(draw("path", { class: "cursor", d: `M${x(near[0])} 0V${height}` }));
      nodes.push(draw("circle", { class: "last", cx: x(near[0]), cy: y(near[1]), r: 3 }));
      const ago = Math.max(0, Math.round(this.now_s - near[0]));
      this.read.textContent = `${this.words(near[1])}, ${ago} s ago`;
    }
    this.svg.replaceChildren(...nodes);
    this.scale.textContent = points.length > 0 ? this.words(top) : "";
    const text = points.length
      ? `now ${this.words(last[1])}, highest ${this.words(highest)} in the last five minutes`
      : "nothing yet";
    this.place.setAttribute("aria-label", `${this.title}: ${text}`);
  }
}
