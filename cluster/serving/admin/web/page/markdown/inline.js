// Makes nodes of the tokens inside of a block. HTML is shown as text, and images as links.

import { make } from "../dom.js";
import { MAX_DEPTH } from "./budget.js";
import { mathNode } from "./math.js";

const SAFE_LINK = /^(https?:|mailto:)/i;
const LINE_BREAK = /^<br\s*\/?>$/i;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const TAGS = { strong: "strong", em: "em", del: "del" };

/** Return the nodes of tokens. */
export function inlineNodes(tokens, budget, depth = 0) {
  const nodes = [];
  for (const [index, token] of tokens.entries()) {
    if (depth > MAX_DEPTH || !budget.take()) {
      nodes.push(tokens.slice(index).map((one) => one.raw).join(""));
      break;
    }
    nodes.push(nodeOf(token, budget, depth));
  }
  return nodes;
}

/** Return text with its character references replaced. */
export function decode(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|(\w{2,4}));/gi, (whole, ten, hex, name) => {
    if (name !== undefined) return NAMED[name.toLowerCase()] ?? whole;
    const code = Number.parseInt(ten ?? hex, ten === undefined ? 16 : 10);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });
}

function nodeOf(token, budget, depth) {
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return make(TAGS[token.type], {}, ...inlineNodes(token.tokens, budget, depth + 1));
    case "codespan":
      return make("code", { textContent: token.text });
    case "math":
      return mathNode(token, budget);
    case "br":
      return make("br");
    case "html":
      return LINE_BREAK.test(token.raw) ? make("br") : token.raw;
    case "link":
      return link(token.href, token.raw, inlineNodes(token.tokens, budget, depth + 1));
    case "image":
      return link(token.href, token.raw, [`Image: ${decode(token.text) || token.href}`]);
    case "checkbox":
      return make("input", { type: "checkbox", disabled: true, checked: token.checked });
    case "text":
      if (token.tokens) {
        return make("span", {}, ...inlineNodes(token.tokens, budget, depth + 1));
      }
      return decode(token.text);
    case "escape":
      return token.text;
    default:
      return token.raw;
  }
}

/** Return a link that opens in another tab, or its source if it is none that pages should have. */
function link(href, raw, children) {
  const url = decode(href);
  if (!SAFE_LINK.test(url)) return raw;
  return make(
    "a",
    { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url },
    ...children,
  );
}
