/** The page: it asks, shows the tree while it grows, and the answer. */

import { curl, getJSON, key, stream } from "./api.js";
import { $, count, make, whole } from "./dom.js";
import { Form, SAMPLING } from "./form.js";
import { inspect } from "./inspect.js";
import { refresh, watch } from "./state.js";
import { Turn, announce } from "./turn.js";
import { View } from "./view.js";

const EXAMPLES = [
  [
    "chat",
    "best_of_n",
    { n: 6, max_tokens: 48 },
    "A pizza costs 9 dollars and a drink costs 3 dollars. What do they cost together?",
  ],
  ["completion", "beam", { beam_width: 4, max_tokens: 20 }, "The three primary colours are"],
  ["completion", "", { n: 1, max_tokens: 64, temperature: 0.7 }, "The best way to learn a language is"],
];
const RANKED = 400; // milliseconds between two rankings of the leaves
const SPOKEN = 4000; // milliseconds between two words about a search that goes on

const turns = [];
const narrow = matchMedia("(max-width: 760px)");
let strategies = [SAMPLING];
let model = null;
let running = null; // the AbortController of the request that is under way
let shown = null; // the turn whose tree is on the canvas

const view = new View(look, () => {
  if (narrow.matches) pane("node");
});
const form = new Form($("fields"), $("help"));

const kind = () => document.querySelector('[name="kind"]:checked').value;
const strategy = () => strategies.find((item) => item.name === $("strategy").value) ?? SAMPLING;

/* ---- what is asked ---- */

async function connect() {
  try {
    const [known, models] = await Promise.all([getJSON("strategies"), getJSON("v1/models")]);
    model = models.data[0].id;
    strategies = [SAMPLING, ...known.strategies];
    const before = $("strategy").value;
    listStrategies();
    $("strategy").value = strategies.some(({ name }) => name === before) ? before : "";
    chooseStrategy();
    if (!turns.length) $("transcript").replaceChildren(welcome());
  } catch (error) {
    if (error.status !== 401) setTimeout(connect, 2000);
  }
}

function listStrategies() {
  $("strategy").replaceChildren(
    ...strategies.map(({ name, help }) => make("option", { value: name, title: help }, name || "sampling")),
  );
}

function chooseStrategy() {
  $("about").textContent = strategy().help;
  form.show(strategy());
  tellChanged();
}

function tellChanged() {
  const values = Object.entries(form.values()).map(([name, value]) => `${name} ${value}`);
  $("changed").textContent = values.join(" · ");
}

function chooseKind() {
  const chat = kind() === "chat";
  $("prompt-label").textContent = chat ? "Message" : "Text to complete";
  $("prompt").placeholder = chat ? "Ask something" : "Text to complete";
  $("keys").textContent = chat ? "Enter sends, Shift Enter breaks the line" : "Ctrl Enter sends";
}

/** The request for `text`, or for a conversation. */
function requestOf(messages, text) {
  const { seed, ...values } = form.values();
  const body = { model, stream: true, stream_options: { include_usage: true } };
  if (messages) body.messages = messages;
  else body.prompt = text;
  if (seed !== undefined) body.seed = seed;
  const { name } = strategy();
  if (name) return { ...body, search: { strategy: name, tree: true, ...values } };
  const { logprobs, ...sampling } = values;
  if (logprobs !== undefined && messages) Object.assign(body, { logprobs: true, top_logprobs: logprobs });
  else if (logprobs !== undefined) body.logprobs = logprobs;
  return { ...body, ...sampling };
}

function draft() {
  const text = $("prompt").value;
  if (kind() === "completion") return requestOf(null, text);
  const before = turns.findLast((turn) => turn.kind === "chat" && turn.text);
  return requestOf([...(before?.messages ?? []), { role: "user", content: text }], text);
}

const path = (turn) => (turn === "chat" ? "v1/chat/completions" : "v1/completions");

async function ask(asked, prompt, body) {
  const turn = new Turn(asked, prompt, body, { show: showTurn, again });
  running = new AbortController();
  turns.push(turn);
  $("transcript").querySelector(".welcome")?.remove();
  $("transcript").append(turn.element);
  setRunning(true);
  showTurn(turn);
  scrollDown();
  announce(`Started: ${turn.tree.strategy || "sampling"}.`);
  let spoken = performance.now();
  let outcome = "done";
  try {
    for await (const chunk of stream(path(asked), body, running.signal)) {
      const low = nearEnd();
      const replaced = turn.take(chunk);
      if (shown === turn) {
        if (replaced) view.replaced();
        drawn(turn);
      }
      if (low) scrollDown();
      if (performance.now() - spoken > SPOKEN) {
        spoken = performance.now();
        announce(turn.facts.textContent);
      }
    }
  } catch (error) {
    outcome = error.name === "AbortError" ? "stopped" : error;
  }
  const low = nearEnd();
  turn.end(outcome);
  if (outcome instanceof Error && !turn.text && !$("prompt").value) $("prompt").value = prompt; // to be put right
  running = null;
  setRunning(false);
  if (shown === turn) drawn(turn);
  if (low) scrollDown();
  announce(
    outcome instanceof Error ? outcome.message : outcome === "stopped" ? "Stopped." : `Answer: ${turn.text || "empty"}`,
  );
  refresh();
}

function again(turn) {
  if (running) return;
  const messages = turn.body.messages ?? null;
  ask(turn.kind, turn.prompt, requestOf(messages, turn.prompt));
}

function setRunning(on) {
  const focused = document.activeElement === $(on ? "send" : "stop");
  $("send").hidden = on;
  $("stop").hidden = !on;
  if (focused) $(on ? "stop" : "send").focus();
  for (const button of document.querySelectorAll("article .actions button:last-child")) button.disabled = on;
}

const nearEnd = () => $("transcript").scrollHeight - $("transcript").scrollTop - $("transcript").clientHeight < 40;

function scrollDown() {
  $("transcript").scrollTop = $("transcript").scrollHeight;
}

/* ---- what is shown ---- */

function showTurn(turn) {
  shown = turn;
  for (const other of turns) other.mark(other === turn);
  view.show(turn?.tree ?? null);
  if (turn) drawn(turn);
  else for (const name of ["chosen", "save", "fold"]) $(name).disabled = true;
  look(null);
}

let ranked = 0; // when leaves were last ranked
let due = false; // a chunk may come with every token: draw once a frame

function drawn(turn) {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    if (shown !== turn) return;
    const { tree } = turn;
    view.change();
    if (view.selected || performance.now() > ranked + RANKED || !tree.running) {
      ranked = performance.now();
      look(view.selected);
    }
    const { nodes, live, pruned, tokens } = tree.counts();
    $("caption").textContent = [
      tree.strategy || "sampling",
      count(nodes, "node"),
      live && `${whole(live)} decoding`,
      pruned && `${whole(pruned)} pruned`,
      count(tokens, "token"),
    ]
      .filter(Boolean)
      .join(" · ");
    $("chosen").disabled = !tree.chosen;
    $("save").disabled = !tree.json;
    $("fold").disabled = !pruned;
  });
}

function look(node) {
  inspect(shown?.tree, node, (step) => (step ? view.reveal(step) : view.choose(null)));
}

/** Narrow windows show one pane at a time. */
function pane(name) {
  document.body.dataset.pane = name;
  for (const button of document.querySelectorAll("[data-show]"))
    button.setAttribute("aria-pressed", String(button.dataset.show === name));
}

/* ---- wiring ---- */

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  const body = draft();
  $("prompt").value = "";
  ask(kind(), text, body);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
  if (kind() === "chat" || event.ctrlKey || event.metaKey) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !event.isComposing) running.abort();
});
$("clear").addEventListener("click", () => {
  running?.abort();
  turns.length = 0;
  $("transcript").replaceChildren(welcome());
  $("caption").textContent = "";
  showTurn(null);
  $("prompt").focus();
});
$("strategy").addEventListener("change", chooseStrategy);
$("fields").addEventListener("changed", tellChanged);
for (const radio of document.querySelectorAll('[name="kind"]')) radio.addEventListener("change", chooseKind);
$("curl").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(curl(path(kind()), draft()));
    $("help").textContent = "Copied.";
  } catch {
    $("help").textContent = "The browser does not let this page write to the clipboard.";
  }
});
$("key").value = key.get();
$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("access").open = false;
  refresh();
  connect();
});
$("in").addEventListener("click", () => view.zoom(1.25));
$("out").addEventListener("click", () => view.zoom(0.8));
$("fit").addEventListener("click", () => view.fit());
$("chosen").addEventListener("click", () => shown?.tree.chosen && view.reveal(shown.tree.chosen));
$("fold").addEventListener("click", () => {
  view.setFolds(!view.folds);
  $("fold").setAttribute("aria-pressed", String(view.folds));
});
$("save").addEventListener("click", () => {
  const url = URL.createObjectURL(new Blob([JSON.stringify(shown.tree.json)], { type: "application/json" }));
  make("a", { href: url, download: "tree.json" }).click();
  URL.revokeObjectURL(url);
});
for (const button of document.querySelectorAll("[data-show]"))
  button.addEventListener("click", () => pane(button.dataset.show));

function welcome() {
  return make(
    "div",
    { class: "welcome" },
    make(
      "p",
      {},
      "Ask, and watch the tree of what the model considers. What a search gives up turns grey; what it chooses is marked.",
    ),
    make(
      "ul",
      {},
      ...EXAMPLES.filter(([, name]) => strategies.some((item) => item.name === name)).map(
        ([asked, name, values, text]) =>
          make(
            "li",
            {},
            make(
              "button",
              { type: "button", onclick: () => example(asked, name, values, text) },
              make("span", { class: "tag" }, name || "sampling"),
              text,
            ),
          ),
      ),
    ),
  );
}

function example(asked, name, values, text) {
  document.querySelector(`[name="kind"][value="${asked}"]`).checked = true;
  chooseKind();
  $("strategy").value = name;
  chooseStrategy();
  form.set(values);
  $("prompt").value = text;
  $("send").focus();
}

$("transcript").append(welcome());
$("node").after(make("p", { class: "unseen", id: "token-keys" }, "Left and right arrow keys move over the tokens."));
listStrategies();
chooseKind();
chooseStrategy();
showTurn(null);
connect();
watch();
