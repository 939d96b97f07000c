// Whether the server can be used, in the header.

import { byId } from "./dom.js";

/** Show a state: `ready`, `down`, or `locked` if a key is needed. */
export function showStatus(state, text) {
  const node = byId("status");
  node.dataset.state = state;
  node.title = state === "locked" ? "Enter a key" : "";
  // Screen readers would repeat it.
  if (node.textContent !== text) node.textContent = text;
}
