/** A question and its answers in the transcript, and the tree that they are of. */

import { $, fixed, make, whole } from "./dom.js";
import { TokenText, tokensOf } from "./tokens.js";
import { Tree } from "./tree.js";

export class Turn {
  /** `body` is the request; `show` puts the turn's tree on the canvas, `again` asks once more. */
  constructor(kind, prompt, body, { show, again }) {
    this.kind = kind;
    this.prompt = prompt;
    this.body = body;
    this.tree = new Tree(prompt, body.search?.strategy ?? "");
    this.answers = [];
    this.current = 0;
    this.usage = null;
    this.output = make("div", { class: "output" });
    this.pager = make(
      "span",
      { class: "pager", hidden: true },
      make(
        "button",
        { type: "button", "aria-label": "Answer before", onclick: () => this.turnTo(this.current - 1) },
        "‹",
      ),
      make("span"),
      make(
        "button",
        { type: "button", "aria-label": "Next answer", onclick: () => this.turnTo(this.current + 1) },
        "›",
      ),
    );
    this.facts = make("span", { class: "facts" });
    this.element = make(
      "article",
      { "aria-busy": "true" },
      make("h2", {}, kind === "chat" ? "You" : "Prompt"),
      make("div", { class: "text asked" }, prompt),
      make("h2", {}, kind === "chat" ? "Model" : "Completion", this.pager),
      this.output,
      make(
        "p",
        { class: "foot" },
        this.facts,
        make(
          "span",
          { class: "actions" },
          make("button", { type: "button", class: "quiet", "data-tree": true, onclick: () => show(this) }, "Tree"),
          make("button", { type: "button", class: "quiet", onclick: () => again(this) }, "Again"),
        ),
      ),
    );
    this.progress();
  }

  answer(index) {
    while (this.answers.length <= index) {
      this.answers.push(new TokenText(`Answer ${this.answers.length + 1}`));
      if (this.answers.length === 1) this.output.replaceChildren(this.answers[0].element);
    }
    if (this.answers.length > 1) this.turnTo(this.current);
    return this.answers[index];
  }

  turnTo(index) {
    this.current = Math.min(this.answers.length - 1, Math.max(0, index));
    this.output.replaceChildren(this.answers[this.current].element);
    this.pager.hidden = false;
    const [before, place, next] = this.pager.children;
    place.textContent = `${this.current + 1} of ${this.answers.length}`;
    before.disabled = this.current === 0;
    next.disabled = this.current === this.answers.length - 1;
  }

  /** Take a chunk of the stream; true if the tree has been replaced by the whole one. */
  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const { nodes, tree, chosen } = chunk.treewise ?? {};
    if (nodes) this.tree.update(nodes);
    if (tree) this.tree.replace(tree);
    else if (chosen != null) this.tree.choose(chosen);
    for (const choice of chunk.choices ?? []) {
      const text = choice.text ?? choice.delta?.content ?? "";
      if (this.body.search) this.answer(choice.index).add(text);
      else this.sample(choice, text, tokensOf(choice.logprobs));
    }
    this.progress();
    return Boolean(tree);
  }

  /** Samples are a tree too: each is a branch of the prompt. */
  sample(choice, text, tokens) {
    this.answer(choice.index).add(text, tokens);
    const id = choice.index + 1;
    const node = this.tree.nodes.get(id) ?? this.tree.put(id, this.tree.root);
    node.text += text;
    node.pieces.push(...tokens);
    node.tokens += tokens.length || (text ? 1 : 0);
    for (const token of tokens) if (token.logprob != null) node.logprob = (node.logprob ?? 0) + token.logprob;
    if (choice.finish_reason) [node.state, node.finish] = ["ended", choice.finish_reason];
    node.changed = true;
  }

  progress() {
    const { tree } = this;
    if (!tree.running) return;
    const { nodes, live, pruned, tokens } = tree.counts();
    const parts = tree.strategy ? [`${whole(nodes)} nodes`, `${whole(live)} decoding`, `${whole(pruned)} pruned`] : [];
    this.facts.textContent = [...parts, `${whole(tokens)} tokens`].join(" · ");
    if (!this.answers.length && !this.output.firstChild) {
      this.output.append(
        make("p", { class: "about" }, tree.strategy ? "Searching; the answer comes when it is chosen." : "…"),
      );
    }
  }

  /** It is over: `outcome` is "done", "stopped" or an error. */
  end(outcome) {
    const { tree } = this;
    tree.end();
    for (const answer of this.answers) answer.end();
    // The whole tree knows the tokens of the answer that a search chose.
    const pieces =
      tree.json &&
      tree.chosen
        ?.path()
        .slice(1)
        .flatMap((node) => node.pieces);
    if (pieces) this.answers[0]?.rewrite(pieces);
    if (!tree.chosen && tree.nodes.size === 2) tree.choose(1);
    this.element.removeAttribute("aria-busy");
    if (!this.answers.length) this.output.replaceChildren();
    if (outcome instanceof Error) this.output.append(make("p", { class: "error", role: "alert" }, outcome.message));
    const tokens = this.usage?.completion_tokens ?? tree.counts().tokens;
    const usage = tree.usage;
    const saved = usage?.kv_bytes_read ? usage.kv_bytes_per_sequence / usage.kv_bytes_read : 0;
    this.facts.textContent =
      outcome instanceof Error && !tokens
        ? ""
        : [
            outcome === "stopped" && "stopped",
            tree.strategy || (this.answers.length > 1 ? `${this.answers.length} samples` : "sampled"),
            `${whole(tokens)} tokens`,
            `${fixed(tree.seconds, 1)} s`,
            tree.seconds > 0 && `${whole(tokens / tree.seconds)} tokens/s`,
            saved > 1.05 && `KV reads ${fixed(saved, 1)}× fewer than branch by branch`,
          ]
            .filter(Boolean)
            .join(" · ");
  }

  get text() {
    return this.answers[this.current]?.text ?? "";
  }

  /** The conversation so far, for the next question. */
  get messages() {
    return [...this.body.messages, { role: "assistant", content: this.text }];
  }

  mark(shown) {
    this.element.classList.toggle("shown", shown);
    this.element.querySelector("[data-tree]").setAttribute("aria-pressed", String(shown));
  }
}

export const announce = (text) => {
  $("announce").textContent = text;
};
