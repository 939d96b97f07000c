// A button that copies a text.

import { makeButton } from "./dom.js";

const SHOWN_MS = 1500;

/** Return a button that copies what a function returns. */
export function copyButton(text) {
  const button = makeButton("Copy", "quiet copy", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      // Browsers allow it on pages of this machine and over TLS only.
      button.textContent = "Not allowed";
    }
    setTimeout(() => {
      button.textContent = "Copy";
    }, SHOWN_MS);
  });
  return button;
}
