/** A form made of a strategy's parameters, and what it says: only what differs from the defaults. */

import { make } from "./dom.js";

/** What plain sampling has, in the form of GET /strategies. */
export const SAMPLING = {
  name: "",
  help: "Sample answers, without a search.",
  parameters: [
    {
      name: "n",
      type: "integer",
      default: 1,
      help: "Answers, drawn side by side; they share the prompt's keys and values.",
    },
    {
      name: "temperature",
      type: "number",
      default: 1,
      help: "Divides the logits. 0 always takes the likeliest token.",
    },
    {
      name: "top_p",
      type: "number",
      default: 1,
      help: "Keeps the likeliest tokens that together reach this probability.",
    },
    { name: "top_k", type: "integer", default: 0, help: "Keeps so many of the likeliest tokens; 0 keeps all." },
    {
      name: "min_p",
      type: "number",
      default: 0,
      help: "Keeps tokens at least so many times as likely as the likeliest.",
    },
    { name: "max_tokens", type: "integer", default: null, initial: 256, help: "The most tokens of an answer." },
    { name: "presence_penalty", type: "number", default: 0, help: "Taken off the logit of every token that has come." },
    { name: "frequency_penalty", type: "number", default: 0, help: "Taken off it for each time that it has come." },
    { name: "repetition_penalty", type: "number", default: 1, help: "Makes tokens of prompt and answer less likely." },
    { name: "stop", type: "string", default: null, help: "A text that ends the answer." },
    {
      name: "logprobs",
      type: "integer",
      default: null,
      initial: 5,
      help: "Likely tokens that are shown at each place.",
    },
  ],
};

/** What every request has, searches too. */
const COMMON = [{ name: "seed", type: "integer", default: null, help: "The same seed gives the same tree." }];

export class Form {
  constructor(fields, help) {
    this.fields = fields;
    this.help = help;
    this.given = {};
    fields.addEventListener("focusin", (event) => this.explain(event.target));
    fields.addEventListener("input", (event) => this.take(event.target));
  }

  /** Show the parameters of `strategy`; what has been entered under the same name stays. */
  show(strategy) {
    this.parameters = [...strategy.parameters, ...COMMON];
    this.fields.replaceChildren(...this.parameters.map((parameter) => this.field(parameter)));
    this.help.textContent = "";
  }

  field(parameter) {
    const { name, help } = parameter;
    const id = `parameter-${name}`;
    const entry = control(parameter, this.text(parameter));
    entry.id = id;
    entry.name = name;
    return make("div", { title: help }, make("label", { for: id }, name), entry);
  }

  /** What stands in a field: what has been entered, or what the page proposes. */
  text({ name, initial }) {
    return this.given[name] ?? String(initial ?? "");
  }

  explain(entry) {
    const parameter = this.parameters.find((item) => item.name === entry.name);
    const form = kinds(parameter).includes("object") ? ' As JSON, such as {"regex": "[0-9]+"}.' : "";
    this.help.textContent = `${parameter.name}: ${parameter.help}${form}`.replaceAll("`", "");
  }

  take(entry) {
    this.given[entry.name] = entry.value.trim() === "" ? "" : entry.value;
    this.fields.dispatchEvent(new CustomEvent("changed"));
  }

  set(values) {
    for (const [name, value] of Object.entries(values)) {
      this.given[name] = String(value);
      const entry = this.fields.querySelector(`[name="${name}"]`);
      if (entry) entry.value = String(value);
    }
    this.fields.dispatchEvent(new CustomEvent("changed"));
  }

  /** Parameters that are not left to their defaults, as JSON values. */
  values() {
    const values = {};
    for (const parameter of this.parameters) {
      const text = this.text(parameter);
      if (text !== "") values[parameter.name] = read(parameter, text);
    }
    return values;
  }
}

/** What the user did not type, the server says: the default stands in the empty field. */
function control(parameter, text) {
  const preset = parameter.default;
  const word =
    preset == null || preset === "" || String(preset) === ""
      ? "none"
      : typeof preset === "string"
        ? preset.replaceAll("\n", "⏎")
        : JSON.stringify(preset);
  const choices = parameter.choices ?? (isFlag(parameter) ? ["true", "false"] : null);
  if (choices) {
    const options = choices.map(String).filter((choice) => choice !== String(preset));
    const select = make(
      "select",
      {},
      make("option", { value: "" }, word),
      ...options.map((choice) => make("option", {}, choice)),
    );
    select.value = text;
    if (select.selectedIndex < 0) select.selectedIndex = 0;
    return select;
  }
  const numeric = isNumber(parameter);
  const entry = make("input", {
    type: "text",
    inputmode: numeric ? "decimal" : "text",
    placeholder: word,
    autocomplete: "off",
    spellcheck: "false",
  });
  entry.value = text;
  return entry;
}

const kinds = (parameter) => parameter.type.split("|").map((kind) => kind.trim());
const isNumber = (parameter) => kinds(parameter).some((kind) => kind === "integer" || kind === "number");
const isFlag = (parameter) => kinds(parameter).includes("boolean");

/** What is no text is written as in JSON; a text may have \n in it. What fits nothing the server refuses. */
function read(parameter, text) {
  const types = kinds(parameter);
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return text.replaceAll("\\n", "\n");
  }
  const type = Array.isArray(value) ? "array" : typeof value;
  const fits = types.includes(type) || (type === "number" && types.includes("integer"));
  return types.includes("string") && !fits ? text.replaceAll("\\n", "\n") : value;
}
