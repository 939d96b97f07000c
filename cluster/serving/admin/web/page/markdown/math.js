// Makes MathML of formulas in TeX. A formula with an unknown command is shown as its source.

import { make } from "../dom.js";
import { MAX_DEPTH } from "./budget.js";

const TOKEN = /\\(?:text\w*|mbox|mathrm|mathbb|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+|\\[^]|\d+(?:\.\d+)?|[^]/gu;
/** Spaces, and how something is drawn, which MathML decides. */
const IGNORED = /^(?:\s|\\(?:no)?limits|\\(?:display|text)style|\\[bB]igg?[lrm]?)$/;
const GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma sigma tau upsilon phi chi psi omega";
/** Code points by the names of commands. */
const SYMBOLS = tableOf(
  "times d7 cdot b7 div f7 pm b1 mp 2213 le 2264 leq 2264 ge 2265 geq 2265 ne 2260 neq 2260 ll 226a gg 226b approx 2248 equiv 2261 " +
    "sim 223c simeq 2243 cong 2245 propto 221d in 2208 notin 2209 subset 2282 subseteq 2286 supset 2283 supseteq 2287 cup 222a cap 2229 " +
    "setminus 2216 emptyset 2205 varnothing 2205 forall 2200 exists 2203 neg ac land 2227 lor 2228 wedge 2227 vee 2228 to 2192 " +
    "rightarrow 2192 leftarrow 2190 leftrightarrow 2194 Rightarrow 21d2 Leftarrow 21d0 Leftrightarrow 21d4 implies 27f9 iff 27fa " +
    "mapsto 21a6 infty 221e partial 2202 nabla 2207 sum 2211 prod 220f int 222b iint 222c oint 222e bigcup 22c3 bigcap 22c2 ldots 2026 " +
    "dots 2026 cdots 22ef vdots 22ee ddots 22f1 circ 2218 bullet 2022 ast 2217 oplus 2295 otimes 2297 perp 22a5 parallel 2225 mid 2223 " +
    "angle 2220 triangle 25b3 therefore 2234 because 2235 langle 27e8 rangle 27e9 lceil 2308 rceil 2309 lfloor 230a rfloor 230b vert 7c " +
    "lvert 7c rvert 7c Vert 2016 lVert 2016 rVert 2016 | 2016 square 25a1 ell 2113 hbar 210f varepsilon 3b5 varphi 3c6 { 7b } 7d % 25 " +
    "$ 24 & 26 _ 5f # 23",
);
GREEK.split(" ").forEach((name, index) => {
  SYMBOLS[name] = String.fromCodePoint(0x3b1 + index);
  SYMBOLS[name[0].toUpperCase() + name.slice(1)] = String.fromCodePoint(0x391 + index);
});
const BLACKBOARD = tableOf("C 2102 E 1d53c F 1d53d H 210d N 2115 P 2119 Q 211a R 211d Z 2124");
const ACCENTS = tableOf("hat 5e widehat 5e bar af overline af vec 2192 tilde 7e widetilde 7e dot 2d9 ddot a8 overbrace 23de");
const WORDS = /^(?:(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp|deg|dim|ker|gcd|det|Pr|(?:arg)?(?:max|min)|lim(?:sup|inf)?|sup|inf)$/;
const STACKED = /^\\(?:sum|prod|lim(?:sup|inf)?|(?:arg)?(?:max|min)|sup|inf|bigcup|bigcap|overbrace)$/;
const SPACES = { quad: "1em", qquad: "2em", ",": ".17em", ":": ".22em", ";": ".28em", " ": ".28em", "!": "0" };
const TABLE = /^(?:([pbBv]?)matrix|cases|(align|split)(?:ed|\*)?|gather(?:ed|\*)?|equation\*?)$/;
const FENCES = { p: "()", b: "[]", B: "{}", v: "||" };

/** Return the node of a token of type `math`. */
export function mathNode({ text, raw, isBlock, isWhole }, budget) {
  try {
    const math = isWhole ? formulaOf(text, isBlock, budget) : fail();
    return isBlock ? make("div", { className: "formula", tabIndex: 0 }, math) : math;
  } catch {
    return make(isBlock ? "p" : "span", { className: "plain", textContent: raw.trim() });
  }
}

function tableOf(text) {
  const pairs = text.matchAll(/(\S+) (\S+)/g);
  return Object.fromEntries(Array.from(pairs, ([, name, code]) => [name, String.fromCodePoint(`0x${code}`)]));
}

function formulaOf(source, isBlock, budget) {
  // The last one is the next.
  const tokens = source.match(TOKEN).filter((token) => !IGNORED.test(token)).reverse();
  let depth = 0;
  return node("math", isBlock ? { display: "block" } : {}, rowUpTo(undefined));

  function node(tag, attributes, ...children) {
    if (!budget.take()) fail();
    const made = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function symbol(text, stretchy = false) {
    return /[\p{L}\u221e\u2205]/u.test(text) ? node("mi", {}, text) : node("mo", { stretchy }, text);
  }

  function rowUpTo(...ends) {
    const row = node("mrow", {});
    while (!ends.includes(tokens.at(-1)?.replace(/^\\end.*/, "\\end"))) row.append(scripted());
    return row;
  }

  function group(end) {
    const row = rowUpTo(end);
    tokens.pop();
    return row;
  }

  function scripted() {
    const isStacked = isBlock && STACKED.test(tokens.at(-1));
    const base = atom();
    const under = [];
    const over = [];
    while ("_^'".includes(tokens.at(-1) ?? "none")) {
      const mark = tokens.pop();
      const side = mark === "_" ? under : over;
      if (side.length === 4) fail();
      side.push(mark === "'" ? symbol("\u2032") : atom());
    }
    const scripts = [under, over].filter((side) => side.length).map((side) => node("mrow", {}, ...side));
    const tags = isStacked ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (scripts.length === 0) return base;
    return node(tags[scripts.length === 2 ? 2 : Number(over.length > 0)], {}, base, ...scripts);
  }

  function atom() {
    depth += 1;
    const made = depth > 2 * MAX_DEPTH ? fail() : atomOf(tokens.pop());
    depth -= 1;
    return made;
  }

  function atomOf(token) {
    if (token === undefined || "}&^_'#$".includes(token)) fail();
    if (token === "{") return group("}");
    if (token[0] === "\\") return command(token.slice(1));
    if (/^\d/.test(token)) return node("mn", {}, token);
    return symbol({ "-": "\u2212", "*": "\u2217", "~": "\u00a0" }[token] ?? token);
  }

  function command(whole) {
    const [, name, text] = /^(\w+|[^])\s*(?:\{(.*)\})?$/s.exec(whole);
    if (name === "begin") return table(text);
    if (name === "mathbb") return node("mi", {}, BLACKBOARD[text] ?? fail());
    if (/^mbox$|^text/.test(name)) return node("mtext", {}, text.replace(/^ | $/g, "\u00a0"));
    if (text !== undefined) return node("mi", { mathvariant: "normal" }, text);
    if (Object.hasOwn(SYMBOLS, name)) return symbol(SYMBOLS[name]);
    if (Object.hasOwn(SPACES, name)) return node("mspace", { width: SPACES[name] });
    if (Object.hasOwn(ACCENTS, name)) return node("mover", { accent: true }, atom(), symbol(ACCENTS[name], /^(?:w|over)/.test(name)));
    if (WORDS.test(name)) return node("mi", {}, name);
    if (/^[dtc]?frac$/.test(name)) return node("mfrac", {}, atom(), atom());
    if (name === "binom") return fenced("()", node("mfrac", { linethickness: 0 }, atom(), atom()));
    if (/^(?:mathbf|mathcal|boldsymbol|boxed)$/.test(name)) return node("mrow", { class: name }, atom());
    if (name === "left") return node("mrow", {}, fence(), group("\\right"), fence());
    if (name !== "sqrt") fail();
    if (tokens.at(-1) !== "[") return node("msqrt", {}, atom());
    tokens.pop();
    const degree = group("]");
    return node("mroot", {}, atom(), degree);
  }

  function fence() {
    const token = tokens.pop() ?? "";
    return symbol(token === "." ? "" : (SYMBOLS[token.slice(1)] ?? token), true);
  }

  function fenced([open = "", close = ""], inner) {
    return node("mrow", {}, symbol(open, true), inner, symbol(close, true));
  }

  function table(name) {
    const [, fences, align] = TABLE.exec(name) ?? fail();
    const made = node("mtable", { class: align ?? name }, node("mtr", {}));
    for (let end = ""; !end.startsWith("\\end"); end = tokens.pop()) {
      if (end === "\\\\") made.append(node("mtr", {}));
      made.lastChild.append(node("mtd", {}, rowUpTo("&", "\\\\", "\\end")));
    }
    return fenced(name === "cases" ? "{" : (FENCES[fences] ?? ""), made);
  }
}

function fail() {
  throw new Error("The formula has something that is unknown here.");
}
