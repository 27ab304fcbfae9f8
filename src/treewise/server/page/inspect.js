/** The pane of one node: what became of it, its numbers, and the text that leads to it. */

import { $, count, fill, fixed, make, percent, score, whole } from "./dom.js";
import { tokenSpan } from "./tokens.js";

const WORDS = { prompt: "Prompt", live: "Decoding", ended: "Ended", pruned: "Pruned" };
const REASONS = {
  stop: "at an end of text or a stop string",
  length: "at the length limit",
  abort: "because it was stopped",
};

const MOST_LEAVES = 30;

/** Show `node` of `tree`, or how its leaves rank; `go` is called with a node that the user chose, or with null. */
export function inspect(tree, node, go) {
  const pane = $("node");
  if (!tree) {
    fill(pane, make("p", { class: "about" }, "What a node says, and how likely it was, stands here."));
    return;
  }
  if (!node) {
    fill(pane, ...ranking(tree, go));
    return;
  }
  const path = node.path();
  const chosen = tree.onPath.has(node) && node !== tree.root;
  const tokens = path.slice(1).reduce((sum, step) => sum + step.tokens, 0);
  const own =
    node.parent && node.logprob != null ? node.logprob - (node.parent.parent ? (node.parent.logprob ?? 0) : 0) : null;
  fill(
    pane,
    make("button", { type: "button", class: "quiet back", onclick: () => go(null) }, "‹ All leaves"),
    make(
      "h2",
      { class: chosen ? "chosen" : node.state },
      node === tree.chosen ? "Chosen" : chosen ? "On the chosen path" : inner(node) ? "Branched" : WORDS[node.state],
    ),
    make(
      "p",
      { class: "about" },
      node === tree.root
        ? "Shared by everything that follows."
        : where(node, path) + (node.finish ? `, ended ${REASONS[node.finish] ?? node.finish}` : ""),
    ),
    node === tree.root ||
      facts({
        "log-prob": node.logprob == null ? null : fixed(node.logprob, 3),
        "of which here": path.length > 2 && own != null ? fixed(own, 3) : null,
        "a token":
          tokens && node.logprob != null
            ? `${fixed(node.logprob / tokens, 3)}, ${percent(Math.exp(node.logprob / tokens))}`
            : null,
        score: node.score == null ? null : score(node.score),
        visits: node.visits == null ? null : whole(node.visits),
        tokens: path.length > 2 ? `${whole(tokens)}, ${whole(node.tokens)} here` : whole(node.tokens),
        children: node.children.length ? whole(node.children.length) : null,
      }),
    make("h3", {}, node === tree.root ? "Text" : "Text from the prompt on"),
    make(
      "div",
      { class: "text" },
      ...(node === tree.root
        ? [node.text]
        : path.slice(1).map((step) => (step === node ? ownText(node) : before(step, go)))),
    ),
    node.pieces.some((piece) => piece.logprob != null) && table(node),
  );
}

const where = (node, path) => (path.length < 8 ? `Node ${node.place}` : `${path.length - 1} nodes from the prompt`);

const inner = (node) => node.children.length > 0 && node.state !== "pruned" && node.state !== "prompt";

const facts = (values) =>
  make(
    "dl",
    {},
    ...Object.entries(values)
      .filter(([, value]) => value != null)
      .flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
  );

/** The text of a leaf, and so much of what stands before it that one sees where it belongs. */
function excerpt(node) {
  const before = node.parent.answer.trim();
  const shown = before.length > 40 ? `… ${before.slice(-36).replace(/^\S*\s/, "")}` : before;
  const own = node.text.slice(0, 240) || (before ? "" : node.state === "live" ? "(nothing yet)" : "(nothing)");
  return [make("span", { class: "before" }, shown), own];
}

/** The leaves, the chosen one first, then by score and likelihood; what was given up last. */
function ranking(tree, go) {
  const low = (value) => value ?? -Infinity;
  const leaves = [...tree.nodes.values()].filter((node) => node.parent && !node.children.length);
  leaves.sort(
    (a, b) =>
      (b === tree.chosen) - (a === tree.chosen) ||
      (a.state === "pruned") - (b.state === "pruned") ||
      low(b.score) - low(a.score) ||
      low(b.logprob) - low(a.logprob),
  );
  const items = leaves
    .slice(0, MOST_LEAVES)
    .map((node) =>
      make(
        "li",
        {},
        make(
          "button",
          { type: "button", class: node === tree.chosen ? "chosen" : node.state, onclick: () => go(node) },
          make(
            "span",
            { class: "facts" },
            make("b", {}, node === tree.chosen ? "chosen" : WORDS[node.state].toLowerCase()),
            node.logprob != null && make("span", {}, fixed(node.logprob)),
            node.score != null && make("span", {}, `score ${score(node.score)}`),
          ),
          make("span", { class: "said" }, ...excerpt(node)),
        ),
      ),
    );
  return [
    make("h2", {}, leaves.length === 1 ? "1 leaf" : `${whole(leaves.length)} leaves`),
    make("p", { class: "about" }, "Choose one, or any node of the tree, to read it with its numbers."),
    make("ol", { class: "leaves" }, ...items),
    leaves.length > MOST_LEAVES &&
      make("p", { class: "about" }, `and ${whole(leaves.length - MOST_LEAVES)} more in the tree`),
  ];
}

function before(step, go) {
  const press = (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    go(step);
  };
  return make(
    "span",
    {
      role: "button",
      tabindex: "0",
      class: "before go",
      title: "Go to this node",
      onclick: () => go(step),
      onkeydown: press,
    },
    step.text,
  );
}

function ownText(node) {
  if (!node.pieces.length) return make("span", { class: "here" }, node.text);
  const spans = node.pieces.flatMap((piece) => (piece.logprob == null ? [piece.text] : tokenSpan(piece.text, [piece])));
  return make("span", { class: "here" }, ...spans);
}

function table(node) {
  const rows = node.pieces.map((piece, i) =>
    make(
      "tr",
      {},
      make("td", {}, String(i + 1)),
      make("td", { class: "mono" }, JSON.stringify(piece.text).slice(1, -1)),
      make("td", {}, piece.logprob == null ? "given" : fixed(piece.logprob, 3)),
      make("td", {}, piece.logprob == null ? "" : percent(Math.exp(piece.logprob))),
    ),
  );
  return make(
    "details",
    { class: "tokens" },
    make("summary", {}, count(node.pieces.length, "token")),
    make(
      "table",
      {},
      make(
        "thead",
        {},
        make("tr", {}, ...["", "token", "log-prob", "chance"].map((name) => make("th", { scope: "col" }, name))),
      ),
      make("tbody", {}, ...rows),
    ),
  );
}
