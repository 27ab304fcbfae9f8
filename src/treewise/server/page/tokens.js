/** Text with the log-probabilities of its tokens: shades, a tip under the pointer, and a cursor for the keyboard. */

import { $, fill, fixed, make, percent, shade } from "./dom.js";

/** The tokens of a chunk, whichever of the two forms of the API it has: [{text, logprob, top: [[text, logprob]]}]. */
export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((token) => ({
      text: token.token,
      logprob: token.logprob,
      top: (token.top_logprobs ?? []).map((other) => [other.token, other.logprob]),
    }));
  }
  return (logprobs.tokens ?? []).map((text, i) => ({
    text,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}),
  }));
}

/** A text that grows, in an element of its own. */
export class TokenText {
  constructor(label) {
    this.element = make("div", { class: "text", role: "group", "aria-label": label });
    this.text = "";
    this.rest = ""; // text that no token has been found for yet
    this.waiting = []; // tokens that no text has been found for yet
    this.element.addEventListener("keydown", (event) => this.move(event));
  }

  /** Add a piece of text and the tokens that came with it. A character may be cut between tokens, or between chunks. */
  add(text, tokens = []) {
    this.text += text;
    this.rest += text;
    this.waiting.push(...tokens);
    if (!this.waiting.length) {
      this.write(this.rest);
      this.rest = "";
    }
    while (this.waiting.length && this.rest) {
      const parts = this.nextTokens();
      if (!parts) return;
      const [number, length] = parts;
      this.write(this.rest.slice(0, length), this.waiting.splice(0, number));
      this.rest = this.rest.slice(length);
    }
  }

  /** Write the text anew, with what is known of its tokens now. */
  rewrite(tokens) {
    const { text } = this;
    this.element.replaceChildren();
    this.text = this.rest = "";
    this.waiting = [];
    this.add(text, tokens);
    this.end();
  }

  /** How many waiting tokens make how much of the text: one, or those up to a token that is found again. */
  nextTokens() {
    const [first] = this.waiting;
    if (first.text && this.rest.startsWith(first.text)) return [1, first.text.length];
    for (let i = 1; i < this.waiting.length; i++) {
      const { text } = this.waiting[i];
      const at = text && !text.includes("\ufffd") ? this.rest.slice(0, text.length + 8 * i).indexOf(text) : -1;
      if (at >= 0) return [i, at];
    }
    return null;
  }

  end() {
    if (this.rest) this.write(this.rest, this.waiting);
    this.rest = "";
    this.waiting = [];
  }

  write(text, tokens = []) {
    if (!text) return;
    const known = tokens.filter((token) => token.logprob != null);
    if (!known.length) {
      this.element.append(text);
      return;
    }
    this.element.append(...tokenSpan(text, known));
    if (!this.element.hasAttribute("tabindex")) {
      this.element.tabIndex = 0;
      this.element.setAttribute("aria-describedby", "token-keys");
    }
  }

  /** Left and right move over the tokens; the tip tells of the one at the cursor. */
  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    const spans = [...this.element.querySelectorAll(".token")];
    const at = spans.findIndex((span) => span.classList.contains("cursor"));
    const next = spans[Math.min(spans.length - 1, Math.max(0, at + step))];
    spans[at]?.classList.remove("cursor");
    if (next) {
      next.classList.add("cursor");
      next.scrollIntoView({ block: "nearest" });
      showTip(next);
      $("announce").textContent = $("tip").innerText.replaceAll("\n", ", ");
    }
    event.preventDefault();
  }
}

const told = new WeakMap(); // what the tip says of a span

/** Nodes for a token: the space before a word is left plain, so that words stand apart. */
export function tokenSpan(text, tokens) {
  const logprob = tokens.reduce((sum, token) => sum + token.logprob, 0);
  const space = text.trim() ? text.length - text.trimStart().length : 0;
  const kind = "token" + (logprob < Math.log(0.5) ? " doubtful" : "");
  const span = shade(make("span", { class: kind }, text.slice(space)), logprob);
  told.set(span, { text, logprob, top: tokens.length === 1 ? (tokens[0].top ?? []) : [] });
  return [text.slice(0, space), span];
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(nothing)";

function showTip(span) {
  const { text, logprob, top } = told.get(span);
  const tip = $("tip");
  const others = top.length ? top : [[text, logprob]];
  fill(
    tip,
    make("p", {}, make("b", {}, visible(text)), ` ${percent(Math.exp(logprob))}, log-prob ${fixed(logprob, 3)}`),
    top.length > 0 &&
      make(
        "ol",
        {},
        ...others.map(([other, value]) => {
          const bar = make("i");
          bar.style.width = `${Math.max(1, 72 * Math.exp(value))}px`;
          return make(
            "li",
            { class: other === text && "taken" },
            make("span", {}, visible(other)),
            bar,
            make("span", {}, percent(Math.exp(value))),
          );
        }),
      ),
  );
  tip.hidden = false;
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, box.left))}px`;
  tip.style.top = `${box.bottom + height + 10 < innerHeight ? box.bottom + 4 : box.top - height - 4}px`;
}

const hideTip = () => {
  $("tip").hidden = true;
};

addEventListener("pointerover", (event) => {
  const span = event.target.closest?.(".token");
  if (span && told.has(span)) showTip(span);
  else hideTip();
});
addEventListener("focusout", (event) => {
  event.target.querySelector?.(".cursor")?.classList.remove("cursor");
  hideTip();
});
addEventListener("scroll", hideTip, true);
addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
