// SPDX-License-Identifier: Apache-2.0
// The list of decisions; each opens to what every candidate would have cost.

import { arrange, bar, byId, fill, make, mark, say } from "./page-dom.js";
import { Decisions } from "./page-charts.js";
import * as words from "./page-words.js";

const PAGE = window.matchMedia("(max-width: 1000px)").matches ? 8 : 20;
const PARTS = ["wait", "media", "prefill"];
let numbered = 0;

const head = (text, name = "") =>
  make("th", { role: "columnheader", scope: "col", class: name }, text);
const data = (title, name, ...children) =>
  make("td", { role: "cell", class: name, "data-label": title }, ...children);

function candidateRow(decision, candidate, most) {
  const chosen = candidate.target === decision.target;
  const notes = [
    chosen ? "chosen" : "",
    candidate.reserved ? "hit is on its way" : "",
    candidate.in_bound === false ? "has its share of the chats" : "",
  ];
  const stack = make("span", { class: "bar stack", "aria-hidden": "true" });
  words.parts(candidate).forEach((part, i) => {
    const piece = make("span", { class: PARTS[i] });
    piece.style.width = `${most > 0 ? ((100 * part) / most).toFixed(2) : 0}%`;
    stack.append(piece);
  });
  const decode = decision.role === "decode"; // costs tokens in memory there, not time
  const cost = decode ? `${words.count(candidate.cost)} tokens` : words.seconds(candidate.cost);
  return make(
    "tr",
    { role: "row", class: chosen ? "chosen" : "" },
    make("th", { role: "rowheader", scope: "row" }, words.label(candidate.target)),
    data("Hit tokens", "num", words.count(candidate.hit_tokens)),
    data("Wait", "num", words.seconds(candidate.wait_s)),
    data("Prefill", "num", words.seconds(candidate.prefill_s)),
    data("Media", "num", words.seconds(candidate.media_s)),
    data("Cost", "num strong", cost),
    data("", "c-stack", stack),
    data("", "note", notes.filter(Boolean).join(", ")),
  );
}

function candidateTable(decision) {
  const candidates = decision.candidates ?? [];
  const most = Math.max(0, ...candidates.map((one) => one.cost ?? 0));
  const swatch = (part, text) =>
    make("span", { class: `swatch ${part}` }, text);
  const caption = make(
    "caption",
    {},
    "Candidates, cheapest first. Cost in the bars: ",
    swatch("wait", "wait"),
    " ",
    swatch("media", "media"),
    " ",
    swatch("prefill", "prefill"),
  );
  const top = make(
    "tr",
    { role: "row" },
    head("Worker"),
    head("Hit tokens", "num"),
    head("Wait", "num"),
    head("Prefill", "num"),
    head("Media", "num"),
    head("Cost", "num"),
    head("Parts of the cost", "c-stack"),
    head("Note", "note"),
  );
  const rows = candidates.map((one) => candidateRow(decision, one, most));
  return make(
    "table",
    { class: "candidates", role: "table" },
    caption,
    make("thead", { role: "rowgroup" }, top),
    make("tbody", { role: "rowgroup" }, ...rows),
  );
}

function facts(decision) {
  const times = words.factor(decision);
  const pairs = [
    ["Request", decision.request],
    ["Path", decision.path],
    ["Model", decision.model],
    ["Session", decision.session],
    ["Prompt", words.plural(decision.prompt_tokens, "token")],
    ["Forecast hit", words.count(decision.predicted_hit_tokens ?? decision.hit_tokens)],
    ["Engine's hit", words.known(decision.actual_hit_tokens) ? words.count(decision.actual_hit_tokens) : null],
    ["In flight", words.known(decision.queue) ? `${decision.queue.toFixed(2)} a worker` : null],
    ["Cost", times === null ? null : `wait + media + ${times.toFixed(1)} × prefill`],
    ["Retries", decision.retries > 0 ? words.count(decision.retries) : null],
  ];
  const list = make("dl", { class: "facts" });
  for (const [name, value] of pairs) {
    if (value === null || value === undefined || value === "") continue;
    list.append(make("div", {}, make("dt", {}, name), make("dd", {}, String(value))));
  }
  return list;
}

class Row {
  constructor(onToggle) {
    numbered += 1;
    const id = `decision-${numbered}`;
    this.open = false;
    this.button = make("button", { type: "button", class: "open", "aria-expanded": "false", "aria-controls": id });
    this.time = make("time");
    this.who = make("span", { class: "upper" });
    this.what = make("span", { class: "lower" });
    this.target = make("strong");
    this.why = make("span");
    this.hit = make("span", { class: "upper" });
    this.hitBar = bar();
    this.forecast = make("span", { class: "lower" });
    this.ttft = make("span");
    this.status = make("span");
    this.line = make(
      "tr",
      { role: "row", class: "line" },
      data("", "c-open", this.button),
      data("", "c-time", this.time),
      data("", "c-request", this.who, this.what),
      data("", "c-target", this.target),
      data("", "c-why", this.why),
      data("", "c-hits", this.hit, this.hitBar, this.forecast),
      data("First token", "c-ttft", this.ttft),
      data("Status", "c-status", this.status),
    );
    this.inside = make("td", { role: "cell", colspan: "8" });
    this.detail = make("tr", { role: "row", class: "detail", id, hidden: "" }, this.inside);
    this.node = make("tbody", { role: "rowgroup" }, this.line, this.detail);
    this.line.addEventListener("click", () => {
      if (String(window.getSelection()) !== "") return; // somebody selects text
      this.toggle();
      onToggle();
    });
  }

  toggle() {
    this.open = !this.open;
    this.detail.hidden = !this.open;
    mark(this.button, "aria-expanded", String(this.open));
    mark(this.node, "class", this.open ? "opened" : "");
    if (this.open) this.fillDetail();
  }

  fillDetail() {
    const text = JSON.stringify(this.decision);
    if (text === this.filled) return;
    this.filled = text;
    this.inside.replaceChildren(facts(this.decision), candidateTable(this.decision));
  }

  // `several`: whether there is more than one model, so that it has to be said which.
  show(decision, several) {
    this.decision = decision;
    const time = words.clock(decision.time_s);
    mark(this.button, "aria-label", `Candidates of the request at ${time}`);
    say(this.time, time);
    say(this.who, decision.session ? String(decision.session) : "no session");
    mark(this.who, "class", decision.session ? "upper" : "upper none");
    const path = String(decision.path ?? "").replace(/^\/v1\//, "");
    say(this.what, [path, several ? decision.model : ""].filter(Boolean).join(" · "));
    say(this.target, words.label(decision.target));
    say(this.why, words.why(decision));
    const hit = words.hitOf(decision);
    say(this.hit, `${words.count(hit)} of ${words.count(decision.prompt_tokens)}`);
    fill(this.hitBar, hit, decision.prompt_tokens);
    const [sure, said] = words.forecast(decision);
    mark(this.forecast, "data-level", sure);
    say(this.forecast, said);
    say(this.ttft, words.seconds(decision.ttft_s));
    const [level, status] = words.outcome(decision.status);
    mark(this.status, "data-level", level);
    say(this.status, status);
    if (this.open) this.fillDetail();
  }
}

export class DecisionsTable {
  constructor() {
    this.table = byId("decisions");
    this.rows = new Map();
    this.all = [];
    this.limit = PAGE;
    this.held = null; // time of the newest one in the list, while the list stands still
    byId("filter").addEventListener("input", () => this.render());
    for (const kind of ["focusin", "focusout"]) {
      this.table.addEventListener(kind, () => setTimeout(() => this.hold()));
    }
    byId("more").addEventListener("click", () => {
      this.limit += PAGE;
      this.render();
    });
    byId("newer").addEventListener("click", () => {
      for (const row of this.rows.values()) if (row.open) row.toggle();
      this.held = null;
      this.render();
      this.table.scrollIntoView({ block: "nearest" });
    });
  }

  show(decisions) {
    this.all = decisions;
    this.render();
  }

  // While somebody reads one, or is there with the keyboard, nothing comes in above it.
  hold() {
    const open = [...this.rows.values()].some((row) => row.open);
    const here = this.table.querySelector("button.open:focus-visible") !== null;
    if (!open && !here) this.held = null;
    else this.held ??= this.all[0]?.time_s ?? null;
    this.render();
  }

  render() {
    const text = byId("filter").value.trim().toLowerCase();
    const matches = (one) =>
      [one.session, one.model, one.target, one.request, one.path, one.reason].some((field) =>
        String(field ?? "").toLowerCase().includes(text),
      );
    const fitting = text ? this.all.filter(matches) : this.all;
    const listed = this.held === null ? fitting : fitting.filter((one) => one.time_s <= this.held);
    const shown = listed.slice(0, this.limit);
    const keys = new Set(shown.map(Decisions.key));
    for (const [key, row] of this.rows) if (!keys.has(key)) {
      if (row.open) row.toggle();
      this.rows.delete(key);
    }
    const several = new Set(this.all.map((one) => one.model)).size > 1;
    const nodes = shown.map((decision) => {
      const key = Decisions.key(decision);
      if (!this.rows.has(key)) this.rows.set(key, new Row(() => this.hold()));
      const row = this.rows.get(key);
      row.show(decision, several);
      return row.node;
    });
    arrange(this.table, nodes, this.table.tHead);
    const newer = fitting.length - listed.length;
    byId("newer").hidden = newer === 0;
    say(byId("newer"), `Show ${newer} newer`);
    byId("more").hidden = listed.length <= this.limit;
    byId("decisions-empty").hidden = shown.length > 0;
    say(byId("decisions-empty"), text ? "None fits the filter." : "No requests yet.");
  }
}
