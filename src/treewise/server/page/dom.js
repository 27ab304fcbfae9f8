/** Elements, numbers and words. What a model says enters the page only as text and attributes that are made here. */

export const $ = (id) => document.getElementById(id);

/** Make an element; an attribute that is false, null or undefined is left out, children that are so too. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  return fill(element, ...children);
}

/** Give an element new children in place of those that it has. */
export function fill(element, ...children) {
  element.replaceChildren(...children.filter((child) => child != null && child !== false && child !== true));
  return element;
}

/** A number with a true minus sign, so that columns line up. */
export const fixed = (value, digits = 2) => Number(value).toFixed(digits).replace("-", "−");

export const whole = (value) => Math.round(value).toLocaleString("en");

export const count = (value, noun) => `${whole(value)} ${noun}${value === 1 ? "" : "s"}`;

export const percent = (share) =>
  (share >= 0.0995 || share < 0.0005 ? (100 * share).toFixed(0) : (100 * share).toFixed(1)) + " %";

/** A score may be a log-probability or a share: three significant digits say enough of either. */
export const score = (value) => String(Number(Number(value).toPrecision(3))).replace("-", "−");

/** How sure the model was, as a shade: see `.token` in the style sheet. */
export function shade(element, logprob) {
  element.style.setProperty("--doubt", (0.5 * (1 - Math.exp(logprob))).toFixed(3));
  return element;
}
