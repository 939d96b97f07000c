// Parses Markdown in a thread of its own, because some texts take the parser very long.

import { Lexer } from "../vendor/marked.js";
import { MAX_ITEMS, isLargeTable } from "./budget.js";

// Formulas, which Markdown would change. A block that has no end yet reaches to the next blank line.
const BLOCK =
  /^ {0,3}(?:\$\$((?:(?!\$\$|\n[ \t]*\n)[^])+)(?:\$\$[ \t]*(?:\n|$)|$)|\\\[((?:(?!\\\]|\n[ \t]*\n)[^])+)(?:\\\][ \t]*(?:\n|$)|$))/;
const INLINE =
  /^(?:\$\$([^$]+)\$\$|\\\[((?:(?!\\\])[^])+)\\\]|\\\(((?:(?!\\\))[^])+)\\\)|\$(?![\s$])((?:\\.|[^\\$\n])+)(?<!\s)\$(?!\w))/;
const extensions = {
  block: [(source) => mathOf(BLOCK, source, true)],
  startBlock: [(source) => source.search(/\n {0,3}(?:\$\$|\\\[)/)],
  inline: [(source) => mathOf(INLINE, source, false)],
  startInline: [(source) => source.search(/\$|\\[([]/)],
};
const hooks = {
  // Emphasis does not end in a formula.
  emStrongMask: (text) => text.replace(/\$[^$\n]+\$|\\\([^\n]+?\\\)/g, (math) => "a".repeat(math.length)),
};

// Items that are shown as text, so many in one piece.
const PLAIN_ITEMS = 256;

addEventListener("message", ({ data: text }) => {
  try {
    const tokens = new Lexer({ gfm: true, extensions, hooks }).lex(text);
    postMessage({ tokens: tokens.map(compact), hasDefinitions: Object.keys(tokens.links).length > 0 });
  } catch {
    // The text is nested too deeply for the parser.
    postMessage(null);
  }
});

/** Return the token of a formula at the start of a text, if there is one. */
function mathOf(pattern, source, isBlock) {
  const [raw, dollars, brackets, parentheses, dollar] = pattern.exec(source) ?? [];
  if (raw === undefined) return undefined;
  const text = dollars ?? brackets ?? parentheses ?? dollar;
  const isWhole = /(?:\$|\\[\])])\s*$/.test(raw.slice(2));
  return { type: "math", raw, text, isWhole, isBlock: isBlock || (dollars ?? brackets) !== undefined };
}

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
