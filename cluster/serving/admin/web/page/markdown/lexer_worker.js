// Parses Markdown in a thread of its own, because some texts take the parser very long.

import { Lexer } from "../vendor/marked.js";
import { MAX_ITEMS, isLargeTable } from "./budget.js";

// Items that are shown as text, so many in one piece.
const PLAIN_ITEMS = 256;

addEventListener("message", ({ data: text }) => {
  try {
    const tokens = new Lexer({ gfm: true }).lex(text);
    postMessage({ tokens: tokens.map(compact), hasDefinitions: Object.keys(tokens.links).length > 0 });
  } catch {
    // The text is nested too deeply for the parser.
    postMessage(null);
  }
});

/** Return a token without what is shown as text, which takes the page long to receive. */
function compact(token) {
  if (token.type === "table" && isLargeTable(token)) return { type: "plain", raw: token.raw };
  if (token.type !== "list") return token;
  const plain = [];
  for (let from = MAX_ITEMS; from < token.items.length; from += PLAIN_ITEMS) {
    const items = token.items.slice(from, from + PLAIN_ITEMS);
    plain.push(items.map((item) => item.raw).join(""));
  }
  return { ...token, items: token.items.slice(0, MAX_ITEMS), plain };
}

postMessage("started");
