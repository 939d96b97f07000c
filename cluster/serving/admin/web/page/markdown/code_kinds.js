// The kinds of parts of code that have a color, and how the library names them.

/** The kinds; each is a highlight in the style sheet. */
export const KINDS = ["comment", "keyword", "string", "number", "title", "name", "added", "removed"];

const OF_NAME = {
  comment: "comment",
  quote: "comment",
  keyword: "keyword",
  tag: "keyword",
  "selector-tag": "keyword",
  "template-tag": "keyword",
  string: "string",
  regexp: "string",
  char: "string",
  link: "string",
  number: "number",
  literal: "number",
  symbol: "number",
  bullet: "number",
  title: "title",
  section: "title",
  type: "title",
  built_in: "name",
  name: "name",
  meta: "name",
  attr: "name",
  attribute: "name",
  variable: "name",
  "template-variable": "name",
  "selector-id": "name",
  "selector-class": "name",
  "selector-attr": "name",
  "selector-pseudo": "name",
  addition: "added",
  deletion: "removed",
};
const PREFIX = "hljs-";

/**
 * Return the kind of a part by its classes: null is none, as of code in a string, and undefined is
 * that of the part around it.
 */
export function kindOf(classes) {
  const [first] = classes.split(" ");
  if (first === `${PREFIX}subst`) return null;
  return Object.hasOwn(OF_NAME, first.slice(PREFIX.length))
    ? OF_NAME[first.slice(PREFIX.length)]
    : undefined;
}
