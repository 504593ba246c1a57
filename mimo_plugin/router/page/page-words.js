// SPDX-License-Identifier: Apache-2.0
// Numbers and decisions in words. Pure functions: values in, text out.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export const known = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (known(value) ? WHOLE.format(value) : "–");

export const short = (value) =>
  !known(value) ? "–" : Math.abs(value) < 10000 ? WHOLE.format(value) : SHORT.format(value);

export function percent(part, whole) {
  if (!known(part) || !known(whole) || whole <= 0) return "–";
  return `${((100 * part) / whole).toFixed(1)} %`;
}

export function seconds(value) {
  if (!known(value)) return "–";
  if (value < 0.0005) return "0 s";
  if (value < 0.9995) return `${Math.max(1, Math.round(value * 1000))} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 99.5) return `${Math.round(value)} s`;
  if (value < 3600) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function rate(value) {
  if (!known(value)) return "–";
  return value >= 99.5 ? WHOLE.format(value) : value.toFixed(1);
}

export const plural = (value, one, many = `${one}s`) =>
  `${count(value)} ${value === 1 ? one : many}`;

export function clock(unix_s) {
  return known(unix_s) ? new Date(unix_s * 1000).toLocaleTimeString("en-GB") : "–";
}

// "http://10.0.0.1:8000#1" -> "10.0.0.1:8000 rank 1"
export function label(target) {
  const [worker, rank] = String(target ?? "–").split("#");
  const name = worker.replace(/^https?:\/\//, "").replace(/\/$/, "");
  return rank === undefined ? name : `${name} rank ${rank}`;
}

// Whether the router has to guess a part of what a target has: "windows", "all" or "".
function guessed(worker, target) {
  const how = target.how ?? null; // {full, windows}, each "events" or "believed"
  if (how !== null) {
    if (how.full === "believed") return "all";
    return how.windows === "believed" ? "windows" : "";
  }
  const alone = (worker.targets ?? []).length <= 1; // else another rank may be what is not exact
  return worker.exact === false && alone ? "all" : "";
}

// What the router knows of a target's cache: [level, title, more]; level: good, fair or bad.
export function knowledge(worker, target) {
  const events = target.events ?? {};
  if (Object.keys(events).length === 0) {
    if (worker.exact === false) return ["fair", "approximate", "from answers, not events"];
    return ["bad", "nothing", "no events"];
  }
  const lost = [
    events.gaps > 0 ? plural(events.gaps, "gap") : "",
    events.restarts > 0 ? plural(events.restarts, "restart") : "",
    events.decode_errors > 0 ? `${count(events.decode_errors)} unreadable` : "",
  ].filter(Boolean);
  const age = known(events.last_event_age_s)
    ? `last event ${seconds(events.last_event_age_s)} ago`
    : "no event yet";
  if (!events.connected) return ["bad", "events cut off", [age, ...lost].join(", ")];
  if (!target.trusted) {
    const why = lost.length ? "events were lost" : "catching up";
    return ["fair", "incomplete", [why, ...lost].join(", ")];
  }
  const guess = guessed(worker, target);
  if (guess === "windows") {
    return ["fair", "approximate", ["windows are not told", age, ...lost].join(", ")];
  }
  if (guess === "all") return ["fair", "approximate", [age, ...lost].join(", ")];
  return ["good", "exact", [age, ...lost].join(", ")];
}

export const chosenOf = (decision) =>
  (decision.candidates ?? []).find((one) => one.target === decision.target) ?? null;

// What of a prompt was hit, as far as it is known by now.
export const hitOf = (decision) => decision.actual_hit_tokens ?? decision.hit_tokens;

function there(decision, chosen) {
  const prompt = decision.prompt_tokens;
  if (!(prompt > 0)) return "its tokens are not known";
  const hit = chosen?.hit_tokens ?? decision.hit_tokens ?? 0;
  const verb = chosen?.reserved ? "on their way there" : "there";
  if (hit > 0) return `${count(hit)} of ${count(prompt)} tokens are ${verb}`;
  const anywhere = (decision.candidates ?? []).some((one) => one.hit_tokens > 0);
  return `none of its ${count(prompt)} tokens ${anywhere ? "are there" : "are anywhere"}`;
}

// Why the one that has most of the prompt did not get it.
function rival(decision, chosen) {
  if (!chosen) return "";
  const more = (decision.candidates ?? [])
    .filter((one) => one.target !== chosen.target && one.hit_tokens > chosen.hit_tokens)
    .sort((a, b) => b.hit_tokens - a.hit_tokens)[0];
  if (!more) return "";
  const has = `${label(more.target)} has ${count(more.hit_tokens)}`;
  if (more.in_bound === false) return `; ${has}, but its share of the chats too`;
  if (more.wait_s > chosen.wait_s) return `; ${has}, but a wait of ${seconds(more.wait_s)}`;
  if (more.media_s > chosen.media_s) return `; ${has}, but not the images`;
  return `; ${has}, but costs more`;
}

const REASONS = new Map([
  ["only", "the only one that could take it"],
  ["cost", "cheapest"],
  ["session", "as cheap as others, and the chat was here before"],
  ["prefix", "as cheap as others, with most of it in full attention"],
  ["work", "as cheap as others, with least work lately"],
  ["chance", "as cheap as others, by chance"],
  ["owner", "keeps its images and videos"],
]);

export function why(decision) {
  if (!decision.target) return "no worker could take it";
  const chosen = chosenOf(decision);
  const reason = REASONS.get(decision.reason) ?? String(decision.reason ?? "unknown");
  const tail = rival(decision, chosen);
  const again = decision.retries > 0 ? ` (after ${plural(decision.retries, "retry", "retries")})` : "";
  return `${reason} — ${there(decision, chosen)}${tail}${again}`;
}

// How the forecast of a hit compares with what the engine said: [level, text].
export function forecast(decision) {
  if (!decision.target) return ["none", ""];
  const actual = decision.actual_hit_tokens;
  const said = decision.predicted_hit_tokens ?? decision.hit_tokens;
  if (!known(actual)) return ["none", "forecast"];
  if (actual === said) return ["good", "as forecast"];
  return ["fair", `forecast ${count(said)}`];
}

// What a request's line says about how it went: [level, text].
export function outcome(status) {
  if (!status) return ["none", "running"];
  if (!known(status)) return ["none", String(status)];
  return [status < 400 ? "good" : "bad", String(status)];
}

// What the cost of a candidate is made of, in its own unit: [wait, media, prefill].
export function parts(candidate) {
  const wait = Math.max(0, candidate.wait_s ?? 0);
  const media = Math.max(0, candidate.media_s ?? 0);
  const cost = Math.max(0, candidate.cost ?? 0);
  return [Math.min(wait, cost), Math.min(media, cost), Math.max(0, cost - wait - media)];
}

// The factor of T_prefill in the cost, from the numbers of the candidate that was chosen.
export function factor(decision) {
  const chosen = chosenOf(decision);
  if (!chosen || !(chosen.prefill_s > 0) || chosen.in_bound === false) return null;
  return parts(chosen)[2] / chosen.prefill_s;
}
