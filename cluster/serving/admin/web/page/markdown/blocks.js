// Makes nodes of the blocks of a Markdown text.

import { make } from "../dom.js";
import { MAX_CELLS, MAX_DEPTH } from "./budget.js";
import { CodeBlock } from "./code_block.js";
import { inlineNodes } from "./inline.js";

/** Return the nodes of block tokens. */
export function blockNodes(tokens, budget, depth = 0) {
  const nodes = [];
  for (const [index, token] of tokens.entries()) {
    if (depth > MAX_DEPTH || !budget.take()) {
      nodes.push(plainBlock(tokens.slice(index).map((one) => one.raw).join("")));
      break;
    }
    const node = blockNode(token, budget, depth);
    if (node !== null) nodes.push(node);
  }
  return nodes;
}

/** Return text that keeps its lines. */
export function plainBlock(text) {
  return make("p", { className: "plain", textContent: text });
}

function blockNode(token, budget, depth) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      // The page itself has headings of the first two levels.
      return make(
        `h${Math.min(6, token.depth + 2)}`,
        {},
        ...inlineNodes(token.tokens, budget, depth),
      );
    case "paragraph":
      return make("p", {}, ...inlineNodes(token.tokens, budget, depth));
    case "code":
      return new CodeBlock(token.text, languageOf(token)).node;
    case "blockquote":
      return make("blockquote", {}, ...blockNodes(token.tokens, budget, depth + 1));
    case "list":
      return list(token, budget, depth);
    case "table":
      return table(token, budget);
    case "hr":
      return make("hr");
    case "text":
    case "checkbox":
      return make("span", {}, ...inlineNodes([token], budget, depth));
    default:
      return plainBlock(token.raw.trimEnd());
  }
}

/** Return the language of a code block, such as "python". */
export function languageOf(token) {
  return (token.lang ?? "").trim().split(/\s/)[0].slice(0, 30);
}

function list(token, budget, depth) {
  const items = [];
  for (const [index, item] of token.items.entries()) {
    if (!budget.take()) {
      items.push(make("li", {}, plainBlock(token.items.slice(index).map((one) => one.raw).join(""))));
      break;
    }
    const className = item.task ? "task" : "";
    items.push(make("li", { className }, ...blockNodes(item.tokens, budget, depth + 1)));
  }
  const node = make(token.ordered ? "ol" : "ul", {}, ...items);
  if (token.ordered && Number.isSafeInteger(token.start)) node.start = token.start;
  return node;
}

function table(token, budget) {
  if ((token.rows.length + 1) * token.header.length > MAX_CELLS) return plainBlock(token.raw);
  const row = (cells, tag) =>
    make(
      "tr",
      {},
      ...cells.map((cell) => {
        const node = make(tag, {}, ...inlineNodes(cell.tokens, budget));
        if (cell.align) node.style.textAlign = cell.align;
        return node;
      }),
    );
  return make(
    "div",
    { className: "table", tabIndex: 0 },
    make(
      "table",
      {},
      make("thead", {}, row(token.header, "th")),
      make("tbody", {}, ...token.rows.map((cells) => row(cells, "td"))),
    ),
  );
}
