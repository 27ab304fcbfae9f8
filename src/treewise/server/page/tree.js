/** The tree of one request as the server tells of it: nodes by id, parents before children. */

export class Node {
  constructor(id, parent) {
    this.id = id;
    this.parent = parent;
    this.children = [];
    this.text = "";
    this.tokens = 0;
    this.logprob = null; // over the path, natural logarithm
    this.score = null;
    this.state = "live";
    this.finish = null;
    this.visits = null;
    this.pieces = []; // [{text, logprob, top}]: its tokens, where they are known
    this.changed = true; // for whoever draws it
  }

  path() {
    const path = [];
    for (let node = this; node; node = node.parent) path.push(node);
    return path.reverse();
  }

  /** The text from the prompt to here. */
  get answer() {
    return this.path()
      .slice(1)
      .map((node) => node.text)
      .join("");
  }

  /** Where it stands: which child of which child. */
  get place() {
    return this.path()
      .slice(1)
      .map((node) => node.parent.children.indexOf(node) + 1)
      .join(".");
  }
}

export class Tree {
  /** `strategy` is a name, "" for plain sampling. */
  constructor(prompt, strategy) {
    this.strategy = strategy;
    this.nodes = new Map();
    this.root = this.put(0, null);
    this.root.state = "prompt";
    this.root.text = prompt;
    this.chosen = null;
    this.onPath = new Set(); // the nodes down to the chosen one
    this.running = true;
    this.json = null; // the whole tree as the server drew it
    this.usage = null;
    this.started = performance.now();
    this.seconds = 0;
  }

  put(id, parent) {
    const node = new Node(id, parent);
    if (parent) {
      parent.children.push(node);
      parent.changed = true;
    }
    this.nodes.set(id, node);
    return node;
  }

  /** Take what is new: `text` is what a node has gained, the other fields are whole. */
  update(changes) {
    for (const { id, parent, text, ...facts } of changes) {
      const node = this.nodes.get(id) ?? this.put(id, this.nodes.get(parent) ?? this.root);
      if (node !== this.root) {
        node.text += text ?? "";
        node.state = facts.state;
      }
      node.tokens = facts.tokens;
      node.logprob = facts.logprob;
      node.score = facts.score;
      node.changed = true;
    }
  }

  choose(id) {
    this.chosen = this.nodes.get(id) ?? null;
    this.onPath = new Set(this.chosen?.path() ?? []);
    for (const node of this.nodes.values()) node.changed = true;
  }

  end() {
    this.running = false;
    this.seconds = (performance.now() - this.started) / 1000;
    for (const node of this.nodes.values()) {
      if (node.state === "live") node.state = "ended";
      node.changed = true;
    }
  }

  /** Take the whole tree: it has every token with its log-probability. Nodes keep their places on the canvas. */
  replace(json) {
    const before = new Map([...this.nodes.values()].map((node) => [node.place, node]));
    const prompt = this.root.text;
    this.json = json;
    this.usage = json.usage;
    this.nodes = new Map();
    for (const drawn of json.nodes) {
      const node = this.put(drawn.id, this.nodes.get(drawn.parent) ?? null);
      node.text = drawn.parent == null ? prompt : drawn.text;
      node.tokens = drawn.token_ids.length;
      node.logprob = Number(drawn.logprob);
      node.score = drawn.score == null ? null : Number(drawn.score);
      node.state = { prompt: "prompt", pruned: "pruned" }[drawn.state] ?? "ended";
      node.finish = drawn.finish_reason;
      node.visits = drawn.visits;
      node.pieces = drawn.token_texts.map((text, i) => ({
        text,
        logprob: drawn.logprobs[i] == null ? null : Number(drawn.logprobs[i]),
        top: [],
      }));
      const old = before.get(node.place);
      if (old) [node.x, node.y] = [old.x, old.y];
    }
    this.root = this.nodes.values().next().value;
    this.choose(json.best);
  }

  counts() {
    const counts = { nodes: this.nodes.size - 1, live: 0, pruned: 0, tokens: 0 };
    for (const node of this.nodes.values()) {
      if (node === this.root) continue;
      counts.tokens += node.tokens;
      counts.pruned += node.state === "pruned";
      counts.live += node.state === "live" && !node.children.length;
    }
    return counts;
  }
}
