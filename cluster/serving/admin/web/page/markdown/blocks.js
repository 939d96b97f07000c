// Makes nodes of the blocks of a Markdown text.

import { make } from "../dom.js";
import { MAX_DEPTH, isLargeTable } from "./budget.js";
import { CodeBlock } from "./code_block.js";
import { inlineNodes } from "./inline.js";
import { mathNode } from "./math.js";

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
      return new CodeBlock(token).node;
    case "blockquote":
      return make("blockquote", {}, ...blockNodes(token.tokens, budget, depth + 1));
    case "list":
      return list(token, budget, depth);
    case "table":
      return table(token, budget);
    case "math":
      return mathNode(token, budget);
    case "hr":
      return make("hr");
    case "text":
    case "checkbox":
      return make("span", {}, ...inlineNodes([token], budget, depth));
    default:
      return plainBlock(token.raw.trimEnd());
  }
}

/** Return the node of a list, without its items. */
export function listNode(token) {
  const node = make(token.ordered ? "ol" : "ul");
  if (token.ordered && Number.isSafeInteger(token.start)) node.start = token.start;
  return node;
}

/** Return the node of an item whose blocks have a depth. */
export function listItem(item, budget, depth) {
  const className = item.task ? "task" : "";
  return make("li", { className }, ...blockNodes(item.tokens, budget, depth));
}

function list(token, budget, depth) {
  const items = [];
  for (const [index, item] of token.items.entries()) {
    if (!budget.take()) {
      items.push(make("li", {}, plainBlock(token.items.slice(index).map((one) => one.raw).join(""))));
      break;
    }
    items.push(listItem(item, budget, depth + 1));
  }
  const node = listNode(token);
  node.append(...items);
  return node;
}

/** Return a row of a table; `tag` is that of its cells. */
export function tableRow(cells, tag, budget) {
  const nodes = cells.map((cell) => {
    const node = make(tag, {}, ...inlineNodes(cell.tokens, budget));
    if (cell.align) node.style.textAlign = cell.align;
    return node;
  });
  return make("tr", {}, ...nodes);
}

/** Return the node of a table with these rows in its body. */
export function tableNode(token, body, budget) {
  const head = make("thead", {}, tableRow(token.header, "th", budget));
  return make("div", { className: "table", tabIndex: 0 }, make("table", {}, head, body));
}

function table(token, budget) {
  if (isLargeTable(token)) return plainBlock(token.raw);
  const body = make("tbody");
  const node = tableNode(token, body, budget);
  body.append(...token.rows.map((cells) => tableRow(cells, "td", budget)));
  return node;
}
