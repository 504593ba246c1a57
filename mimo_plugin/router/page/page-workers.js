// SPDX-License-Identifier: Apache-2.0
// The table of workers: one row a worker, and one a rank where it has several.

import { arrange, bar, byId, fill, make, mark, say } from "./page-dom.js";
import * as words from "./page-words.js";

const FIELDS = [
  "in_flight",
  "decoding",
  "decode_tokens",
  "sessions",
  "blocks",
  "hit_tokens",
  "prompt_tokens",
  "requests",
  "errors",
  "recent_work_s",
];
const LEVELS = ["bad", "fair", "good"];

export const targetsOf = (workers) => workers.flatMap((worker) => worker.targets ?? []);

// What all ranks of a worker come to.
export function sumOf(targets) {
  const sum = Object.fromEntries(FIELDS.map((field) => [field, 0]));
  for (const target of targets) for (const field of FIELDS) sum[field] += target[field] ?? 0;
  sum.wait_s = targets.length ? Math.min(...targets.map((one) => one.wait_s ?? 0)) : null;
  return sum;
}

// Two lines in a cell: what matters, and more about it.
function cell(row, name, title, ...extra) {
  const upper = make("span", { class: "upper" });
  const lower = make("span", { class: "lower" });
  row.append(make("td", { role: "cell", class: name, "data-label": title }, upper, ...extra, lower));
  return { upper, lower };
}

class Row {
  constructor(onDrain) {
    const node = make("tr", { role: "row" });
    this.node = node;
    this.title = make("span", { class: "upper name" });
    this.about = make("span", { class: "lower" });
    this.error = make("span", { class: "lower", "data-level": "bad" });
    node.append(make("th", { role: "rowheader", scope: "row", class: "c-name" }, this.title, this.about, this.error));
    this.state = cell(node, "c-state", "State");
    this.loadBar = bar();
    this.load = cell(node, "c-load", "Load", this.loadBar);
    this.wait = cell(node, "c-num", "Wait");
    this.flight = cell(node, "c-flight", "In flight");
    this.decode = cell(node, "c-wide", "Decode tokens");
    this.sessions = cell(node, "c-num", "Sessions");
    this.hitBar = bar();
    this.hit = cell(node, "c-hit", "Hit rate", this.hitBar);
    this.blocks = cell(node, "c-wide", "Resident blocks");
    this.index = cell(node, "c-index", "What is known");
    this.button = make("button", { type: "button" });
    this.button.addEventListener("click", () => onDrain(this.worker));
    const action = make("td", { role: "cell", class: "c-action" });
    if (onDrain) action.append(this.button);
    node.append(action);
  }

  numbers(one, most) {
    say(this.load.upper, words.seconds(one.recent_work_s));
    fill(this.loadBar, one.recent_work_s, most);
    say(this.wait.upper, words.seconds(one.wait_s));
    say(this.flight.upper, words.count(one.in_flight));
    say(this.flight.lower, one.decoding > 0 ? `${words.count(one.decoding)} decoding` : "");
    say(this.decode.upper, words.count(one.decode_tokens));
    say(this.sessions.upper, words.count(one.sessions));
    say(this.hit.upper, words.percent(one.hit_tokens, one.prompt_tokens));
    fill(this.hitBar, one.hit_tokens, one.prompt_tokens);
    say(this.blocks.upper, words.count(one.blocks));
  }

  known([level, title, more]) {
    mark(this.index.upper, "data-level", level);
    say(this.index.upper, title);
    say(this.index.lower, more);
  }

  // `several`: whether there is more than one model, so that it has to be said which.
  showWorker(worker, most, busy, several) {
    this.worker = worker;
    const targets = worker.targets ?? [];
    const sum = sumOf(targets);
    say(this.title, words.label(worker.url));
    const engine = [worker.engine, worker.version].filter(Boolean).join(" ");
    say(this.about, [several ? worker.model : "", engine].filter(Boolean).join(" · "));
    say(this.error, worker.state === "down" ? String(worker.error ?? "") : "");
    const state = String(worker.state ?? "unknown");
    mark(this.state.upper, "data-state", state);
    mark(this.state.upper, "class", "upper state");
    say(this.state.upper, state);
    say(this.state.lower, worker.role === "both" ? "prefill, decode" : String(worker.role ?? ""));
    this.numbers(sum, most * Math.max(1, targets.length));
    const known = targets.map((target) => words.knowledge(worker, target));
    known.sort((a, b) => LEVELS.indexOf(a[0]) - LEVELS.indexOf(b[0]));
    this.known(known[0] ?? ["bad", "nothing", "no targets"]);
    const off = worker.state === "draining";
    say(this.button, busy ? "…" : off ? "Resume" : "Drain");
    mark(this.button, "aria-label", `${off ? "Resume" : "Drain"} ${words.label(worker.url)}`);
    mark(this.button, "aria-disabled", String(busy));
  }

  showRank(worker, target, most) {
    mark(this.node, "class", "rank");
    say(this.title, `rank ${words.count(target.rank)}`);
    this.numbers(target, most);
    this.known(words.knowledge(worker, target));
  }
}

export class WorkersTable {
  // `onDrain(worker)` is called when its button is pressed.
  constructor(onDrain) {
    this.table = byId("workers");
    this.onDrain = onDrain;
    this.bodies = new Map();
    this.busy = new Set(); // addresses of workers that wait for an answer
  }

  show(workers) {
    const most = Math.max(1, ...targetsOf(workers).map((one) => one.recent_work_s ?? 0));
    const several = new Set(workers.map((worker) => worker.model)).size > 1;
    const bodies = workers.map((worker) => {
      const targets = worker.targets ?? [];
      const ranks = targets.length > 1 ? targets : [];
      let body = this.bodies.get(worker.url);
      if (!body || body.ranks.length !== ranks.length) {
        const rows = [new Row(this.onDrain), ...ranks.map(() => new Row(null))];
        const node = make("tbody", { role: "rowgroup" }, ...rows.map((row) => row.node));
        body = { node, first: rows[0], ranks: rows.slice(1) };
        this.bodies.set(worker.url, body);
      }
      body.first.showWorker(worker, most, this.busy.has(worker.url), several);
      body.ranks.forEach((row, i) => row.showRank(worker, ranks[i], most));
      return body.node;
    });
    const there = new Set(workers.map((worker) => worker.url));
    for (const url of this.bodies.keys()) if (!there.has(url)) this.bodies.delete(url);
    arrange(this.table, bodies, this.table.tHead);
    byId("workers-empty").hidden = workers.length > 0;
    say(byId("workers-empty"), "No workers. Add one: POST /workers with its url.");
  }
}
