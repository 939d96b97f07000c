// Finds what code consists of in a thread of its own, because some code takes the library long.

import library from "../vendor/highlight.js";
import { KINDS, kindOf } from "./code_kinds.js";

// What the library's output consists of: the beginning and the end of a part, an escaped character,
// and other text.
const PIECES = /<span class="([^"]*)">|<\/span>|&(?:#x27|[a-z]+);|[^<&]+/g;

addEventListener("message", ({ data: { text, language } }) => {
  const runs = library.getLanguage(language) === undefined ? [] : runsOf(text, language);
  const answer = Uint32Array.from(runs);
  postMessage(answer, [answer.buffer]);
});

/** Return the parts with a kind as triples: where one begins, where it ends, and its kind. */
function runsOf(text, language) {
  const { value } = library.highlight(text, { language, ignoreIllegals: true });
  const runs = [];
  const open = [null];
  let at = 0;
  for (const [piece, names] of value.matchAll(PIECES)) {
    if (names !== undefined) {
      const kind = kindOf(names);
      open.push(kind === undefined ? open.at(-1) : kind);
    } else if (piece === "</span>") {
      open.pop();
    } else {
      const end = at + (piece[0] === "&" ? 1 : piece.length);
      const kind = open.at(-1);
      if (kind !== null) addRun(runs, at, end, KINDS.indexOf(kind));
      at = end;
    }
  }
  // Otherwise the library has changed the text.
  return at === text.length ? runs : [];
}

function addRun(runs, start, end, kind) {
  if (runs.at(-1) === kind && runs.at(-2) === start) runs[runs.length - 2] = end;
  else runs.push(start, end, kind);
}

postMessage("started");
