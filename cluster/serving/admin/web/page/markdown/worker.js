// Parses Markdown in a thread of its own, because some texts take the parser very long.

import { Lexer } from "../vendor/marked.js";

addEventListener("message", ({ data: text }) => {
  try {
    const tokens = new Lexer({ gfm: true }).lex(text);
    postMessage({ tokens: [...tokens], hasDefinitions: Object.keys(tokens.links).length > 0 });
  } catch {
    // The text is nested too deeply for the parser.
    postMessage(null);
  }
});
postMessage("started");
