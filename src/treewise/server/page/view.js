/**
 * The tree on a canvas: text over a line that leads on to the children.
 *
 * A layout says where every node should be; a frame moves each a part of the way there, and the view likewise while it
 * follows a growing tree. Only nodes in sight have elements that are shown.
 */

import { $, fixed, make, score, whole } from "./dom.js";

const LINE = 17; // pixels of a line of text
const MOST_LINES = 3;
const WIDTH = 226; // of the longest lines
const LEAST_WIDTH = 44;
const BELOW = 17; // room for the figures under the line
const GAP = 34; // between a node and its children
const BETWEEN = 9; // between neighbours
const SMALLEST = 0.015;
const LARGEST = 2.5;
const READABLE = 0.5; // below it lines are drawn, not text
const FOLLOWED = 0.62; // a growing tree is not shown smaller unless someone asks
const SPEED = 90; // milliseconds in which a movement is two thirds done
const MARGIN = { left: 28, right: 28, top: 56, bottom: 44 };

const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class View {
  /** `select` is called with the node that is selected, or null; `tapped` with one that was so by a pointer. */
  constructor(select, tapped) {
    this.select = select;
    this.tapped = tapped;
    this.canvas = $("canvas");
    this.world = $("world");
    this.tree = null;
    this.shown = [];
    this.selected = null;
    this.folds = false;
    this.at = { x: MARGIN.left, y: 200, k: 1 };
    this.goal = { ...this.at };
    this.follows = true;
    this.size = { width: 0, height: 0, top: 0 };
    this.frame = 0;
    this.measure = document.createElement("canvas").getContext("2d");
    this.family = getComputedStyle(document.body).fontFamily;
    this.listen();
    new ResizeObserver(() => this.change()).observe(this.canvas);
  }

  show(tree) {
    if (this.tree === tree) return;
    this.tree = tree;
    this.selected = null;
    this.clear();
    for (const node of tree?.nodes.values() ?? []) node.changed = true;
    this.follows = true;
    this.jump = true;
    $("vacant").hidden = Boolean(tree);
    this.change();
  }

  /** The tree has new nodes in place of the old ones: what was selected stays so. */
  replaced() {
    const focused = document.activeElement?.node;
    const same = (old) => old && [...this.tree.nodes.values()].find((node) => node.place === old.place);
    this.selected = same(this.selected);
    this.layout();
    if (focused) this.rove(same(focused) ?? this.tree.root);
    this.change();
  }

  clear() {
    $("nodes").replaceChildren();
    $("edges").replaceChildren();
    for (const node of this.tree?.nodes.values() ?? []) node.element = node.edge = null;
    this.shown = [];
  }

  /** The tree has changed: lay it out with the next frame. */
  change() {
    this.stale = true;
    this.wake();
  }

  wake() {
    if (!this.frame) this.frame = requestAnimationFrame((now) => this.draw(now));
  }

  /* ---- layout ---- */

  layout() {
    const nodes = this.tree ? this.visible() : [];
    for (const node of nodes) if (node.changed || node.lines === undefined) this.fill(node);
    for (const node of nodes.toReversed()) {
      node.below = node.heirs.reduce((sum, child) => sum + child.room, 0);
      node.room = Math.max(node.above + BELOW + BETWEEN, node.below);
    }
    for (const node of nodes) {
      if (!node.stem) [node.toX, node.top] = [0, 0];
      let top = node.top + (node.room - node.below) / 2;
      for (const child of node.heirs) {
        child.top = top;
        child.toX = node.toX + node.width + GAP;
        top += child.room;
      }
    }
    for (const node of nodes.toReversed()) {
      const [lowest, highest] = [node.top + node.above + BETWEEN / 2, node.top + node.room - BELOW - BETWEEN / 2];
      const middle = node.heirs.length ? (node.heirs[0].toY + node.heirs.at(-1).toY) / 2 : (lowest + highest) / 2;
      node.toY = Math.max(lowest, Math.min(highest, middle));
    }
    const stays = new Set(nodes);
    for (const node of this.shown) if (!stays.has(node)) this.drop(node);
    this.shown = nodes;
    this.size = {
      width: Math.max(0, ...nodes.map((node) => node.toX + node.width)),
      height: nodes[0]?.room ?? 0,
    };
    for (const node of nodes) {
      if (node.x === undefined || node.x === null) {
        // A branch grows out of the end of its parent.
        node.x = node.stem?.x === undefined ? node.toX : node.stem.x + node.stem.width;
        node.y = node.stem?.y ?? node.toY;
      }
      node.moves = true;
    }
  }

  /** The nodes that are drawn, parents first; siblings that were given up may stand as one. */
  visible() {
    const order = [this.tree.root];
    for (const node of this.tree.nodes.values()) node.dead = node.state === "pruned";
    if (this.folds) {
      for (const node of [...this.tree.nodes.values()].reverse()) {
        if (node.children.length && !this.tree.onPath.has(node))
          node.dead ||= node.children.every((child) => child.dead);
      }
    }
    [this.tree.root.stem, this.tree.root.level] = [null, 1];
    for (const node of order) {
      node.heirs = node.fold === true ? [] : node.children.flatMap(spoke);
      const dead = this.folds ? node.heirs.filter((child) => child.dead && !child.unfolded) : [];
      if (dead.length) {
        node.fold ??= { fold: true, children: [], state: "pruned", id: `fold-${node.id}` };
        node.fold.changed = node.fold.dead?.length !== dead.length;
        node.fold.dead = dead;
        node.heirs = [...node.heirs.filter((child) => !dead.includes(child)), node.fold];
      }
      for (const child of node.heirs) [child.stem, child.level] = [node, node.level + 1];
      order.push(...node.heirs);
    }
    return order;
  }

  /** Put what a node says in its element. */
  fill(node) {
    node.changed = false;
    const text = said(node);
    const facts = figuresOf(node);
    const chosen = this.tree.onPath.has(node) && node !== this.tree.root;
    this.measure.font = `${chosen ? 600 : 400} 13px ${this.family}`;
    const width = this.measure.measureText(text).width + 3;
    const numbers = 6.6 * facts.join("   ").length + 4;
    node.lines = Math.min(MOST_LINES, Math.ceil((width * (width > WIDTH ? 1.1 : 1)) / WIDTH) || 1);
    node.above = node.lines * LINE + 3;
    node.width = Math.ceil(Math.max(LEAST_WIDTH, numbers, Math.min(WIDTH, width)));
    if (!node.element) this.draft(node);
    const { element } = node;
    const look = [
      node.state,
      chosen && "chosen",
      node.fold === true && "folded",
      node.state === "live" && !node.children.length && "tip-live",
    ]
      .filter(Boolean)
      .join(" ");
    element.className = `item ${look}`;
    node.edge.setAttribute("class", look);
    element.style.width = `${node.width}px`;
    element.style.height = `${node.above + BELOW}px`;
    element.firstChild.style.height = `${node.above}px`;
    element.firstChild.firstChild.textContent = text;
    element.lastChild.replaceChildren(...facts.map((fact, i) => make(i ? "b" : "span", {}, fact)));
    element.setAttribute("aria-label", spoken(node, chosen));
    element.setAttribute("aria-level", node.level);
    element.setAttribute("aria-selected", String(node === this.selected));
    if (node.children.length) element.setAttribute("aria-expanded", "true");
  }

  draft(node) {
    node.element = make(
      "div",
      { role: "treeitem", tabindex: "-1", "data-id": node.id },
      make("span", { class: "above" }, make("span", { class: "said" })),
      make("span", { class: "facts" }),
    );
    node.element.node = node;
    node.edge = document.createElementNS("http://www.w3.org/2000/svg", "path");
    $("nodes").append(node.element);
    $("edges").append(node.edge);
    if (node === this.tree.root) node.element.tabIndex = 0;
    node.hidden = false;
  }

  drop(node) {
    node.element.remove();
    node.edge.remove();
    node.element = node.edge = null;
    node.lines = undefined;
    node.x = node.y = undefined;
  }

  /* ---- frames ---- */

  draw(now) {
    this.frame = 0;
    const part = calm.matches || this.jump ? 1 : 1 - Math.exp(-Math.min(64, now - (this.last ?? now - 16)) / SPEED);
    this.last = now;
    if (this.stale) {
      this.stale = false;
      this.layout();
      if (this.follows) this.aim();
    }
    let moving = approach(this.at, this.goal, part);
    const { x, y, k } = this.at;
    this.world.style.transform = `translate(${x}px, ${y}px) scale(${k})`;
    this.world.classList.toggle("far", k < READABLE);
    if (k !== this.drawnZoom) this.world.style.setProperty("--zoom", (this.drawnZoom = k)); // lines stay equally thick
    const left = -x / k,
      top = -y / k,
      right = left + this.canvas.clientWidth / k,
      bottom = top + this.canvas.clientHeight / k;
    for (const node of this.shown) {
      if (node.moves) {
        node.moves = part < 1 && (Math.abs(node.toX - node.x) > 0.4 || Math.abs(node.toY - node.y) > 0.4);
        node.x = node.moves ? node.x + part * (node.toX - node.x) : node.toX;
        node.y = node.moves ? node.y + part * (node.toY - node.y) : node.toY;
        node.drawn = false;
        moving ||= node.moves;
      }
    }
    for (const node of this.shown) {
      const from = node.stem;
      const hidden =
        node.x > right || node.x + node.width < left || node.y + BELOW < top || node.y - node.above > bottom;
      if (hidden !== node.hidden) node.element.hidden = node.hidden = hidden;
      if (!node.drawn || (from && !from.still)) {
        node.element.style.transform = `translate(${node.x}px, ${node.y - node.above}px)`;
        node.edge.setAttribute(
          "d",
          from ? edge(from.x + from.width, from.y, node) : `M${node.x} ${node.y}H${node.x + node.width}`,
        );
      }
      node.still = node.drawn;
      node.drawn = true;
    }
    this.jump = false;
    if (moving) this.wake();
    else this.last = undefined;
  }

  /* ---- looking around ---- */

  /** Look at the whole tree, or, if it is too big to be read, at where it grows, and then at the chosen answer. */
  aim() {
    const room = {
      width: this.canvas.clientWidth - MARGIN.left - MARGIN.right,
      height: this.canvas.clientHeight - MARGIN.top - MARGIN.bottom,
    };
    if (room.width <= 0 || !this.size.height) return;
    const all = Math.min(1, room.width / this.size.width, room.height / this.size.height);
    const k = Math.max(SMALLEST, this.whole || all > READABLE ? all : FOLLOWED);
    const { chosen } = this.tree;
    const tips = chosen ? [chosen] : this.shown.filter((node) => node.state === "live" && !node.heirs.length);
    const middle = tips.length ? tips.reduce((sum, node) => sum + node.toY, 0) / tips.length : this.size.height / 2;
    const furthest = tips.length ? Math.max(...tips.map((node) => node.toX + node.width)) : this.size.width;
    const width = this.size.width * k,
      height = this.size.height * k;
    this.goal = {
      k,
      x:
        width <= room.width
          ? MARGIN.left + Math.min(60, (room.width - width) / 2)
          : Math.min(MARGIN.left, MARGIN.left + room.width - furthest * k),
      y:
        height <= room.height
          ? MARGIN.top + (room.height - height) / 2
          : Math.min(
              MARGIN.top,
              Math.max(MARGIN.top + room.height - height, MARGIN.top + room.height / 2 - middle * k),
            ),
    };
  }

  fit() {
    this.follows = this.whole = true;
    this.change();
  }

  free() {
    this.follows = this.whole = false;
  }

  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2, smooth = true) {
    this.free();
    const k = Math.min(LARGEST, Math.max(SMALLEST, this.goal.k * factor));
    const { goal } = this;
    this.goal = { k, x: x - ((x - goal.x) * k) / goal.k, y: y - ((y - goal.y) * k) / goal.k };
    if (!smooth) this.at = { ...this.goal };
    this.wake();
  }

  pan(x, y) {
    this.free();
    this.goal = { ...this.goal, x: this.goal.x + x, y: this.goal.y + y };
    this.at = { ...this.goal };
    this.wake();
  }

  /** Move just so far that a node is in sight; to the middle if it is far away. */
  bringIn(node) {
    const { k, x, y } = this.goal;
    const left = node.toX * k + x,
      right = left + node.width * k,
      bottom = node.toY * k + y;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (
      left >= 8 &&
      right <= width - 8 &&
      bottom >= MARGIN.top + 20 &&
      bottom <= height - MARGIN.bottom &&
      k >= READABLE
    )
      return;
    this.free();
    const scale = Math.max(k, 0.85);
    this.goal = { k: scale, x: width / 2 - (node.toX + node.width / 2) * scale, y: height / 2 - node.toY * scale };
    this.wake();
  }

  /** Select a node, or none. */
  choose(node, focus = false) {
    if (node?.fold === true) {
      for (const child of node.dead) child.unfolded = true;
      this.change();
      return;
    }
    const before = this.selected;
    this.selected = node;
    before?.element?.setAttribute("aria-selected", "false");
    node?.element?.setAttribute("aria-selected", "true");
    if (focus) this.rove(node);
    this.select(node);
  }

  rove(node) {
    for (const item of $("nodes").querySelectorAll('[tabindex="0"]')) item.tabIndex = -1;
    node.element.tabIndex = 0;
    node.element.hidden = node.hidden = false;
    node.element.focus({ preventScroll: true });
    this.bringIn(node);
  }

  /** Show a node, wherever it is. */
  reveal(node) {
    for (const step of node.path()) step.unfolded = true;
    this.layout();
    this.choose(node, true);
  }

  setFolds(folds) {
    this.folds = folds;
    for (const node of this.tree?.nodes.values() ?? []) node.unfolded = false;
    this.change();
  }

  listen() {
    const pointers = new Map();
    let moved = false;
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      pointers.set(event.pointerId, event);
      moved = false;
    });
    addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return;
      const [x, y] = [event.clientX - before.clientX, event.clientY - before.clientY];
      if (!moved && Math.hypot(x, y) < 4) return;
      if (!moved) canvas.setPointerCapture(event.pointerId);
      moved = true;
      canvas.classList.add("dragging");
      const other = [...pointers.values()].find((pointer) => pointer.pointerId !== event.pointerId);
      if (other) {
        const box = canvas.getBoundingClientRect();
        const apart = (pointer) => Math.hypot(pointer.clientX - other.clientX, pointer.clientY - other.clientY);
        this.zoom(
          apart(event) / Math.max(1, apart(before)),
          (event.clientX + other.clientX) / 2 - box.left,
          (event.clientY + other.clientY) / 2 - box.top,
          false,
        );
      } else this.pan(x, y);
      pointers.set(event.pointerId, event);
    });
    for (const kind of ["pointerup", "pointercancel"]) {
      addEventListener(kind, (event) => {
        pointers.delete(event.pointerId);
        if (!pointers.size) canvas.classList.remove("dragging");
      });
    }
    canvas.addEventListener("click", (event) => {
      const item = event.target.closest(".item");
      if (item && !moved) {
        this.choose(item.node);
        if (item.isConnected) {
          this.rove(item.node);
          this.tapped(item.node);
        }
      }
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const box = canvas.getBoundingClientRect();
        if (event.ctrlKey || event.metaKey)
          this.zoom(Math.exp(-event.deltaY * 0.01), event.clientX - box.left, event.clientY - box.top, false);
        else this.pan(event.shiftKey ? -event.deltaY : -event.deltaX, event.shiftKey ? 0 : -event.deltaY);
      },
      { passive: false },
    );
    // NOTE: the browser would scroll the canvas to show a focused node; the view is ours to move.
    canvas.addEventListener("scroll", () => {
      canvas.scrollTop = canvas.scrollLeft = 0;
    });
    $("nodes").addEventListener("keydown", (event) => this.key(event));
    canvas.closest(".stage").addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const action = {
        "+": () => this.zoom(1.25),
        "=": () => this.zoom(1.25),
        "-": () => this.zoom(0.8),
        0: () => this.fit(),
        b: () => $("chosen").click(),
        p: () => $("fold").click(),
      }[event.key];
      if (action) {
        event.preventDefault();
        action();
      }
    });
  }

  key(event) {
    const node = event.target.node;
    if (!node || event.ctrlKey || event.metaKey || event.altKey) return;
    const { onPath } = this.tree;
    const beside = (step) => {
      const level = this.shown.filter((other) => other.level === node.level).sort((a, b) => a.toY - b.toY);
      return level[level.indexOf(node) + step];
    };
    const next = {
      ArrowLeft: () => node.stem,
      ArrowRight: () => node.heirs.find((child) => onPath.has(child)) ?? node.heirs[0],
      ArrowUp: () => beside(-1),
      ArrowDown: () => beside(1),
      Home: () => this.tree.root,
      End: () => this.shown.at(-1),
    }[event.key];
    if (next) {
      const target = next();
      if (target) this.rove(target);
    } else if (event.key === "Enter" || event.key === " ") this.choose(node, true);
    else return;
    event.preventDefault();
  }
}

/** Move `at` a part of the way to `goal`; true while there is some way left. */
function approach(at, goal, part) {
  const near =
    part === 1 ||
    (Math.abs(goal.x - at.x) < 0.3 && Math.abs(goal.y - at.y) < 0.3 && Math.abs(goal.k / at.k - 1) < 0.001);
  for (const name of ["x", "y", "k"]) at[name] = near ? goal[name] : at[name] + part * (goal[name] - at[name]);
  return !near;
}

/** The way from the end of the parent's line to the child's own line, and along it. */
function edge(x, y, node) {
  const middle = (x + node.x) / 2;
  return `M${x} ${y}C${middle} ${y} ${middle} ${node.y} ${node.x} ${node.y}H${node.x + node.width}`;
}

/** A node that decoded nothing before it branched is only a place: its children stand for it. */
function spoke(node) {
  return node.tokens || node.text || !node.children.length ? [node] : node.children.flatMap(spoke);
}

/** What stands over the line: the end of a text that grows, the beginning and the end of one that does not. */
function said(node) {
  if (node.fold === true) return `+${whole(node.dead.length)} pruned`;
  const most = 96;
  const text = node.text
    .slice(node.state === "live" ? -4 * most : 0)
    .trim()
    .replace(/\s*\n\s*/g, " ⏎ ");
  if (!text) return { live: "…", ended: "(end)", pruned: "(end)" }[node.state] ?? "";
  if (text.length <= most) return text;
  const tail = (length) => text.slice(-length).replace(/^\S*\s+(?=\S)/, "");
  if (node.state === "live") return `… ${tail(most - 2)}`;
  return `${text.slice(0, most - 33).replace(/\s+\S*$/, "")} … ${tail(30)}`;
}

/** What stands under it. */
function figuresOf(node) {
  if (node.fold === true) return [];
  if (node.state === "prompt") return [node.tokens ? `prompt, ${whole(node.tokens)} tokens` : "prompt"];
  const facts = [node.logprob == null ? "" : fixed(node.logprob)];
  if (node.score != null) facts.push(score(node.score));
  if (node.visits != null) facts.push(`${whole(node.visits)}×`);
  return facts;
}

function spoken(node, chosen) {
  if (node.fold === true) return `${whole(node.dead.length)} pruned siblings; Enter shows them`;
  const state = chosen
    ? "on the chosen path"
    : { live: "decoding", ended: "ended", pruned: "pruned", prompt: "prompt" }[node.state];
  const facts = [
    node.logprob != null && node.state !== "prompt" && `log-probability ${fixed(node.logprob)}`,
    node.score != null && `score ${score(node.score)}`,
  ];
  return [said(node), state, ...facts].filter(Boolean).join(", ");
}
