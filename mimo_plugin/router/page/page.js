// SPDX-License-Identifier: Apache-2.0
// Asks the router every two seconds and shows what it says; goes on by itself when it is gone.

import { byId, bar, fill, make, mark, say } from "./page-dom.js";
import { Chart, Decisions, History, quantile } from "./page-charts.js";
import { DecisionsTable } from "./page-decisions.js";
import { WorkersTable, sumOf, targetsOf } from "./page-workers.js";
import * as words from "./page-words.js";

const PERIOD_MS = 2000;
const PATIENCE_MS = 5000;
const FIRST_DECISIONS = 200;
const DECISIONS = 50;

let key = ""; // the admin key; only here
let offset_s = 0; // the router's clock minus ours
let reached_s = null; // when the router answered last
let paused = false;
let timer = 0;
let asking = false;

const decisions = new Decisions();
const history = new History();
const list = new DecisionsTable();
const table = new WorkersTable(drain);
const charts = [
  new Chart(chartOf("requests"), "requests_per_s", "Requests", (v) => `${words.rate(v)} /s`),
  new Chart(chartOf("hits"), "hit_rate", "Hit rate", (v) => words.percent(v, 1), 1),
  new Chart(chartOf("ttft"), "ttft_s", "Median time to first token", words.seconds),
  new Chart(chartOf("waiting"), "in_flight", "In flight", words.count),
];

function chartOf(name) {
  return byId(`tile-${name}`).querySelector("[data-chart]");
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function messageOf(text) {
  try {
    const body = JSON.parse(text);
    return String(body.error?.message ?? body.error ?? body.message ?? body.detail ?? text);
  } catch {
    return text;
  }
}

class Unreachable extends Error {}

// The JSON of an answer. Throws Refused when the router says no, Unreachable when it says nothing,
// and SyntaxError when what came is no JSON.
async function ask(path, options = {}) {
  const headers = { Accept: "application/json", ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const signal = AbortSignal.timeout(options.method ? 6 * PATIENCE_MS : PATIENCE_MS);
  let response;
  let text;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers, signal });
    text = await response.text();
  } catch (error) {
    throw new Unreachable(String(error));
  }
  const sent_ms = Date.parse(response.headers.get("Date") ?? "");
  if (Number.isFinite(sent_ms)) {
    const found_s = (sent_ms - Date.now()) / 1000;
    if (Math.abs(found_s - offset_s) > 1.5) offset_s = found_s; // the header has whole seconds
  }
  if (!response.ok) throw new Refused(response.status, messageOf(text).slice(0, 300));
  return text ? JSON.parse(text) : {};
}

// The round of questions

async function round() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    const limit = reached_s === null ? FIRST_DECISIONS : DECISIONS;
    const [found, recent] = await Promise.all([ask("workers"), ask(`decisions?limit=${limit}`)]);
    reach(found.workers ?? [], recent.decisions ?? []);
  } catch (error) {
    fail(error);
  } finally {
    asking = false;
    if (!paused && !document.hidden) timer = setTimeout(round, PERIOD_MS);
  }
}

function reach(workers, recent) {
  const now_s = Date.now() / 1000 + offset_s;
  decisions.merge(recent);
  if (reached_s === null) history.seed(decisions, now_s);
  reached_s = Date.now() / 1000;
  const targets = targetsOf(workers);
  const sample = history.add(targets, decisions, now_s);
  showHealth(workers);
  showTotals(sumOf(targets), sample, now_s, targets);
  for (const chart of charts) chart.update(history.samples, now_s);
  table.show(workers);
  list.show(decisions.all);
  showModels(workers);
  byId("banner").hidden = true;
  mark(document.body, "class", "");
  showUpdated();
}

function fail(error) {
  const refused = error instanceof Refused;
  const gone = error instanceof Unreachable;
  const wantsKey = refused && (error.status === 401 || error.status === 403);
  if (!refused && !gone) console.error(error); // an answer that this page does not understand
  say(byId("health"), gone ? "Unreachable" : "No figures");
  mark(byId("health"), "data-state", "down");
  const since = reached_s === null ? "" : ` What is shown is from ${words.clock(reached_s)}.`;
  let title = "The router's answer can't be read.";
  if (gone) title = "The router can't be reached.";
  if (refused) title = `The router answered ${error.status}.`;
  say(byId("banner-title"), title);
  const detail = refused ? ` ${error.message}` : "";
  const again = paused ? "" : " Trying again every two seconds.";
  say(byId("banner-text"), `${detail}${since}${again}`.trim());
  byId("banner-key").hidden = !wantsKey;
  byId("banner").hidden = false;
  mark(document.body, "class", "stale");
}

// What is shown of it

function showHealth(workers) {
  const ready = workers.filter((worker) => worker.state === "ready").length;
  const all = workers.length;
  const state = ready === 0 ? "down" : ready < all ? "draining" : "ready";
  mark(byId("health"), "data-state", state);
  say(byId("health"), all === 0 ? "No workers" : `${ready} of ${words.plural(all, "worker")} ready`);
  const down = workers.filter((worker) => worker.state === "down").length;
  document.title = down > 0 ? `(${down} down) mimo router` : "mimo router";
}

function showUpdated() {
  say(byId("updated"), paused ? `Paused at ${words.clock(reached_s)}` : `As of ${words.clock(reached_s)}`);
}

function tile(name, figure, note) {
  const node = byId(`tile-${name}`);
  say(node.querySelector("[data-figure]"), figure);
  say(node.querySelector("[data-note]"), note);
}

function showTotals(sum, sample, now_s, targets) {
  const failed = sum.errors > 0 ? `, ${words.plural(sum.errors, "error")}` : "";
  tile("requests", words.rate(sample.requests_per_s), `${words.count(sum.requests)} since start${failed}`);
  const told = decisions.all.filter((one) => words.known(one.actual_hit_tokens));
  const right = told.filter((one) => words.forecast(one)[0] === "good").length;
  const forecast = told.length ? `, ${right} of ${told.length} as forecast` : "";
  tile("hits", words.percent(sample.hit_rate, 1), `${words.percent(sum.hit_tokens, sum.prompt_tokens)} since start${forecast}`);
  const firsts = decisions.firstTokens(now_s - 60, now_s);
  tile("ttft", words.seconds(sample.ttft_s), `90 % within ${words.seconds(quantile(firsts, 0.9))}, last minute`);
  const longest = Math.max(0, ...targets.map((target) => target.wait_s ?? 0));
  tile("waiting", words.count(sum.in_flight), `${words.count(sum.decoding)} decoding, longest wait ${words.seconds(longest)}`);
}

function showModels(workers) {
  const models = [...new Set(workers.map((worker) => worker.model).filter(Boolean))];
  say(byId("models"), models.length === 1 ? models[0] : models.length ? `${models.length} models` : "");
  const select = byId("model");
  if ([...select.options].map((one) => one.value).join("\n") !== models.join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...models.map((name) => make("option", { value: name }, name)));
    if (models.includes(chosen)) select.value = chosen;
  }
  byId("model-label").hidden = models.length < 2;
}

// A key, when one is wanted

function askForKey(error) {
  const dialog = byId("key-dialog");
  say(byId("key-reason"), `It answered ${error.status}: ${error.message}`);
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "use"), { once: true });
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  byId("key").value = "";
  byId("key-dialog").close("use");
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("banner-key").addEventListener("click", async () => {
  const error = new Refused(401, byId("banner-text").textContent);
  if (await askForKey(error)) round();
});

// Asks; as long as the router wants a key and somebody gives one, once more.
async function askWithKey(path, options) {
  for (;;) {
    try {
      return await ask(path, options);
    } catch (error) {
      const wantsKey = error instanceof Refused && (error.status === 401 || error.status === 403);
      if (!wantsKey || !(await askForKey(error))) throw error;
    }
  }
}

// Drain and resume

let saidTimer = 0;
function tell(text, level = "good") {
  const node = byId("said");
  mark(node, "data-level", level);
  node.hidden = false;
  say(node, text);
  clearTimeout(saidTimer);
  saidTimer = setTimeout(() => (node.hidden = true), 6000);
}

function reason(error) {
  if (error instanceof Unreachable) return "the router can't be reached";
  return error instanceof Refused ? `${error.status}: ${error.message}` : String(error);
}

async function drain(worker) {
  if (table.busy.has(worker.url)) return;
  const on = worker.state !== "draining";
  const name = words.label(worker.url);
  table.busy.add(worker.url);
  try {
    const query = new URLSearchParams({ url: worker.url, on: String(on) });
    // A header of our own, so that no other site's page can send this.
    const headers = { "X-Mimo-Router": "page" };
    await askWithKey(`workers/drain?${query}`, { method: "POST", headers });
    tell(on ? `${name} gets nothing new; what it has goes on.` : `${name} gets requests again.`);
  } catch (error) {
    tell(`${name} is as it was: ${reason(error)}`, "bad");
  } finally {
    table.busy.delete(worker.url);
    round();
  }
}

// What is resident

function bodyOf(text) {
  try {
    const value = JSON.parse(text);
    if (Array.isArray(value)) return { messages: value };
    if (value !== null && typeof value === "object" && (value.messages || value.prompt)) return value;
  } catch {
    // not JSON: a prompt
  }
  return { prompt: text };
}

byId("prompt").addEventListener("input", () => {
  const body = bodyOf(byId("prompt").value);
  const kind = body.messages ? `${words.plural(body.messages.length, "message")}` : "a prompt";
  say(byId("prompt-kind"), `Sent as ${kind}.`);
});

byId("resident").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = event.target.querySelector("[type=submit]");
  if (button.getAttribute("aria-disabled") === "true") return;
  mark(button, "aria-disabled", "true");
  const model = byId("model").value;
  const body = { ...(model ? { model } : {}), ...bodyOf(byId("prompt").value) };
  try {
    const headers = { "Content-Type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify(body) };
    showResident(await askWithKey("resident", options));
  } catch (error) {
    const text = `Not looked up: ${reason(error)}`;
    byId("resident-answer").replaceChildren(make("p", { class: "wrong" }, text));
  } finally {
    mark(button, "aria-disabled", "false");
  }
});

function showResident(answer) {
  const prompt = answer.prompt_tokens;
  const found = Object.entries(answer.targets ?? {});
  found.sort(([, a], [, b]) => b.hit_tokens - a.hit_tokens || b.full_tokens - a.full_tokens);
  const cell = (title, ...children) =>
    make("td", { role: "cell", class: "num", "data-label": title }, ...children);
  const head = (text, name) => make("th", { role: "columnheader", scope: "col", class: name }, text);
  const measured = (value) => {
    const node = bar();
    fill(node, value, prompt);
    return [make("span", { class: "upper" }, words.count(value)), node];
  };
  const rows = found.map(([name, one]) =>
    make(
      "tr",
      { role: "row" },
      make("th", { role: "rowheader", scope: "row" }, words.label(name)),
      cell("Hit", ...measured(one.hit_tokens)),
      cell("In full attention", ...measured(one.full_tokens)),
      cell("To compute", words.count(prompt - one.hit_tokens)),
    ),
  );
  const top = make("tr", { role: "row" });
  top.append(head("Worker", ""), head("Hit", "num"), head("In full attention", "num"), head("To compute", "num"));
  const caption = make("caption", {}, `${words.plural(prompt, "prompt token")}. A hit is what the engine would reuse: ` +
    "where full attention has more, the windows before that point are gone.");
  byId("resident-answer").replaceChildren(
    make(
      "table",
      { class: "found", role: "table" },
      caption,
      make("thead", { role: "rowgroup" }, top),
      make("tbody", { role: "rowgroup" }, ...rows),
    ),
  );
}

// Pause; and rest while nobody looks

byId("pause").addEventListener("click", () => {
  paused = !paused;
  mark(byId("pause"), "aria-pressed", String(paused));
  clearTimeout(timer);
  if (paused) showUpdated();
  else round();
});

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden && !paused) round();
});

round();
