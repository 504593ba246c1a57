// SPDX-License-Identifier: Apache-2.0
// The few things that all parts of the page do to the document. Text is only ever set as text.

export const byId = (id) => document.getElementById(id);

// make("td", {class: "x", role: "cell"}, "text", node, …)
export function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Only what differs is written: screen readers speak of changes, and selections stay.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function mark(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// A bar for `part` of `whole`, beside a number that says the same.
export function bar() {
  return make("span", { class: "bar", "aria-hidden": "true" }, make("span"));
}

export function fill(node, part, whole) {
  const share = whole > 0 ? Math.max(0, Math.min(1, part / whole)) : 0;
  node.firstElementChild.style.width = `${(100 * share).toFixed(1)}%`;
}

// Puts `nodes` into `parent` behind `before`, in order, moving as few as possible.
export function arrange(parent, nodes, before) {
  const wanted = new Set(nodes);
  let next = before === null ? parent.firstElementChild : before.nextElementSibling;
  for (const node of nodes) {
    while (next !== null && !wanted.has(next)) {
      const gone = next;
      next = next.nextElementSibling;
      gone.remove();
    }
    if (next === node) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  while (next !== null) {
    const gone = next;
    next = next.nextElementSibling;
    gone.remove();
  }
}
