/** The strip at the top: what the server is doing, asked once a second while the page is looked at. */

import { getJSON } from "./api.js";
import { $, make, whole } from "./dom.js";

const EVERY = 1000; // milliseconds
const KEPT = 60; // values of a spark line

const figures = {};
const rates = [];

function figure(name, title, ...parts) {
  const value = make("dd", { title }, ...parts);
  $("figures").append(make("div", { title }, make("dt", {}, name), value));
  return (figures[name] = value);
}

const spark = document.createElementNS("http://www.w3.org/2000/svg", "svg");
const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
spark.setAttribute("viewBox", `0 0 ${KEPT - 1} 16`);
spark.setAttribute("preserveAspectRatio", "none");
spark.setAttribute("class", "spark");
spark.setAttribute("aria-hidden", "true");
spark.append(line);
const rate = make("span");
const held = make("i", { class: "held" });
const cached = make("i", { class: "cached" });
const share = make("span");

figure("running", "Requests that are decoding");
figure("waiting", "Requests that wait for their turn");
figure("rows/step", "Rows of the last step: a row is a token of one branch");
figure("step", "Time of the last step");
figure("tokens/s", "Tokens decoded a second; the line is the last minute", rate, spark);
figure(
  "KV",
  "Slots for keys and values: in use by running requests, and kept for prompts that may come again",
  make("span", { class: "gauge", "aria-hidden": "true" }, held, cached),
  share,
);

let timer = 0;

async function poll() {
  clearTimeout(timer);
  try {
    show(await getJSON("state", AbortSignal.timeout(5000)));
  } catch (error) {
    health(error.status === 401 ? "failed" : "away", error.status === 401 ? "needs an API key" : "no answer");
    if (error.status === 401) $("access").classList.add("wanted");
  }
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(poll, EVERY);
}

function show(state) {
  $("access").classList.remove("wanted");
  $("model").textContent = state.model;
  $("model").title = [state.model, state.device, `up ${age(state.uptime_s)}`, `${whole(state.requests_total)} requests`]
    .filter(Boolean)
    .join(", ");
  health(state.health, { ok: "ready", draining: "draining", failed: "failed" }[state.health] ?? state.health);
  figures.running.textContent = whole(state.running);
  figures.waiting.textContent = whole(state.waiting);
  figures["rows/step"].textContent = whole(state.rows_last_step);
  figures.step.textContent =
    state.step_ms == null ? "–" : `${state.step_ms < 10 ? state.step_ms.toFixed(1) : whole(state.step_ms)} ms`;
  rate.textContent = whole(state.tokens_per_s);
  rates.push(state.tokens_per_s);
  if (rates.length > KEPT) rates.shift();
  const most = Math.max(1, ...rates);
  line.setAttribute(
    "points",
    rates.map((value, i) => `${KEPT - rates.length + i},${15 - (14 * value) / most}`).join(" "),
  );
  const { total, free, held: inUse, cached: kept } = state.kv_slots;
  held.style.width = `${(100 * inUse) / total}%`;
  cached.style.width = `${(100 * kept) / total}%`;
  share.textContent = `${Math.round((100 * inUse) / total)} %`;
  figures.KV.title = `${whole(inUse)} slots in use, ${whole(kept)} cached, ${whole(free)} free of ${whole(total)}`;
}

function health(kind, word) {
  const element = $("health");
  if (element.textContent !== word) element.textContent = word;
  element.dataset.kind = kind;
}

function age(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function watch() {
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) poll();
  });
  poll();
}
export const refresh = poll;
