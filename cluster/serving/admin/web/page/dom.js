// Finds and makes elements. Text is always inserted as text, never as HTML.

/** Return the element with an id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Return a new element with properties and children. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Return a button that does something else than to submit a form. */
export function makeButton(text, className, onClick) {
  const button = make("button", { type: "button", className, textContent: text });
  button.addEventListener("click", onClick);
  return button;
}
